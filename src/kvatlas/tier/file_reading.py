"""Read runs from the blocks of a tier's file into memory with few system calls.

The mean lengths of the runs, and of the contiguous ranges that the runs form, determine the method.
The first of these cases that applies is used:

1. Long runs are read one by one.
2. If the runs form long ranges in memory and the file is mapped, one system call copies hundreds of
   runs out of the mapping.
3. Runs of medium length are read with vectored calls.
4. If the runs form long ranges in the file, vectored calls read and scatter each range.
5. Other runs are read in file order, in pieces. Most pieces pass through a staging buffer.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from kvatlas.copying.file_runs import copy_file_runs
from kvatlas.copying.run_bounds import Bytes
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_pieces import Piece, Rooms, pieces

_LONGEST_RUN = 256 << 10
"""Mean size in bytes from which runs are read one by one, without planning."""
_MAPPED_STRETCH = 4 << 10
"""Mean size in bytes from which stretches of memory are filled through the file map."""
_LONG_RUN = 4 << 10
"""Mean size in bytes from which runs are worth one system call each."""
_LONG_STRETCH = 128 << 10
"""Mean size in bytes from which stretches of the file are worth one scattering call each."""


class RunReader:
    """Reads runs of a file. Thread-safe."""

    def __init__(self, file: int, mapped: FileMap, rooms: Rooms) -> None:
        self._file, self._map, self._rooms = file, mapped, rooms

    def read(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        """Read runs from offsets in the file to offsets in memory."""
        nbytes = int(length.sum())
        if nbytes >= _LONGEST_RUN * len(length):
            self._read_long(memory, near, far, length)
            return
        if nbytes < _MAPPED_STRETCH * _stretches(near, length):
            order = np.argsort(near, kind="stable")
            near, far, length = near[order], far[order], length[order]
        filled = nbytes >= _MAPPED_STRETCH * _stretches(near, length)
        if filled and self._map.read(near + memory.ctypes.data, far, length):
            return
        if nbytes >= _LONG_RUN * len(length):
            self._read_each(memory, near, far, length)
            return
        order = np.argsort(far, kind="stable")
        near, far, length = near[order], far[order], length[order]
        short = nbytes < _LONG_STRETCH * _stretches(far, length)
        cut = pieces(near, far, length, int(far[-1]) + 1) if short else []
        for piece in cut:
            self._read_piece(piece, memory)
        if not cut:
            self._read_each(memory, near, far, length)

    def _read_long(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        everything = memory.data
        for start, offset, nbytes in zip(*(a.tolist() for a in (near, far, length)), strict=True):
            room = everything[start : start + nbytes]
            while room:
                done = os.preadv(self._file, (room,), offset)
                if not done:
                    raise OSError(errno.ENODATA, f"a truncated file that ends at byte {offset}")
                room, offset = room[done:], offset + done

    def _read_piece(self, piece: Piece, memory: Bytes) -> None:
        if piece.is_long:
            self._read(memory, *piece.runs())
            return
        far, nbytes = piece.stretches
        with self._rooms.one() as room:
            self._read(room, np.cumsum(nbytes) - nbytes, far, nbytes)
            piece.scatter(room, memory)

    def _read(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        if not self._map.read(near + memory.ctypes.data, far, length):
            self._read_each(memory, near, far, length)

    def _read_each(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        address = memory.ctypes.data
        for _ in copy_file_runs(lambda: self._file, near + address, far, length, write=False):
            pass


def _stretches(at: Int64s, length: Int64s) -> int:
    """Return the number of contiguous ranges that consecutive runs form."""
    return 1 + int(np.count_nonzero(at[1:] != at[:-1] + length[:-1]))
