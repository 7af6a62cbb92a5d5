"""Farthest next use first (Belady): an upper bound, because it knows the whole trace."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value


class Optimal(Eviction):
    """Evict the entry with the farthest next use first. Optimal if all entries have equal size."""

    needs = ("next_use",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank by next use, the latest first."""
        if use.next_use is None:
            problem = "Optimal eviction requires the next use of each entry"
            hint = "Use it only to simulate a trace, or use lru"
            raise AtlasError(Code.CONTRADICTORY, problem, got="no next uses", hint=hint)
        for later, segment in by_value(ids, use.next_use):
            yield (-later,), segment
