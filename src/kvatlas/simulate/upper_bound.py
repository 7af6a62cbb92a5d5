"""`upper_bound`: the most prompt tokens that any policy can find in the pools of a plan.

A request that continues after n spans needs every attention span before n, the windows before n and
the states after n. Each of these entries must have been kept since the previous request that
contains it, because no later request could have stored it. So a hit occupies the blocks of each
entry from the previous request to this one. The bound is the largest number of tokens whose entries
fit into the pools at all times: between two requests, and together with the blocks of a running
request.

This packing problem is relaxed by a price per block and moment (Lagrangian duality). With given
prices every request chooses its best hit by itself, and the sum of all gains plus the price of all
blocks is at least the optimum, whatever the prices are. Prices are improved by subgradient steps,
and the lowest sum is the result.

How many blocks a running request needs depends on the engine, so some requests are served by one
engine and refused by another. Such a request takes blocks only if it has a hit. Three
simplifications only raise the bound. An entry may be stored by every request that contains it, even
if that request continued after the entry or was refused. A refused request takes no blocks. Layers
with chunked attention are assumed to need no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.integers import ceil_div
from kvatlas.simulate.layer_classes import PoolModel
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import MOST_TOKENS, Ints, Trace

Floats = NDArray[np.float64]

ROUNDS = 1000
"""Maximum number of price updates."""
PATIENCE = 40
"""Number of updates without progress after which smaller steps are taken."""


@dataclass(frozen=True)
class _Runs:
    """Runs of consecutive spans. All spans of a run were last used by one earlier request.

    A request has several runs, because its shorter prefixes were used more recently than longer
    ones. The best hit of a request always ends at the end of a run, because inside a run the gain
    of a hit is a convex function of the hit's length.
    """

    request: Ints
    before: Ints
    """The previous request that contains the spans."""
    start: Ints
    stop: Ints
    """Indices of spans in the request."""
    owner: Ints
    """For each run, the index of the first run of its request."""

    @classmethod
    def of(cls, spans: Spans, served: NDArray[np.bool_]) -> _Runs:
        last = np.full(spans.count, -1, np.int64)
        requests, befores, starts, stops = [], [], [], []
        limits = spans.reusable.tolist()
        for request in range(len(served)):
            numbers = spans.of_request(request)
            before = last[numbers[: limits[request]]]
            known = int(np.searchsorted(-before, 1))  # before descends; -1 means never requested
            last[numbers] = request
            if known and served[request]:
                before = before[:known]
                ends = np.append(np.flatnonzero(np.diff(before)) + 1, known)
                stops.append(ends)
                starts.append(np.append(0, ends[:-1]))
                befores.append(before[ends - 1])
                requests.append(np.full(len(ends), request))
        parts = [np.concatenate([*some, np.empty(0, np.int64)]).astype(np.int64)
                 for some in (requests, befores, starts, stops)]  # fmt: skip
        first = np.flatnonzero(np.diff(parts[0], prepend=-1))
        owner = np.repeat(first, np.diff(np.append(first, len(parts[0]))))
        return cls(parts[0], parts[1], parts[2], parts[3], owner)


class _Prices:
    """The relaxed problem: prices of blocks at every moment, and the hits that they allow."""

    def __init__(
        self, model: PoolModel, spans: Spans, trace: Trace, values: Floats, step_tokens: int
    ) -> None:
        least, most = _running_blocks(model, trace, step_tokens)
        rooms = np.array(model.blocks)[:, None]
        served: NDArray[np.bool_] = np.logical_and.reduce(least <= rooms)
        sure = np.logical_and.reduce(most <= rooms)
        self._runs = runs = _Runs.of(spans, served)
        moments = 2 * len(trace) + 1
        self.room = np.repeat(rooms.astype(np.float64), moments, axis=1)
        """[pool, moment]: blocks that kept entries may take. Moment 2 n is during request n, and
        moment 2 n + 1 is between requests n and n + 1."""
        self.room[:, 0:-1:2] -= np.where(sure, least, 0)
        self._own = np.where(sure, 0, least)[:, runs.request]
        """[pool, run]: blocks that the request itself takes if it has a hit."""
        self._begin, self._end = 2 * runs.before + 1, 2 * runs.request
        self._first = np.flatnonzero(runs.owner == np.arange(len(runs.owner)))
        self._sizes = np.diff(np.append(self._first, len(runs.owner)))
        self._value = values[runs.request] * runs.stop
        self._attention = [_blocks(model, pool, "all") for pool in range(len(model.blocks))]
        self._states = [_blocks(model, pool, "state") for pool in range(len(model.blocks))]
        self._windows = [
            (one.pool, one.blocks, *self._window(one.first(runs.stop, spans.step)))
            for one in model.classes
            if one.needs == "window" and not one.visibility.chunk
        ]

    def _window(self, first: Ints) -> tuple[Ints, Ints]:
        """Return the first span of each run's window, and the run that contains this span."""
        runs = self._runs
        # Runs are sorted by request and by span, so one search over both finds the run.
        far = int(runs.stop.max(initial=0)) + 1
        order = runs.request * far + runs.start
        place = np.searchsorted(order, runs.request * far + first, side="right") - 1
        return first, place.astype(np.int64)

    def solve(self, rounds: int) -> float:
        """Update the prices at most `rounds` times, and return the lowest bound found."""
        price = best_price = np.full(self.room.shape, self._constant_price())
        best, left = self.evaluate(price)
        hope, idle, direction = 0.1 * best, 0, left
        for _ in range(rounds):
            bound, left = self.evaluate(price)
            if bound < best:
                idle = 0 if bound < best - 0.05 * hope else idle
                best, best_price = bound, price
            idle += 1
            if idle > PATIENCE:
                hope, idle, price = 0.85 * hope, 0, best_price
                bound, left = self.evaluate(price)
                direction = left
            direction = _downhill(price, (direction + left) / 2)
            if not direction.any():
                direction = _downhill(price, left)
            if not direction.any():
                return bound  # no price can be improved, so this is the optimum
            step = (bound - best + hope) / float((direction**2).sum())
            price = np.maximum(price - step * direction, 0.0)
        return best

    def _constant_price(self) -> float:
        """Return the price with the lowest bound, if one price applies at all moments."""
        prices = [0.0, *np.geomspace(1e-9, 1.0, 28) * max(float(self._value.max(initial=1.0)), 1.0)]
        sums = [self.evaluate(np.full(self.room.shape, one))[0] for one in prices]
        return float(prices[int(np.argmin(sums))])

    def evaluate(self, price: Floats) -> tuple[float, Floats]:
        """Return the bound for these prices, and the blocks that stay free at each moment.

        Each request takes its best hit at these prices. The number of free blocks is negative if
        these hits do not fit into the pools.
        """
        runs, gain = self._runs, self._value.copy()
        lengths = runs.stop - runs.start
        for pool, row in enumerate(price):
            total = np.concatenate([[0.0], row.cumsum()])
            each = total[self._end] - total[self._begin]
            whole = (each * lengths).cumsum()
            before = whole - each * lengths
            gain -= self._attention[pool] * (whole - before[runs.owner])
            gain -= self._states[pool] * each + self._own[pool] * row[2 * runs.request]
            for of, blocks, first, place in self._windows:
                if of == pool:
                    outside = before[place] + (first - runs.start[place]) * each[place]
                    gain -= blocks * (whole - outside)
        bound = float((price * self.room).sum())
        left = self.room.copy()
        if len(self._first):
            best = np.maximum.reduceat(gain, self._first)
            bound += float(np.maximum(best, 0.0).sum())
            self._take(left, gain, best)
        return bound, left

    def _take(self, left: Floats, gain: Floats, best: Floats) -> None:
        """Subtract the blocks of each request's best hit from the free blocks, `left`, in place."""
        runs = self._runs
        top = np.repeat(best, self._sizes)
        hits = np.flatnonzero((gain == top) & (top > 0))
        last = np.full(len(self._first), -1, np.int64)
        number = np.repeat(np.arange(len(self._first)), self._sizes)
        last[number[hits]] = hits  # the longest of equal hits
        chosen = last[number]
        inside = np.arange(len(chosen)) <= chosen
        lengths = (runs.stop - runs.start) * inside
        ends = left.shape[1] + 1
        for pool, row in enumerate(left):
            attention = self._attention[pool] * lengths.astype(np.float64)
            states = self._states[pool] * (np.arange(len(chosen)) == chosen).astype(np.float64)
            windows = np.zeros(len(chosen))
            for of, size, first, _ in self._windows:
                if of == pool:
                    seen = runs.stop - np.maximum(runs.start, first[chosen])
                    windows += size * np.clip(seen, 0, None) * inside
            taken = attention + states + windows
            change = np.bincount(self._begin, taken, ends) - np.bincount(self._end, taken, ends)
            row -= change.cumsum()[:-1]
            served = np.flatnonzero(np.arange(len(chosen)) == chosen)
            row[2 * runs.request[served]] -= self._own[pool][served]


def _downhill(price: Floats, direction: Floats) -> Floats:
    """Return a copy of `direction` with 0 where a price of 0 would become negative."""
    return np.where((price <= 0.0) & (direction > 0.0), 0.0, direction)


def _blocks(model: PoolModel, pool: int, needs: str) -> int:
    return sum(one.blocks for one in model.classes if one.pool == pool and one.needs == needs)


def _running_blocks(model: PoolModel, trace: Trace, step_tokens: int) -> tuple[Ints, Ints]:
    """Return the fewest and the most blocks of running requests, as two arrays [pool, request].

    Every engine holds the blocks of full attention and a state. It may also hold the blocks of
    windows, and the states of a step of `step_tokens` tokens.
    """
    tokens = trace.lengths + trace.outputs
    spans = ceil_div(tokens, model.step)
    step = ceil_div(min(step_tokens, int(tokens.max(initial=1))), model.step)
    rings = model.rings or (0,) * len(model.blocks)
    least = np.repeat(np.array(rings)[:, None], len(trace), axis=1)
    most = least.copy()
    for one in model.classes:
        seen = one.visibility.window or one.visibility.chunk or 1
        held = np.minimum(spans, step + ceil_div(seen, model.step)) + 1
        if one.needs == "all":
            mine = ceil_div(tokens * one.blocks, model.step)
            least[one.pool] += mine
            most[one.pool] += mine
        else:
            least[one.pool] += one.blocks * (one.needs == "state")
            most[one.pool] += one.blocks * held
    return least, most


def upper_bound(
    model: PoolModel, spans: Spans, trace: Trace, values: Floats | None = None,
    *, step_tokens: int = MOST_TOKENS, rounds: int = ROUNDS,
) -> float:  # fmt: skip
    """Return an upper bound of the number of spans that requests find in the pools.

    The bound holds for all checkpoint and eviction policies of engines whose steps have at most
    `step_tokens` tokens. With `values`, each span that request i finds counts as `values[i]` spans
    instead of one.
    """
    given = np.ones(len(trace)) if values is None else values
    if all(one.visibility.chunk or one.visibility.window == 1 for one in model.classes):
        # A chunk begins without earlier tokens, and a window of one token contains none.
        return float((given * spans.reusable).sum())
    problem = _Prices(model, spans, trace, given, step_tokens)
    return problem.solve(rounds)
