"""Runs between memory and a tier's file, cut into pieces that one core moves.

A call of the system for each short run takes long. So short runs are moved by way of memory in
which they lie as they do in the file: in stretches, of which the system takes hundreds at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import Int64s
from kvatlas.wire import Bytes, Places, one_length

_PIECE = 8 << 20
"""Bytes of runs that are moved together at most. Threads that are done ask for Python, and hold
each other up then: large pieces have them ask less often."""
_SMALL_PIECE = 1 << 20
"""Pieces are not made smaller than this for more of them."""
_PIECES = 8
"""Pieces that are wanted at least, so that all cores have some."""
_LONG_RUN = 32 << 10
"""Runs from here on need no memory between."""
_LONG_STRETCH = 8 << 10
"""Stretches from here on, on the whole, are worth being moved one by one."""

Mask = NDArray[np.bool_]


class Piece(NamedTuple):
    """Runs that one core sees to: all of them short, or all long."""

    near: Int64s
    """Where they are in memory."""
    far: Int64s
    """Where they are in a pool of the file, or in the file."""
    length: Int64s
    first: Int64s
    """The first run of each stretch of the file."""

    @property
    def is_long(self) -> bool:
        """Whether its runs need no memory between."""
        return int(self.length[0]) >= _LONG_RUN

    @property
    def stretch_bytes(self) -> Int64s:
        """The bytes of each stretch."""
        return np.add.reduceat(self.length, self.first)

    @property
    def packed(self) -> Places:
        """Where its runs start in memory that has them one behind the other."""
        if one_length(self.length):
            each = int(self.length[0])
            return range(0, len(self.length) * each, each)
        return np.cumsum(self.length) - self.length


def pieces(near: Int64s, far: Int64s, length: Int64s, block_bytes: int) -> list[Piece]:
    """Runs, cut into pieces; none where their stretches of the file are short.

    A stretch is made of runs that follow each other in a block.
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
    """Runs that touch at both ends as one, and which runs do not follow the one before."""
    apart = np.concatenate([[True], ~follows])
    kept = np.flatnonzero(
        np.concatenate([[True], ~follows | (near[1:] != near[:-1] + length[:-1])])
    )
    if len(kept) == len(length):
        return near, far, length, apart
    return near[kept], far[kept], np.add.reduceat(length, kept), apart[kept]


class Rooms:
    """Memory between, for any number of threads; new memory costs a fault for each page."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    @contextmanager
    def one(self) -> Iterator[Bytes]:
        """Room for a piece, which nobody else has meanwhile."""
        try:
            room = self._free.pop()
        except IndexError:  # all are in use
            room = np.empty(_PIECE + _LONG_RUN, np.uint8)
        try:
            yield room
        finally:
            self._free.append(room)
