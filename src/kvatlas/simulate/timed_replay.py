"""`TimedReplay`: replay requests at their arrival times. Active requests hold their blocks.

One prompt is computed at a time, at the rate of a cost model. Answers are decoded in parallel, at
a fixed time per token. If there is no space for a request, it waits, and so do all requests after
it. Other requests can find new blocks once the whole prompt is computed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvatlas.simulate.prefill_cost import DECODE_SECONDS, PrefillCost
from kvatlas.simulate.replay import Replay
from kvatlas.simulate.replay_base import Outcome, Progress
from kvatlas.simulate.traces import Ints, Trace

_PREFILLED, _DONE = 0, 1


@dataclass
class _Running:
    entries: Ints
    places: Ints
    new: Ints


class TimedReplay(Replay):
    """A replay in which requests overlap in time."""

    def start(self, trace: Trace, cost: PrefillCost | None) -> None:
        """Prepare a replay with the arrival times of `trace` and the cost of its prompts."""
        self._trace, self._cost = trace, cost
        self._pins = np.zeros(len(self._present), np.int32)
        self._held = [0] * len(self._blocks)
        """Blocks of each pool that active requests hold. They cannot be evicted."""
        self._running: dict[int, _Running] = {}
        self._events: list[tuple[float, int, int]] = []
        self.waited = 0.0
        """Total seconds that requests waited for space."""

    def run(self, progress: Progress | None = None) -> Outcome:
        """Replay all requests at their arrival times and return their hits."""
        times, requests = self._trace.times, len(self._trace)
        order = np.argsort(times, kind="stable")
        busy = 0.0
        for count, request in enumerate(order.tolist()):
            came = float(times[request])
            now = max(came, busy)
            self._happen(now)
            hit = self._begin(request)
            while hit is None and self._events:
                now = max(now, self._events[0][0])
                self._happen(now)
                hit = self._begin(request)
            self.waited += now - max(came, busy)
            self.outcome.hits[request] = hit or 0
            if hit is None:
                self._seen[self.spans.of_request(request)] = True
                self.outcome.refused += 1
                busy = now
                continue
            busy = now + self._prefill_seconds(request, hit)
            done = busy + DECODE_SECONDS * float(self._trace.outputs[request])
            heapq.heappush(self._events, (busy, _PREFILLED, request))
            heapq.heappush(self._events, (done, _DONE, request))
            if progress and not count % 128:
                progress(count / requests)
        self._happen(np.inf)
        return self.outcome

    def _prefill_seconds(self, request: int, hit: int) -> float:
        if self._cost is None:
            return 0.0
        tokens = self._trace.lengths[request : request + 1]
        found = np.minimum(tokens, hit * self.spans.step)
        return self._cost.seconds(float(self._cost.flops(found, tokens)[0]))

    def _happen(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            _, kind, request = heapq.heappop(self._events)
            (self._prefilled if kind == _PREFILLED else self._done)(request)

    def _begin(self, request: int) -> int | None:
        """Take blocks for a request and return how many of its spans are cached.

        Returns None if there is no space.
        """
        spans = self.spans.of_request(request)
        prompt = self._prompt(request, spans)
        hit = prompt.hit
        wanted = self.policy.checkpoints.positions(prompt)
        parts = self._entries(spans, hit, wanted)
        fitting = self._fitting(request, spans, hit, wanted, parts)
        if fitting is None:
            return None
        entries, places = self._in_order(request, fitting)
        here = self._present[entries]
        fresh, new = entries[here & (self._pins[entries] == 0)], entries[~here]
        needs = []
        for pool in range(len(self._blocks)):
            held = self._room(self._of_pool(fresh, pool))
            need = self._room(self._of_pool(new, pool))
            need += int(self._in_flight[pool, request])
            if self._held[pool] + held + need > self._blocks[pool]:
                return None
            needs.append((held, need))
        self._pins[entries[here]] += 1
        self._pinned[entries[here]] = True
        for pool, (held, need) in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])
            self._used[pool] += need
            self._held[pool] += held + need
        self.outcome.peak = max(self.outcome.peak, sum(self._used))
        self._seen[spans] = True
        self._running[request] = _Running(entries, places, new)
        return hit

    def _prefilled(self, request: int) -> None:
        """Make a request's new blocks findable by other requests after its prefill.

        If another request has stored the same blocks in the meantime, the new ones are freed
        instead.
        """
        new = self._running[request].new
        twice = new[self._present[new]]
        fresh = self._pins[twice] == 0
        for pool in range(len(self._blocks)):
            blocks = self._room(self._of_pool(twice, pool))
            self._used[pool] -= blocks
            idle = self._room(self._of_pool(twice[fresh], pool))
            self._held[pool] += idle - blocks
        self._present[new] = True
        self._pins[new] += 1
        self._pinned[new] = True

    def _done(self, request: int) -> None:
        ended = self._running.pop(request)
        entries = ended.entries
        self._pins[entries] -= 1
        idle = entries[self._pins[entries] == 0]
        self._pinned[idle] = False
        for pool in range(len(self._blocks)):
            held = int(self._in_flight[pool, request])
            self._used[pool] -= held
            self._held[pool] -= held + self._room(self._of_pool(idle, pool))
        self._rank(request, entries, ended.places)
