"""The layout of a row in staging memory: object by object, each after its header.

A row is one block of the tier. The bytes of one object may be scattered over the row. In staging
memory they are contiguous, so a store reads or writes an object as one range. The runs between
pools and rows are translated to this layout. A run that crosses an object boundary is split there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.routing.binding import Starts
from kvatlas.tier.object_header import HEADER
from kvatlas.tier.row_objects import GroupObjects

End = Literal["source", "destination"]
"""Which end of a copy is in rows."""

_KEPT = 64
"""Number of cached starts in staging memory: a few per route and block size."""


class FramedStarts(NamedTuple):
    """The `starts` of a `Copy` as offsets in a staged row, and the objects that its runs access.

    Objects are given by index. `starts` is None if a run crosses from one object into another.
    """

    starts: Starts | None
    objects: frozenset[int]


class RowFrame:
    """The layout of one group's rows in staging memory, with a header before each object.

    >>> halves = [(np.array([0]), np.array([8])), (np.array([8]), np.array([8]))]
    >>> frame = RowFrame(GroupObjects(halves, 16))
    >>> frame.nbytes, frame.object(1)
    (144, slice(72, 144, None))
    >>> one = Copy(0, 0, np.array([500]), np.array([4]), np.array([12]))
    >>> moved = frame.moved(one, "destination", begin=0, to=1000)
    >>> moved.source.tolist(), moved.destination.tolist(), moved.length.tolist()
    ([500, 504], [1068, 1136], [4, 8])
    """

    def __init__(self, objects: GroupObjects) -> None:
        self._starts, self._stops, self._owner = objects.stretches
        owner = self._owner
        stops = np.cumsum(np.array(objects.sizes) + HEADER)
        begins = stops - objects.sizes - HEADER
        self.nbytes = int(stops[-1])
        self._objects = [slice(*ends) for ends in zip(begins.tolist(), stops.tolist(), strict=True)]
        order = np.argsort(owner, kind="stable")
        length = (self._stops - self._starts)[order]
        places = np.empty_like(length)
        # Stretches follow each other object by object, and each object follows its header.
        places[order] = np.cumsum(length) - length + HEADER * (1 + owner[order])
        self._shift = places - self._starts
        """The distance by which each stretch of a row is shifted."""
        self.starts_at = lru_cache(_KEPT)(self._starts_at)

    def object(self, index: int) -> slice:
        """Return the byte range of an object within a staged row, as one slice.

        The slice begins with the header of the object.
        """
        return self._objects[index]

    def moved(self, copy: Copy, end: End, begin: Int64s | int, to: Int64s | int) -> Copy:
        """Translate offsets of a copy from rows to staged rows.

        `end` selects the source or the destination offsets. `begin` is the offset of the row that a
        run is in, and `to` the offset of the same row in staging memory. Both have one element per
        run, or are one integer for all runs.
        """
        within = (copy.source if end == "source" else copy.destination) - begin
        stretch = np.searchsorted(self._starts, within, "right") - 1
        if (within + copy.length > self._stops[stretch]).any():
            last = np.searchsorted(self._starts, within + copy.length - 1, "right") - 1
            copy, stretch, run = self._cut(copy, within, stretch, last)
            within = (copy.source if end == "source" else copy.destination) - _of_runs(begin, run)
            to = _of_runs(to, run)
        at = within + self._shift[stretch] + to
        return replace(copy, source=at) if end == "source" else replace(copy, destination=at)

    def moved_grid(
        self, grid: Copy, end: End, within: Sequence[tuple[int, int]], to: Int64s | int
    ) -> list[Copy]:
        """Translate a copy like `moved`, but keep its `Copy.starts` if possible.

        `within` contains, for each span, its offset in its row and its length. Returns one copy for
        each distinct pair (offset, length). Such a copy is expanded to single runs only if one of
        its runs crosses from one object into another.
        """
        other = grid.destination if end == "source" else grid.source
        to = np.full(len(other), to) if isinstance(to, int) else to
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for span, about in enumerate(within):
            alike[about].append(span)
        moved = []
        for (offset, length), spans in alike.items():
            framed = self.starts_at(grid.starts, end, offset, length)
            some = slice(None) if len(alike) == 1 else spans
            near = to[some] if framed.starts else np.full(len(spans), offset)
            source, destination = (near, other[some]) if end == "source" else (other[some], near)
            starts = framed.starts or grid.starts
            pools = grid.source_pool, grid.destination_pool
            part = Copy(*pools, source, destination, grid.length[some], starts=starts)
            if framed.starts is None:
                rows = np.repeat(to[some], len(starts.source))
                part = self.moved(part.expanded(), end, 0, rows)
            moved.append(part)
        return moved

    def _starts_at(self, starts: Starts, end: End, begin: int, length: int) -> FramedStarts:
        """Translate the source or destination starts of a copy to offsets in a staged row.

        `begin` is the offset of a span in its row, and `length` its length. Raises an error unless
        the destination offsets of `starts` are ascending, as a route provides them.
        """
        if starts.step < 1:
            problem = "The destination offsets of a copy must be ascending"
            got = f"offsets {starts.destination[:8].tolist()}"
            hint = "Pass a copy that a Route has computed"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
        at = begin + (starts.source if end == "source" else starts.destination)
        first = np.searchsorted(self._starts, at, "right") - 1
        last = np.searchsorted(self._starts, at + length - 1, "right") - 1
        reached = np.zeros(len(self._starts) + 1, np.int64)
        np.add.at(reached, first, 1)
        np.add.at(reached, last + 1, -1)
        objects = frozenset(self._owner[np.cumsum(reached[:-1]) > 0].tolist())
        if (first != last).any():
            return FramedStarts(None, objects)
        at = at + self._shift[first]
        if end == "source":
            return FramedStarts(Starts.of(at, starts.destination), objects)
        order = np.argsort(at)  # the order of objects may differ from that of their bytes in a row
        return FramedStarts(Starts.of(starts.source[order], at[order]), objects)

    def _cut(
        self, copy: Copy, within: Int64s, first: Int64s, last: Int64s
    ) -> tuple[Copy, Int64s, Int64s]:
        """Split runs at object boundaries.

        Returns the split runs as a copy. Also returns, for each split run, the index of its range
        in `GroupObjects.stretches`, and the index of the original run.
        """
        parts = last - first + 1
        run = np.repeat(np.arange(len(parts)), parts)
        stretch = first[run] + np.arange(len(run)) - (np.cumsum(parts) - parts)[run]
        skip = np.maximum(self._starts[stretch] - within[run], 0)
        stop = np.minimum(self._stops[stretch] - within[run], copy.length[run])
        source, destination = copy.source[run] + skip, copy.destination[run] + skip
        return (
            replace(copy, source=source, destination=destination, length=stop - skip),
            stretch,
            run,
        )


def _of_runs(values: Int64s | int, run: Int64s) -> Int64s | int:
    return values if isinstance(values, int) else values[run]
