"""`RowRuns`: the runs of a request, split by row, so that rows can be staged in batches.

A row is one block of the tier. A route is bound once, to `RowNumbers`. The runs of each row are
then translated to the row's address in staging memory. A copy may describe many runs by spans and
starts (see `Copy.starts`). Such a copy is not expanded to single runs, because each row has only a
few of the copy's spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

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


class _Grouped(NamedTuple):
    """A copy whose spans (see `Copy`) are grouped by row."""

    copy: Copy
    rows: dict[int, tuple[int, int]]
    """The range of spans of each row, by row number."""
    grid_spans: list[tuple[int, int]]
    """The offset of each span in its row, and its length; empty if the copy is not a grid."""


class RowRuns:
    """The runs of copies between a rank's pools and rows, grouped by row.

    `end` is "source" if the copies read rows, or "destination" if they write rows. The copies
    address rows by the placeholder block ids of `numbered`.
    """

    def __init__(self, copies: Iterable[Copy], end: End, numbered: RowNumbers) -> None:
        self._end, self._numbered = end, numbered
        self._sorted = [self._by_row(copy) for copy in copies]

    def _by_row(self, copy: Copy) -> _Grouped:
        """Group the spans of a copy by row.

        If runs are long, the spans of a row are also sorted by offset, so that contiguous runs are
        copied without a staging buffer. For short runs sorting costs more than it saves.
        """
        at, nbytes = self._at(copy), self._numbered.block_bytes(self._pool(copy))
        row = at // nbytes
        key = at if copy.nbytes >= _LONG_RUN * len(copy) else row
        if len(key) > 1 and (np.diff(key) < 0).any():
            order = np.argsort(key, kind="stable")
            row, length = row[order], np.array(copy.length)[order]
            copy = replace(
                copy, source=copy.source[order], destination=copy.destination[order], length=length
            )
        first = np.flatnonzero(np.diff(row, prepend=-1))
        ranges = pairwise([*first.tolist(), len(row)])
        rows = dict(zip(row[first].tolist(), ranges, strict=True))
        if copy.starts is ORIGIN:
            return _Grouped(copy, rows, [])
        within = (self._at(copy) - row * nbytes).tolist()
        return _Grouped(copy, rows, list(zip(within, copy.length.tolist(), strict=True)))

    def objects(self, pool: int, number: int, staging: StagingRows) -> list[int]:
        """Return the indices of the objects of a row that the runs access."""
        group = self._numbered.group(pool, number)
        found: set[int] = set()
        for copy, rows, grid_spans in self._sorted:
            if number in rows and self._pool(copy) == pool:
                spans = slice(*rows[number])
                if copy.starts is ORIGIN:
                    begin = number * self._numbered.block_bytes(pool)
                    within, length = self._at(copy)[spans] - begin, np.array(copy.length[spans])
                    overlap = staging.cut.groups[group].overlap(within, length)
                    found.update(np.flatnonzero(overlap).tolist())
                else:
                    starts_at = staging.frames[group].starts_at
                    for span in set(grid_spans[spans]):
                        found |= starts_at(copy.starts, self._end, *span).objects
        return sorted(found)

    def at(self, places: Mapping[int, Mapping[int, int]], staging: StagingRows) -> list[Copy]:
        """Return the runs of the rows in `places`, with their addresses in staging memory.

        `places[pool][number]` is the index of the staging row for the row with this placeholder
        number. In `numbered`, the rows of each pool must be consecutive.
        """
        moved: list[Copy] = []
        numbers = {pool: sorted(there) for pool, there in places.items()}
        for copy, rows, grid_spans in self._sorted:
            pool = self._pool(copy)
            for some in self._together(copy, [n for n in numbers.get(pool, ()) if n in rows]):
                counts = [stop - start for start, stop in (rows[number] for number in some)]
                staged = [places[pool][number] for number in some]
                to = _of_spans(staged, staging.row_bytes[pool], counts)
                spans = slice(rows[some[0]][0], rows[some[-1]][1])
                ends = copy.source[spans], copy.destination[spans], copy.length[spans]
                part = Copy(copy.source_pool, copy.destination_pool, *ends, starts=copy.starts)
                frame = staging.frames[self._numbered.group(pool, some[0])]
                if copy.starts is ORIGIN:
                    begin = _of_spans(some, self._numbered.block_bytes(pool), counts)
                    moved.append(frame.moved(part, self._end, begin, to))
                else:
                    moved += frame.moved_grid(part, self._end, grid_spans[spans], to)
        return moved

    def _together(self, copy: Copy, numbers: list[int]) -> Iterator[list[int]]:
        """Split row numbers into lists. The rows of a list have one group and are moved together.

        Large rows are moved one by one, so that more runs can be joined. Copies with several
        starts (see `Copy.starts`) are an exception, because their runs are not joined.
        """
        pool = self._pool(copy)
        if copy.starts is ORIGIN and self._numbered.block_bytes(pool) >= _LARGE_ROW:
            yield from ([number] for number in numbers)
        else:
            for _, some in groupby(numbers, lambda number: self._numbered.group(pool, number)):
                yield list(some)

    def _at(self, copy: Copy) -> Int64s:
        return np.asarray(copy.source if self._end == "source" else copy.destination)

    def _pool(self, copy: Copy) -> int:
        return copy.source_pool if self._end == "source" else copy.destination_pool


def _of_spans(rows: list[int], stride: int, counts: list[int]) -> Int64s | int:
    """Return, for each span of a copy, the byte offset of its row: row index times `stride`.

    `counts` is the number of spans in each of `rows`. If there is only one row, return one integer.
    """
    if len(rows) == 1:
        return stride * rows[0]
    return np.repeat(stride * np.array(rows, np.int64), counts)
