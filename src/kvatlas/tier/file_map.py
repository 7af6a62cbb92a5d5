"""`FileMap`: a file's bytes at addresses that this process never touches itself.

The system copies from them on request: hundreds of runs, scattered at both ends, in one
call that holds up no other thread. Where the file has been cut short or its disk fails, that
call fails, while touching the addresses would end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from kvatlas.geometry import Int64s

_AT_ONCE = 1024
"""Ranges that the system takes in one call (IOV_MAX)."""
_MOST_BYTES = 1 << 30
"""Bytes of one call; the system takes 2 GiB."""

_read = ctypes.CDLL(None, use_errno=True).process_vm_readv
_read.restype = ctypes.c_ssize_t
_read.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
)  # fmt: skip


class FileMap:
    """The first bytes of a file, mapped where that is possible."""

    def __init__(self, file: int, nbytes: int) -> None:
        try:
            self._map: mmap.mmap | None = mmap.mmap(file, nbytes, prot=mmap.PROT_READ)
        except (OSError, ValueError):  # no such addresses, or not so many bytes
            self._map = None
        # The address is asked for without touching a byte.
        self._address = 0 if self._map is None else np.frombuffer(self._map, np.uint8).ctypes.data

    def read(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs at offsets of the file to addresses; whether all of them were.

        Where that is not so, some may have been: whoever reads them by other calls hears why.
        """
        if self._map is None or int(length.max()) > _MOST_BYTES // _AT_ONCE:
            return False
        ranges = np.empty((2, len(length), 2), np.uint64)
        ranges[0, :, 0], ranges[1, :, 0] = near, far + self._address
        ranges[:, :, 1] = length
        row, process = ranges.strides[1], os.getpid()
        for first in range(0, len(length), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            into, out_of = (end.ctypes.data + first * row for end in ranges)
            many = len(length[some])
            if _read(process, into, many, out_of, many, 0) != int(length[some].sum()):
                return False
        return True

    def close(self) -> None:
        """Let go of the addresses."""
        if self._map is not None:
            self._map.close()
            self._map = None
