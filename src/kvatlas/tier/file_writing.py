"""Write runs from memory into the blocks of a tier's file and compute their checksums.

Short runs are first gathered, on several cores, into stretches: contiguous ranges of the file. The
checksum of a stretch is computed while its bytes are in the processor's cache, and then it is
written.

If the target part of the file was written recently, its pages are in memory. One call then writes
hundreds of stretches, and several cores make such calls in parallel. If the part was not written
recently, such a call would have to prepare or read every page first, so each stretch is written by
a separate call. The system serialises these separate calls per file, and contention costs more than
the calls themselves. One thread therefore makes them, while others gather runs and compute
checksums. Only a few threads compute checksums, which also limits contention.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from kvatlas.copying.checksum import crc32, has_fast_crc32
from kvatlas.copying.run_bounds import Bytes
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_opening import write_all
from kvatlas.tier.file_pieces import Piece, Rooms
from kvatlas.tier.part_sums import START, SummedStretches

_AT_ONCE = 256 << 10
"""Bytes per write and checksum update, small enough for the processor's cache."""
_MAPPED_STRETCH = 8 << 10
"""Mean size in bytes from which the stretches of a piece are written through the file map."""
_REGION = 1 << 20
"""Granularity in bytes at which the time of the last write is recorded."""
_STILL_DIRTY = 15.0
"""Seconds for which written pages are assumed to be dirty. The system's default is 30."""
_SUMMING, _SUMMING_FAST = 4, 2
"""Number of threads that compute checksums: usually, and if a fast CRC-32 is available."""


class PieceWriter:
    """Writes pieces to a file. Thread-safe."""

    def __init__(self, file: int, nbytes: int, mapped: FileMap | None, rooms: Rooms) -> None:
        """Write to an open file of `nbytes` bytes. Pass None as `mapped` if the tier is durable."""
        self._file, self._map, self._rooms = file, mapped, rooms
        self._written = np.full(1 + nbytes // _REGION, -np.inf)
        """The time of the last write to each region."""
        self._turn = threading.Lock()
        """Held by the thread that writes short stretches with one call each."""
        self._summing = threading.Semaphore(_SUMMING_FAST if has_fast_crc32() else _SUMMING)
        """Held by threads that compute checksums of short stretches."""

    def write(self, piece: Piece, memory: Bytes, offset: int) -> SummedStretches:
        """Write the runs of a piece to the pool that starts at file offset `offset`.

        Returns the contiguous ranges of the pool that were written, with the checksum of each.
        """
        if piece.is_long:
            return self._write(memory, *piece.runs(), offset)
        far, nbytes = piece.stretches
        with self._rooms.one() as room:
            piece.gather(memory, room)
            return self._write(room, np.cumsum(nbytes) - nbytes, far, nbytes, offset)

    def _write(
        self, memory: Bytes, source: Int64s, destination: Int64s, length: Int64s, offset: int
    ) -> SummedStretches:
        data, to = memory.data, offset + destination
        ends = zip(source.tolist(), (source + length).tolist(), strict=True)
        stretches = [data[start:stop] for start, stop in ends]
        if int(length.max()) >= _AT_ONCE:
            crcs = self._write_long(stretches, to.tolist())
        else:
            with self._summing:
                crcs = [crc32(stretch, START) for stretch in stretches]
            if not self._write_mapped(memory.ctypes.data + source, to, length):
                self._write_short(stretches, to.tolist())
        return SummedStretches(destination, length, np.array(crcs, np.uint32))

    def _write_mapped(self, source: Int64s, to: Int64s, length: Int64s) -> bool:
        """Write contiguous ranges in one call. Return False if that fails or would be slower."""
        now, regions = time.monotonic(), to // _REGION
        recent = now - float(self._written[regions].min()) < _STILL_DIRTY
        self._written[regions] = now
        long = int(length.sum()) >= _MAPPED_STRETCH * len(length)
        return self._map is not None and recent and long and self._map.write(source, to, length)

    def _write_short(self, stretches: list[memoryview], to: list[int]) -> None:
        with self._turn:
            for stretch, place in zip(stretches, to, strict=True):
                write_all(self._file, stretch, place)

    def _write_long(self, stretches: list[memoryview], to: list[int]) -> list[int]:
        crcs = []
        for stretch, place in zip(stretches, to, strict=True):
            crc, done = START, 0
            while done < len(stretch):
                # Each write ends at a multiple of _AT_ONCE in the file. The page cache then holds
                # its bytes in one contiguous piece of memory, which later reads copy fastest.
                some = stretch[done : done + _AT_ONCE - (place + done) % _AT_ONCE]
                crc = crc32(some, crc)
                write_all(self._file, some, place + done)
                done += len(some)
            crcs.append(crc)
        return crcs
