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

The file is read and written by calls and never mapped: a disk that fails or fills, and a
file that somebody cuts short, are then errors, where a mapping would end the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s, round_up
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.tier.index import TierBlock
from kvatlas.tier.request_blocks import LONGEST_KEY, Cover
from kvatlas.wire import (
    Bytes,
    Memory,
    check_bounds,
    check_plan_size,
    copy_file_runs,
    memory_of,
)

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
_READ_AT_ONCE = 256 << 10
"""Bytes that are read and summed together: what stays in the processor's cache."""
_WORTH_A_CORE = 8 << 20
"""Bytes of a read that are worth another core."""
_CUT_SHORT = -1
"""The checksum of a block that the file does not have to its end."""
_SECTOR = 512
"""What the system counts the room of a file in."""
_MAP_NORESERVE = 0x4000
"""Addresses alone, without a claim to as much memory; `mmap` does not name it in Python 3.11."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """A file that is open, locked, allocated, and as sound as its header says."""

    def __init__(self, path: Path, plan: Plan | None, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        if plan is not None and not path.exists():
            _create(path, plan)
        self._fd = _opened(path)
        try:
            _lock(self._fd, path)
            with _refusals(path):
                self.plan, self._identity, self.extent = _checked(self._fd, path)
            if plan is not None and plan.to_json() != self.plan.to_json():
                problem = "The tier's file was made for another plan"
                got = f"{plan}, not {self.plan}"
                hint = "Leave the plan out, or use another path"
                raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
            with _refusals(path):
                _allocate(self._fd, self.extent.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._places = {
            pool.index: Memory(self.extent.pools[pool.index], pool.nbytes)
            for pool in self.plan.pools
        }
        self.window = Window(self._places)
        self._helpers = ThreadPoolExecutor(1 + _SUMMING, thread_name_prefix="kvatlas-tier")
        self._block_bytes = {pool.index: pool.block_bytes for pool in self.plan.pools}

    # -- blocks -------------------------------------------------------------------------

    def write(self, copies: Sequence[Copy], pools: Mapping[int, Bytes]) -> None:
        """Carry copies out from pools in memory into blocks of the file."""
        near = memory_of(pools)
        check_bounds(copies, near, self._places)
        ends = [(near[c.src_pool].address + c.src, self._places[c.dst_pool].address + c.dst, c)
                for c in copies]  # fmt: skip
        self._move(ends, write=True)

    def read(self, copies: Sequence[Copy], pools: Mapping[int, Bytes]) -> None:
        """Carry copies out from blocks of the file into pools in memory."""
        near = memory_of(pools)
        check_bounds(copies, self._places, near)
        ends = [(near[c.dst_pool].address + c.dst, self._places[c.src_pool].address + c.src, c)
                for c in copies]  # fmt: skip
        self._move(ends, write=False)

    def _move(self, ends: Sequence[tuple[Int64s, Int64s, Copy]], *, write: bool) -> None:
        if not ends:
            return
        near, far, copies = zip(*ends, strict=True)
        length = np.concatenate([copy.length for copy in copies])
        runs = np.concatenate(near), np.concatenate(far), length
        # The system reads a file on several cores at once, and writes to it on one.
        parts = 1 if write else min(_SUMMING, len(length), 1 + int(length.sum()) // _WORTH_A_CORE)
        shares = zip(*(np.array_split(column, parts) for column in runs), strict=True)
        run = self._helpers.map if parts > 1 else map
        with self._whole_file():
            for _ in run(lambda share: self._move_runs(*share, write=write), shares):
                pass

    def _move_runs(self, near: Int64s, far: Int64s, length: Int64s, *, write: bool) -> None:
        for _ in copy_file_runs(lambda: self._fd, near, far, length, write=write):
            pass

    def checksums(self, blocks: Sequence[TierBlock]) -> list[int]:
        """The checksums of blocks, as their bytes are now; on several cores where there are."""
        run = self._helpers.map if len(blocks) > 1 else map
        with _refusals(self.path):
            return list(run(self._checksum, blocks))

    def commit(self, blocks: Sequence[TierBlock]) -> None:
        """Write the records of blocks whose bytes are all there, and on the disk where asked."""
        synced = self._helpers.submit(os.fdatasync, self._fd) if self.durable else None
        with self._whole_file():
            for block, checksum in zip(blocks, self.checksums(blocks), strict=True):
                if checksum == _CUT_SHORT:
                    raise OSError(errno.ENODATA, "The file ends before its blocks")
                block.checksum = checksum
            if synced is not None:
                synced.result()
        with self._whole_file():
            for block in blocks:
                _write_all(self._fd, self._record(block), self._place(block))
            if self.durable:
                os.fdatasync(self._fd)

    def clear(self, block: TierBlock) -> None:
        """Say that a block is empty, before anything is written to it."""
        with self._whole_file():
            _write_all(self._fd, _EMPTY, self._place(block))

    def recorded(self) -> Iterator[TierBlock]:
        """The blocks that have sound records; their bytes are yet to be verified."""
        for first in range(0, self.extent.blocks, _AT_ONCE):
            many = min(_AT_ONCE, self.extent.blocks - first)
            with _refusals(self.path):
                text = _read_all(self._fd, many * RECORD, self.extent.index + first * RECORD)
            records = np.frombuffer(text, dtype=np.uint8).reshape(-1, RECORD)
            for place in np.flatnonzero(records.any(axis=1)).tolist():
                block = self._read(first + place, records[place].tobytes())
                if block is not None:
                    yield block

    def close(self) -> None:
        """Let go of the file."""
        self._helpers.shutdown()
        self.window.close()
        os.close(self._fd)

    @contextmanager
    def _whole_file(self) -> Iterator[None]:
        """Refuse where the file is not as long as it was, before or after something is done.

        Writing to a file that was cut short would make it long again, with zeros in it
        that nobody has stored.
        """
        with _refusals(self.path):
            _check_length(self._fd, self.path, self.extent)
            yield
            _check_length(self._fd, self.path, self.extent)

    # -- records ------------------------------------------------------------------------

    def _checksum(self, block: TierBlock) -> int:
        nbytes = self._block_bytes[block.pool]
        start = self.extent.pools[block.pool] + block.block_id * nbytes
        checksum, room = 0, memoryview(bytearray(min(nbytes, _READ_AT_ONCE)))
        at = start
        while at < start + nbytes:
            done = os.preadv(self._fd, [room[: start + nbytes - at]], at)
            if not done:
                return _CUT_SHORT
            checksum = zlib.crc32(room[:done], checksum)
            at += done
        return checksum

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


class Window:
    """Memory that stands for the pools of a file where a transport wants addresses.

    As large as the pools, but only those pages exist that were used, and these may go
    again whenever nobody uses any: then the system takes them where it is short of memory.
    """

    def __init__(self, places: Mapping[int, Memory]) -> None:
        self._places = places
        self._map: mmap.mmap | None = None
        self._pools: dict[int, Bytes] = {}
        self._users = 0
        self._lock = threading.Lock()

    @property
    def pools(self) -> dict[int, Bytes]:
        """The pools' memory."""
        with self._lock:
            if self._map is None:
                self._map = self._mapped()
                at, everything = 0, np.frombuffer(self._map, np.uint8)
                for index, place in self._places.items():
                    self._pools[index] = everything[at : at + place.nbytes]
                    at = round_up(at + place.nbytes, PAGE)
            return self._pools

    def _mapped(self) -> mmap.mmap:
        nbytes = sum(round_up(place.nbytes, PAGE) for place in self._places.values())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            return mmap.mmap(-1, nbytes, flags=flags)
        except OSError as problem:
            what = f"{nbytes:,} bytes of addresses: {problem}"
            hint = "Store and fetch without carry=, or plan the tier with less memory"
            raise AtlasError(Code.NOT_ENOUGH_MEMORY, got=what, hint=hint) from problem

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep all pages meanwhile; once nobody uses any, the system may have them."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._map is not None and not self._users:
                    # Pages that were handed to a device stay where they are.
                    self._map.madvise(mmap.MADV_FREE)

    def close(self) -> None:
        """Let go of the memory, which goes with the last view of it."""
        with self._lock:
            self._pools, self._map = {}, None


# -- opening -----------------------------------------------------------------------------


def _opened(path: Path) -> int:
    """A file of this user that nobody else may write to."""
    with _refusals(path):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise _unreadable(path, "something that is not a file")
    if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        problem = "The tier's file belongs to another user, or others may write to it"
        got = f"user {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}: {path}"
        hint = "Run as its owner, and take the rights of others away: chmod go-w"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
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
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _refusals(path):
        fd = os.open(beside, flags, 0o600)
        try:
            _allocate(fd, extent.nbytes)
            _write_all(fd, header(text, secrets.token_bytes(16), extent) + text, 0)
            os.fsync(fd)
            with suppress(FileExistsError):  # somebody was faster: theirs is as good
                os.link(beside, path)
        finally:
            os.close(fd)
            beside.unlink()
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Have the disk know the names in a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _allocate(fd: int, nbytes: int) -> None:
    """Take the room now, so that no store finds the disk full; what is there stays."""
    state = os.fstat(fd)
    if state.st_size < nbytes or state.st_blocks * _SECTOR < nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def _write_all(fd: int, text: bytes, offset: int) -> None:
    done = 0
    while done < len(text):
        done += os.pwrite(fd, text[done:], offset + done)


def _read_all(fd: int, nbytes: int, offset: int) -> bytes:
    """So many bytes, or a refusal where the file ends before."""
    text = b""
    while len(text) < nbytes:
        more = os.pread(fd, nbytes - len(text), offset + len(text))
        if not more:
            raise OSError(errno.ENODATA, f"The file ends at byte {offset + len(text)}")
        text += more
    return text


def _checked(fd: int, path: Path) -> tuple[Plan, bytes, Extent]:
    """The plan, id and extent of a file, everything held against the plan."""
    first_page = _read_all(fd, PAGE, 0)
    if not first_page.startswith(MAGIC):
        raise _unreadable(path, "a file that is no tier's")
    _, version, _, length, digest, identity, *_ = _HEADER.unpack_from(first_page)
    if version != VERSION:
        problem = f"The tier's file is not of version {VERSION}"
        raise _refusal(Code.UNLIKE_VERSIONS, problem, path, f"version {version}")
    if not 0 < length <= LONGEST_PLAN:
        raise _unreadable(path, f"a plan of {length:,} bytes")
    text = _read_all(fd, length, PAGE)
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
    _check_length(fd, path, extent)
    return plan, identity, extent


def _check_length(fd: int, path: Path, extent: Extent) -> None:
    if (size := os.fstat(fd).st_size) != extent.nbytes:
        raise _unreadable(path, f"{size:,} bytes instead of {extent.nbytes:,}")


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn what the system says into refusals."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in _NO_ROOM:
            raise _unreadable(path, fault.strerror or str(fault)) from fault
        problem = "The disk has no room for the tier's file"
        hint = "Make room, plan the tier with less memory, or use another disk"
        got = f"{fault.strerror}: {path}"
        raise AtlasError(Code.NOT_ENOUGH_MEMORY, problem, got=got, hint=hint) from fault


def _wrong(path: Path, got: str) -> AtlasError:
    return _refusal(Code.CHECKSUM, "The header of the tier's file was changed", path, got)


def _unreadable(path: Path, got: str) -> AtlasError:
    problem = "The tier's file cannot be read or written, or is not as long as its plan says"
    return _refusal(Code.UNREADABLE, problem, path, got)


def _refusal(code: Code, problem: str, path: Path, got: str) -> AtlasError:
    return AtlasError(code, problem, got=f"{got}: {path}", hint=_REMOVE)
