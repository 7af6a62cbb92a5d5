"""The file of a tier: a header, the blocks, and a record for each block.

    0       header: magic, version, the plan's length and digest, sizes, the file's own id
    4096    the plan, as JSON
    ...     the blocks of each pool, which starts at a multiple of 4096 bytes
    ...     a record of 128 bytes for each block, in the same order

A record contains the key, the tokens, the checksum and the sequence number of its block, and a
digest of the record itself. A record of zeros means that the block is empty. A record is cleared
before its block is written to, and written after all bytes of the block are stored. The process
may therefore die at any point: a block is complete or absent. A record is trusted only after its
digest and the block's checksum have been verified. Nothing else in the file ever changes. A
reader can compute every field of the header except the id from the plan, and compares them.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import round_up
from kvatlas.planning import Plan
from kvatlas.tier.blocks import TierBlock
from kvatlas.tier.request_blocks import LONGEST_KEY, Cover

MAGIC = b"kvatlas\x00"
VERSION = 1
PAGE = 4096
LONGEST_PLAN = 16 << 20
MOST_BLOCKS = 1 << 22
_MOST_BYTES = 1 << 62

_HEADER = struct.Struct("<8sIIQ32s16sQQQ")
"""Magic, version, record bytes, plan bytes, plan's sha256, id, blocks, index offset, file bytes."""

_RECORD = struct.Struct("<4sIIIQQQQ64s")
"""Mark, group, length of the key, checksum, sequence, block, first token, stop token, key."""

_MARK = b"row\x01"
_DIGEST = 16
RECORD = _RECORD.size + _DIGEST
EMPTY_RECORD = bytes(RECORD)
_LATEST = 1 << 62


class Extent:
    """The byte offsets of the pools and block records in a tier's file, computed from its plan."""

    def __init__(self, plan: Plan, plan_bytes: int) -> None:
        self.pools: dict[int, int] = {}
        """The offset of the first block of each pool."""
        self.numbers: dict[int, int] = {}
        """The number, in the file, of the first block of each pool."""
        at, blocks = round_up(PAGE + plan_bytes, PAGE), 0
        for pool in sorted(plan.pools, key=lambda one: one.index):
            self.pools[pool.index], self.numbers[pool.index] = at, blocks
            at, blocks = round_up(at + pool.nbytes, PAGE), blocks + pool.blocks
        self.index, self.blocks = at, blocks
        self.nbytes = at + blocks * RECORD
        if blocks > MOST_BLOCKS:
            problem = f"A tier's file must not have more than {MOST_BLOCKS:,} blocks"
            hint = "Plan the tier with less memory or larger blocks"
            raise AtlasError(Code.TOO_MANY, problem, got=f"{blocks:,} blocks", hint=hint)
        if self.nbytes >= _MOST_BYTES:
            problem = f"A tier's file must be smaller than {_MOST_BYTES:,} bytes"
            hint = "Plan the tier with less memory"
            raise AtlasError(Code.TOO_MANY, problem, got=f"{self.nbytes:,} bytes", hint=hint)


def header(text: bytes, identity: bytes, extent: Extent) -> bytes:
    """Return the first page of a file. `text` is the plan as JSON, and `identity` the file's id."""
    digest = hashlib.sha256(text).digest()
    sizes = (extent.blocks, extent.index, extent.nbytes)
    packed = _HEADER.pack(MAGIC, VERSION, RECORD, len(text), digest, identity, *sizes)
    said = packed.ljust(PAGE - _DIGEST, b"\x00")
    return said + hashlib.blake2b(said, digest_size=_DIGEST).digest()


class HeaderFields(NamedTuple):
    """The fields of the header that cannot be computed from the plan alone."""

    version: int
    plan_bytes: int
    plan_digest: bytes
    identity: bytes


def read_header(first_page: bytes) -> HeaderFields:
    """Decode the header in the first page of a file, without any validation."""
    _, version, _, length, digest, identity, *_ = _HEADER.unpack_from(first_page)
    return HeaderFields(version, length, digest, identity)


class RecordFormat:
    """The records of one file: where they are, and how they are written and read."""

    def __init__(self, plan: Plan, extent: Extent, identity: bytes) -> None:
        self._plan, self._extent, self._identity = plan, extent, identity

    def number(self, block: TierBlock) -> int:
        """Return the position of a block, and of its record, among all blocks of the file."""
        return self._extent.numbers[block.pool] + block.block_id

    def place(self, block: TierBlock) -> int:
        """Return the offset of a block's record in the file."""
        return self._extent.index + self.number(block) * RECORD

    def write(self, block: TierBlock) -> bytes:
        """Encode the record of a block."""
        about = (block.group, len(block.key), block.checksum, block.sequence, self.number(block))
        said = _RECORD.pack(_MARK, *about, *block.cover, block.key)
        return said + self._digest(said)

    def _digest(self, said: bytes) -> bytes:
        return hashlib.blake2b(said, digest_size=_DIGEST, key=self._identity).digest()

    def read(self, number: int, text: bytes) -> TierBlock | None:
        """Decode the record at position `number` and return its block; None if it is not valid."""
        said, digest = text[: _RECORD.size], text[_RECORD.size :]
        if digest != self._digest(said):
            return None
        mark, group, length, checksum, sequence, place, first, stop, key = _RECORD.unpack(said)
        if (mark, place) != (_MARK, number) or group >= len(self._plan.groups):
            return None
        if not (1 <= length <= LONGEST_KEY and 0 < sequence < _LATEST):
            return None
        pool = self._plan.pool(0, group)
        block_id = number - self._extent.numbers[pool.index]
        state = self._plan.groups[group].kind == "recurrent"
        longest = self._plan.max_len if state else self._plan.groups[group].block
        if not 0 <= block_id < pool.blocks or not first < stop <= longest or (state and first):
            return None
        return TierBlock(
            pool.index, block_id, group, key[:length], Cover(first, stop),
            whole=True, verified=False, checksum=checksum, sequence=sequence,
        )  # fmt: skip
