"""`TimedReplay`: replay requests at their arrival times. Active requests hold their blocks.

One prompt is computed at a time, at the rate of a cost model. Answers are decoded in parallel, at
a fixed time per token. If there is no space for a request, it waits, and so do all requests after
it.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from kvatlas.simulate.pool_replay import PoolReplay, Request
from kvatlas.simulate.prefill_cost import DECODE_SECONDS, PrefillCost
from kvatlas.simulate.replay_policy import Outcome, Progress
from kvatlas.simulate.traces import Ints


class TimedReplay(PoolReplay):
    """A replay in which requests overlap in time."""

    def __init__(self, *given: Any, cost: PrefillCost | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self._cost = cost
        self._running: dict[int, Request] = {}
        self._events: list[tuple[float, int]] = []
        """(time, request) of the ends of running requests, a heap."""
        self._shared: dict[int, int] = {}
        """The number of seen spans of each request when it came first."""
        self.waited = 0.0
        """Total seconds that requests waited for space."""

    def run(self, progress: Progress | None = None) -> Outcome:
        """Replay all requests at their arrival times and return their hits."""
        times, requests = self.trace.times, len(self.trace)
        busy = 0.0
        for count, request in enumerate(np.argsort(times, kind="stable").tolist()):
            came = max(float(times[request]), busy)
            now = came
            self._end_until(now)
            while not (fits := self._begin(request)) and self._events:
                now = max(now, self._events[0][0])
                self._end_until(now)
            self.waited += now - came
            busy = now
            if not fits:
                self.outcome.refused += 1
                continue
            hit = self._running[request].hit
            self.outcome.hits[request] = hit // self.model.step
            busy += self._prefill_seconds(request, hit)
            done = busy + DECODE_SECONDS * self._outputs[request]
            heapq.heappush(self._events, (done, request))
            if progress and not count % 128:
                progress(count / requests)
        self._end_until(np.inf)
        return self.outcome

    def _begin(self, request: int) -> bool:
        """Compute a prompt, unless a pool has too few blocks. The request keeps its blocks."""
        asked = self._admit(self._look(request))
        if self._compute_all(asked):
            self._running[request] = asked
            return True
        self._end(asked)
        return False

    def _end_until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._end(self._running.pop(heapq.heappop(self._events)[1]))

    def _count_seen(self, request: int, spans: Ints) -> int:
        if request not in self._shared:
            self._shared[request] = super()._count_seen(request, spans)
        return self._shared[request]

    def _prefill_seconds(self, request: int, hit: int) -> float:
        if self._cost is None:
            return 0.0
        tokens = self.trace.lengths[request : request + 1]
        found = np.minimum(tokens, hit)
        return self._cost.seconds(float(self._cost.flops(found, tokens)[0]))
