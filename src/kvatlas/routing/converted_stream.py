"""`ConvertedStream`: a request whose content changes format during the transfer.

Other routes copy runs of bytes that are equal at both ends. If the formats differ, no
bytes are equal, so a converting route works in cells: the fields of one head and state, or one
element of a recurrent state. Both ends enumerate the cells in the same order, independent of their
page layouts: box by box, within a box by state in request order, within a state by layer, head and
field.

A box is a range of heads or rows that one rank reads from another rank. It covers all layers that
are in the same regions, both in the source plan and in the destination plan. Every byte of the
stream belongs to one box, and pieces end at cell boundaries.

The source copies runs of its pages into stream order, and the destination copies from stream
order into its pages. Both copies are ordinary strips, so tensor parallelism, different block
sizes, layouts, packings and windows need no extra code. Between the two copies, one end decodes
and encodes the cells: the source if its format is larger, so that the smaller format is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import StateBlocks
from kvatlas.geometry.integers import positive
from kvatlas.geometry.state_spans import CommonStates
from kvatlas.routing.binding import (
    CompiledPair,
    Copy,
    joined,
    ranges,
)
from kvatlas.routing.converting_compiler import ConvertedBox
from kvatlas.routing.request import BoundStates, RequestEnds
from kvatlas.routing.request_shape import Lengths, RequestShape, TableShape, table_lengths
from kvatlas.routing.run_grids import SpanPattern
from kvatlas.routing.streams import StreamChunk, checked_range
from kvatlas.specs import CellFormat

CELLS = -1
"""The pool index that a `Copy` uses for the buffer of a piece of the stream."""

_CHUNK = 4 << 20
"""Target size of a chunk in bytes. The runs of a chunk are computed at once. A chunk has at least
one state, even if the state is larger."""

MakePatterns = Callable[[], list[SpanPattern] | None]

_IN_ORDER = StateBlocks(1 << 40)
"""The states of a stream are consecutive, as in one very large block."""


class ConvertedSection(NamedTuple):
    """A box, and the states of the box that a request copies.

    A box is a range of heads or rows of some layers. One rank reads it from another rank.
    """

    box: ConvertedBox
    states: CommonStates

    @property
    def nbytes(self) -> int:
        """Bytes of the section in the format that is sent."""
        return self.states.total * self.box.ends[self.box.wire].nbytes

    @property
    def chunk(self) -> int:
        """Number of states per chunk. The runs of a chunk are computed together."""
        return max(1, _CHUNK // max(end.nbytes for end in self.box.ends))


class ConvertedPart(NamedTuple):
    """A range of cells within one chunk of the stream.

    A cell is the unit of conversion, such as the fields of one head and state. A chunk holds the
    cells of consecutive states of one `ConvertedSection`.
    """

    stream: ConvertedStream
    section: int
    first: int
    """First state of the chunk."""
    units: tuple[int, int]
    """Range of cells in the chunk: the first, and one past the last."""

    @property
    def box(self) -> ConvertedBox:
        """The box that contains the cells."""
        return self.stream.sections[self.section].box

    def nbytes(self, end: int) -> int:
        """Return the bytes of the cells in the format of one end (0: source, 1: destination)."""
        return (self.units[1] - self.units[0]) * self.box.unit(end)

    @property
    def travelling(self) -> int:
        """Bytes of the cells in the format that is sent."""
        return self.nbytes(self.box.wire)

    def converted_at(self, end: int) -> bool:
        """Return whether an end (0: source, 1: destination) converts the cells."""
        return not self.box.copied and self.box.wire != end

    @property
    def formats(self) -> tuple[CellFormat, CellFormat]:
        """Formats of the cells at the source and at the destination."""
        return self.box.ends[0].cell, self.box.ends[1].cell

    def copy(self, end: int) -> Copy:
        """Return a `Copy` between one end's pool and a buffer with the cells in stream order.

        For end 0, it copies from the source's pool into the buffer; for end 1, from the buffer
        into the destination's pool. The buffer has the format of that end.
        """
        unit = self.box.unit(end)
        chunk = self.stream.chunk(end, self.section, self.first)
        part = chunk.slice(self.units[0] * unit, self.units[1] * unit)
        order = part.destination - self.units[0] * unit
        if end == 0:
            return Copy(part.source_pool, CELLS, part.source, order, part.length)
        return Copy(CELLS, part.source_pool, order, part.source, part.length)


class ConvertedStream:
    """The byte stream of a request from one rank to another, with a change of format.

    Created by `Route.converted`. Any number of threads may read it.
    """

    def __init__(
        self, boxes: Sequence[ConvertedBox], request: RequestEnds, casts: MakePatterns
    ) -> None:
        """Create the stream of a request from its compiled boxes.

        `casts()` returns the request's runs as patterns that cast elements; None if elements cannot
        be cast one by one.
        """
        self._request, self._casts = request, casts
        found = [ConvertedSection(box, request.states(box.pair)) for box in boxes]
        request.check_distinct()
        self.sections = [section for section in found if section.states.total]
        self._ends = list(accumulate(section.nbytes for section in self.sections))
        # Each value is replaced as a whole, so threads need no lock. At worst, two compute it.
        self._last: dict[int, StreamChunk] = {}
        self._patterns: tuple[list[SpanPattern] | None] | None = None
        self._grids: list[Copy] | None = None

    def __repr__(self) -> str:
        return f"<ConvertedStream of {self.nbytes:,} bytes that arrive as {self.arriving:,}>"

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self._ends[-1] if self._ends else 0

    @property
    def arriving(self) -> int:
        """Bytes written at the destination."""
        return sum(one.states.total * one.box.ends[1].nbytes for one in self.sections)

    @property
    def runs(self) -> int:
        """Upper bound on the number of runs, counted at the end whose format is sent."""
        return sum(
            one.states.total
            * sum(len(runs.starts.source) for own in end.runs.values() for runs in own)
            for one in self.sections
            for end in (one.box.ends[one.box.wire],)
        )

    @property
    def by_element(self) -> bool:
        """Whether every element can be converted separately; true without a conversion."""
        return all(one.box.by_element for one in self.sections)

    def grids(self) -> list[Copy] | None:
        """Return copies that cast elements from source to destination pages. The result is cached.

        Returns None if the conversion is not element-wise.
        """
        if self._grids is None:
            patterns = self._cast_patterns()
            if patterns is None:
                return None
            tables = self._request.source.by_group, self._request.destination.by_group
            self._grids = [pattern.grid(*tables) for pattern in patterns]
        return self._grids

    @property
    def table_lengths(self) -> tuple[Lengths, Lengths]:
        """(source, destination) lengths of the block tables, in entries."""
        return table_lengths(self._request.source.by_group), table_lengths(
            self._request.destination.by_group
        )

    def shape(self) -> RequestShape | None:
        """Return the runs of `grids` without block ids, for reuse with other block ids.

        Returns None if the conversion is not element-wise.
        """
        patterns = self._cast_patterns()
        if patterns is None:
            return None
        ends = TableShape(self._request.source), TableShape(self._request.destination)
        return RequestShape(self.nbytes, self.arriving, tuple(patterns), *ends)

    def _cast_patterns(self) -> list[SpanPattern] | None:
        if self._patterns is None:
            self._patterns = (self._casts(),)
        return self._patterns[0]

    def spans(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Divide the stream into pieces of at most `nbytes` bytes; yield (start, stop) of each.

        No piece ends inside a cell, the unit of conversion.
        """
        nbytes, start = positive(nbytes, "the piece size"), 0
        while start < self.nbytes:
            stop = self._cell_boundary(min(start + nbytes, self.nbytes))
            if stop == start:
                problem = "A piece of the transfer must be at least as large as one cell"
                hint = "Pass a larger piece= at both nodes"
                got = f"pieces of {nbytes} bytes"
                raise AtlasError(Code.BAD_SIZE, problem, got=got, hint=hint)
            yield start, stop
            start = stop

    def parts(self, start: Any = 0, stop: Any = None) -> Iterator[ConvertedPart]:
        """Yield the cells in bytes `start .. stop - 1` of the stream, one part for each chunk."""
        start, stop = self._checked(start, self.nbytes if stop is None else stop)
        index = bisect_right(self._ends, start)
        while start < stop:
            section = self.sections[index]
            box, base = section.box, self._ends[index] - section.nbytes
            each, unit = box.ends[box.wire].nbytes, box.unit(box.wire)
            first = (start - base) // each // section.chunk * section.chunk
            begin = base + first * each
            end = base + min(first + section.chunk, section.states.total) * each
            upto = min(stop, end)
            units = (start - begin) // unit, (upto - begin) // unit
            yield ConvertedPart(self, index, first, units)
            start = upto
            index += start == self._ends[index]

    def parts_of_entry(self, group: int, entry: int) -> Iterator[ConvertedPart]:
        """Yield the cells of one source block: entry `entry` of group `group`'s block table."""
        for section, end in zip(self.sections, self._ends, strict=True):
            box = section.box
            if box.pair.groups[0] == group:
                numbers = section.states.numbers_in(0, entry)
                base, each = end - section.nbytes, box.ends[box.wire].nbytes
                yield from self.parts(base + numbers.start * each, base + numbers.stop * each)

    def chunk(self, end: int, index: int, first: int) -> StreamChunk:
        """Return the runs that copy a chunk between a pool and a buffer in stream order.

        `end` selects the pool: 0 for the source, 1 for the destination. The chunk starts at state
        `first` of section `index`. The most recent result for each value of `end` is cached.
        """
        made = self._last.get(end)
        if made is None or (made.section, made.first) != (index, first):
            made = self._last[end] = self._chunk(end, index, first)
        return made

    def _chunk(self, end: int, index: int, first: int) -> StreamChunk:
        section = self.sections[index]
        box, states = section.box, section.states
        stop = min(first + section.chunk, states.total)
        tables = self._request.destination if end else self._request.source
        group, local, step = box.pair.groups[end], states.local[end], states.steps[end]
        found = []
        for blocks, own in box.ends[end].runs.items():
            held = StateBlocks(1) if box.pair.per_state is None else blocks
            numbered = CommonStates((held, _IN_ORDER), states.total, (local, 0), (step, 1))
            spans = numbered.spans(first, stop)
            ids = tables.ids(group, spans.source.entry), np.zeros(len(spans.length), np.int64)
            compiled = CompiledPair(box.pair, own, [])
            found += list(ranges(compiled, BoundStates(spans, ids)))
        pool = self._request.pools(box.pair)[end]
        (copy,) = joined({(pool, CELLS): found})
        order = copy.destination - first * box.ends[end].nbytes
        copy = Copy(pool, CELLS, copy.source, order, copy.length)
        return StreamChunk(index, first, copy, np.cumsum(copy.length))

    def _cell_boundary(self, position: int) -> int:
        """Return the last cell boundary at or before a byte position in the stream."""
        index = bisect_right(self._ends, position)
        if index == len(self._ends):
            return self.nbytes
        section = self.sections[index]
        base = self._ends[index] - section.nbytes
        return position - (position - base) % section.box.unit(section.box.wire)

    def _checked(self, start: Any, stop: Any) -> tuple[int, int]:
        start, stop = checked_range(start, stop, self.nbytes)
        if (self._cell_boundary(start), self._cell_boundary(stop)) != (start, stop):
            problem = "A range must start and end at cell boundaries"
            got = f"start {start}, stop {stop}"
            hint = "Use the ranges that ConvertedStream.spans yields"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint=hint)
        return start, stop
