"""Runs from memory into the blocks of a tier's file: by few calls, and summed on the way.

Short runs are gathered first, on several cores, into stretches of the file; these are summed
while they are in the processor's cache, and then written. Where the system has their pages of
the file in memory, hundreds are written by one call, on several cores at once. Elsewhere it
would read a page before a part of it is replaced, so there each stretch is written by a call
of its own. Such calls the system carries out one at a time for each file, and waiting for each
other costs them more than they do: one thread makes them, while others gather and sum.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_opening import write_all
from kvatlas.tier.part_sums import START, SummedStretches
from kvatlas.wire import Bytes, Places, copy_runs, crc32, one_length

_AT_ONCE = 256 << 10
"""Bytes of a long stretch that are summed and written together: what stays in the cache."""
_PIECE = 2 << 20
"""Bytes of short runs that are gathered together."""
_ROOM = 8 << 20
"""Bytes of the memory that is gathered into. A piece needs less, but from 4 MiB on numpy asks
for large pages, which the system looks up faster; what is not used of it does not exist."""
_LONG_RUN = 32 << 10
"""Runs from here on are written from where they are."""
_LONG_STRETCH = 8 << 10
"""Stretches from here on, on the whole, are worth being summed and written one by one."""
_MAPPED_STRETCH = 8 << 10
"""Stretches of a piece from here on, on the whole, are worth being written by one call."""

Mask = NDArray[np.bool_]


class Piece(NamedTuple):
    """Runs of a copy that one core sees to: all of them short, or all long."""

    src: Int64s
    dst: Int64s
    length: Int64s
    stretch: Int64s
    """The first run of each stretch of the file."""


def pieces(copy: Copy, block_bytes: int) -> list[Piece]:
    """The runs of a copy, cut into pieces; none where its stretches of the file are short.

    A stretch is made of runs that follow each other in a block.
    """
    block = copy.dst // block_bytes
    follows = (copy.dst[1:] == copy.dst[:-1] + copy.length[:-1]) & (block[1:] == block[:-1])
    stretches = len(copy) - np.count_nonzero(follows)
    if not stretches or copy.nbytes < _LONG_STRETCH * stretches:
        return []
    src, dst, length, apart = _joined(copy, follows)
    step, long = (np.cumsum(length) - length) // _PIECE, length >= _LONG_RUN
    cut = np.flatnonzero((step[1:] != step[:-1]) | (long[1:] != long[:-1])) + 1
    apart[cut] = True
    edges = [0, *cut.tolist(), len(length)]
    return [
        Piece(src[a:b], dst[a:b], length[a:b], np.flatnonzero(apart[a:b]))
        for a, b in pairwise(edges)
    ]


def _joined(copy: Copy, follows: Mask) -> tuple[Int64s, Int64s, Int64s, Mask]:
    """Runs that touch at both ends as one, and which runs do not follow the one before."""
    apart = np.concatenate([[True], ~follows])
    kept = np.flatnonzero(
        np.concatenate([[True], ~follows | (copy.src[1:] != copy.src[:-1] + copy.length[:-1])])
    )
    if len(kept) == len(copy):
        return copy.src, copy.dst, copy.length, apart
    return copy.src[kept], copy.dst[kept], np.add.reduceat(copy.length, kept), apart[kept]


class PieceWriter:
    """Writes pieces to a file, on any number of threads."""

    def __init__(self, file: int, mapped: FileMap) -> None:
        self._file, self._map = file, mapped
        self._turn = threading.Lock()
        """Held by the thread that writes short stretches by a call each."""
        self._rooms: list[Bytes] = []
        """Memory that was gathered into before; new memory costs a fault for each page."""

    def write(self, piece: Piece, memory: Bytes, offset: int) -> SummedStretches:
        """Write runs of some memory to a pool at an offset of the file; its stretches, summed."""
        if int(piece.length[0]) >= _LONG_RUN:
            return self._write(memory, piece.src, piece.dst, piece.length, offset)
        nbytes = np.add.reduceat(piece.length, piece.stretch)
        room = self._room()
        try:
            for _ in copy_runs(memory, room, piece.src, _packed(piece.length), piece.length):
                pass
            starts = np.cumsum(nbytes) - nbytes
            return self._write(room, starts, piece.dst[piece.stretch], nbytes, offset)
        finally:
            self._rooms.append(room)

    def _room(self) -> Bytes:
        try:
            return self._rooms.pop()
        except IndexError:  # all are in use
            return np.empty(_ROOM, np.uint8)

    def _write(
        self, memory: Bytes, src: Int64s, dst: Int64s, length: Int64s, offset: int
    ) -> SummedStretches:
        data, to = memory.data, offset + dst
        ends = zip(src.tolist(), (src + length).tolist(), strict=True)
        stretches = [data[start:stop] for start, stop in ends]
        if int(length.max()) >= _AT_ONCE:
            crcs = self._write_long(stretches, to.tolist())
        else:
            crcs = [crc32(stretch, START) for stretch in stretches]
            if not self._write_mapped(memory.ctypes.data + src, to, length):
                self._write_short(stretches, to.tolist())
        return SummedStretches(dst, length, np.array(crcs, np.uint32))

    def _write_mapped(self, src: Int64s, to: Int64s, length: Int64s) -> bool:
        """Write stretches by one call; False where that is not worth it, or cannot be."""
        long = int(length.sum()) >= _MAPPED_STRETCH * len(length)
        return long and self._map.in_memory(to) and self._map.write(src, to, length)

    def _write_short(self, stretches: list[memoryview], to: list[int]) -> None:
        with self._turn:
            for stretch, place in zip(stretches, to, strict=True):
                write_all(self._file, stretch, place)

    def _write_long(self, stretches: list[memoryview], to: list[int]) -> list[int]:
        crcs = []
        for stretch, place in zip(stretches, to, strict=True):
            crc = START
            for done in range(0, len(stretch), _AT_ONCE):
                some = stretch[done : done + _AT_ONCE]
                crc = crc32(some, crc)
                write_all(self._file, some, place + done)
            crcs.append(crc)
        return crcs


def _packed(length: Int64s) -> Places:
    """Where runs start that lie one behind the other."""
    if one_length(length):
        return range(0, len(length) * int(length[0]), int(length[0]))
    return np.cumsum(length) - length
