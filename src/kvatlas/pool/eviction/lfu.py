"""Least frequently used first; among entries with equally many uses, least recently used first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value


class Lfu(Eviction):
    """Evict the entry with the fewest uses first. Eviction resets the count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uses = np.zeros(self.entries, np.int32)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank by number of uses, then by time."""
        self._uses[ids] += 1
        for uses, segment in by_value(ids, self._uses[ids]):
            yield (uses, use.now), segment

    def forget(self, ids: Ids) -> None:
        """Remove entries and reset their counts."""
        super().forget(ids)
        self._uses[ids] = 0

    def _leave(self, segment: Ids) -> None:
        super()._leave(segment)
        self._uses[segment] = 0
