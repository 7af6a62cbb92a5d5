"""The farthest next use first (Belady): an upper bound, since it knows the whole trace."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value


class Optimal(Eviction):
    """The entry whose next use is the farthest goes first; optimal where all are equally large."""

    needs = ("next_use",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """By next use, the latest first."""
        if use.next_use is None:
            problem = "Optimal eviction needs to know the future"
            hint = "Simulate a trace with it, or use lru"
            raise AtlasError(Code.CONTRADICTORY, problem, got="no next uses", hint=hint)
        for later, segment in by_value(ids, use.next_use):
            yield (-later,), segment
