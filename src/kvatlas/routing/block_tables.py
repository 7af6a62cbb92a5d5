"""Block tables from outside: checked before anything is computed with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.planning import Plan, Pool

Ids = Sequence[int] | Int64s
Blocks = Mapping[int, Sequence[int]] | Mapping[int, Int64s] | Ids
"""Block ids by group, or the ids of the only group."""

_SHOWN = 8


class End:
    """One rank's block tables for one request, and which of their entries are used."""

    def __init__(self, plan: Plan, rank: int, blocks: Any, name: str) -> None:
        self.plan, self.rank, self.name = plan, rank, name
        self.stage = rank // plan.tp
        self._tables = _tables(plan, blocks, name)
        self._used: dict[int, NDArray[np.bool_]] = {}

    def pool(self, group: int) -> int:
        """The pool of a group."""
        return self.plan.groups[group].pool

    def state_entry(self, group: int, stop: int) -> int:
        """Which entry of its table has a recurrent group's state after `stop` tokens."""
        if len(self._table(group)) == 1:
            return 0
        return (stop - 1) // self.plan.groups[group].block

    def ids(self, group: int, entries: Int64s) -> Int64s:
        """Block ids of the entries that are needed, each of them in range."""
        table = self._table(group)
        last = int(entries.max())
        if last >= len(table):
            raise AtlasError(
                Code.MISSING_BLOCKS,
                "A block table covers every token that moves",
                got=f"{len(table)} blocks for group {group} at the {self.name}, {last + 1} needed",
                hint=f"Blocks of that group have {self.plan.groups[group].block} tokens",
            )
        ids = table[entries]
        blocks = self._pool_of(group).blocks
        if int(ids.min()) < 0 or int(ids.max()) >= blocks:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                f"Block ids of group {group} at the {self.name} are 0..{blocks - 1}",
                got=f"{int(ids.min())}..{int(ids.max())}",
                hint="Check the block table, and that it is the right rank's",
            )
        self._used.setdefault(group, np.zeros(len(table), dtype=bool))[entries] = True
        return ids

    def refuse_twice(self) -> None:
        """Refuse a block that two places of a request would share, in a group or across."""
        by_pool: dict[int, list[Int64s]] = {}
        for group, used in self._used.items():
            by_pool.setdefault(self.pool(group), []).append(self._table(group)[used])
        for pool, parts in by_pool.items():
            ids = np.sort(np.concatenate(parts))
            again = ids[1:][ids[1:] == ids[:-1]]
            if len(again):
                raise AtlasError(
                    Code.TWICE,
                    "A block belongs to one place of one request",
                    got=f"blocks {again[:_SHOWN].tolist()} twice in pool {pool} at the {self.name}",
                    hint="Groups that share a pool draw unlike ids from it",
                )

    def _table(self, group: int) -> Int64s:
        if group not in self._tables:
            raise AtlasError(
                Code.MISSING_BLOCKS,
                "Every group that moves has a block table",
                got=f"none for group {group} at the {self.name}",
                hint=f"Pass block ids for groups 0..{len(self.plan.groups) - 1} by their index",
            )
        return self._tables[group]

    def _pool_of(self, group: int) -> Pool:
        place = (self.stage, self.pool(group))
        return next(pool for pool in self.plan.pools if (pool.stage, pool.index) == place)


def checked_rank(plan: Plan, rank: Any, name: str) -> int:
    """A rank of a plan, or a refusal."""
    ranks = plan.tp * plan.pp
    whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not whole or not 0 <= rank < ranks:
        raise AtlasError(
            Code.BAD_RANK,
            f"Ranks of the {name} are 0..{ranks - 1}",
            got=repr(rank),
            hint="Stages count slowest: rank = stage * tp + tensor-parallel rank",
        )
    return int(rank)


def _tables(plan: Plan, blocks: Any, name: str) -> dict[int, Int64s]:
    if isinstance(blocks, Mapping):
        known = range(len(plan.groups))
        unknown = [g for g in blocks if isinstance(g, bool) or g not in known]
        if unknown:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                f"Groups of the {name} are 0..{len(plan.groups) - 1}",
                got=unknown[:_SHOWN],
                hint="Groups are numbered as in Plan.groups",
            )
        return {
            int(group): block_table(ids, f"group {group} at the {name}")
            for group, ids in blocks.items()
        }
    if len(plan.groups) > 1:
        raise AtlasError(
            Code.MISSING_BLOCKS,
            "Every group has a block table of its own",
            got=f"{type(blocks).__name__} for {len(plan.groups)} groups at the {name}",
            hint="Pass a mapping from group index to block ids",
        )
    return {0: block_table(blocks, f"the {name}")}


def block_table(given: Any, what: str) -> Int64s:
    """A block table from outside: one axis of whole numbers."""
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        ids = np.asarray(None)
    if isinstance(given, list | tuple) and any(isinstance(block, bool) for block in given):
        ids = np.asarray(None)  # numpy takes True for 1; nobody means that
    if ids.size == 0 and ids.ndim == 1:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise AtlasError(
            Code.NOT_AN_INTEGER,
            f"The block ids of {what} are one row of whole numbers",
            got=f"{type(given).__name__} of {ids.dtype} with {ids.ndim} axes",
            hint="Pass a list of ints or a numpy array of one axis",
        )
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) >= 1 << 63:
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"The block ids of {what} are ids of its pool",
            got=int(ids.max()),
            hint="Check the block table",
        )
    return ids.astype(np.int64)
