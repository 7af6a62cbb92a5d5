"""Runs from the blocks of a tier's file into memory, by few calls.

Long runs are read one by one. Others that fill stretches of memory are copied there by the
system, hundreds at once, wherever they lie in the file. The rest is taken in the order of the
file: its stretches are read into memory between and scattered from there, or scattered by the
call that reads them.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_pieces import Piece, Rooms, pieces
from kvatlas.wire.memory_copy import copy_runs_unchecked
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.transports.file import copy_file_runs

_LONGEST_RUN = 256 << 10
"""Runs from here on, on the whole, are read one by one: nothing is worked out for them before."""
_MAPPED_STRETCH = 4 << 10
"""Stretches of memory from here on, on the whole, are filled by few calls, of any runs."""
_LONG_RUN = 4 << 10
"""Runs from here on, on the whole, are worth a call each."""
_LONG_STRETCH = 128 << 10
"""Stretches of the file from here on, on the whole, are worth a call each, which scatters runs."""


class RunReader:
    """Reads runs of a file, on any number of threads."""

    def __init__(self, file: int, mapped: FileMap, rooms: Rooms) -> None:
        self._file, self._map, self._rooms = file, mapped, rooms

    def read(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        """Read runs at offsets of the file to offsets of some memory."""
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
                    raise OSError(errno.ENODATA, f"The file ends at byte {offset}")
                room, offset = room[done:], offset + done

    def _read_piece(self, piece: Piece, memory: Bytes) -> None:
        if piece.is_long:
            self._read(memory, piece.near, piece.far, piece.length)
            return
        nbytes = piece.stretch_bytes
        with self._rooms.one() as room:
            self._read(room, np.cumsum(nbytes) - nbytes, piece.far[piece.first], nbytes)
            for _ in copy_runs_unchecked(room, memory, piece.packed, piece.near, piece.length):
                pass

    def _read(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        if not self._map.read(near + memory.ctypes.data, far, length):
            self._read_each(memory, near, far, length)

    def _read_each(self, memory: Bytes, near: Int64s, far: Int64s, length: Int64s) -> None:
        address = memory.ctypes.data
        for _ in copy_file_runs(lambda: self._file, near + address, far, length, write=False):
            pass


def _stretches(at: Int64s, length: Int64s) -> int:
    """How many stretches runs are in, of which each follows the one before it."""
    return 1 + int(np.count_nonzero(at[1:] != at[:-1] + length[:-1]))
