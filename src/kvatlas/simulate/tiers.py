"""`TieredReplay`: evicted entries move from the GPU to the next tier, such as host memory or disk.

An entry is in one tier at a time. A hit may use entries of any tier and moves them to the GPU. A
recomputed entry is removed from its old tier. Lower tiers evict the oldest entries first. They
have separate plans, so an entry may have a different size there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Plan
from kvatlas.pool.eviction import Lru, Use
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.replay import Replay
from kvatlas.simulate.traces import Ints
from kvatlas.specs import Visibility

NOWHERE = -1


@dataclass(frozen=True)
class LowerTier:
    """A tier below the GPU: its size, and the bytes of an entry of each layer class."""

    name: str
    nbytes: int
    sizes: tuple[int, ...]
    """Number of bytes per span or state of each class."""
    state_share: float | None = None
    """Share of the tier that is reserved for checkpoints; None if nothing is reserved."""

    def __post_init__(self) -> None:
        if self.state_share is not None and not 0 < self.state_share < 1:
            raise AtlasError(
                Code.BAD_SIZE,
                "The share of a tier for checkpoints must be greater than 0 and less than 1",
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
                f"{len(there)} kinds of layers in tier {name!r} ({plan.model}), of which "
                f"{len(set(here) & set(there))} are among the {len(here)} kinds on the GPU"
            )
            hint = "Plan the same model for all tiers"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
        sizes = tuple(
            ceil_div(there[_kind(one)] * one.blocks * one.block_bytes, here[_kind(one)])
            for one in model.classes
        )
        nbytes = sum(pool.nbytes for pool in plan.pools) * plan.tp
        return cls(name, nbytes, sizes, state_share)


def _kind(one: LayerClass) -> tuple[str, Visibility]:
    return one.needs, one.visibility


class _Store:
    """The entries that a lower tier contains."""

    def __init__(self, tier: LowerTier, kinds: Sequence[LayerClass], bits: int) -> None:
        self._sizes, self._bits = np.array(tier.sizes, np.int64), bits
        share = tier.state_share
        states = 0 if share is None else int(tier.nbytes * share)
        self._room = [tier.nbytes - states, states] if states else [tier.nbytes]
        self._part = np.array([int(bool(states) and one.needs != "all") for one in kinds])
        self._queues = [Lru(len(kinds) << bits, self._size) for _ in self._room]
        self._used = [0] * len(self._room)
        self._pinned = np.zeros(len(kinds) << bits, bool)

    def put(self, entries: Ints, now: int) -> Ints:
        """Add entries, and return the entries that were evicted to make space, oldest first."""
        gone = []
        for part, queue in enumerate(self._queues):
            mine = entries[self._part[entries >> self._bits] == part]
            queue.used(mine, Use(now))
            self._used[part] += int(self._size(mine).sum())
            over = self._used[part] - self._room[part]
            if over > 0:
                victims = queue.victims(over, self._pinned)
                self._used[part] -= int(self._size(victims).sum())
                gone.append(victims)
        return np.concatenate(gone) if gone else entries[:0]

    def take(self, entries: Ints) -> None:
        """Remove entries, because they move to the GPU or are recomputed there."""
        for part, queue in enumerate(self._queues):
            mine = entries[self._part[entries >> self._bits] == part]
            queue.forget(mine)
            self._used[part] -= int(self._size(mine).sum())

    def _size(self, entries: Ints) -> Ints:
        sizes: Ints = self._sizes[entries >> self._bits]
        return sizes


class TieredReplay(Replay):
    """A replay in which evicted entries can be found in the next tier."""

    def __init__(self, *given: Any, tiers: Sequence[LowerTier], **options: Any) -> None:
        super().__init__(*given, **options)
        self._tier = np.full(len(self._present), NOWHERE, np.int8)
        """The tier of each entry: 0 for the GPU, 1 and more for the tiers below it."""
        self._stores = [_Store(tier, self.model.classes, self._bits) for tier in tiers]
        self._now = 0
        requests = len(self.outcome.hits)
        self.found = np.zeros((1 + len(tiers), requests), np.int64)
        """[tier, request]: number of cached spans, by the lowest tier that was needed."""

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Make space on the GPU for a request, and move its entries from lower tiers to the GPU.

        Returns False if the request can never fit.
        """
        fitting = self._fitting(request, spans, hit, wanted, parts)
        if fitting is None:
            return False
        entries, places = self._in_order(request, fitting)
        where = self._tier[entries]
        self._count(request, hit, places, where)
        for number, store in enumerate(self._stores, 1):
            store.take(entries[where == number])
        new, here = entries[where != 0], entries[where == 0]
        self._now = request + 1
        for pool in range(len(self._evictions)):
            need = self._room(self._of_pool(new, pool))
            held = int(self._in_flight[pool, request])
            self._evict(pool, self._used[pool] + need + held - self._blocks[pool], here)
            self._used[pool] += need
            self.outcome.peak = max(self.outcome.peak, sum(self._used) + held)
        self._tier[entries] = 0
        self._present[entries] = True
        self._rank(request, entries, places)
        return True

    def _count(self, request: int, hit: int, places: Ints, where: NDArray[np.int8]) -> None:
        lowest = np.zeros(hit, np.int8)
        found = places < hit
        np.maximum.at(lowest, places[found], where[found])
        self.found[:, request] = np.bincount(lowest, minlength=len(self.found))

    def _gone(self, victims: Ints) -> None:
        """Move evicted entries to the next tier; entries evicted from the last tier are lost."""
        for number, store in enumerate(self._stores, 1):
            self._tier[victims] = number
            victims = store.put(victims, self._now)
        self._tier[victims] = NOWHERE
        self._present[victims] = False
