"""`RowRuns`: the runs of a request, split by row, so that rows can be staged in batches.

A route is bound once, to `RowNumbers`. The runs of each row are then translated to the row's
address in staging memory. A copy may be a grid of runs (see `Copy.starts`). Grids are not expanded:
each row has only a few of their spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.routing.binding import ORIGIN
from kvatlas.tier.row_frames import End
from kvatlas.tier.row_numbers import RowNumbers
from kvatlas.tier.staging_rows import StagingRows

_LARGE_ROW = 1 << 20
"""Size in bytes from which rows are moved one by one, because that joins more runs."""

_LONG_RUN = 4 << 10
"""Mean size in bytes from which runs are worth sorting."""


class RowRuns:
    """The runs of copies between a rank's pools and rows, grouped by row.

    `end` is the end of the copies that is in rows. The route was bound to `numbered` there.
    """

    def __init__(self, copies: Iterable[Copy], end: End, numbered: RowNumbers) -> None:
        self._end, self._numbered = end, numbered
        self._sorted = [self._by_row(copy) for copy in copies]

    def _by_row(self, copy: Copy) -> tuple[Copy, Int64s]:
        """Return a copy with its spans grouped by row, and the number of each span's row.

        Long runs are sorted by their offset in the row, so that contiguous runs are copied without
        a staging buffer. For short runs sorting costs more than it saves.
        """
        at = self._at(copy)
        row = at // self._numbered.block_bytes(self._pool(copy))
        key = at if copy.nbytes >= _LONG_RUN * len(copy) else row
        if len(key) > 1 and (np.diff(key) < 0).any():
            order = np.argsort(key, kind="stable")
            row, length = row[order], np.array(copy.length)[order]
            copy = replace(copy, src=copy.src[order], dst=copy.dst[order], length=length)
        return copy, row

    def objects(self, pool: int, number: int, staging: StagingRows) -> list[int]:
        """Return the indices of a row's objects that contain bytes of the runs."""
        group = self._numbered.group(pool, number)
        found: set[int] = set()
        for copy, row in self._sorted:
            if self._pool(copy) == pool:
                spans = slice(*np.searchsorted(row, (number, number + 1)))
                begin = self._at(copy)[spans] - number * self._numbered.block_bytes(pool)
                length = np.array(copy.length[spans])
                if copy.starts is ORIGIN:
                    overlap = staging.cut.groups[group].overlap(begin, length)
                    found.update(np.flatnonzero(overlap).tolist())
                else:
                    frame = staging.frames[group]
                    for span in set(zip(begin.tolist(), length.tolist(), strict=True)):
                        found |= frame.starts_at(copy.starts, self._end, *span).objects
        return sorted(found)

    def at(self, places: Mapping[int, Mapping[int, int]], staging: StagingRows) -> list[Copy]:
        """Return the runs of the rows in `places`, with their addresses in staging memory.

        `places` maps a pool and the number of a row to the index of a staging row. The rows of each
        pool must be consecutive in `numbered`.
        """
        moved: list[Copy] = []
        for copy, row in self._sorted:
            pool = self._pool(copy)
            for some in self._together(copy, sorted(places.get(pool, {}))):
                spans = slice(*np.searchsorted(row, (some[0], some[-1] + 1)))
                if spans.start < spans.stop:
                    src, dst, length = copy.src[spans], copy.dst[spans], copy.length[spans]
                    part = replace(copy, src=src, dst=dst, length=length)
                    of, to = self._rows(row[spans], some, places[pool])
                    begin, to = of * self._numbered.block_bytes(pool), to * staging.row_bytes[pool]
                    frame = staging.frames[self._numbered.group(pool, some[0])]
                    if copy.starts is ORIGIN:
                        moved.append(frame.moved(part, self._end, begin, to))
                    else:
                        moved += frame.moved_grid(part, self._end, begin, to)
        return moved

    def _rows(
        self, row: Int64s, some: list[int], places: Mapping[int, int]
    ) -> tuple[Int64s | int, Int64s | int]:
        """Return the row number and the staging row of each span, or one of each for all spans."""
        if len(some) == 1:
            return some[0], places[some[0]]
        there = np.array([places[number] for number in some], np.int64)
        return row, there[np.searchsorted(some, row)]

    def _together(self, copy: Copy, numbers: list[int]) -> Iterator[list[int]]:
        """Yield the numbers of rows that are moved together: rows of one group.

        Large rows are moved one by one, unless the copy is a grid, whose runs are not joined.
        """
        pool = self._pool(copy)
        if copy.starts is ORIGIN and self._numbered.block_bytes(pool) >= _LARGE_ROW:
            yield from ([number] for number in numbers)
        else:
            for _, some in groupby(numbers, lambda number: self._numbered.group(pool, number)):
                yield list(some)

    def _at(self, copy: Copy) -> Int64s:
        return np.asarray(copy.src if self._end == "src" else copy.dst)

    def _pool(self, copy: Copy) -> int:
        return copy.src_pool if self._end == "src" else copy.dst_pool
