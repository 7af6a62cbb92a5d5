"""`Stream`: the bytes of a bound route in a fixed order, with runs computed piece by piece.

The order depends only on the two plans, the ranks, the block tables, the tokens and the layers.
Both ends of a transfer therefore derive the same order, and a start and a stop describe a piece
completely. The stream contains one pair of groups after another. The states of a pair are divided
into chunks, in request order. Within a chunk, runs are sorted by destination and joined if they are
adjacent at both ends. All states of a pair have the same number of bytes, so a division finds the
chunk of any position, and only that chunk is computed.

A chunk has about `CHUNK_RUNS` runs. If a chunk would have more runs, because elements are copied
one by one, the strips of the pair are divided into sections. The chunk boundaries are part of the
order: a change to them breaks compatibility between peers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import ceil_div, integer, positive
from kvatlas.geometry.state_spans import CommonStates
from kvatlas.routing.binding import (
    CompiledPair,
    Copy,
    RepeatedRuns,
    count_ranges,
    joined,
    ranges,
)
from kvatlas.routing.request import RequestEnds
from kvatlas.routing.request_shape import Lengths, RequestShape, TableShape, table_lengths
from kvatlas.routing.run_grids import SpanPattern, span_patterns

CHUNK_RUNS = 1 << 19
"""Runs per chunk: 8 MB of memory if all runs have one length, else 16 MB.

A chunk costs about 0.2 ms in addition to its runs. With half as many runs per chunk, that would
be a fifth of the total time; twice as many runs would exceed the memory limit of a transfer.
"""

_COUNTED = 1 << 16
"""Runs are counted for this many blocks at a time, or states if these are not contiguous."""


class StreamSection(NamedTuple):
    """A section of a stream: states `first .. stop - 1` of a pair of groups.

    The section contains all runs of these states or, if a state has very many runs, some of them.
    """

    compiled: CompiledPair
    states: CommonStates
    first: int
    stop: int
    chunk: int
    """States per chunk. Chunks start at block boundaries."""
    cell: int
    """Number of states that have `cell_bytes` bytes together: 1, or those of a kernel block."""
    cell_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all states in the section."""
        return self.offset(self.stop)

    def offset(self, state: int) -> int:
        """Return the offset in bytes from the start of the section to state `state`."""
        return (state - self.first) // self.cell * self.cell_bytes

    def chunk_at(self, offset: int) -> tuple[int, int]:
        """Return (first, stop), the states of the chunk that contains the byte at `offset`."""
        state = self.first + offset // self.cell_bytes * self.cell
        shift = self.states.local[0]
        begin = (state + shift) // self.chunk * self.chunk - shift
        return max(begin, self.first), min(begin + self.chunk, self.stop)


class StreamChunk(NamedTuple):
    """The runs of one chunk of a stream, and the offset in the chunk at which each run ends."""

    section: int
    first: int
    copy: Copy
    ends: Int64s | None
    """Ends of the runs; None if all runs have the same length."""

    def slice(self, start: int, stop: int) -> Copy:
        """Return a `Copy` with the runs of bytes `start .. stop - 1` of the chunk.

        The first and the last run are cut at `start` and `stop`.
        """
        copy = self.copy
        if self.ends is None:
            each = int(copy.length[0])
            first, last = start // each, ceil_div(stop, each)
            before, after = start - first * each, last * each - stop
        else:
            first = int(np.searchsorted(self.ends, start, side="right"))
            last = int(np.searchsorted(self.ends, stop, side="left")) + 1
            before = start - int(self.ends[first] - copy.length[first])
            after = int(self.ends[last - 1]) - stop
        source, destination, length = (
            a[first:last] for a in (copy.source, copy.destination, copy.length)
        )
        if before or after:
            source, destination, length = source.copy(), destination.copy(), length.copy()
            source[0] += before
            destination[0] += before
            length[0] -= before
            length[-1] -= after
        return Copy(copy.source_pool, copy.destination_pool, source, destination, length)


class Stream:
    """The byte stream of a request from one rank to another.

    Created by `Route.stream`. Any number of threads may read it.
    """

    def __init__(self, pairs: Sequence[CompiledPair], request: RequestEnds) -> None:
        self._request = request
        self._moving = [(compiled, request.states(compiled.pair)) for compiled in pairs]
        request.check_distinct()
        # Each value is replaced as a whole, so threads need no lock. At worst, two compute it.
        self._last: StreamChunk | None = None
        self._grids: list[Copy] | None = None

    @cached_property
    def _sections(self) -> list[StreamSection]:
        return [part for compiled, own in self._moving for part in _sections(compiled, own)]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(section.nbytes for section in self._sections))

    def __repr__(self) -> str:
        return f"<Stream of {self.nbytes:,} bytes in at most {self.runs:,} runs>"

    @property
    def nbytes(self) -> int:
        """Total bytes of the stream."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def runs(self) -> int:
        """Upper bound on the number of runs of the stream; adjacent runs may count separately."""
        return sum(map(self._count, self._sections))

    @property
    def runs_apart(self) -> int:
        """Number of runs if runs of adjacent blocks are not joined; fast if `grids` is cached."""
        return sum(map(len, self.grids()))

    def copies(self, start: int, stop: int) -> tuple[Copy, ...]:
        """Return `Copy` objects with the runs of bytes `start .. stop - 1` of the stream.

        Runs are cut at `start` and `stop`. The copies are in stream order.
        Several of them may have the same pair of pools.
        """
        return tuple(self.walk(start, stop))

    def walk(self, start: int = 0, stop: int | None = None) -> Iterator[Copy]:
        """Yield the items of `copies` one by one, with only one chunk's runs in memory."""
        stop = self.nbytes if stop is None else stop
        start, stop = checked_range(start, stop, self.nbytes)
        index = bisect_right(self._ends, start)
        while start < stop:
            section = self._sections[index]
            base = self._ends[index] - section.nbytes
            first, last = section.chunk_at(start - base)
            begin, end = base + section.offset(first), base + section.offset(last)
            upto = min(stop, end)
            yield self._chunk(index, first, last).slice(start - begin, upto - begin)
            start = upto
            index += start == self._ends[index]

    def grids(self) -> list[Copy]:
        """Return the whole stream as `Copy` objects with starts and spans, in unspecified order.

        Computed once and cached.
        """
        if self._grids is None:
            tables = self._request.source.by_group, self._request.destination.by_group
            self._grids = [pattern.grid(*tables) for pattern in self.patterns()]
        return self._grids

    @property
    def table_lengths(self) -> tuple[Lengths, Lengths]:
        """(source, destination) lengths of the block tables, in entries."""
        return table_lengths(self._request.source.by_group), table_lengths(
            self._request.destination.by_group
        )

    def shape(self) -> RequestShape:
        """Return the runs of the stream without block ids, for reuse with other block ids."""
        source, destination = self._request.source, self._request.destination
        nbytes, patterns = self.nbytes, tuple(self.patterns())
        return RequestShape(nbytes, nbytes, patterns, TableShape(source), TableShape(destination))

    def patterns(self) -> Iterator[SpanPattern]:
        """Yield the runs of the stream as starts and spans (see `Copy`), without block ids."""
        for section in self._sections:
            span, pools = (section.first, section.stop), self._request.pools(section.compiled.pair)
            yield from span_patterns(pools, section.compiled, section.states, span)

    def pieces(self, nbytes: int) -> Iterator[tuple[Copy, ...]]:
        """Split the stream into pieces of `nbytes` bytes; yield the `Copy` objects of each piece.

        The last piece may be shorter.
        """
        nbytes = positive(nbytes, "the piece size")
        for start in range(0, self.nbytes, nbytes):
            yield self.copies(start, min(start + nbytes, self.nbytes))

    def _chunk(self, index: int, first: int, stop: int) -> StreamChunk:
        made = self._last
        if made is None or (made.section, made.first) != (index, first):
            compiled, states = self._sections[index][:2]
            bound = self._request.bind(compiled.pair, states.spans(first, stop))
            runs = list(ranges(compiled, bound))
            (copy,) = joined({self._request.pools(compiled.pair): runs})
            one_length = copy.length.strides == (0,)
            made = StreamChunk(index, first, copy, None if one_length else np.cumsum(copy.length))
            self._last = made
        return made

    def _count(self, section: StreamSection) -> int:
        """Return an upper bound on the number of runs of a section."""
        compiled, states = section.compiled, section.states
        sizes = [end.states for end in states.ends]
        step = _COUNTED * (min(sizes) if states.side_by_side else 1)
        count = 0
        for first in range(section.first, section.stop, step):
            stop = min(first + step, section.stop)
            bound = self._request.bind(compiled.pair, states.spans(first, stop))
            cuts = (stop - first) // section.chunk + 1
            count += count_ranges(compiled, bound, cuts)
            if section.chunk % max(sizes):  # Chunks smaller than a block also cut its spans.
                count += cuts * sum(len(runs.starts.source) for runs in compiled.states)
        return count


def checked_range(start: Any, stop: Any, nbytes: int) -> tuple[int, int]:
    """Return a byte range as ints; raise an error unless it fits in `nbytes` bytes."""
    start, stop = integer(start, "the start"), integer(stop, "the stop")
    if not 0 <= start <= stop <= nbytes:
        problem = f"A range must be within the {nbytes} bytes of the stream"
        hint = f"Pass start and stop with 0 <= start <= stop <= {nbytes}"
        got = f"start {start}, stop {stop}"
        raise AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint=hint)
    return start, stop


def _sections(compiled: CompiledPair, states: CommonStates) -> Iterator[StreamSection]:
    """Divide the states of a pair of groups into as few sections as the chunk size permits."""
    if not states.total:
        return
    apart, cell = compiled._replace(whole=[]), compiled.pair.cells[0].states
    if not compiled.whole or not (states.side_by_side or cell == 1):
        yield from _of_states(apart, states, 0, states.total)
    elif _alike(compiled) and _in_chunk(compiled):
        chunk = cell * (CHUNK_RUNS // _runs(compiled.whole, 1, 1))
        state_bytes = _bytes(compiled.states)
        yield StreamSection(compiled, states, 0, states.total, chunk, 1, state_bytes)
    else:
        # Whole kernel blocks, preceded and followed by states of partially copied ones.
        start = states.local[0]
        first = min(states.total, -start % cell)
        last = max(first, (start + states.total) // cell * cell - start)
        yield from _of_states(apart, states, 0, first)
        yield from _of_cells(compiled._replace(states=[]), states, first, last)
        yield from _of_states(apart, states, last, states.total)


def _alike(compiled: CompiledPair) -> bool:
    """Return whether a kernel block that is copied whole is copied without unused bytes."""
    return _bytes(compiled.whole) == compiled.pair.cells[0].states * _bytes(compiled.states)


def _in_chunk(compiled: CompiledPair) -> bool:
    """Return whether a kernel block fits into a chunk, copied whole or state by state."""
    cell = compiled.pair.cells[0].states
    return max(_runs(compiled.states, 1, cell), _runs(compiled.whole, 1, 1)) <= CHUNK_RUNS


def _of_states(
    compiled: CompiledPair, states: CommonStates, first: int, stop: int
) -> Iterator[StreamSection]:
    """Yield sections that copy state by state; their chunks end at block boundaries if possible."""
    if first == stop:
        return
    unit = spans = 1
    if states.side_by_side:
        sizes = [end.states for end in states.ends]
        common = lcm(*sizes)
        unit = min(common if common <= CHUNK_RUNS else max(sizes), CHUNK_RUNS)
        spans = sum(ceil_div(unit, size) for size in sizes) - 1
    for own in _divided(compiled.states, unit):
        chunk = unit * max(1, CHUNK_RUNS // _runs(own, spans, unit))
        part = compiled._replace(states=own)
        yield StreamSection(part, states, first, stop, chunk, 1, _bytes(own))


def _of_cells(
    compiled: CompiledPair, states: CommonStates, first: int, stop: int
) -> Iterator[StreamSection]:
    """Yield sections that copy whole kernel blocks."""
    if first == stop:
        return
    cell = compiled.pair.cells[0].states
    for own in _divided(compiled.whole, 1):
        chunk = cell * max(1, CHUNK_RUNS // _runs(own, 1, 1))
        part = compiled._replace(whole=own)
        yield StreamSection(part, states, first, stop, chunk, cell, _bytes(own))


def _divided(repeated: list[RepeatedRuns], each: int) -> Iterator[list[RepeatedRuns]]:
    """Divide runs into lists of at most `CHUNK_RUNS` runs.

    Each start counts as `each` runs. A list has at least one start.
    """
    most = max(1, CHUNK_RUNS // each)
    if sum(len(runs.starts.source) for runs in repeated) <= most:
        yield repeated
        return
    for runs in repeated:
        for first in range(0, len(runs.starts.source), most):
            yield [runs.part(first, first + most)]


def _runs(repeated: list[RepeatedRuns], spans: int, states: int) -> int:
    """Return the number of runs that are needed, at most, to copy `spans` spans of states.

    The spans have `states` states in total.
    """
    return sum(
        len(runs.starts.source) * (spans if runs.strip.gapless else states) for runs in repeated
    )


def _bytes(repeated: list[RepeatedRuns]) -> int:
    """Return the bytes that the runs copy for one state.

    If the runs copy whole kernel blocks, return the bytes for one kernel block instead.
    """
    return sum(len(runs.starts.source) * runs.strip.item for runs in repeated)
