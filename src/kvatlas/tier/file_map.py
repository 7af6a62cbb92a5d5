"""`FileMap`: a file that is mapped into memory. Only system calls access the mapping.

`process_vm_readv` and `process_vm_writev` copy hundreds of scattered runs in one call, without
blocking other threads, on any number of cores. If the file was truncated or its disk fails, the
call returns an error, whereas a direct access to the mapping would kill the process.

Each call takes a list of local ranges and a list of remote ranges. The system accesses local ranges
directly, but first looks up the pages of each remote range. The list with fewer, longer ranges is
therefore passed as the remote one. If both lists have long ranges, the ranges of the file are the
remote ones, because the system writes faster to local ranges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.address_arrays import Int64s

_AT_ONCE = 1024
"""Maximum number of ranges in one call (IOV_MAX)."""
_MOST_BYTES = 1 << 30
"""Maximum number of bytes in one call. The system's limit is 2 GiB."""
_LONG_RANGE = 4 << 10
"""Mean size in bytes from which ranges of the file are worth a page lookup."""

_libc = ctypes.CDLL(None, use_errno=True)
_into_file = _out_of_long_ranges = _libc.process_vm_readv
_out_of_short_ranges = _libc.process_vm_writev
for _call in (_into_file, _out_of_short_ranges):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip


class FileMap:
    """A mapping of the first `nbytes` bytes of a file.

    If the file cannot be mapped, reads and writes return False.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        try:
            self._map: mmap.mmap | None = mmap.mmap(file, nbytes)
        except (OSError, ValueError):  # too little address space, or a shorter file
            self._map = None
        # Taking the address does not access the mapped bytes.
        self._address = 0 if self._map is None else np.frombuffer(self._map, np.uint8).ctypes.data

    def read(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs from file offsets `far` to addresses `near`. Return whether that succeeded.

        After a failure, some runs may have been copied. Read all of them again with other system
        calls, which report the error.
        """
        if self._map is None:
            return False
        mapped = far + self._address
        if int(length.sum()) >= _LONG_RANGE * np.count_nonzero(_apart(far, length)):
            return _copied(_out_of_long_ranges, near, mapped, length)
        return _copied(_out_of_short_ranges, mapped, near, length)

    def write(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs from addresses `near` to file offsets `far`. Return whether that succeeded.

        As with other writes, the data reaches the disk after an `fdatasync`.
        """
        if self._map is None:
            return False
        return _copied(_into_file, far + self._address, near, length)

    def close(self) -> None:
        """Unmap the file."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _copied(copy: Any, own: Int64s, other: Int64s, length: Int64s) -> bool:
    """Copy runs with system calls and return whether all were copied.

    `own` contains the local address of each run, and `other` its remote address. Adjacent remote
    ranges are merged.
    """
    if int(length.max()) > _MOST_BYTES // _AT_ONCE:
        return False
    calls = np.arange(0, len(length), _AT_ONCE)
    apart = _apart(other, length)
    apart[calls] = True
    first = np.flatnonzero(apart)
    ours, others = _ranges(own, length), _ranges(other[first], np.add.reduceat(length, first))
    edges = [*np.searchsorted(first, calls).tolist(), len(first)]
    nbytes = np.add.reduceat(length, calls).tolist()
    process, to, of, row = os.getpid(), ours.ctypes.data, others.ctypes.data, ours.strides[0]
    for at, (begin, end), wanted in zip(calls.tolist(), pairwise(edges), nbytes, strict=True):
        many = min(_AT_ONCE, len(length) - at)
        if copy(process, to + at * row, many, of + begin * row, end - begin, 0) != wanted:
            return False
    return True


def _apart(at: Int64s, length: Int64s) -> NDArray[np.bool_]:
    """Return a mask of the runs that do not start where the previous run ends."""
    apart = np.ones(len(length), np.bool_)
    np.not_equal(at[1:], at[:-1] + length[:-1], out=apart[1:])
    return apart


def _ranges(address: Int64s, length: Int64s) -> Int64s:
    """Return addresses and lengths as an array of iovec."""
    ranges = np.empty((len(length), 2), np.int64)
    ranges[:, 0], ranges[:, 1] = address, length
    return ranges
