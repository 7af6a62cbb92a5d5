"""The copies of a request, split by row, so that rows can pass through staging memory in batches.

A route is bound once, to numbers that represent rows. The numbers have gaps, so that no run
crosses from one row into the next. The runs of a row are then translated to its actual address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.tier.ingest import APART
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.row_frames import End
from kvatlas.tier.staging_rows import StagingRows

_LARGE_ROW = 1 << 20
"""Size in bytes from which rows are moved one by one, because that joins more runs."""

_LONG_RUN = 4 << 10
"""Mean size in bytes from which runs are worth sorting."""


class NumberedRows:
    """A number for each row that a request needs, pool by pool."""

    def __init__(self, plan: Plan, needs: Iterable[NeededBlock]) -> None:
        self._groups = plan.groups
        self._block_bytes = {pool.index: pool.block_bytes for pool in plan.pools}
        self.numbers: dict[NeededBlock, int] = {}
        counts = {pool.index: 0 for pool in plan.pools}
        for need in needs:
            pool = plan.groups[need.group].pool
            self.numbers[need] = APART * counts[pool]
            counts[pool] += 1
        self._group = {self.place(need): need.group for need in self.numbers}

    def entry(self, need: NeededBlock) -> int:
        """Return the entry of a row in its group's table. States have a single entry."""
        return 0 if self._groups[need.group].kind == "recurrent" else need.entry

    def place(self, need: NeededBlock) -> tuple[int, int]:
        """Return the pool of a row, and its number there."""
        return self._groups[need.group].pool, self.numbers[need]

    def group(self, pool: int, number: int) -> int:
        """Return the group of the row with a number."""
        return self._group[pool, number]

    def block_bytes(self, pool: int) -> int:
        """Return the size of a pool's rows in bytes."""
        return self._block_bytes[pool]

    def tables(self) -> dict[int, list[int]]:
        """Return a table for each group. Unneeded entries are -1, which routes reject."""
        tables = {group: [-1] for group in range(len(self._groups))}
        for need, number in self.numbers.items():
            entry = self.entry(need)
            table = tables[need.group]
            table += [-1] * (entry + 1 - len(table))
            table[entry] = number
        return tables


class NumberedCopies:
    """The runs of copies, grouped by row. `end` is the end of the copies that is in rows."""

    def __init__(self, copies: Iterable[Copy], end: End, numbered: NumberedRows) -> None:
        self._end, self._numbered = end, numbered
        self._sorted = [self._by_row(copy) for copy in copies]

    def _by_row(self, copy: Copy) -> tuple[Copy, Int64s]:
        """Return the runs grouped by row, and the row of each run.

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

    def within(self, pool: int, number: int) -> tuple[Int64s, Int64s]:
        """Return the starts of a row's runs, relative to its first byte, and their lengths."""
        starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for copy, row in self._sorted:
            if self._pool(copy) == pool:
                some = slice(*np.searchsorted(row, (number, number + 1)))
                starts.append(self._at(copy)[some] - number * self._numbered.block_bytes(pool))
                lengths.append(np.array(copy.length[some]))
        return np.concatenate(starts), np.concatenate(lengths)

    def objects(self, pool: int, number: int, staging: StagingRows) -> list[int]:
        """Return the indices of a row's objects that contain bytes of the runs."""
        cut = staging.cut.groups[self._numbered.group(pool, number)]
        found: list[int] = np.flatnonzero(cut.overlap(*self.within(pool, number))).tolist()
        return found

    def at(self, places: Mapping[int, Mapping[int, int]], staging: StagingRows) -> list[Copy]:
        """Return the runs of the rows in `places`, with their addresses in staging memory.

        `places` maps a pool and the number of a row to the index of a staging row.
        """
        moved = []
        for copy, row in self._sorted:
            pool = self._pool(copy)
            for some in self._together(pool, sorted(places.get(pool, {}))):
                runs = slice(*np.searchsorted(row, (some[0], some[-1] + 1)))
                if runs.start < runs.stop:
                    src, dst, length = copy.src[runs], copy.dst[runs], copy.length[runs]
                    part = replace(copy, src=src, dst=dst, length=length)
                    of, to = self._rows(row[runs], some, places[pool])
                    begin, to = of * self._numbered.block_bytes(pool), to * staging.row_bytes[pool]
                    frame = staging.frames[self._numbered.group(pool, some[0])]
                    moved.append(frame.moved(part, self._end, begin, to))
        return moved

    def _rows(
        self, row: Int64s, some: list[int], places: Mapping[int, int]
    ) -> tuple[Int64s | int, Int64s | int]:
        """Return the row number and the staging row of each run, or one of each for all runs."""
        if len(some) == 1:
            return some[0], places[some[0]]
        there = np.array([places[number] for number in some], np.int64)
        return row, there[np.searchsorted(some, row)]

    def _together(self, pool: int, numbers: list[int]) -> Iterator[list[int]]:
        """Yield rows that are moved together: small rows of one group, with equal layout."""
        if self._numbered.block_bytes(pool) >= _LARGE_ROW:
            yield from ([number] for number in numbers)
        else:
            for _, some in groupby(numbers, lambda number: self._numbered.group(pool, number)):
                yield list(some)

    def _at(self, copy: Copy) -> Int64s:
        return np.asarray(copy.src if self._end == "src" else copy.dst)

    def _pool(self, copy: Copy) -> int:
        return copy.src_pool if self._end == "src" else copy.dst_pool
