"""First in, first out: a hit changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use


class Fifo(Eviction):
    """The entry that came first goes first."""

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Only those that are new."""
        yield (use.now,), ids[self._place[ids] == 0]
