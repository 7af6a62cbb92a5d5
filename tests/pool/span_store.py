"""A store of spans outside of an engine: running requests hold nothing in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvatlas.pool.eviction import Use, eviction_policy
from kvatlas.simulate import Spans
from kvatlas.simulate.traces import Ints


def store_hits(
    spans: Spans,
    room: int,
    eviction: str = "lru",
    *,
    head_first: bool = False,
    saved: Callable[[int], float] = float,
) -> Ints:
    """Return how many leading spans each request finds in a store with room for `room` spans.

    A request adds its spans, the last one first, and then spans are evicted until all fit. With
    `head_first`, the spans are added one by one from the first on. `saved` returns the compute that
    a hit on a span saves, by the span's index in the request.
    """
    kind = eviction_policy(eviction)
    queue, there, used = kind(spans.count), np.zeros(spans.count, bool), 0
    later = spans.next_uses() if "next_use" in kind.needs else None
    hits = []
    for request in range(len(spans.starts) - 1):
        mine = spans.of_request(request)
        known = there[mine]
        hits.append(int(known.argmin()) if not known.all() else len(mine))
        places = np.arange(len(mine)) if head_first else np.arange(len(mine))[::-1]
        for chosen in places[:, None] if head_first else [places]:
            some = mine[chosen]
            used += int(np.count_nonzero(~there[some]))
            there[some] = True
            next_use = None if later is None else later[spans.starts[request] + chosen]
            worth = None
            if "saved" in kind.needs:
                worth = np.array([saved(place) for place in chosen.tolist()])
            queue.used(some, Use(request + 1, worth, next_use))
            if used > room:
                gone = queue.victims(used - room, None)
                there[gone] = False
                used -= len(gone)
    return np.array(hits, np.int64)
