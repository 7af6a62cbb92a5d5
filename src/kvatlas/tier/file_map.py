"""`FileMap`: a file's bytes at addresses that this process never touches itself.

The system copies from and to them on request: hundreds of runs, scattered at both ends, in
one call that holds up no other thread, on any number of cores. Where the file has been cut
short or its disk fails, that call fails, while touching the addresses would end the process.
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

_copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy.restype = ctypes.c_ssize_t
_copy.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
)  # fmt: skip


class FileMap:
    """The first bytes of a file, mapped where that is possible."""

    def __init__(self, file: int, nbytes: int) -> None:
        try:
            self._map: mmap.mmap | None = mmap.mmap(file, nbytes)
        except (OSError, ValueError):  # no such addresses, or not so many bytes
            self._map = None
        # The address is asked for without touching a byte.
        self._address = 0 if self._map is None else np.frombuffer(self._map, np.uint8).ctypes.data

    def read(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs at offsets of the file to addresses; whether all of them were.

        Where that is not so, some may have been: whoever reads them by other calls hears why.
        """
        return self._map is not None and _copied(near, far + self._address, length)

    def write(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs at addresses to offsets of the file; whether all of them were, as above.

        The disk has them as it has what is written by other calls: after an `fdatasync`.
        """
        return self._map is not None and _copied(far + self._address, near, length)

    def close(self) -> None:
        """Let go of the addresses."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _copied(into: Int64s, out_of: Int64s, length: Int64s) -> bool:
    """Have the system copy runs between addresses; whether it has copied all of them."""
    if int(length.max()) > _MOST_BYTES // _AT_ONCE:
        return False
    ranges = np.empty((2, len(length), 2), np.uint64)
    ranges[0, :, 0], ranges[1, :, 0] = into, out_of
    ranges[:, :, 1] = length
    row, process = ranges.strides[1], os.getpid()
    for first in range(0, len(length), _AT_ONCE):
        some = length[first : first + _AT_ONCE]
        to, of = (end.ctypes.data + first * row for end in ranges)
        if _copy(process, to, len(some), of, len(some), 0) != int(some.sum()):
            return False
    return True
