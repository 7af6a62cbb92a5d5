"""The blocks of a tier: what a block contains, and which ranks have written it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvatlas.tier.ingest import Delivery
from kvatlas.tier.part_sums import PartSum
from kvatlas.tier.request_blocks import Cover, NeededBlock

BlockPlace = tuple[int, int]
"""A pool and the id of one of its blocks."""

PartSums = dict[BlockPlace, PartSum]
"""The known contributions of a rank to the checksums of blocks."""


class StoreResult(NamedTuple):
    """The outcome of a store call: how many keys are complete, are incomplete, or found no space.

    `whole` keys have the bytes of all ranks, `waiting` keys still lack bytes of other ranks, and
    for `no_room` keys the tier had no free block.
    """

    whole: int
    waiting: int
    no_room: int


@dataclass(eq=False)
class TierBlock:
    """A block of one of the tier's pools, being filled or complete."""

    pool: int
    block_id: int
    group: int
    key: bytes
    cover: Cover
    whole: bool = False
    verified: bool = True
    """Whether the block's checksum has been verified since the tier was opened."""
    checksum: int = 0
    sequence: int = 0
    pins: int = 0
    dropped: bool = False
    """Whether lookups no longer find the block. It is freed when the last pin is released."""
    brought: dict[int, Delivery] = field(default_factory=dict)
    """The byte ranges that each rank has written to the block."""
    sums: dict[int, PartSum] = field(default_factory=dict)
    """Contributions to the block's checksum, by rank, for ranks that computed them."""
    writing: set[int] = field(default_factory=set)
    """Ranks that are writing to the block."""
    fill_key: tuple[Any, ...] = ()
    """The key under which other ranks find the block while it is being filled."""

    @property
    def place(self) -> BlockPlace:
        """The pool and the block id."""
        return self.pool, self.block_id

    @property
    def name(self) -> tuple[int, bytes]:
        """The group and the key by which lookups find the block."""
        return self.group, self.key


@dataclass
class Claim:
    """The blocks that a rank may fill for one store operation (`fills`).

    `pinned` are blocks of the same request that were already complete. They stay pinned until the
    operation ends.
    """

    rank: int
    fills: list[tuple[NeededBlock, TierBlock]] = field(default_factory=list)
    pinned: list[TierBlock] = field(default_factory=list)
    whole: int = 0
    waiting: int = 0
    no_room: int = 0
