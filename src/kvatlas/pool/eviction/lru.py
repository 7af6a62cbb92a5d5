"""Least recently used first, the policy of most engines."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use


class Lru(Eviction):
    """Evict the least recently used entry first.

    >>> import numpy as np
    >>> queue, nobody = Lru(4), np.zeros(4, bool)
    >>> queue.used(np.array([0, 1, 2]), Use(1))
    >>> queue.used(np.array([0]), Use(2))
    >>> queue.victims(2, nobody).tolist()
    [1, 2]
    """

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Move all used entries to the end of the queue."""
        yield (use.now,), ids
