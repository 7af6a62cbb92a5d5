"""Evict entries that save the least compute per byte, as Marconi does, with GreedyDual's ageing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value

LEVELS = 4
"""Number of levels per doubling of the saved compute. Few levels mean few segments."""


class SavedCompute(Eviction):
    """Evict first the entries that save little compute per byte or have long been unused.

    The rank of an entry is the clock plus its level, which grows with the logarithm of the saved
    compute. The clock is the rank of the last evicted entry, so entries that are not used again
    fall behind.
    """

    needs = ("saved",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank each entry by a clock plus a level, which grows with the compute that a hit saves.

        The clock is the rank of the last evicted entry. The level is 0 if the saved compute is
        unknown.
        """
        worth = np.ones(len(ids)) if use.saved is None else use.saved
        levels = np.rint(LEVELS * np.log2(np.maximum(worth, 1.0)))
        for level, segment in by_value(ids, levels):
            yield (self._last_rank[0] + level,), segment
