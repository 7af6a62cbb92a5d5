"""`RowNumbers`: placeholder block ids for the rows that a request needs.

A route is bound once, to these numbers instead of block ids. The numbers have gaps, so that no run
crosses from one row into the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvatlas.planning import Plan
from kvatlas.tier.ingest import APART
from kvatlas.tier.request_blocks import NeededBlock, block_tables


class RowNumbers:
    """A placeholder block id for each row that a request needs, unique within a pool."""

    def __init__(self, plan: Plan, needs: Iterable[NeededBlock]) -> None:
        self._plan = plan
        self._block_bytes = {pool.index: pool.block_bytes for pool in plan.pools}
        self.numbers: dict[NeededBlock, int] = {}
        counts = {pool.index: 0 for pool in plan.pools}
        for need in needs:
            pool = plan.groups[need.group].pool
            self.numbers[need] = APART * counts[pool]
            counts[pool] += 1
        self._group = {self.place(need): need.group for need in self.numbers}

    def entry(self, need: NeededBlock) -> int:
        """Return the index of a row in the block table of its group; 0 for a recurrent state."""
        return 0 if self._plan.groups[need.group].kind == "recurrent" else need.entry

    def place(self, need: NeededBlock) -> tuple[int, int]:
        """Return (pool, placeholder number) of a row."""
        return self._plan.groups[need.group].pool, self.numbers[need]

    def group(self, pool: int, number: int) -> int:
        """Return the group of the row with this placeholder number in this pool."""
        return self._group[pool, number]

    def block_bytes(self, pool: int) -> int:
        """Return the size in bytes of each row of a pool."""
        return self._block_bytes[pool]

    def tables(self) -> dict[int, list[int]]:
        """Return the block table of each group, with placeholder numbers instead of block ids."""
        return block_tables(self._plan, self.numbers)
