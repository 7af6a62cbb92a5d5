"""Runs from memory into the blocks of a tier's file: by few calls, and summed on the way.

The system writes to a file on one core at a time, and a call for each short run would keep
it for long. So short runs are gathered first, on several cores, into stretches of the file;
these are summed while they are in the processor's cache, and written by a call each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.tier.file_opening import write_all
from kvatlas.tier.part_sums import START, SummedStretches
from kvatlas.wire import Bytes, Places, copy_runs, crc32, one_length

_AT_ONCE = 256 << 10
"""Bytes that are summed and written together: what stays in the processor's cache."""
_PIECE = 2 << 20
"""Bytes of short runs that are gathered together."""
_LONG_RUN = 32 << 10
"""Runs from here on are written from where they are."""
_LONG_STRETCH = 8 << 10
"""Stretches from here on, on the whole, are worth being summed and written one by one."""

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


class Prepared(NamedTuple):
    """A piece that was gathered and summed, and what of it is yet to be written."""

    summed: SummedStretches
    data: list[memoryview]
    offset: list[int]
    """Where each goes in the file."""
    room: Bytes | None
    """What it was gathered into, which nothing else may use until it is written."""


class PieceWriter:
    """Writes pieces to a file: `prepare` on any number of threads, `finish` on one.

    Long stretches are written by whoever prepares them. Calls for short ones would wait for
    each other on every core, which costs more than they do.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._rooms: list[Bytes] = []
        """Memory that was gathered into before; new memory costs a fault for each page."""

    def prepare(self, piece: Piece, memory: Bytes, offset: int) -> Prepared:
        """Gather and sum runs of some memory, which go to a pool at an offset of the file."""
        if int(piece.length[0]) >= _LONG_RUN:
            stretches = piece.src, piece.dst, piece.length
            return Prepared(*self._sum(memory, *stretches, offset), room=None)
        nbytes = np.add.reduceat(piece.length, piece.stretch)
        room = self._room()
        for _ in copy_runs(memory, room, piece.src, _packed(piece.length), piece.length):
            pass
        starts = np.cumsum(nbytes) - nbytes
        return Prepared(*self._sum(room, starts, piece.dst[piece.stretch], nbytes, offset), room)

    def finish(self, prepared: Prepared) -> SummedStretches:
        """Write what of a piece is yet to be written; its stretches, summed."""
        for data, offset in zip(prepared.data, prepared.offset, strict=True):
            write_all(self._file, data, offset)
        if prepared.room is not None:
            self._rooms.append(prepared.room)
        return prepared.summed

    def _room(self) -> Bytes:
        try:
            return self._rooms.pop()
        except IndexError:  # all are in use
            return np.empty(_PIECE + _LONG_RUN, np.uint8)

    def _sum(
        self, memory: Bytes, src: Int64s, dst: Int64s, length: Int64s, offset: int
    ) -> tuple[SummedStretches, list[memoryview], list[int]]:
        """Stretches summed, and those that are yet to be written."""
        crcs, data = [], memory.data
        later: tuple[list[memoryview], list[int]] = [], []
        rows = zip(src.tolist(), (offset + dst).tolist(), length.tolist(), strict=True)
        for start, to, nbytes in rows:
            crc = START
            for done in range(0, nbytes, _AT_ONCE):
                some = data[start + done : start + min(done + _AT_ONCE, nbytes)]
                crc = crc32(some, crc)
                if nbytes >= _AT_ONCE:
                    write_all(self._file, some, to + done)
                else:
                    later[0].append(some)
                    later[1].append(to)
            crcs.append(crc)
        return SummedStretches(dst, length, np.array(crcs, np.uint32)), *later


def _packed(length: Int64s) -> Places:
    """Where runs start that lie one behind the other."""
    if one_length(length):
        return range(0, len(length) * int(length[0]), int(length[0]))
    return np.cumsum(length) - length
