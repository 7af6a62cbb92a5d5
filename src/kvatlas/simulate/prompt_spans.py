"""Spans: the prompts of a trace, cut at the positions where hits can end.

The length of a span is the smallest number of tokens that is a whole number of blocks in every
group. A trace has one id per block of a prompt, and these blocks may be larger or smaller than
spans. The ids determine which spans two requests share: a span is identified by the id of the trace
block that contains the span's last token, because an id represents everything up to the end of its
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.simulate.traces import Ints, Trace


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans of every request. Equal spans have the same number in the whole trace."""

    step: int
    """Number of tokens per span."""
    numbers: NDArray[np.int32] | Ints
    """The span numbers of all requests, concatenated."""
    starts: Ints
    count: int
    """Number of distinct spans."""
    reusable: Ints
    """Number of spans of each request that can be hits. The last token is always computed."""
    known: Ints
    """Number of spans of each request within complete blocks of the trace. An incomplete last block
    has a separate id, so a longer request never shares it."""

    @classmethod
    def of(cls, trace: Trace, step: int) -> Spans:
        """Cut the prompts of a trace into spans of `step` tokens."""
        block, counts = trace.block, np.diff(trace.starts)
        covered = np.minimum(trace.lengths, counts * block)
        stop = covered // step
        every = np.zeros(trace.distinct, np.int64)
        for some, ids in trace.pieces():
            depth = _depths(counts[some])
            every[ids] = (depth + 1) * block // step - depth * block // step
        base = np.concatenate([[0], np.cumsum(every)])
        starts = np.concatenate([[0], np.cumsum(stop)])
        # With hundreds of millions of spans, this array is most of the memory.
        width: Any = np.int32 if base[-1] < 1 << 31 else np.int64
        numbers: Ints = np.empty(int(starts[-1]), width)
        for some, ids in trace.pieces():
            depth = _depths(counts[some])
            begin, end = depth * block // step, (depth + 1) * block // step
            here = np.maximum(np.minimum(end, np.repeat(stop[some], counts[some])) - begin, 0)
            mine = np.repeat(base[ids] - (np.cumsum(here) - here), here)
            mine += np.arange(len(mine))
            numbers[starts[some.start] : starts[some.stop]] = mine
        return cls(
            step=step,
            numbers=numbers,
            starts=starts,
            count=int(base[-1]),
            reusable=np.minimum(stop, np.maximum(trace.lengths - 1, 0) // step),
            known=np.minimum(stop, np.minimum(trace.lengths // block, counts) * block // step),
        )

    @classmethod
    def of_ids(cls, trace: Trace) -> Spans:
        """Use each id of a trace as one span, including the id of an incomplete last block."""
        counts = np.diff(trace.starts)
        return cls(trace.block, trace.ids, trace.starts, trace.distinct, counts, counts)

    def of_request(self, request: int) -> Ints:
        """Return the span numbers of one request."""
        found = self.numbers[self.starts[request] : self.starts[request + 1]]
        return found.astype(np.int64)

    def next_uses(self) -> Ints:
        """Return, for each element of `numbers`, the index of the next request with that span.

        If there is none, the result is larger than the indices of all requests.
        """
        requests = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        order = np.argsort(self.numbers, kind="stable")
        ordered = self.numbers[order]
        later = np.full(len(order), len(self.starts), np.int64)
        same = np.flatnonzero(ordered[1:] == ordered[:-1])
        later[order[same]] = requests[order[same + 1]]
        return later


def _depths(counts: Ints) -> Ints:
    """Return the index of each id in its prompt, for prompts with these numbers of ids.

    >>> _depths(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    stops = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(stops - counts, counts)


def check_step(step: int) -> None:
    """Raise an error if spans of `step` tokens are too long for a simulation."""
    if step > 1 << 20:
        problem = f"The least common multiple of all block sizes must be at most {1 << 20:,} tokens"
        hint = "Plan with another block size"
        raise AtlasError(Code.CONTRADICTORY, problem, got=f"{step:,} tokens", hint=hint)
