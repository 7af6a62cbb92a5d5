"""Compare how many requests fit in two drafts of a plan, for every request length.

This module enforces the promise of policy atlas: for every request length, while prefilling
and while decoding, a plan fits at least `PROMISE` of the requests that vLLM's plan fits. The
ratio is computed only at the lengths at which a request starts to take one more block in the
compared plan. From one such length up to the next, the number of blocks that a request takes is
constant in the compared plan and does not decrease in vLLM's plan. Within this range, the ratio is
therefore lowest at the start.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.planning.placing import PlanDraft, divide_memory
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plan_parts import Group, blocks_taken
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import FIXED_KINDS

PROMISE = 0.99
"""The minimum fraction of vLLM's number of requests that a plan must fit."""
LENGTHS = 32_768
"""The promise holds at least up to this request length in tokens, even if `max_len` is less. A plan
that an engine must run is an exception: there it ends at `max_len`."""
MOST_LENGTHS = 1 << 20
"""The request length in tokens up to which all results of `steps` are compared."""


def longest_promised(request: PlanRequest) -> int:
    """Return the request length, in tokens, up to which a plan keeps the promise.

    An engine accepts no request above `max_len`, so a plan for an engine promises nothing for
    longer requests.
    """
    return request.max_len if request.runs_on else max(request.max_len, LENGTHS)


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of a plan: its groups, and the number of blocks in each pool."""

    groups: tuple[Group, ...]
    blocks: tuple[int, ...]
    dcp: int = 1

    def requests(self, lengths: NDArray[np.int64], in_flight: int) -> NDArray[np.float64]:
        """Return, for each request length in `lengths`, how many such requests fit at once.

        `in_flight` is the number of tokens per request that are scheduled but not computed.
        """
        taken = blocks_taken(self.groups, lengths, in_flight=in_flight, dcp=self.dcp)
        with np.errstate(divide="ignore"):  # without encoder tokens, cross attention takes 0 blocks
            fits = [self.blocks[pool] / blocks for pool, blocks in taken.items()]
        fewest: NDArray[np.float64] = np.min(fits, axis=0)
        return fewest


def steps(groups: Iterable[Group], request: PlanRequest) -> NDArray[np.int64]:
    """Return the request lengths, in tokens, at which a request starts to need one more block.

    The lengths of all groups are included. The range ends at `longest_promised`. Of the lengths
    above `MOST_LENGTHS`, only `max_len` is included, because fixed costs no longer matter at such
    lengths.
    """
    longest = min(longest_promised(request), MOST_LENGTHS)
    sizes = {group.block * request.dcp for group in groups if group.kind not in FIXED_KINDS}
    starts = [np.arange(1, longest + 1, size, dtype=np.int64) for size in sizes]
    return np.concatenate([*starts, [longest, request.max_len]])


class Share(msgspec.Struct, frozen=True):
    """The number of requests that a plan fits, divided by the number that another plan fits.

    `share` is the smallest ratio over all request lengths. `length` and `in_flight` are the request
    length and the number of tokens in flight at which the ratio is this small.
    """

    share: float
    length: int
    in_flight: int

    @property
    def keeps_promise(self) -> bool:
        """Whether the share is at least `PROMISE`, as policy atlas requires."""
        return self.share >= PROMISE


def capacity_of(request: PlanRequest, draft: PlanDraft) -> Capacity:
    """Return the capacity of the plan that a draft describes, without building the plan."""
    stages = draft.stages(request)
    blocks = divide_memory(request, draft.pools, stages)
    return Capacity(draft.groups, tuple(blocks), request.dcp)


def least_share(mine: Capacity, theirs: Capacity, request: PlanRequest) -> Share:
    """Return how many requests fit in `mine`, divided by how many fit in `theirs`.

    The result is the smallest ratio over all request lengths, while prefilling and while decoding.
    """
    lengths = steps(mine.groups, request)
    found = []
    for in_flight in {request.in_flight, DECODING}:
        shares = mine.requests(lengths, in_flight) / theirs.requests(lengths, in_flight)
        worst = int(np.argmin(shares))
        found.append(Share(float(shares[worst]), int(lengths[worst]), in_flight))
    return min(found, key=lambda one: one.share)
