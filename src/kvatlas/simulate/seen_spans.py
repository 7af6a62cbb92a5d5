"""`SeenSpans`: the prefixes that were requested before."""

from __future__ import annotations

import numpy as np

from kvatlas.simulate.traces import Ints


class SeenSpans:
    """At most `most` spans that were requested last: like `SeenPrefixes`, for numbered spans."""

    def __init__(self, spans: int, most: int) -> None:
        self._most = most
        self._added = 1
        self._when = np.zeros(spans, np.int64)
        """When each span was added, counted from 1; 0 for spans that were never added."""

    def count(self, spans: Ints) -> int:
        """Return how many leading spans were seen before, and record all of them."""
        oldest = max(self._added - self._most, 1)
        known = self._when[spans] >= oldest
        new = spans[~known]
        self._when[new] = np.arange(self._added, self._added + len(new))
        self._added += len(new)
        return int(known.argmin()) if len(new) else len(spans)
