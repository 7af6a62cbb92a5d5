"""Validation of block tables: ids and lengths are checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, whole_numbers
from kvatlas.geometry.state_spans import CommonStates
from kvatlas.planning import Plan
from kvatlas.planning.plans import checked_plan

Ids = Sequence[int] | Int64s
Blocks = Mapping[int, Sequence[int]] | Mapping[int, Int64s] | Ids
"""Block ids by group index, or the block ids of the only group."""

_SHOWN = 8


class RequestTables:
    """One rank's block tables for a request, and a record of the entries that the request uses."""

    def __init__(self, plan: Plan, rank: int, blocks: Any, end: str) -> None:
        self.plan, self.rank, self.end = plan, rank, end
        self.by_group = _tables(plan, blocks, end)
        self._used: dict[int, NDArray[np.bool_]] = {}

    def state_entry(self, group: int, stop: int) -> int:
        """Return the index of the table entry that holds a group's state after `stop` tokens.

        The group must be recurrent.
        """
        if len(self._table(group)) == 1:
            return 0
        return (stop - 1) // self.plan.groups[group].block

    def use(self, group: int, states: CommonStates, end: int) -> None:
        """Check that the entries for `states` exist and are in range, and mark them as used."""
        table, last = self._table(group), states.last_entry(end)
        # Check before allocating arrays, because a caller may pass any number of tokens.
        if last >= len(table):
            problem = f"The block table of group {group} at the {self.end} is too short"
            got = f"{len(table)} block ids; {last + 1} are needed"
            hint = f"Pass one block id for every {self.plan.groups[group].block} tokens"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
        entries = states.entry_slice(end)
        ids = table[entries]
        low, high = _bounds(ids)
        blocks = self.plan.pool(self.rank, group).blocks
        if low < 0 or high >= blocks:
            problem = f"Block ids of group {group} at the {self.end} must be in 0..{blocks - 1}"
            hint = "Check the block table, and that it belongs to this rank"
            wrong = low if low < 0 else high
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=wrong, hint=hint)
        self._used.setdefault(group, np.zeros(len(table), dtype=bool))[entries] = True

    def ids(self, group: int, entries: Int64s) -> Int64s:
        """Return the block ids of entries that `use` has checked."""
        return self.by_group[group][entries]

    def used(self) -> dict[int, Int64s]:
        """Return the block tables by group, with -1 for entries that are not in use."""
        return {
            group: np.where(self._used.get(group, False), table, -1)
            for group, table in self.by_group.items()
        }

    def used_entries(self) -> dict[int, Int64s]:
        """Return the indices of the used table entries, by group."""
        return {group: np.flatnonzero(used) for group, used in self._used.items()}

    def check_distinct(self) -> None:
        """Raise an error if two used entries of one pool have the same block id."""
        by_pool: dict[int, list[Int64s]] = {}
        for group, used in self._used.items():
            pool = self.plan.groups[group].pool
            by_pool.setdefault(pool, []).append(self._table(group)[used])
        for pool, tables in by_pool.items():
            if sum(map(len, tables)) < 2:
                continue
            ids = np.sort(np.concatenate(tables))
            again = ids[1:][ids[1:] == ids[:-1]]
            if len(again):
                got = f"block ids {again[:_SHOWN].tolist()} of pool {pool} at the {self.end}"
                hint = "Use each block id once among all groups of a pool"
                raise AtlasError(Code.TWICE, got=got, hint=hint)

    def _table(self, group: int) -> Int64s:
        if group not in self.by_group:
            problem = f"Group {group} has no block table at the {self.end}"
            got = f"tables for groups {sorted(self.by_group)}"
            hint = f"Pass a block table for each group index in 0..{len(self.plan.groups) - 1}"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
        return self.by_group[group]


def _bounds(ids: Int64s) -> tuple[int, int]:
    """Return the smallest and the largest id."""
    if len(ids) == 1:  # a reduction takes four times as long
        return (only := int(ids[0])), only
    return int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))


def checked_rank(plan: Plan, rank: Any, end: str) -> int:
    """Return `rank` as an int; raise an error if the plan has no such rank."""
    checked_plan(plan)
    whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not whole or not 0 <= rank < plan.ranks:
        hint = f"Pass stage * tp + tensor-parallel rank, in 0..{plan.ranks - 1}"
        problem = f"The {end} plan has no such rank"
        raise AtlasError(Code.BAD_RANK, problem, got=repr(rank), hint=hint)
    return int(rank)


def _tables(plan: Plan, blocks: Any, end: str) -> dict[int, Int64s]:
    groups = range(len(plan.groups))
    if isinstance(blocks, Mapping):
        unknown = [group for group in blocks if isinstance(group, bool) or group not in groups]
        if unknown:
            problem = f"The {end} plan has no such group"
            hint = f"Use group indices in 0..{len(groups) - 1}, as in Plan.groups"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=unknown[:_SHOWN], hint=hint)
        return {int(g): block_table(ids, f"group {g} at the {end}") for g, ids in blocks.items()}
    if len(groups) > 1:
        problem = f"The {end} has {len(groups)} groups, and each needs a block table"
        got, hint = f"one {type(blocks).__name__}", "Pass a mapping from group index to block ids"
        raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
    return {0: block_table(blocks, f"the {end}")}


def table_arrays(blocks: Any, end: str) -> Any:
    """Convert block tables to arrays, for repeated use.

    `end` is "source" or "destination", for error messages.

    >>> table_arrays({0: [3, 1]}, "source"), table_arrays([2], "source")
    ({0: array([3, 1])}, array([2]))
    """
    if not isinstance(blocks, Mapping):
        return block_table(blocks, f"the {end}") if isinstance(blocks, list | tuple) else blocks
    return {group: block_table(ids, f"group {group} at the {end}") for group, ids in blocks.items()}


def block_table(given: Any, what: str) -> Int64s:
    """Return a caller's block table as an int64 array; `what` describes it in error messages."""
    return whole_numbers(given, f"block ids of {what}")
