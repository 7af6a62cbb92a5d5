"""`trace_facts`: the figures of a trace that do not depend on a model or a plan."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.simulate.traces import Trace

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Reuse(msgspec.Struct, frozen=True):
    """Reuse distances: from a request to the last earlier request with the same prefix.

    The prefix is the longest one that the request shares with any earlier request. Each field maps
    p50, p90, p99 and max to a value, over all requests that share a prefix.
    """

    seconds: dict[str, float]
    requests: dict[str, int]
    """Number of requests in between."""
    new_tokens: dict[str, int]
    """Number of tokens that the requests in between used for the first time. A cache with LRU
    eviction must hold at least as many, or the prefix is evicted before it is used again."""


class TraceFacts(msgspec.Struct, frozen=True):
    """Figures that describe a trace. Percentiles are values that occur in the trace."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    block: int
    """Number of tokens per id. Prefixes are shared in whole blocks."""
    duration: float
    """Time from the first to the last request."""
    requests_per_second: float | None
    """Mean arrival rate; None if the trace has no arrival times."""
    busiest_minute: int | None
    """Maximum number of requests that arrive within one minute, counted from the first request."""
    prompt_lengths: dict[str, int]
    output_lengths: dict[str, int]
    distinct_tokens: int | None
    """Number of tokens that an unlimited cache would hold; None if the content is unknown."""
    shared_tokens: float | None
    """Share of the prompt tokens that an earlier request has in the same prefix."""
    shared_requests: float | None
    """Share of the requests that have a prefix in common with an earlier request."""
    reuse: Reuse | None
    """None if no request shares a prefix, or the content is unknown."""
    notes: list[str]


def trace_facts(trace: Trace) -> TraceFacts:
    """Return what a trace contains: arrivals, lengths, shared prefixes and reuse distances.

    >>> from kvatlas.simulate.traces import TraceBuilder, TraceRequest
    >>> builder = TraceBuilder("mine", 16)
    >>> for time, ids in enumerate([[1, 2], [3, 4], [1, 2, 5]]):
    ...     builder.add("line 1", TraceRequest(16 * len(ids), ids, 10, float(time)))
    >>> facts = trace_facts(builder.finish())
    >>> facts.distinct_tokens, facts.shared_requests, facts.reuse.new_tokens["max"]
    (80, 0.3333333333333333, 32)
    """
    known = trace.content_known
    shared, last = _last_uses(trace)
    found = np.minimum(shared * trace.block, trace.lengths)
    new = trace.lengths - found
    span = float(np.ptp(trace.times))
    return TraceFacts(
        name=trace.name,
        requests=len(trace),
        prompt_tokens=trace.tokens,
        output_tokens=int(trace.outputs.sum()),
        block=trace.block,
        duration=span,
        requests_per_second=len(trace) / span if span else None,
        busiest_minute=_busiest_minute(trace.times) if span else None,
        prompt_lengths=_percentiles(trace.lengths),
        output_lengths=_percentiles(trace.outputs),
        distinct_tokens=int(new.sum()) if known else None,
        shared_tokens=float(found.sum() / max(trace.tokens, 1)) if known else None,
        shared_requests=float((shared > 0).mean()) if known else None,
        reuse=_reuse(trace, np.flatnonzero(shared > 0), last, new),
        notes=trace.notes(),
    )


def _last_uses(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each request, the length of its shared prefix and its last use.

    The length counts the leading ids that the request shares with any earlier request. The last use
    is the index of the last earlier request that has all of these ids, or -1.
    """
    shared, last = np.zeros(len(trace), np.int64), np.full(len(trace), -1, np.int64)
    uses = np.full(trace.distinct, -1, np.int64)
    starts = trace.starts.tolist()
    for request in range(len(trace)) if len(trace.ids) else ():
        ids = trace.ids[starts[request] : starts[request + 1]]
        seen = int(np.count_nonzero(uses[ids] >= 0))  # new ids are always the last ones
        if seen:
            shared[request], last[request] = seen, uses[ids[seen - 1]]
        uses[ids] = request
    return shared, last


def _reuse(
    trace: Trace, requests: NDArray[np.int64], last: NDArray[np.int64], new: NDArray[np.int64]
) -> Reuse | None:
    if not len(requests):
        return None
    before = last[requests]
    added = np.concatenate([[0], np.cumsum(new)])
    return Reuse(
        _percentiles(trace.times[requests] - trace.times[before]),
        _percentiles(requests - before - 1),
        _percentiles(added[requests] - added[before + 1]),
    )


def _percentiles(values: NDArray[Any]) -> dict[str, Any]:
    """Return the percentiles p50, p90, p99 and max of the values, by name.

    For example, p90 is the smallest value that is at least as large as 90% of the values.

    >>> _percentiles(np.arange(1, 101))
    {'p50': 50, 'p90': 90, 'p99': 99, 'max': 100}
    """
    ordered = np.sort(values)
    places = {name: max(int(np.ceil(q * len(ordered))) - 1, 0) for name, q in _SHARES.items()}
    return {name: ordered[place].item() for name, place in places.items()}


def _busiest_minute(times: NDArray[np.float64]) -> int:
    """Return the greatest number of arrivals in any minute since the first arrival."""
    return int(np.bincount(((times - times.min()) // 60).astype(np.int64)).max())
