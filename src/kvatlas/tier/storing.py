"""`StoreDesk`: store operations in two steps, so that another process can move the bytes.

`begin` returns the blocks that a rank may fill, and `end` reports that it has filled them. Blocks
that then have the bytes of all ranks are committed. Only committed blocks can be found.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvatlas.planning import Plan
from kvatlas.routing.block_tables import checked_rank
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.blocks import Claim, PartSums, StoreResult, TierBlock
from kvatlas.tier.converting import PLANS
from kvatlas.tier.index import BlockIndex
from kvatlas.tier.ingest import Delivery, Ingest
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.storage import TierStorage


@dataclass
class OpenStore:
    """A store operation of one rank, between `begin` and `end`."""

    ingest: Ingest
    start: int
    stop: int
    needs: list[NeededBlock]
    claim: Claim

    @property
    def ids(self) -> dict[NeededBlock, int]:
        """The id of each tier block that the rank fills."""
        return {need: block.block_id for need, block in self.claim.fills}


class Ingests:
    """A cache with one `Ingest` for each plan whose ranks store blocks in a tier."""

    def __init__(self, tier: Plan) -> None:
        self._tier = tier
        self._of = lru_cache(PLANS)(lambda source: Ingest(source, tier))
        self._compiling = threading.Lock()

    def of(self, plan: Plan) -> Ingest:
        """Return the `Ingest` of a plan. All ranks of the plan share this object."""
        with self._compiling:
            return self._of(plan)

    def needs(
        self, plan: Plan, tokens: Any, keys: Mapping[int, Sequence[bytes | None]]
    ) -> tuple[int, int, list[NeededBlock]]:
        """Return (start, stop, blocks) for the tokens to store.

        `start` is rounded down to a position at which every group begins a block.
        """
        start, stop = token_range(tokens, min(plan.max_len, self._tier.max_len))
        spans = self.of(plan).spans
        start = spans.whole_blocks(start)
        return start, stop, spans.needs(start, stop, keys)


class StoreDesk:
    """Begins and ends the store operations of a tier. Thread-safe."""

    def __init__(self, plan: Plan, index: BlockIndex, storage: TierStorage) -> None:
        self._index, self._storage = index, storage
        self._ingests = Ingests(plan)

    def begin(
        self, plan: Plan, rank: int, tokens: Any, keys: Mapping[int, Sequence[bytes | None]]
    ) -> OpenStore:
        """Begin a store operation: claim the blocks that a rank may fill. `end` must follow."""
        ingest = self._ingests.of(plan)
        rank = checked_rank(plan, rank, "source")
        start, stop, needs = self._ingests.needs(plan, tokens, keys)
        if rank in ingest.sources:
            claim = self._index.claim(needs, ingest, rank)
        else:  # other ranks store the same data
            keyed = [need for need in needs if need.key is not None]
            whole = sum(self._index.present(keyed))
            claim = Claim(rank, whole=whole, waiting=len(keyed) - whole)
        return OpenStore(ingest, start, stop, needs, claim)

    def end(
        self, store: OpenStore, brought: dict[Any, Delivery] | None, sums: PartSums | None
    ) -> StoreResult:
        """End a store operation and return its result.

        `brought` contains the byte ranges that the rank has written, by `NeededBlock.shape`, or is
        None if the rank has failed. `sums` are the rank's contributions to block checksums. A block
        without the contributions of all ranks is read again to compute its checksum.
        """
        claim = store.claim
        try:
            if claim.fills:
                ready = self._index.arrived(claim, store.ingest, brought, sums)
                self._commit(ready)
                claim.whole += len(ready)
        finally:
            self._index.unpin(claim.pinned)
        return StoreResult(claim.whole, claim.waiting, claim.no_room)

    def _commit(self, blocks: list[TierBlock]) -> None:
        """Commit complete blocks, so that they can be found."""
        done = False
        try:
            self._storage.commit(blocks)
            done = True
        finally:
            self._index.settle(blocks, whole=done)
