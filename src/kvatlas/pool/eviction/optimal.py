"""Farthest next use first (Belady's algorithm): an upper bound that needs the whole trace."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.eviction.base import Eviction, Ids, Rank, Use, by_value


class Optimal(Eviction):
    """Evict the entry whose next use is farthest away.

    This is optimal if all entries have equal size.
    """

    needs = ("next_use",)

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Rank by next use, the latest first."""
        if use.next_use is None:
            problem = (
                "The `optimal` policy needs the next use of each entry, which is known only in a "
                "simulation"
            )
            hint = "Use `optimal` only in simulations; in a BlockPool, pass eviction='lru'"
            raise AtlasError(Code.CONTRADICTORY, problem, got="next_use=None", hint=hint)
        for later, segment in by_value(ids, use.next_use):
            yield (-later,), segment
