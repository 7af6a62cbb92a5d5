"""`TieredReplay`: evicted blocks move from the GPU to the next tier, such as host memory or disk.

The content of a block is in one tier at a time. A hit may use blocks of any tier and moves them to
the GPU. A recomputed block is removed from its old tier. Lower tiers evict the oldest blocks first.
They have separate plans, so a block may have a different size there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Plan
from kvatlas.pool.eviction import Lru, Use
from kvatlas.simulate.bundles import ABSENT, Bundle
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.pool_replay import CachedPrefix, PoolReplay, Request
from kvatlas.simulate.traces import Ints
from kvatlas.specs import Visibility

LOWER = 1 << 30
"""The value in `_where` of a block in lower tier n is `LOWER` + n. Block ids are smaller."""


@dataclass(frozen=True)
class LowerTier:
    """A tier below the GPU: its size, and the bytes of a block of each layer class."""

    name: str
    nbytes: int
    sizes: tuple[int, ...]
    """Number of bytes that the content of one block of each class takes here."""
    state_share: float | None = None
    """Share of the tier that is reserved for checkpoints; None if nothing is reserved."""

    def __post_init__(self) -> None:
        if self.state_share is not None and not 0 < self.state_share < 1:
            raise AtlasError(
                Code.BAD_SIZE,
                "The share of a tier's memory for checkpoints must be above 0 and less than 1",
                got=f"state_share={self.state_share}",
                hint="Pass state_share=0.25, for example, or state_share=None to reserve nothing",
            )

    @classmethod
    def of(
        cls, name: str, plan: Plan, model: PoolModel, *, state_share: float | None = None
    ) -> LowerTier:
        """Return a tier with the memory of `plan`, for the layer classes of `model`."""
        theirs = PoolModel.of(plan)
        there: dict[tuple[str, Visibility], int] = {}
        here: dict[tuple[str, Visibility], int] = {}
        for one in theirs.classes:
            spans = 1 if one.needs == "state" else ceil_div(model.step, theirs.step)
            there[_kind(one)] = there.get(_kind(one), 0) + spans * one.blocks * one.block_bytes
        for one in model.classes:
            here[_kind(one)] = here.get(_kind(one), 0) + one.blocks * one.block_bytes
        if set(here) != set(there):
            problem = "The plan of a tier must have the same kinds of layers as the GPU's plan"
            got = (
                f"{len(there)} kinds of layers in tier {name!r} ({plan.model}) and {len(here)} "
                f"kinds on the GPU, with {len(set(here) & set(there))} in common"
            )
            hint = "Plan the same model for all tiers"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
        sizes = tuple(
            ceil_div(there[_kind(one)] * one.block_bytes, here[_kind(one)]) for one in model.classes
        )
        nbytes = sum(pool.nbytes for pool in plan.pools) * plan.tp
        return cls(name, nbytes, sizes, state_share)


def _kind(one: LayerClass) -> tuple[str, Visibility]:
    return one.needs, one.visibility


class _Store:
    """The blocks that a lower tier contains, by their elements of `_where`."""

    def __init__(self, tier: LowerTier, bundles: Sequence[Bundle], elements: int) -> None:
        self._starts = np.array([bundle.base for bundle in bundles])
        self._sizes = np.array(tier.sizes, np.int64)
        share = tier.state_share
        states = 0 if share is None else int(tier.nbytes * share)
        self._room = [tier.nbytes - states, states] if states else [tier.nbytes]
        self._part = np.array([int(bool(states) and not bundle.keeps_all) for bundle in bundles])
        self._queues = [Lru(elements, self._size) for _ in self._room]
        self._used = [0] * len(self._room)

    def put(self, names: Ints, now: int) -> Ints:
        """Add blocks, and return the blocks that were evicted to make space, oldest first."""
        gone = [names[:0]]
        for part, mine in self._by_part(names):
            queue = self._queues[part]
            queue.used(mine, Use(now))
            self._used[part] += int(self._size(mine).sum())
            over = self._used[part] - self._room[part]
            if over > 0:
                victims = queue.victims(over, None)
                self._used[part] -= int(self._size(victims).sum())
                gone.append(victims)
        return np.concatenate(gone)

    def take(self, names: Ints) -> None:
        """Remove blocks, because they move to the GPU or are recomputed there."""
        for part, mine in self._by_part(names):
            self._queues[part].forget(mine)
            self._used[part] -= int(self._size(mine).sum())

    def _by_part(self, names: Ints) -> Iterator[tuple[int, Ints]]:
        parts = self._part[self._class(names)]
        for part in range(len(self._room)):
            yield part, names[parts == part]

    def _size(self, names: Ints) -> Ints:
        sizes: Ints = self._sizes[self._class(names)]
        return sizes

    def _class(self, names: Ints) -> Ints:
        return np.searchsorted(self._starts, names, side="right") - 1


class TieredReplay(PoolReplay):
    """A replay in which evicted blocks can be found in the next tier."""

    def __init__(self, *given: Any, tiers: Sequence[LowerTier], **options: Any) -> None:
        self._tiers = tiers
        super().__init__(*given, **options)
        self._stores = [_Store(tier, self._bundles, len(self._where)) for tier in tiers]
        self._moves = 0
        self.found = np.zeros((1 + len(tiers), len(self.trace)), np.int64)
        """[tier, request]: number of cached spans, by the lowest tier that was needed."""

    def _most_rows(self, number: int) -> int:
        below = sum(tier.nbytes // max(tier.sizes[number], 1) for tier in self._tiers)
        return super()._most_rows(number) + below

    def serve(self, request: int) -> int:
        """Serve one request and return how many of its leading spans were cached."""
        hit = super().serve(request)
        if not hit:
            self.found[:, request] = 0
        return hit

    def _admit(self, found: CachedPrefix) -> Request:
        """Begin a request, after moving the blocks that it needs to the GPU."""
        needed = list(self._needed(found)) if found.hit else []
        self._count(found, needed)
        here: list[list[Ints]] = [[] for _ in self._ids]
        for bundle, _, names in needed:
            blocks = self._where[names.ravel()].astype(np.int64)
            here[bundle.one.pool].append(blocks[blocks < LOWER])
        held = [np.concatenate([_NOTHING, *parts]) for parts in here]
        for ids, blocks in zip(self._ids, held, strict=True):
            ids.share_array(blocks)  # so that loading evicts none of them
        if not self._load(needed, held):
            found.hit = 0
        asked = super()._admit(found)
        for ids, blocks in zip(self._ids, held, strict=True):
            ids.release_array(blocks)
        return asked

    def _needed(self, found: CachedPrefix) -> Iterator[tuple[Bundle, Ints, Ints]]:
        """Yield (bundle, table entries, elements of `_where`) for the cached prefix.

        The elements of `_where` are an array [group, entry].
        """
        for bundle in self._bundles:
            numbers, stop = found.cuts[bundle.block], found.hit // bundle.block
            if bundle.state:
                row = int(bundle.row_of[numbers[stop - 1]])
                yield bundle, np.array([stop - 1]), self._elements(bundle, row)[:, None]
            else:
                first = min(bundle.first(found.hit) // bundle.block, stop)
                yield bundle, np.arange(first, stop), bundle.names(numbers[first:stop])

    def _count(self, found: CachedPrefix, needed: list[tuple[Bundle, Ints, Ints]]) -> None:
        lowest = np.zeros(found.hit // self.model.step, np.int64)
        for bundle, entries, names in needed:
            tiers = np.maximum(self._where[names].max(axis=0) - LOWER, 0)
            np.maximum.at(lowest, entries * bundle.block // self.model.step, tiers)
        self.found[:, found.request] = np.bincount(lowest, minlength=len(self.found))

    def _load(self, needed: list[tuple[Bundle, Ints, Ints]], held: list[Ints]) -> bool:
        """Move the blocks that are in lower tiers to the GPU. Return False if they do not fit."""
        lower = [(bundle, names[self._where[names] >= LOWER]) for bundle, _, names in needed]
        for pool, ids in enumerate(self._ids):
            if sum(len(names) for one, names in lower if one.one.pool == pool) > ids.free:
                return False
        for _, names in lower:
            self._leave_tiers(names)
        for bundle, names in lower:
            pool = bundle.one.pool
            blocks = self._ids[pool].take_array(len(names))
            self._keep(bundle, names, blocks)
            held[pool] = np.concatenate([held[pool], blocks])
        return True

    def _leave_tiers(self, names: Ints) -> None:
        """Remove blocks from the lower tiers. Blocks that are in no lower tier are ignored."""
        where = self._where[names]
        lower = where >= LOWER
        if np.count_nonzero(lower):
            for number, store in enumerate(self._stores, 1):
                store.take(names[where == LOWER + number])
            self._where[names[lower]] = ABSENT

    def _keep(self, bundle: Bundle, names: Ints, blocks: Ints) -> None:
        self._leave_tiers(names.ravel())
        super()._keep(bundle, names, blocks)

    def _keep_shared(self, bundle: Bundle, names: Ints, blocks: Ints) -> None:
        self._leave_tiers(names)
        super()._keep_shared(bundle, names, blocks)

    def _lost(self, names: Ints) -> None:
        """Move evicted blocks to the next tier; blocks evicted from the last tier are lost."""
        self._moves += 1
        for number, store in enumerate(self._stores, 1):
            self._where[names] = LOWER + number
            names = store.put(names, self._moves)
        self._where[names] = ABSENT


_NOTHING = np.empty(0, np.int64)
