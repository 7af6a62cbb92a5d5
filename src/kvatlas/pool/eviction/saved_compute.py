"""Least compute saved per byte first, aged by use: Marconi's idea in the form of GreedyDual."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value

LEVELS = 4
"""Number of ranks per doubling of the saved compute, which keeps the segments few."""


class SavedCompute(Eviction):
    """Evict entries first that save little compute per byte or have not been used for long.

    The rank is the clock plus the level of saved compute. The clock is the rank of the last
    victim. An entry of half the value thus ranks like one that was used a little earlier.
    """

    needs = ("saved",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank by level. An entry of unknown value counts as worthless."""
        worth = np.ones(len(ids)) if use.saved is None else use.saved
        levels = np.rint(LEVELS * np.log2(np.maximum(worth, 1.0)))
        for level, segment in by_value(ids, levels):
            yield (self._last_rank[0] + level,), segment
