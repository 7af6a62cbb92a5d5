"""The grids of runs of a request, split by row, like `NumberedCopies`.

Runs are not expanded: each row records only its spans, of which there are few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.tier.numbered_copies import NumberedRows
from kvatlas.tier.row_frames import End
from kvatlas.tier.staging_rows import StagingRows


class _Span(NamedTuple):
    """A span of runs: its row, its offset there, its offset at the other end and its length."""

    number: int
    begin: int
    other: int
    length: int


class NumberedGrids:
    """The spans of grids, grouped by row. `end` is the end of the grids that is in rows."""

    def __init__(self, grids: Iterable[Copy], end: End, numbered: NumberedRows) -> None:
        self._end, self._numbered = end, numbered
        self._spans = [(grid, self._by_row(grid)) for grid in grids]

    def _by_row(self, grid: Copy) -> dict[int, list[_Span]]:
        """Return the spans of each row, by number."""
        at, other = (grid.src, grid.dst) if self._end == "src" else (grid.dst, grid.src)
        number, begin = np.divmod(at, self._numbered.block_bytes(self._pool(grid)))
        columns = (number, begin, other, grid.length)
        spans: dict[int, list[_Span]] = defaultdict(list)
        for row in zip(*(column.tolist() for column in columns), strict=True):
            spans[row[0]].append(_Span(*row))
        return spans

    def objects(self, pool: int, number: int, staging: StagingRows) -> list[int]:
        """Return the indices of a row's objects that contain bytes of the runs."""
        frame = staging.frames[self._numbered.group(pool, number)]
        found: set[int] = set()
        for grid, rows in self._spans:
            if self._pool(grid) == pool:
                alike = {(span.begin, span.length) for span in rows.get(number, ())}
                for begin, length in alike:
                    found |= frame.starts_at(grid.starts, self._end, begin, length).objects
        return sorted(found)

    def at(self, places: Mapping[int, Mapping[int, int]], staging: StagingRows) -> list[Copy]:
        """Return the runs of the rows in `places`: pool -> number -> index of a staging row."""
        moved: list[Copy] = []
        for grid, rows in self._spans:
            pool = self._pool(grid)
            alike: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
            for number, place in places.get(pool, {}).items():
                group, row = self._numbered.group(pool, number), place * staging.row_bytes[pool]
                for span in rows.get(number, ()):
                    alike[group, span.begin, span.length].append((row, span.other))
            for (group, begin, length), spans in alike.items():
                to, other = np.array(spans, np.int64).T
                frame = staging.frames[group]
                framed = frame.starts_at(grid.starts, self._end, begin, length)
                if framed.starts is None:
                    copy = self._written_out(grid, begin, other, length)
                    to = np.repeat(to, len(grid.starts.src))
                    moved.append(frame.moved(copy, self._end, 0, to))
                else:
                    lengths = np.full(len(other), length)
                    ends = self._ends(to, other)
                    pools = (grid.src_pool, grid.dst_pool)
                    moved.append(Copy(*pools, *ends, lengths, starts=framed.starts))
        return moved

    def _written_out(self, grid: Copy, begin: int, other: Int64s, length: int) -> Copy:
        """Expand spans of one length that all start at offset `begin` of their rows."""
        src, dst = self._ends(np.full(len(other), begin), other)
        some = replace(grid, src=src, dst=dst, length=np.full(len(other), length))
        return Copy(grid.src_pool, grid.dst_pool, *some.runs())

    def _ends(self, rows: Int64s, other: Int64s) -> tuple[Int64s, Int64s]:
        return (rows, other) if self._end == "src" else (other, rows)

    def _pool(self, grid: Copy) -> int:
        return grid.src_pool if self._end == "src" else grid.dst_pool
