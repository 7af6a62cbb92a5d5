"""Check that runs are inside byte buffers of this process before any byte is copied.

A copy between addresses checks no bounds, and numpy counts a negative index from the end of the
buffer. Public functions therefore check their runs before they copy. Runs that come from a route
are already checked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import NestedSteps
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import positive

Bytes = NDArray[np.uint8]
Places = Int64s | range
"""The starts of runs. A range means that the runs are contiguous and of one length."""
_LARGEST = int(np.iinfo(np.int64).max)


def check_runs(
    starts: Places, length: Int64s, buffer: Bytes, *, written: bool = False
) -> tuple[Int64s, Int64s]:
    """Return (starts, lengths) as int64 arrays, or raise an error if a run leaves the buffer.

    If `written` is true, also raise an error if the buffer is read-only.

    >>> check_runs(np.array([0, 60]), np.array([8, 8]), np.zeros(64, np.uint8))
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A byte range extends outside the buffer. Got runs of 8 to 8 bytes \
that start at 0..60, in a buffer of 64 bytes. Pass one buffer per pool of the plan, each \
with the size of its pool. [out_of_bounds]
    """
    _check_buffer(buffer, written=written)
    at, length = _offsets(starts), _offsets(length)
    if len(at) != len(length):
        raise AtlasError(
            Code.BAD_SIZE,
            "Each run needs one start and one length",
            got=f"{len(at)} starts, {len(length)} lengths",
            hint="Pass two arrays of the same length",
        )
    if not len(at):
        return at, length
    nbytes = len(buffer)
    if int(length.min()) < 1:
        problem, hint = "A run must have at least 1 byte", "Omit empty runs"
        raise AtlasError(Code.BAD_SIZE, problem, got=f"{length.min()} bytes", hint=hint)
    # Lengths are subtracted from the size, not added to the starts: large sums wrap around.
    if int(at.min()) < 0 or not (at <= nbytes - length).all():
        runs = f"runs of {length.min()} to {length.max()} bytes"
        raise _outside_buffer(
            f"{runs} that start at {at.min()}..{at.max()}, in a buffer of {nbytes} bytes"
        )
    return at, length


def check_nested(
    source: Bytes, destination: Bytes, places: NestedSteps, length: int
) -> NestedSteps:
    """Return `places` with int64 starts, or raise an error if a run leaves its buffer."""
    nbytes = positive(length, "the length of runs")
    for one in places.steps:
        positive(one.times, "the number of steps")
    ends = (
        (
            _offsets(places.source),
            [(one.times - 1) * one.source for one in places.steps],
            source,
            False,
        ),
        (
            _offsets(places.destination),
            [(one.times - 1) * one.destination for one in places.steps],
            destination,
            True,
        ),
    )
    if len(ends[0][0]) != len(ends[1][0]):
        got = f"{len(ends[0][0])} at the source, {len(ends[1][0])} at the destination"
        hint = "Pass two arrays of starts with the same length"
        problem = "Each run needs one source start and one destination start"
        raise AtlasError(Code.BAD_SIZE, problem, got=got, hint=hint)
    for firsts, reach, buffer, written in ends:
        _check_buffer(buffer, written=written)
        if not len(firsts):
            continue
        # Strides may be negative.
        first = int(firsts.min()) + sum(min(0, far) for far in reach)
        stop = int(firsts.max()) + sum(max(0, far) for far in reach) + nbytes
        if first < 0 or stop > len(buffer):
            raise _outside_buffer(
                f"runs in bytes {first}..{stop - 1} of a buffer of {len(buffer)} bytes"
            )
    return NestedSteps(ends[0][0], ends[1][0], places.steps)


def _check_buffer(buffer: Bytes, *, written: bool) -> None:
    plain = isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1
    if not plain or not buffer.flags.c_contiguous:
        got = (
            f"a {buffer.dtype} array with {buffer.ndim} axes and strides {buffer.strides}"
            if isinstance(buffer, np.ndarray)
            else type(buffer).__name__
        )
        problem = "A buffer must be a contiguous one-dimensional uint8 array"
        hint = "Pass array.reshape(-1).view(np.uint8) of a contiguous array"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if written and not buffer.flags.writeable:
        raise AtlasError(
            Code.BAD_TENSOR,
            "The destination buffer is read-only",
            got=f"a read-only array of {len(buffer)} bytes",
            hint="Pass a writable array",
        )


def _offsets(given: Places) -> Int64s:
    if isinstance(given, range):
        return np.arange(given.start, given.stop, given.step)  # asarray would iterate over it
    at = np.asarray(given)
    if at.ndim != 1 or (at.dtype.kind not in "iu" and at.size):
        raise AtlasError(
            Code.NOT_AN_INTEGER,
            "Offsets and lengths must be one-dimensional integer arrays",
            got=f"{type(given).__name__} of {at.dtype} with {at.ndim} axes",
            hint="Pass numpy arrays of int64",
        )
    if at.dtype == np.uint64 and at.size and int(at.max()) > _LARGEST:
        raise _outside_buffer(f"an offset or a length of {at.max()}")
    return at.astype(np.int64, copy=False)


def _outside_buffer(got: str) -> AtlasError:
    hint = "Pass one buffer per pool of the plan, each with the size of its pool"
    return AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
