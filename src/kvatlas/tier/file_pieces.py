"""Runs between memory and a tier's file, cut into pieces that one core moves.

One system call per short run would be slow. Short runs are therefore gathered in a staging buffer
in the order of the file. They form contiguous stretches there, and one system call moves hundreds
of stretches.
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


class Piece(NamedTuple):
    """Runs that one core moves, either all short or all long."""

    near: Int64s
    """Offsets of the runs in memory."""
    far: Int64s
    """Offsets of the runs in a pool of the file, or in the file."""
    length: Int64s
    first: Int64s
    """The first run of each stretch of the file."""

    def made(self) -> Piece:
        """Return the piece itself, because its runs are already expanded."""
        return self

    @property
    def is_long(self) -> bool:
        """Whether the runs are so long that they need no staging buffer."""
        return int(self.length[0]) >= _LONG_RUN

    @property
    def stretches(self) -> tuple[Int64s, Int64s]:
        """Return the start and the size of each stretch of the file."""
        return self.far[self.first], self.stretch_bytes

    def gather(self, memory: Bytes, room: Bytes) -> None:
        """Copy the runs into `room`, one after the other."""
        for _ in copy_runs_unchecked(memory, room, self.near, self.packed, self.length):
            pass

    @property
    def stretch_bytes(self) -> Int64s:
        """The size of each stretch in bytes."""
        return np.add.reduceat(self.length, self.first)

    @property
    def packed(self) -> Places:
        """The starts of the runs in the buffer where they are contiguous."""
        if one_length(self.length):
            each = int(self.length[0])
            return range(0, len(self.length) * each, each)
        return np.cumsum(self.length) - self.length


class GridPiece(NamedTuple):
    """Several spans of a grid. If its runs are long, the core that moves them expands them."""

    starts: tuple[Int64s, Int64s]
    """Starts of runs at both ends, relative to the start of a span."""
    first: Int64s
    """The first run in each stretch of the file."""
    packed: NestedSteps
    """The starts of a span's runs in memory, and in the buffer where they are contiguous."""
    spans: tuple[Int64s, Int64s]
    """Starts of the spans in memory and in the file."""
    run_bytes: int

    @property
    def is_long(self) -> bool:
        """Whether the runs are so long that they need no staging buffer."""
        return self.run_bytes >= _LONG_RUN

    @property
    def stretches(self) -> tuple[Int64s, Int64s]:
        """Return the start and the size of each stretch of the file."""
        far = (self.spans[1][:, None] + self.starts[1][self.first]).reshape(-1)
        runs = np.diff(self.first, append=len(self.starts[1]))
        return far, np.tile(self.run_bytes * runs, len(self.spans[1]))

    def gather(self, memory: Bytes, room: Bytes) -> None:
        """Copy the runs into `room`, one after the other."""
        behind = len(self.starts[0]) * self.run_bytes * np.arange(len(self.spans[0]))
        src = (self.spans[0][:, None] + self.packed.src).reshape(-1)
        dst = (behind[:, None] + self.packed.dst).reshape(-1)
        copy_nested_unchecked(
            memory, room, NestedSteps(src, dst, self.packed.steps), self.run_bytes
        )

    def made(self) -> Piece:
        """Return the piece with expanded runs."""
        near, far = (
            (at + span[:, None]).reshape(-1)
            for at, span in zip(self.starts, self.spans, strict=True)
        )
        behind = len(self.starts[0]) * np.arange(len(self.spans[0]))
        first = (self.first + behind[:, None]).reshape(-1)
        return Piece(near, far, np.broadcast_to(np.int64(self.run_bytes), near.shape), first)


def grid_pieces(grid: Copy) -> list[GridPiece]:
    """Cut a grid into pieces. Return none if its runs differ in length or its stretches are short.

    A stretch is a contiguous range of the file, within one block. Each span is in one block.

    >>> from kvatlas.routing.binding import Starts
    >>> starts = Starts.of(np.array([0, 1 << 20]), np.array([0, 1 << 14]))
    >>> spans = np.array([7, 9]), np.array([0, 1 << 21]), np.array([1 << 14, 1 << 14])
    >>> (piece,) = grid_pieces(Copy(0, 0, *spans, starts=starts))
    >>> piece.made().near.tolist(), piece.made().stretch_bytes.tolist()
    ([7, 1048583, 9, 1048585], [32768, 32768])
    """
    if not len(grid) or not one_length(grid.length):
        return []
    each, (src, dst) = int(grid.length[0]), grid.starts.ends
    apart = np.concatenate([[True], dst[1:] != dst[:-1] + each])
    if len(dst) * each < _LONG_STRETCH * np.count_nonzero(apart):
        return []
    piece = min(_PIECE, max(_SMALL_PIECE, grid.nbytes // _PIECES))
    runs, made = max(1, piece // each), []
    for start in range(0, len(dst), runs):
        some = slice(start, start + runs)
        starts, cut = (src[some], dst[some]), apart[some].copy()
        cut[0] = True
        first, at_once = np.flatnonzero(cut), max(1, runs // len(cut))
        packed = NestedSteps.of(starts[0], each * np.arange(len(starts[0])))
        for begin in range(0, len(grid.src), at_once):
            spans = grid.src[begin : begin + at_once], grid.dst[begin : begin + at_once]
            made.append(GridPiece(starts, first, packed, spans, each))
    return made


def pieces(near: Int64s, far: Int64s, length: Int64s, block_bytes: int) -> list[Piece]:
    """Cut runs into pieces. Return none if their stretches of the file are short.

    A stretch consists of runs that are contiguous in a block of the file.
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
        Piece(near[a:b], far[a:b], length[a:b], np.flatnonzero(apart[a:b]))
        for a, b in pairwise(edges)
    ]


def _joined(
    near: Int64s, far: Int64s, length: Int64s, follows: Mask
) -> tuple[Int64s, Int64s, Int64s, Mask]:
    """Merge runs that are adjacent at both ends, and return which runs start a stretch."""
    apart = np.concatenate([[True], ~follows])
    kept = np.flatnonzero(
        np.concatenate([[True], ~follows | (near[1:] != near[:-1] + length[:-1])])
    )
    if len(kept) == len(length):
        return near, far, length, apart
    return near[kept], far[kept], np.add.reduceat(length, kept), apart[kept]


class Rooms:
    """A pool of staging buffers. Reusing them avoids page faults."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    @contextmanager
    def one(self) -> Iterator[Bytes]:
        """Lease a buffer for one piece."""
        try:
            room = self._free.pop()
        except IndexError:  # all are in use
            room = np.empty(_PIECE + _LONG_RUN, np.uint8)
        try:
            yield room
        finally:
            self._free.append(room)
