"""How many requests a draft of a plan fits, at every length, beside another draft.

The promise of policy atlas is kept here: for every length, while
prefilling and while decoding, a plan fits at least `PROMISE` of the requests that vLLM's
plan fits. Every length is looked at, by those at which a request takes one more block:
between two of them it takes no more here, and no less there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.planning.placing import PlanDraft, divide_memory
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plan_parts import Group, blocks_taken
from kvatlas.planning.request import PlanRequest

PROMISE = 0.99
"""Share of vLLM's requests that a plan fits at least."""
LENGTHS = 32_768
"""The promise is kept up to this length at least."""
MOST_LENGTHS = 1 << 20
"""Up to this length every step is looked at."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Groups, and the blocks of each pool that they draw from."""

    groups: tuple[Group, ...]
    blocks: tuple[int, ...]
    dcp: int = 1

    def requests(self, lengths: NDArray[np.int64], in_flight: int) -> NDArray[np.float64]:
        """How many requests fit at once, for each of these lengths."""
        taken = blocks_taken(self.groups, lengths, in_flight=in_flight, dcp=self.dcp)
        with np.errstate(divide="ignore"):  # encoders that give no tokens take no blocks
            fits = [self.blocks[pool] / blocks for pool, blocks in taken.items()]
        fewest: NDArray[np.float64] = np.min(fits, axis=0)
        return fewest


def steps(groups: Iterable[Group], request: PlanRequest) -> NDArray[np.int64]:
    """Every length at which a request takes one more block of a group, up to the greatest.

    A plan for short requests is asked about longer ones, too: up to `LENGTHS` at least. Past
    `MOST_LENGTHS` only the greatest is looked at: nothing but tokens is left to pay for there.
    """
    longest = min(max(request.max_len, LENGTHS), MOST_LENGTHS)
    sizes = {group.block * request.dcp for group in groups if group.kind != "recurrent"}
    starts = [np.arange(1, longest + 1, size, dtype=np.int64) for size in sizes]
    return np.concatenate([*starts, [longest, request.max_len]])


@dataclass(frozen=True, slots=True)
class Share:
    """The least share of another plan's requests that a plan fits, and where."""

    share: float
    length: int
    in_flight: int

    @property
    def keeps_promise(self) -> bool:
        """Whether it is large enough."""
        return self.share >= PROMISE


def capacity_of(request: PlanRequest, draft: PlanDraft) -> Capacity:
    """What a draft fits, without making a plan of it."""
    stages = draft.stages(request)
    blocks = divide_memory(request, draft.pools, stages)
    return Capacity(draft.groups, tuple(blocks), request.dcp)


def least_share(mine: Capacity, theirs: Capacity, request: PlanRequest) -> Share:
    """The least share of `theirs` that `mine` fits, over all lengths, prefilling or decoding."""
    lengths = steps(mine.groups, request)
    found = []
    for in_flight in {request.in_flight, DECODING}:
        shares = mine.requests(lengths, in_flight) / theirs.requests(lengths, in_flight)
        worst = int(np.argmin(shares))
        found.append(Share(float(shares[worst]), int(lengths[worst]), in_flight))
    return min(found, key=lambda one: one.share)
