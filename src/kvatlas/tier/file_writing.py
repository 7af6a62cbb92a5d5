"""Runs from memory into the blocks of a tier's file: by few calls, and summed on the way.

Short runs are gathered first, on several cores, into stretches of the file; these are summed
while they are in the processor's cache, and then written. Where the file was written to a
moment ago, hundreds are written by one call, on several cores at once. Elsewhere the system
would have to prepare every page for that, or to read it, so there each stretch is written by a
call of its own. Such calls the system carries out one at a time for each file, and waiting for
each other costs them more than they do: one thread makes them, while others gather and sum.
For the same reason few sum at once.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_opening import write_all
from kvatlas.tier.file_pieces import GridPiece, Piece, Rooms
from kvatlas.tier.part_sums import START, SummedStretches
from kvatlas.wire.checksum import crc32, has_fast_crc32
from kvatlas.wire.run_bounds import Bytes

_AT_ONCE = 256 << 10
"""Bytes of a long stretch that are summed and written together: what stays in the cache."""
_MAPPED_STRETCH = 8 << 10
"""Stretches of a piece from here on, on the whole, are worth being written by one call."""
_REGION = 1 << 20
"""Bytes of a file of which it is known when they were written."""
_STILL_DIRTY = 15.0
"""Seconds for which what was written is in memory alone: the system gives it 30 by default."""
_SUMMING, _SUMMING_FAST = 4, 2
"""Threads that sum at once: few where sums are fast, and threads mostly ask for Python."""


class PieceWriter:
    """Writes pieces to a file, on any number of threads."""

    def __init__(self, file: int, nbytes: int, mapped: FileMap | None, rooms: Rooms) -> None:
        """Of a file of so many bytes; not `mapped` where the disk has all that was written."""
        self._file, self._map, self._rooms = file, mapped, rooms
        self._written = np.full(1 + nbytes // _REGION, -np.inf)
        """When something was written to a region last."""
        self._turn = threading.Lock()
        """Held by the thread that writes short stretches by a call each."""
        self._summing = threading.Semaphore(_SUMMING_FAST if has_fast_crc32() else _SUMMING)
        """Held by threads that sum short stretches."""

    def write(self, piece: Piece | GridPiece, memory: Bytes, offset: int) -> SummedStretches:
        """Write runs of some memory to a pool at an offset of the file; its stretches, summed."""
        if piece.is_long:
            runs = piece.made()
            return self._write(memory, runs.near, runs.far, runs.length, offset)
        far, nbytes = piece.stretches
        with self._rooms.one() as room:
            piece.gather(memory, room)
            return self._write(room, np.cumsum(nbytes) - nbytes, far, nbytes, offset)

    def _write(
        self, memory: Bytes, src: Int64s, dst: Int64s, length: Int64s, offset: int
    ) -> SummedStretches:
        data, to = memory.data, offset + dst
        ends = zip(src.tolist(), (src + length).tolist(), strict=True)
        stretches = [data[start:stop] for start, stop in ends]
        if int(length.max()) >= _AT_ONCE:
            crcs = self._write_long(stretches, to.tolist())
        else:
            with self._summing:
                crcs = [crc32(stretch, START) for stretch in stretches]
            if not self._write_mapped(memory.ctypes.data + src, to, length):
                self._write_short(stretches, to.tolist())
        return SummedStretches(dst, length, np.array(crcs, np.uint32))

    def _write_mapped(self, src: Int64s, to: Int64s, length: Int64s) -> bool:
        """Write stretches by one call; False where that is not worth it, or cannot be."""
        now, regions = time.monotonic(), to // _REGION
        recent = now - float(self._written[regions].min()) < _STILL_DIRTY
        self._written[regions] = now
        long = int(length.sum()) >= _MAPPED_STRETCH * len(length)
        return self._map is not None and recent and long and self._map.write(src, to, length)

    def _write_short(self, stretches: list[memoryview], to: list[int]) -> None:
        with self._turn:
            for stretch, place in zip(stretches, to, strict=True):
                write_all(self._file, stretch, place)

    def _write_long(self, stretches: list[memoryview], to: list[int]) -> list[int]:
        crcs = []
        for stretch, place in zip(stretches, to, strict=True):
            crc, done = START, 0
            while done < len(stretch):
                # Up to a multiple of so many bytes in the file: the system then keeps them in
                # one piece of memory, and reads of it are as fast as they can be.
                some = stretch[done : done + _AT_ONCE - (place + done) % _AT_ONCE]
                crc = crc32(some, crc)
                write_all(self._file, some, place + done)
                done += len(some)
            crcs.append(crc)
        return crcs
