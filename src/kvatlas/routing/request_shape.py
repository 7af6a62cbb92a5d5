"""What requests of one shape have in common: all that does not depend on their block ids.

Requests of the same tokens, in as many blocks, differ in the ids of those alone. What was
worked out for one of them holds for the next: where spans lie in its blocks, and which entries
of its block tables are used. What is left to do is to look at the ids and to add.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvatlas.geometry import Int64s
from kvatlas.routing.block_tables import RequestTables
from kvatlas.routing.run_grids import BlockIds, SpanPattern

_WHOLE, _UNSIGNED = np.dtype(np.int64), np.dtype(np.uint64)

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Groups, and how long the block table of each is."""


def table_lengths(tables: Mapping[int, BlockIds]) -> Lengths:
    """How long some block tables are.

    >>> table_lengths({0: np.array([7, 4]), 3: np.array([9])})
    ((0, 3), (2, 1))
    """
    return tuple(tables), tuple(map(len, tables.values()))


class TableShape:
    """Which entries of the block tables at one end are used, and what may stand there."""

    def __init__(self, tables: RequestTables) -> None:
        by_pool: dict[int, list[tuple[int, slice | Int64s]]] = defaultdict(list)
        blocks: dict[int, int] = {}
        for group, used in tables.used_entries().items():
            pool = tables.plan.groups[group].pool
            by_pool[pool].append((group, _as_slice(used)))
            blocks[pool] = tables.plan.pool(tables.rank, group).blocks
        self.blocks = blocks
        """How many blocks each pool has that is used."""
        self._used = [(blocks[pool], used) for pool, used in by_pool.items()]

    def in_range(self, tables: Mapping[int, BlockIds]) -> bool:
        """Whether all ids that are used, of tables of these lengths, are blocks of their pools."""
        for blocks, used in self._used:
            for group, entries in used:
                ids = tables[group][entries]
                # As numbers without a sign: one that is negative is larger than any.
                plain = ids.view(_UNSIGNED) if ids.dtype == _WHOLE else ids
                if plain.item(plain.argmax()) >= blocks:  # `max` takes twice as long
                    return False
        return True

    def distinct(self, tables: Mapping[int, BlockIds]) -> bool:
        """Whether no block is used twice."""
        for _, used in self._used:
            ids = [tables[group][entries].tolist() for group, entries in used]
            if len(set().union(*ids)) < sum(map(len, ids)):
                return False
        return True


def _as_slice(entries: Int64s) -> slice | Int64s:
    """Entries that follow each other as a slice, which is looked up sooner."""
    first, last = int(entries[0]), int(entries[-1])
    return slice(first, last + 1) if last - first == len(entries) - 1 else entries


@dataclass(frozen=True, eq=False)
class RequestShape:
    """The runs of requests of one shape, as sums that only lack block ids.

    Made by `Stream.shape`.
    """

    nbytes: int
    patterns: tuple[SpanPattern, ...]
    src: TableShape
    dst: TableShape

    @property
    def spans(self) -> int:
        """Spans of all patterns: what a request brings."""
        return sum(len(pattern.template.length) for pattern in self.patterns)

    @property
    def runs(self) -> int:
        """Runs of a request."""
        return sum(
            len(pattern.template.length) * len(pattern.template.starts.src)
            for pattern in self.patterns
        )
