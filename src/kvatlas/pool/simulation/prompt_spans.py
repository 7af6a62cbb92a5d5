"""Spans: a trace's prompts cut where hits of a plan can end.

A span is as many tokens as are whole blocks in every group. Which span two requests share
follows from the trace's ids, whether those are coarser or finer: a span is known by the id of
its last token, since that stands for everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.traces import Ints, Trace


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of every request, numbered over the whole trace."""

    step: int
    """Tokens of a span."""
    numbers: Ints
    """Of all requests behind each other."""
    starts: Ints
    count: int
    """Different spans."""
    reusable: Ints
    """Spans of each request that can be a hit: its last token is computed anyway."""
    known: Ints
    """Spans of each request that lie in whole blocks of the trace: a later request that
    comes past the rest has another id there, whatever its tokens are."""

    @classmethod
    def of(cls, trace: Trace, step: int) -> Spans:
        """The spans of `step` tokens each."""
        block, counts = trace.block, np.diff(trace.starts)
        covered = np.minimum(trace.lengths, counts * block)
        stop = covered // step
        depth = np.arange(len(trace.ids)) - np.repeat(trace.starts[:-1], counts)
        begin, end = depth * block // step, (depth + 1) * block // step
        every = np.zeros(int(trace.ids.max(initial=-1)) + 1, np.int64)
        every[trace.ids] = end - begin
        base = np.concatenate([[0], np.cumsum(every)])
        here = np.maximum(np.minimum(end, np.repeat(stop, counts)) - begin, 0)
        # In place: there may be tens of millions of them.
        numbers = np.repeat(base[trace.ids] - (np.cumsum(here) - here), here)
        numbers += np.arange(len(numbers))
        return cls(
            step=step,
            numbers=numbers,
            starts=np.concatenate([[0], np.cumsum(stop)]),
            count=int(base[-1]),
            reusable=np.minimum(stop, np.maximum(trace.lengths - 1, 0) // step),
            known=np.minimum(stop, np.minimum(trace.lengths // block, counts) * block // step),
        )

    @classmethod
    def of_ids(cls, trace: Trace) -> Spans:
        """One span an id, the last and not full one of a prompt included: a plain block cache."""
        counts = np.diff(trace.starts)
        return cls(
            trace.block, trace.ids, trace.starts, int(trace.ids.max(initial=-1)) + 1, counts, counts
        )

    def of_request(self, request: int) -> Ints:
        """The spans of one request."""
        return self.numbers[self.starts[request] : self.starts[request + 1]]

    def next_uses(self) -> Ints:
        """For each entry of `numbers` the next request with that span; beyond the last for none."""
        requests = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        order = np.argsort(self.numbers, kind="stable")
        ordered = self.numbers[order]
        later = np.full(len(order), len(self.starts), np.int64)
        same = np.flatnonzero(ordered[1:] == ordered[:-1])
        later[order[same]] = requests[order[same + 1]]
        return later


def check_step(step: int) -> None:
    """Refuse blocks so unlike that no hit would ever end."""
    if step > 1 << 20:
        problem = "The groups' blocks have no common multiple within a million tokens"
        hint = "Plan with another block size"
        raise AtlasError(Code.CONTRADICTORY, problem, got=f"{step:,} tokens", hint=hint)
