"""Block tables from outside: checked before anything is computed with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import CommonStates, Int64s, whole_numbers
from kvatlas.planning import Plan, checked_plan

Ids = Sequence[int] | Int64s
Blocks = Mapping[int, Sequence[int]] | Mapping[int, Int64s] | Ids
"""Block ids by group, or the ids of the only group."""

_SHOWN = 8


class RequestTables:
    """One rank's block tables for one request, and which of their entries are used."""

    def __init__(self, plan: Plan, rank: int, blocks: Any, end: str) -> None:
        self.plan, self.rank, self.end = plan, rank, end
        self.by_group = _tables(plan, blocks, end)
        self._used: dict[int, NDArray[np.bool_]] = {}

    def state_entry(self, group: int, stop: int) -> int:
        """Which entry of its table has a recurrent group's state after `stop` tokens."""
        if len(self._table(group)) == 1:
            return 0
        return (stop - 1) // self.plan.groups[group].block

    def use(self, group: int, states: CommonStates, end: int) -> None:
        """Check the entries that have some states: they are there, and their ids in range."""
        table, last = self._table(group), states.last_entry(end)
        # Before any array is made: tokens from outside may be as many as they like.
        if last >= len(table):
            problem = f"The block table of group {group} at the {self.end} is too short"
            got = f"{len(table)} blocks where {last + 1} are needed"
            hint = f"Blocks of that group have {self.plan.groups[group].block} tokens"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
        entries = states.entry_slice(end)
        ids = table[entries]
        low, high = int(ids.min()), int(ids.max())
        blocks = self.plan.pool(self.rank, group).blocks
        if low < 0 or high >= blocks:
            problem = f"A block id of group {group} at the {self.end} is outside 0..{blocks - 1}"
            hint = "Check the block table, and that it is the right rank's: windows keep no others"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=f"{low}..{high}", hint=hint)
        self._used.setdefault(group, np.zeros(len(table), dtype=bool))[entries] = True

    def ids(self, group: int, entries: Int64s) -> Int64s:
        """Block ids of entries that were checked."""
        return self.by_group[group][entries]

    def used(self) -> dict[int, Int64s]:
        """All tables, with -1 for the entries that were not asked for."""
        return {
            group: np.where(self._used.get(group, False), table, -1)
            for group, table in self.by_group.items()
        }

    def used_entries(self) -> dict[int, Int64s]:
        """Which entries were asked for, by group."""
        return {group: np.flatnonzero(used) for group, used in self._used.items()}

    def check_distinct(self) -> None:
        """Refuse a block that two entries would share, in a group or across groups of a pool."""
        by_pool: dict[int, list[Int64s]] = {}
        for group, used in self._used.items():
            pool = self.plan.groups[group].pool
            by_pool.setdefault(pool, []).append(self._table(group)[used])
        for pool, tables in by_pool.items():
            ids = np.sort(np.concatenate(tables))
            again = ids[1:][ids[1:] == ids[:-1]]
            if len(again):
                got = f"blocks {again[:_SHOWN].tolist()} in pool {pool} at the {self.end}"
                hint = "Groups that share a pool draw different ids from it"
                raise AtlasError(Code.TWICE, got=got, hint=hint)

    def _table(self, group: int) -> Int64s:
        if group not in self.by_group:
            problem = f"Group {group} has no block table at the {self.end}"
            got = f"tables of groups {sorted(self.by_group)}"
            hint = f"Pass block ids for groups 0..{len(self.plan.groups) - 1} by their index"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
        return self.by_group[group]


def checked_rank(plan: Plan, rank: Any, end: str) -> int:
    """A rank of a plan, or a refusal."""
    checked_plan(plan)
    whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not whole or not 0 <= rank < plan.ranks:
        hint = f"Ranks are 0..{plan.ranks - 1}: stage * tp + tensor-parallel rank"
        problem = f"There is no such rank at the {end}"
        raise AtlasError(Code.BAD_RANK, problem, got=repr(rank), hint=hint)
    return int(rank)


def _tables(plan: Plan, blocks: Any, end: str) -> dict[int, Int64s]:
    groups = range(len(plan.groups))
    if isinstance(blocks, Mapping):
        unknown = [group for group in blocks if isinstance(group, bool) or group not in groups]
        if unknown:
            problem = f"There is no such group at the {end}"
            hint = f"Groups are 0..{len(groups) - 1}, as in Plan.groups"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=unknown[:_SHOWN], hint=hint)
        return {int(g): block_table(ids, f"group {g} at the {end}") for g, ids in blocks.items()}
    if len(groups) > 1:
        problem = f"The {end} has {len(groups)} groups, and each has a block table of its own"
        got, hint = type(blocks).__name__, "Pass a mapping from group index to block ids"
        raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
    return {0: block_table(blocks, f"the {end}")}


def table_arrays(blocks: Any, end: str) -> Any:
    """Block tables as routes take them, as arrays: what is looked at often is read once.

    >>> table_arrays({0: [3, 1]}, "source"), table_arrays([2], "source")
    ({0: array([3, 1])}, array([2]))
    """
    if not isinstance(blocks, Mapping):
        return block_table(blocks, f"the {end}") if isinstance(blocks, list | tuple) else blocks
    return {group: block_table(ids, f"group {group} at the {end}") for group, ids in blocks.items()}


def block_table(given: Any, what: str) -> Int64s:
    """A block table from outside: one axis of whole numbers."""
    return whole_numbers(given, f"block ids of {what}")
