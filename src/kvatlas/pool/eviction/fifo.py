"""First in, first out: a hit does not change the order."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use


class Fifo(Eviction):
    """Evict the oldest entry first."""

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank new entries. Entries that are ranked already keep their rank."""
        yield (use.now,), ids[self._place[ids] == 0]
