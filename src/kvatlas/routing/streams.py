"""`Stream`: the bytes of a bound route in one order, whose runs are made piece by piece.

The order follows from the two plans, the ranks, the block tables, the tokens and the layers,
so that both ends of a transfer know it and a piece needs no description but where it starts
and stops. It is: one pair of groups after the other; for each its states in chunks, in the
order of the request; and inside a chunk runs in the order of their destination, joined where
they touch at both ends. Every state of a pair has as many bytes as the next, so that a
place in the stream is found by division, and only the chunk that it lies in is ever made.

A chunk has about `CHUNK_RUNS` runs. Where the blocks of one chunk of states would have more
(elements that go one by one), the strips of the pair are divided into sections as well.
Where chunks end is part of the order: whoever changes that changes what peers agree on.
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
from kvatlas.geometry import CommonStates, Int64s, ceil_div, integer, positive
from kvatlas.routing.binding import (
    CompiledPair,
    Copy,
    RepeatedRuns,
    RunGrid,
    count_ranges,
    joined,
    ranges,
)
from kvatlas.routing.request import RequestEnds
from kvatlas.routing.request_shape import Lengths, RequestShape, TableShape, table_lengths
from kvatlas.routing.run_grids import SpanPattern, span_patterns

CHUNK_RUNS = 1 << 19
"""Runs that are made at once: 8 MB to keep where they have one length, else 16.

A chunk costs some 0.2 ms beside its runs, which half as many would make a fifth of the whole;
twice as many would take more memory than a transfer may.
"""

_COUNTED = 1 << 16
"""Blocks, or states where those go one by one, that are looked at together to count runs."""


class StreamSection(NamedTuple):
    """States first .. stop - 1 of those that move between two groups, or some bytes of each."""

    compiled: CompiledPair
    states: CommonStates
    first: int
    stop: int
    chunk: int
    """States in a chunk; chunks start where blocks do."""
    cell: int
    """States that have `cell_bytes` bytes: one, or those of a whole cell."""
    cell_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its states."""
        return self.offset(self.stop)

    def offset(self, state: int) -> int:
        """Where a state starts in the section, in bytes."""
        return (state - self.first) // self.cell * self.cell_bytes

    def chunk_at(self, offset: int) -> tuple[int, int]:
        """First state of the chunk that has a byte, and the state behind its last."""
        state = self.first + offset // self.cell_bytes * self.cell
        shift = self.states.local[0]
        begin = (state + shift) // self.chunk * self.chunk - shift
        return max(begin, self.first), min(begin + self.chunk, self.stop)


class StreamChunk(NamedTuple):
    """The runs of one chunk, and where they end in it."""

    section: int
    first: int
    copy: Copy
    ends: Int64s | None
    """None where all runs have one length."""

    def slice(self, start: int, stop: int) -> Copy:
        """Bytes start .. stop - 1 of the chunk."""
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
        src, dst, length = (a[first:last] for a in (copy.src, copy.dst, copy.length))
        if before or after:
            src, dst, length = src.copy(), dst.copy(), length.copy()
            src[0] += before
            dst[0] += before
            length[0] -= before
            length[-1] -= after
        return Copy(copy.src_pool, copy.dst_pool, src, dst, length)


class Stream:
    """The bytes that carry a request from one rank to another, in one order.

    Made by `Route.stream`. Any number of threads may read it.
    """

    def __init__(self, pairs: Sequence[CompiledPair], request: RequestEnds) -> None:
        self._request = request
        moving = [(compiled, request.states(compiled.pair)) for compiled in pairs]
        request.check_distinct()
        self._sections = [part for compiled, own in moving for part in _sections(compiled, own)]
        self._ends = list(accumulate(section.nbytes for section in self._sections))
        # Replaced as a whole, so that threads need no lock: at worst one makes it again.
        self._last: StreamChunk | None = None
        self._grids: list[RunGrid] | None = None

    def __repr__(self) -> str:
        return f"<Stream of {self.nbytes:,} bytes in at most {self.runs:,} runs>"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stream."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def runs(self) -> int:
        """Runs of the whole stream, at most: strips that happen to touch are counted apart."""
        return sum(map(self._count, self._sections))

    @property
    def runs_apart(self) -> int:
        """The same with all blocks counted apart; quicker to find where `grids` are there."""
        return sum(map(len, self.grids()))

    def copies(self, start: int, stop: int) -> tuple[Copy, ...]:
        """Bytes start .. stop - 1 of the stream, runs cut at its edges.

        Copies follow each other in the order of the stream; several may have the same pools.
        """
        return tuple(self.walk(start, stop))

    def walk(self, start: int = 0, stop: int | None = None) -> Iterator[Copy]:
        """The same one by one, so that there are never more runs than a chunk has."""
        start, stop = self._checked(start, self.nbytes if stop is None else stop)
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

    def grids(self) -> list[RunGrid]:
        """The whole stream as sums of starts and spans, in no order that anybody agrees on.

        Made once, and kept.
        """
        if self._grids is None:
            tables = self._request.src.by_group, self._request.dst.by_group
            self._grids = [pattern.grid(*tables) for pattern in self._patterns()]
        return self._grids

    @property
    def table_lengths(self) -> tuple[Lengths, Lengths]:
        """How long the block tables of its source and its destination are."""
        return table_lengths(self._request.src.by_group), table_lengths(self._request.dst.by_group)

    def shape(self) -> RequestShape:
        """What it has in common with streams of the same tokens and other block ids."""
        src, dst = self._request.src, self._request.dst
        return RequestShape(self.nbytes, tuple(self._patterns()), TableShape(src), TableShape(dst))

    def _patterns(self) -> Iterator[SpanPattern]:
        for section in self._sections:
            span, pools = (section.first, section.stop), self._request.pools(section.compiled.pair)
            yield from span_patterns(pools, section.compiled, section.states, span)

    def pieces(self, nbytes: int) -> Iterator[tuple[Copy, ...]]:
        """The whole stream, so many bytes at a time; the last piece may be shorter."""
        nbytes = positive(nbytes, "the piece")
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
        """Runs of a section, at most, counted by spans of states."""
        compiled, states = section.compiled, section.states
        sizes = [end.states for end in states.ends]
        step = _COUNTED * (min(sizes) if states.side_by_side else 1)
        count = 0
        for first in range(section.first, section.stop, step):
            stop = min(first + step, section.stop)
            bound = self._request.bind(compiled.pair, states.spans(first, stop))
            cuts = (stop - first) // section.chunk + 1
            count += count_ranges(compiled, bound, cuts)
            if section.chunk % max(sizes):  # chunks of less than a block cut its spans as well
                count += cuts * sum(len(runs.starts.src) for runs in compiled.states)
        return count

    def _checked(self, start: Any, stop: Any) -> tuple[int, int]:
        start, stop = integer(start, "the start"), integer(stop, "the stop")
        if not 0 <= start <= stop <= self.nbytes:
            problem = f"These are not bytes of a stream of {self.nbytes}"
            hint = "Ask for bytes from 0 to Stream.nbytes"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=f"{start}..{stop}", hint=hint)
        return start, stop


def _sections(compiled: CompiledPair, states: CommonStates) -> Iterator[StreamSection]:
    """The states of a pair, in as few sections as keep chunks small."""
    if not states.total:
        return
    apart, cell = compiled._replace(whole=[]), compiled.pair.cells[0].states
    if not compiled.whole or not (states.side_by_side or cell == 1):
        yield from _of_states(apart, states, 0, states.total)
    elif max(_runs(compiled.states, 1, cell), _runs(compiled.whole, 1, 1)) <= CHUNK_RUNS:
        chunk = cell * (CHUNK_RUNS // _runs(compiled.whole, 1, 1))
        state_bytes = _bytes(compiled.states)
        yield StreamSection(compiled, states, 0, states.total, chunk, 1, state_bytes)
    else:
        # Whole cells, and before and behind them states of cells that move in part.
        start = states.local[0]
        first = min(states.total, -start % cell)
        last = max(first, (start + states.total) // cell * cell - start)
        yield from _of_states(apart, states, 0, first)
        yield from _of_cells(compiled._replace(states=[]), states, first, last)
        yield from _of_states(apart, states, last, states.total)


def _of_states(
    compiled: CompiledPair, states: CommonStates, first: int, stop: int
) -> Iterator[StreamSection]:
    """Sections that go state by state, in chunks of blocks of both ends."""
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
    """Sections of whole cells."""
    if first == stop:
        return
    cell = compiled.pair.cells[0].states
    for own in _divided(compiled.whole, 1):
        chunk = cell * max(1, CHUNK_RUNS // _runs(own, 1, 1))
        part = compiled._replace(whole=own)
        yield StreamSection(part, states, first, stop, chunk, cell, _bytes(own))


def _divided(repeated: list[RepeatedRuns], each: int) -> Iterator[list[RepeatedRuns]]:
    """Strips in lists of at most a chunk's runs, where each start has so many."""
    most = max(1, CHUNK_RUNS // each)
    if sum(len(runs.starts.src) for runs in repeated) <= most:
        yield repeated
        return
    for runs in repeated:
        for first in range(0, len(runs.starts.src), most):
            yield [runs.part(first, first + most)]


def _runs(repeated: list[RepeatedRuns], spans: int, states: int) -> int:
    """Runs of some spans that have so many states together, at most."""
    return sum(
        len(runs.starts.src) * (spans if runs.strip.gapless else states) for runs in repeated
    )


def _bytes(repeated: list[RepeatedRuns]) -> int:
    """Bytes of one state, or of one cell where states are folded in."""
    return sum(len(runs.starts.src) * runs.strip.item for runs in repeated)
