"""`RequestShape`: the runs of a request without block ids, for reuse by similar requests.

Requests with the same tokens and the same number of blocks differ only in their block ids. The
offsets of their spans and the used entries of their block tables are computed once. For each
further request, only the ids are checked and added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing.block_tables import RequestTables
from kvatlas.routing.run_grids import BlockIds, SpanPattern

_WHOLE, _UNSIGNED = np.dtype(np.int64), np.dtype(np.uint64)

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Group indices, and the length of each group's block table."""


def table_lengths(tables: Mapping[int, BlockIds]) -> Lengths:
    """Return (group indices, numbers of entries) of block tables.

    >>> table_lengths({0: np.array([7, 4]), 3: np.array([9])})
    ((0, 3), (2, 1))
    """
    return tuple(tables), tuple(map(len, tables.values()))


class TableShape:
    """The used block table entries of the source or the destination, and the sizes of its pools."""

    def __init__(self, tables: RequestTables) -> None:
        by_pool: dict[int, list[tuple[int, slice | Int64s]]] = defaultdict(list)
        blocks: dict[int, int] = {}
        for group, used in tables.used_entries().items():
            pool = tables.plan.groups[group].pool
            by_pool[pool].append((group, _as_slice(used)))
            blocks[pool] = tables.plan.pool(tables.rank, group).blocks
        self.blocks = blocks
        """Number of blocks in each pool that is used."""
        self._used = [(blocks[pool], used) for pool, used in by_pool.items()]

    def in_range(self, tables: Mapping[int, BlockIds]) -> bool:
        """Return whether all used block ids are valid; `tables` must have this shape's lengths."""
        for blocks, used in self._used:
            for group, entries in used:
                ids = tables[group][entries]
                # Viewed as unsigned, a negative id exceeds every valid id.
                plain = ids.view(_UNSIGNED) if ids.dtype == _WHOLE else ids
                if plain.item(plain.argmax()) >= blocks:  # Twice as fast as `max`.
                    return False
        return True

    def distinct(self, tables: Mapping[int, BlockIds]) -> bool:
        """Return whether no two used entries of a pool have the same block id."""
        for _, used in self._used:
            ids = [tables[group][entries].tolist() for group, entries in used]
            if len(set().union(*ids)) < sum(map(len, ids)):
                return False
        return True


def _as_slice(entries: Int64s) -> slice | Int64s:
    """Return indices as a slice if they are consecutive; indexing with a slice is faster."""
    first, last = int(entries[0]), int(entries[-1])
    return slice(first, last + 1) if last - first == len(entries) - 1 else entries


@dataclass(frozen=True, eq=False)
class RequestShape:
    """The runs of requests of one shape, complete except for block ids.

    Created by `Stream.shape` and `ConvertedStream.shape`.
    """

    nbytes: int
    """Bytes of the stream."""
    arriving: int
    """Bytes written at the destination; different from `nbytes` if elements are cast."""
    patterns: tuple[SpanPattern, ...]
    source: TableShape
    destination: TableShape

    @property
    def casts(self) -> bool:
        """Whether elements are cast."""
        return any(pattern.cast is not None for pattern in self.patterns)

    @property
    def spans(self) -> int:
        """Number of spans (see `Copy`) of one request, summed over `patterns`."""
        return sum(len(pattern.template.length) for pattern in self.patterns)

    @property
    def runs(self) -> int:
        """Number of runs of one request."""
        return sum(
            len(pattern.template.length) * len(pattern.template.starts.source)
            for pattern in self.patterns
        )
