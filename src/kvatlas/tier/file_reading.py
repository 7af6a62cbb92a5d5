"""Read runs from the blocks of a tier's file into memory with few system calls.

Long runs are read one by one. Runs that are contiguous in memory are copied hundreds at a time,
wherever they are in the file. The rest is read in file order: contiguous ranges of the file are
read into a staging buffer and scattered from there, or scattered directly by the read call.
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
