"""By the compute that a byte saves, aged by use: Marconi's idea, in the form of GreedyDual."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value

LEVELS = 4
"""Steps for each doubling of what is saved, so that entries are ranked in a few segments."""


class SavedCompute(Eviction):
    """What saves little compute for its bytes goes first, and so does what was not used for long.

    The rank is the clock plus the level of compute saved; the clock is the rank of the last
    victim. So an entry of half the worth is as good as one that was used a little earlier.
    """

    needs = ("saved",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """By level; an entry whose worth is unknown is worth nothing."""
        worth = np.ones(len(ids)) if use.saved is None else use.saved
        levels = np.rint(LEVELS * np.log2(np.maximum(worth, 1.0)))
        for level, segment in by_value(ids, levels):
            yield (self._last_rank[0] + level,), segment
