"""Copy runs between memory and a file with vectored system calls.

One call moves a contiguous range of the file to or from up to 1,024 memory ranges. A disk error or
a full disk raises `OSError`. If the file were mapped, such a fault would kill the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory_copy import STEP, split_runs
from kvatlas.geometry.address_arrays import Int64s

_MAX_RANGES = 1024
"""The maximum number of memory ranges in one system call (IOV_MAX)."""
_WORTH_SORTING = 16
"""Runs are sorted by file offset if stretches of adjacent runs are shorter than this on average."""

_system = ctypes.CDLL(None, use_errno=True)
for _call in (_system.preadv, _system.pwritev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


def copy_file_runs(
    file: Callable[[], int], near: Int64s, far: Int64s, length: Int64s, *, write: bool
) -> Iterator[None]:
    """Copy runs between memory and a file, one step per iteration.

    `near` are addresses in this process, `far` are file offsets. The direction is memory to file if
    `write` is true, otherwise file to memory. `file` returns the descriptor; it is called before
    every system call, because the file may be closed in between. Raises `OSError` if a call fails,
    or if the file ends before a run does.
    """
    calls = vectored_calls(near, far, length)
    act = _system.pwritev if write else _system.preadv
    row, step = calls.ranges.ctypes.data, calls.ranges.strides[0]
    moved = 0
    for first, count, offset, nbytes in calls.each():
        if moved >= STEP:
            yield
            moved = 0
        done = act(file(), row + first * step, count, offset)
        if done != nbytes:
            _finish(act, file, calls.ranges[first : first + count].copy(), offset, done)
        moved += nbytes


class VectoredCalls(NamedTuple):
    """Memory ranges grouped into vectored calls. Each call covers contiguous bytes of the file."""

    ranges: NDArray[np.uint64]
    """Rows (address, length), as in the system's `iovec`."""
    first: Int64s
    """The index of each call's first range."""
    offset: Int64s
    """The file offset of each call."""
    nbytes: Int64s

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first range, number of ranges, file offset, bytes) of each read or write."""
        count = np.diff(self.first, append=len(self.ranges))
        columns = (self.first, count, self.offset, self.nbytes)
        yield from zip(*(column.tolist() for column in columns), strict=True)


def vectored_calls(near: Int64s, far: Int64s, length: Int64s) -> VectoredCalls:
    """Group runs that are adjacent in the file into vectored calls, within the system's limits.

    `near` are memory addresses, `far` are file offsets.

    >>> near, far, length = np.array([70, 50, 10]), np.array([4, 0, 90]), np.array([4, 4, 8])
    >>> calls = vectored_calls(near, far, length)
    >>> calls.ranges.tolist(), list(calls.each())
    ([[50, 4], [70, 4], [10, 8]], [(0, 2, 0, 8), (2, 1, 90, 8)])
    """
    near, far, length = split_runs(near, far, length)
    first = _stretches(far, length)
    if len(far) < _WORTH_SORTING * len(first) and int(np.diff(far[first], prepend=0).min()) < 0:
        order = np.argsort(far, kind="stable")
        near, far, length = near[order], far[order], length[order]
        first = _stretches(far, length)
    ranges = np.empty((len(far), 2), dtype=np.uint64)
    ranges[:, 0], ranges[:, 1] = near, length
    ends = np.cumsum(length)
    first = _cut(first, ends, length)
    nbytes = np.diff(ends[first] - length[first], append=ends[-1])
    return VectoredCalls(ranges, first, far[first], nbytes)


def _stretches(far: Int64s, length: Int64s) -> Int64s:
    """Return the index of each run that does not continue the previous run in the file."""
    follows = far[1:] == far[:-1] + length[:-1]
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(~follows) + 1])


def _cut(first: Int64s, ends: Int64s, length: Int64s) -> Int64s:
    """Split calls with more than `_MAX_RANGES` ranges, or with more than about `STEP` bytes.

    Return the index of each call's first run.
    """
    calls = -(-np.diff(first, append=len(ends)) // _MAX_RANGES)
    if int(calls.max()) > 1:
        turn = np.arange(calls.sum()) - np.repeat(np.cumsum(calls) - calls, calls)
        first = np.repeat(first, calls) + turn * _MAX_RANGES
    begins = ends[first] - length[first]
    cuts = [first]
    for call in np.flatnonzero(np.diff(begins, append=ends[-1]) > STEP).tolist():
        stop = first[call + 1] if call + 1 < len(first) else len(ends)
        own = slice(first[call], stop)
        step = (ends[own] - length[own] - begins[call]) // STEP
        cuts.append(first[call] + 1 + np.flatnonzero(np.diff(step)))
    return np.sort(np.concatenate(cuts)) if len(cuts) > 1 else first


def _finish(
    act: Callable[..., int],
    file: Callable[[], int],
    ranges: NDArray[np.uint64],
    offset: int,
    done: int,
) -> None:
    """Repeat a partial or interrupted call for the remaining ranges.

    `done` is the result of the first call. Raises `OSError` if a call fails.
    """
    while True:
        problem = ctypes.get_errno() if done < 0 else 0
        if problem and problem != errno.EINTR:
            raise OSError(problem, os.strerror(problem))
        if done == 0:
            raise OSError(errno.ENODATA, f"The file ends at byte {offset}, before the end of a run")
        offset += max(done, 0)
        ranges = rest_of(ranges, max(done, 0))
        if not len(ranges):
            return
        done = act(file(), ranges.ctypes.data, len(ranges), offset)


def rest_of(ranges: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """Return the part of `ranges` that remains after their first `done` bytes were moved.

    >>> rest_of(np.array([[100, 4], [200, 4]], np.uint64), 5).tolist()
    [[201, 3]]
    """
    ends = np.cumsum(ranges[:, 1].astype(np.int64))
    whole = int(np.searchsorted(ends, done, side="right"))
    rest = ranges[whole:].copy()
    if len(rest):
        into = np.uint64(done - (int(ends[whole - 1]) if whole else 0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest
