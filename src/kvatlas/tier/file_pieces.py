"""Runs between memory and a tier's file, cut into pieces. Each piece is moved by one core.

One system call per short run would be slow. Short runs are therefore gathered in a staging buffer
in file order, where runs that are adjacent in the file form stretches (contiguous ranges). One
system call moves hundreds of stretches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory_copy import copy_runs_unchecked, one_length
from kvatlas.copying.nested_copy import copy_nested_unchecked
from kvatlas.copying.run_bounds import Bytes, Places
from kvatlas.geometry import NestedSteps
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy

_PIECE = 8 << 20
"""Maximum number of bytes per piece. Threads compete for the GIL after each piece, so pieces are
large."""
_SMALL_PIECE = 1 << 20
"""Minimum number of bytes per piece."""
_PIECES = 8
"""Desired number of pieces, so that all cores have work."""
_LONG_RUN = 32 << 10
"""Size in bytes from which runs need no staging buffer."""
_LONG_STRETCH = 8 << 10
"""Mean size in bytes from which stretches are worth one system call each."""

Mask = NDArray[np.bool_]

_ONE_SPAN = np.zeros(1, np.int64), np.zeros(1, np.int64)


class Piece(NamedTuple):
    """A group of runs between memory and the file, moved by one core.

    Either all runs are short or all are long. As in `Copy`, there is one run for each pair of a
    span and a start: the offsets of the two are added.
    """

    starts: tuple[Int64s, Int64s]
    """Offsets of runs in memory and in the file, relative to the start of a span."""
    length: Int64s
    """Size of the run at each start, in bytes."""
    first: Int64s
    """Indices of the starts at which a stretch of the file begins."""
    spans: tuple[Int64s, Int64s] = _ONE_SPAN
    """Offsets of the spans in memory, and in the file or in one of its pools."""
    packed: NestedSteps | None = None
    """For runs of a copy with several starts: their offsets in memory and in a staging buffer."""

    @property
    def is_long(self) -> bool:
        """Whether the runs are so long that they need no staging buffer."""
        return int(self.length[0]) >= _LONG_RUN

    def runs(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return three arrays: offsets in memory, offsets in the file, and lengths of all runs."""
        if self.spans is _ONE_SPAN:
            return *self.starts, self.length
        near, far = (
            (span[:, None] + at).reshape(-1)
            for span, at in zip(self.spans, self.starts, strict=True)
        )
        return near, far, np.tile(self.length, len(self.spans[0]))

    @property
    def stretches(self) -> tuple[Int64s, Int64s]:
        """The contiguous ranges of the file that the runs form: offsets, and sizes in bytes."""
        far = (self.spans[1][:, None] + self.starts[1][self.first]).reshape(-1)
        return far, np.tile(np.add.reduceat(self.length, self.first), len(self.spans[1]))

    def gather(self, memory: Bytes, room: Bytes) -> None:
        """Copy the runs from memory into a staging buffer, one after the other."""
        if self.packed is None:
            near, _, length = self.runs()
            for _ in copy_runs_unchecked(memory, room, near, _packed(length), length):
                pass
            return
        span_bytes, (near, _) = int(self.length.sum()), self.spans
        source = (near[:, None] + self.packed.source).reshape(-1)
        destination = (
            span_bytes * np.arange(len(near))[:, None] + self.packed.destination
        ).reshape(-1)
        nested = NestedSteps(source, destination, self.packed.steps)
        copy_nested_unchecked(memory, room, nested, int(self.length[0]))

    def scatter(self, room: Bytes, memory: Bytes) -> None:
        """Copy the runs from a staging buffer, where they are contiguous, into memory."""
        near, _, length = self.runs()
        for _ in copy_runs_unchecked(room, memory, _packed(length), near, length):
            pass


def _packed(length: Int64s) -> Places:
    """Return the offset of each run in a buffer where the runs follow one another without gaps."""
    if one_length(length):
        each = int(length[0])
        return range(0, len(length) * each, each)
    return np.cumsum(length) - length


def grid_pieces(grid: Copy) -> list[Piece]:
    """Cut a copy with several starts (see `Copy.starts`) into pieces, each moved by one core.

    The result is empty if one system call per run is faster: if the spans differ in length, or the
    runs form only short contiguous ranges of the file. All runs of one span must be inside one
    block of the file.

    >>> from kvatlas.routing.binding import Starts
    >>> starts = Starts.of(np.array([0, 1 << 20]), np.array([0, 1 << 14]))
    >>> spans = np.array([7, 9]), np.array([0, 1 << 21]), np.array([1 << 14, 1 << 14])
    >>> (piece,) = grid_pieces(Copy(0, 0, *spans, starts=starts))
    >>> piece.runs()[0].tolist(), piece.stretches[1].tolist()
    ([7, 1048583, 9, 1048585], [32768, 32768])
    """
    if not len(grid) or not one_length(grid.length):
        return []
    each, (source, destination) = int(grid.length[0]), grid.starts.ends
    apart = np.concatenate([[True], destination[1:] != destination[:-1] + each])
    if len(destination) * each < _LONG_STRETCH * np.count_nonzero(apart):
        return []
    piece = min(_PIECE, max(_SMALL_PIECE, grid.nbytes // _PIECES))
    runs, made = max(1, piece // each), []
    for start in range(0, len(destination), runs):
        some = slice(start, start + runs)
        starts, cut = (source[some], destination[some]), apart[some].copy()
        cut[0] = True
        first, at_once = np.flatnonzero(cut), max(1, runs // len(cut))
        length = np.broadcast_to(np.int64(each), len(cut))
        packed = NestedSteps.of(starts[0], each * np.arange(len(cut)))
        for begin in range(0, len(grid.source), at_once):
            spans = grid.source[begin : begin + at_once], grid.destination[begin : begin + at_once]
            made.append(Piece(starts, length, first, spans, packed))
    return made


def pieces(near: Int64s, far: Int64s, length: Int64s, block_bytes: int) -> list[Piece]:
    """Cut runs into pieces, each moved by one core.

    `near` contains the offsets of the runs in memory, and `far` their offsets in the file. A block
    of the file has `block_bytes` bytes. The result is empty if one system call per run is faster:
    if the runs in each block form only short contiguous ranges.
    """
    block = far // block_bytes
    follows = (far[1:] == far[:-1] + length[:-1]) & (block[1:] == block[:-1])
    stretches = len(length) - np.count_nonzero(follows)
    if not stretches or int(length.sum()) < _LONG_STRETCH * stretches:
        return []
    near, far, length, apart = _joined(near, far, length, follows)
    ends = np.cumsum(length)
    piece = min(_PIECE, max(_SMALL_PIECE, int(ends[-1]) // _PIECES))
    step, long = (ends - length) // piece, length >= _LONG_RUN
    cut = np.flatnonzero((step[1:] != step[:-1]) | (long[1:] != long[:-1])) + 1
    apart[cut] = True
    edges = [0, *cut.tolist(), len(length)]
    return [
        Piece((near[a:b], far[a:b]), length[a:b], np.flatnonzero(apart[a:b]))
        for a, b in pairwise(edges)
    ]


def _joined(
    near: Int64s, far: Int64s, length: Int64s, follows: Mask
) -> tuple[Int64s, Int64s, Int64s, Mask]:
    """Merge runs that are adjacent both in memory and in the file.

    `follows[i]` is true if run i + 1 starts where run i ends in the file. Returns (near, far,
    length, mask) of the merged runs. The mask is true for runs that start a contiguous range of the
    file.
    """
    apart = np.concatenate([[True], ~follows])
    kept = np.flatnonzero(
        np.concatenate([[True], ~follows | (near[1:] != near[:-1] + length[:-1])])
    )
    if len(kept) == len(length):
        return near, far, length, apart
    return near[kept], far[kept], np.add.reduceat(length, kept), apart[kept]


class Rooms:
    """A pool of staging buffers, which are reused to avoid page faults."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    @contextmanager
    def one(self) -> Iterator[Bytes]:
        """Lease a buffer that is large enough for one piece."""
        try:
            room = self._free.pop()
        except IndexError:  # all are in use
            room = np.empty(_PIECE + _LONG_RUN, np.uint8)
        try:
            yield room
        finally:
            self._free.append(room)
