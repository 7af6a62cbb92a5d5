"""The file of a tier: a header, the blocks, and a record for each block.

    0       header: magic, version, the plan's length and digest, sizes, the file's own id
    4096    the plan, as JSON
    ...     the blocks of each pool, from a multiple of 4096 bytes on
    ...     a record of 128 bytes for each block, in the same order

A record says what its block has: a key, the tokens, a checksum of the block's bytes, a
sequence number; and it has a digest of its own. Zeros say that the block is empty. A record
is cleared before its block is written to and written after all bytes of the block are there,
so a process may die anywhere: a block is whole, or absent. What a record says is never
believed before its digest and the block's checksum were found right. Nothing else in the
file ever changes, and all of it follows from the plan, so the header is compared and not
interpreted.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import round_up
from kvatlas.planning import Plan
from kvatlas.tier.index import TierBlock
from kvatlas.tier.request_blocks import LONGEST_KEY, Cover
from kvatlas.wire import Bytes, check_plan_size

MAGIC = b"kvatlas\x00"
VERSION = 1
PAGE = 4096
LONGEST_PLAN = 16 << 20
MOST_BLOCKS = 1 << 22

_HEADER = struct.Struct("<8sIIQ32s16sQQQ")
"""Magic, version, record bytes, plan bytes, plan's sha256, id, blocks, index offset, file bytes."""

_RECORD = struct.Struct("<4sIIIQQQQ64s")
"""Mark, group, key bytes, checksum, sequence, block, first and last token, key."""

_MARK = b"row\x01"
_DIGEST = 16
RECORD = _RECORD.size + _DIGEST
_EMPTY = bytes(RECORD)
_AT_ONCE = 8192
_LATEST = 1 << 62
_REMOVE = "Check the path; a damaged file can be removed: all of it can be computed again"
_SUMMING = min(4, os.cpu_count() or 1)


class Extent:
    """Where everything lies in the file of a plan."""

    def __init__(self, plan: Plan, plan_bytes: int) -> None:
        self.pools: dict[int, int] = {}
        """Where the blocks of each pool begin."""
        self.numbers: dict[int, int] = {}
        """The number, in the file, of the first block of each pool."""
        at, blocks = round_up(PAGE + plan_bytes, PAGE), 0
        for pool in sorted(plan.pools, key=lambda one: one.index):
            self.pools[pool.index], self.numbers[pool.index] = at, blocks
            at, blocks = round_up(at + pool.nbytes, PAGE), blocks + pool.blocks
        self.index, self.blocks = at, blocks
        self.nbytes = at + blocks * RECORD
        if blocks > MOST_BLOCKS or self.nbytes >= 1 << 62:
            problem = f"A tier's file has no room for more than {MOST_BLOCKS:,} blocks"
            got = f"{blocks:,} blocks in {self.nbytes:,} bytes"
            hint = "Plan the tier with less memory, or larger blocks"
            raise AtlasError(Code.TOO_MANY, problem, got=got, hint=hint)


def header(text: bytes, identity: bytes, extent: Extent) -> bytes:
    """The first page of a file."""
    digest = hashlib.sha256(text).digest()
    sizes = (extent.blocks, extent.index, extent.nbytes)
    packed = _HEADER.pack(MAGIC, VERSION, RECORD, len(text), digest, identity, *sizes)
    said = packed.ljust(PAGE - _DIGEST, b"\x00")
    return said + hashlib.blake2b(said, digest_size=_DIGEST).digest()


class TierFile:
    """A file that is open, locked, mapped, and as sound as its header says."""

    def __init__(self, path: Path, plan: Plan | None, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        if plan is not None and not path.exists():
            _create(path, plan)
        self._fd = _opened(path)
        try:
            _lock(self._fd, path)
            self.plan, self._identity, self.extent = _checked(self._fd, path)
            if plan is not None and plan.to_json() != self.plan.to_json():
                problem = "The tier's file was made for another plan"
                got = f"{plan}, not {self.plan}"
                hint = "Leave the plan out, or use another path"
                raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
            self._map = mmap.mmap(self._fd, self.extent.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        everything = np.frombuffer(self._map, dtype=np.uint8)
        self.pools: dict[int, Bytes] = {
            pool.index: everything[self.extent.pools[pool.index] :][: pool.nbytes]
            for pool in self.plan.pools
        }
        self._helpers = ThreadPoolExecutor(1 + _SUMMING, thread_name_prefix="kvatlas-tier")
        self._block_bytes = {pool.index: pool.block_bytes for pool in self.plan.pools}

    # -- blocks -------------------------------------------------------------------------

    def checksums(self, blocks: Sequence[TierBlock]) -> list[int]:
        """The checksums of blocks, as their bytes are now; on several cores where there are."""
        run = self._helpers.map if len(blocks) > 1 else map
        return list(run(self._checksum, blocks))

    def commit(self, blocks: Sequence[TierBlock]) -> None:
        """Write the records of blocks whose bytes are all there, and on the disk where asked."""
        synced = self._helpers.submit(os.fdatasync, self._fd) if self.durable else None
        for block, checksum in zip(blocks, self.checksums(blocks), strict=True):
            block.checksum = checksum
        if synced is not None:
            synced.result()
        for block in blocks:
            os.pwrite(self._fd, self._record(block), self._place(block))
        if self.durable:
            os.fdatasync(self._fd)

    def clear(self, block: TierBlock) -> None:
        """Say that a block is empty, before anything is written to it."""
        os.pwrite(self._fd, _EMPTY, self._place(block))

    def recorded(self) -> Iterator[TierBlock]:
        """The blocks that have sound records; their bytes are yet to be verified."""
        for first in range(0, self.extent.blocks, _AT_ONCE):
            many = min(_AT_ONCE, self.extent.blocks - first)
            text = os.pread(self._fd, many * RECORD, self.extent.index + first * RECORD)
            records = np.frombuffer(text, dtype=np.uint8).reshape(-1, RECORD)
            for place in np.flatnonzero(records.any(axis=1)).tolist():
                block = self._read(first + place, records[place].tobytes())
                if block is not None:
                    yield block

    def close(self) -> None:
        """Let go of the file."""
        self._helpers.shutdown()
        self.pools.clear()
        with suppress(BufferError):  # somebody still looks at it; it goes with the last view
            self._map.close()
        os.close(self._fd)

    # -- records ------------------------------------------------------------------------

    def _checksum(self, block: TierBlock) -> int:
        nbytes = self._block_bytes[block.pool]
        return zlib.crc32(self.pools[block.pool][block.block_id * nbytes :][:nbytes].data)

    def _number(self, block: TierBlock) -> int:
        return self.extent.numbers[block.pool] + block.block_id

    def _place(self, block: TierBlock) -> int:
        return self.extent.index + self._number(block) * RECORD

    def _record(self, block: TierBlock) -> bytes:
        about = (block.group, len(block.key), block.checksum, block.sequence, self._number(block))
        said = _RECORD.pack(_MARK, *about, *block.cover, block.key)
        return said + self._digest(said)

    def _digest(self, said: bytes) -> bytes:
        return hashlib.blake2b(said, digest_size=_DIGEST, key=self._identity).digest()

    def _read(self, number: int, text: bytes) -> TierBlock | None:
        """The block that a record speaks of, if the record is sound."""
        said, digest = text[: _RECORD.size], text[_RECORD.size :]
        if digest != self._digest(said):
            return None
        mark, group, length, checksum, sequence, place, first, stop, key = _RECORD.unpack(said)
        if (mark, place) != (_MARK, number) or group >= len(self.plan.groups):
            return None
        if not (1 <= length <= LONGEST_KEY and 0 < sequence < _LATEST):
            return None
        pool = self.plan.pool(0, group)
        block_id = number - self.extent.numbers[pool.index]
        state = self.plan.groups[group].kind == "recurrent"
        longest = self.plan.max_len if state else self.plan.groups[group].block
        if not 0 <= block_id < pool.blocks or not first < stop <= longest or (state and first):
            return None
        return TierBlock(
            pool.index, block_id, group, key[:length], Cover(first, stop),
            whole=True, verified=False, checksum=checksum, sequence=sequence,
        )  # fmt: skip


# -- opening -----------------------------------------------------------------------------


def _open(path: Path, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as problem:
        raise _unreadable(path, str(problem)) from None


def _opened(path: Path) -> int:
    fd = _open(path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _unreadable(path, "something that is not a file")
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem, hint = "The tier's file is open elsewhere", "Close it there, or use another path"
        raise AtlasError(Code.TWICE, problem, got=path, hint=hint) from None


def _create(path: Path, plan: Plan) -> None:
    """Make the file under another name, so that under its own it is there whole or not at all."""
    text = plan.to_json()
    extent = Extent(plan, len(text))
    if len(text) > LONGEST_PLAN:
        raise _unreadable(path, f"a plan of {len(text):,} bytes")
    beside = path.with_name(path.name + ".new")
    fd = _open(beside, os.O_CREAT)
    try:
        _lock(fd, path)
        if path.exists() or not _still(beside, fd):
            return  # somebody was faster: theirs is as good
        os.ftruncate(fd, 0)
        _allocate(fd, extent.nbytes)
        os.pwrite(fd, header(text, secrets.token_bytes(16), extent) + text, 0)
        os.fsync(fd)
        beside.rename(path)
    finally:
        os.close(fd)


def _still(path: Path, fd: int) -> bool:
    """Whether a path is still the file that was opened there."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _allocate(fd: int, nbytes: int) -> None:
    """Take the room now: a mapped file that finds the disk full kills its process."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as refusal:
        os.ftruncate(fd, 0)
        problem = f"The disk has no room for {nbytes:,} bytes"
        hint = "Plan the tier with less memory, or use another disk"
        raise AtlasError(Code.NOT_ENOUGH_MEMORY, problem, got=str(refusal), hint=hint) from None


def _checked(fd: int, path: Path) -> tuple[Plan, bytes, Extent]:
    """The plan, id and extent of a file, everything held against the plan."""
    first_page = os.pread(fd, PAGE, 0)
    if len(first_page) < PAGE or not first_page.startswith(MAGIC):
        raise _unreadable(path, "a file that is too short, or no tier's")
    _, version, _, length, digest, identity, *_ = _HEADER.unpack_from(first_page)
    if version != VERSION:
        problem = f"The tier's file is not of version {VERSION}"
        raise _refusal(Code.UNLIKE_VERSIONS, problem, path, f"version {version}")
    if not 0 < length <= LONGEST_PLAN:
        raise _unreadable(path, f"a plan of {length:,} bytes")
    text = os.pread(fd, length, PAGE)
    if hashlib.sha256(text).digest() != digest:
        raise _wrong(path, "a plan whose digest is another")
    try:
        check_plan_size(text)
        plan = Plan.from_json(text)
        extent = Extent(plan, len(text))
    except AtlasError as problem:
        if problem.code is Code.BAD_PLAN:
            raise
        raise AtlasError(Code.BAD_PLAN, got=str(problem.got)[:200], hint=_REMOVE) from None
    if first_page != header(text, identity, extent):
        raise _wrong(path, "a header that is not its plan's")
    if (size := os.fstat(fd).st_size) != extent.nbytes:
        raise _unreadable(path, f"{size:,} bytes instead of {extent.nbytes:,}")
    return plan, identity, extent


def _wrong(path: Path, got: str) -> AtlasError:
    return _refusal(Code.CHECKSUM, "The header of the tier's file was changed", path, got)


def _unreadable(path: Path, got: str) -> AtlasError:
    problem = "The tier's file cannot be read, or is not as long as its plan says"
    return _refusal(Code.UNREADABLE, problem, path, got)


def _refusal(code: Code, problem: str, path: Path, got: str) -> AtlasError:
    return AtlasError(code, problem, got=f"{got}: {path}", hint=_REMOVE)
