"""`FileMap`: a file's bytes at addresses that this process never touches itself.

The system copies from and to them on request: hundreds of runs, scattered at both ends, in
one call that holds up no other thread, on any number of cores. Where the file has been cut
short or its disk fails, that call fails, while touching the addresses would end the process.

Such a call has two ends. At its own it follows addresses as a program would; at the other it
looks up the pages of each range first. So the other end is the one with fewer, longer ranges.
Where both are long, it is the file's: the system writes faster at its own.
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
"""Ranges that the system takes in one call (IOV_MAX)."""
_MOST_BYTES = 1 << 30
"""Bytes of one call; the system takes 2 GiB."""
_LONG_RANGE = 4 << 10
"""Ranges of the file from here on, on the whole, are worth being looked up."""

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
        if self._map is None:
            return False
        mapped = far + self._address
        if int(length.sum()) >= _LONG_RANGE * np.count_nonzero(_apart(far, length)):
            return _copied(_out_of_long_ranges, near, mapped, length)
        return _copied(_out_of_short_ranges, mapped, near, length)

    def write(self, near: Int64s, far: Int64s, length: Int64s) -> bool:
        """Copy runs at addresses to offsets of the file; whether all of them were, as above.

        The disk has them as it has what is written by other calls: after an `fdatasync`.
        """
        if self._map is None:
            return False
        return _copied(_into_file, far + self._address, near, length)

    def close(self) -> None:
        """Let go of the addresses."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _copied(copy: Any, own: Int64s, other: Int64s, length: Int64s) -> bool:
    """Have the system copy runs between two ends of a call; whether all of them were.

    Ranges of the other end that touch are one.
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
    """Which runs do not begin where the one before them ends."""
    apart = np.ones(len(length), np.bool_)
    np.not_equal(at[1:], at[:-1] + length[:-1], out=apart[1:])
    return apart


def _ranges(address: Int64s, length: Int64s) -> Int64s:
    """Addresses and lengths as the system takes them (iovec)."""
    ranges = np.empty((len(length), 2), np.int64)
    ranges[:, 0], ranges[:, 1] = address, length
    return ranges
