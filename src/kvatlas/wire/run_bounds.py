"""Whether runs stay inside byte buffers of this process: looked at before a byte is copied.

A copy by address writes wherever it is told, and a slice that starts before its buffer wraps to
the buffer's end. What is called from outside looks first; what routes have bound is not looked at
again.
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
"""Where runs start; a range where runs of one length follow each other."""
_LARGEST = int(np.iinfo(np.int64).max)


def check_runs(
    starts: Places, length: Int64s, buffer: Bytes, *, written: bool = False
) -> tuple[Int64s, Int64s]:
    """Starts and lengths of runs as columns of int64; refused where they leave a buffer.

    >>> check_runs(np.array([0, 60]), np.array([8, 8]), np.zeros(64, np.uint8))
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A byte range extends outside the buffer. Got runs of 8 to 8 bytes \
that start in 0..60, in 64 bytes. Pass pools as large as the plan says, by their index. \
[out_of_bounds]
    """
    _check_buffer(buffer, written=written)
    at, length = _offsets(starts), _offsets(length)
    if len(at) != len(length):
        problem = "Runs have not a length each"
        got = f"{len(at)} starts, {len(length)} lengths"
        raise AtlasError(Code.BAD_SIZE, problem, got=got, hint="Pass columns of the same length")
    if not len(at):
        return at, length
    nbytes = len(buffer)
    if int(length.min()) < 1:
        problem, hint = "A run has no bytes", "Leave such runs out"
        raise AtlasError(Code.BAD_SIZE, problem, got=f"{length.min()} bytes", hint=hint)
    # Taken away from the size, not added to the start: sums of large numbers wrap around.
    if int(at.min()) < 0 or not (at <= nbytes - length).all():
        runs = f"runs of {length.min()} to {length.max()} bytes"
        raise _outside(f"{runs} that start in {at.min()}..{at.max()}, in {nbytes} bytes")
    return at, length


def check_nested(src: Bytes, dst: Bytes, places: NestedSteps, length: int) -> NestedSteps:
    """Runs at nested steps; refused where they leave the buffer of either end."""
    nbytes = positive(length, "the length of runs")
    for one in places.steps:
        positive(one.times, "the number of steps")
    ends = (
        (_offsets(places.src), [(one.times - 1) * one.src for one in places.steps], src, False),
        (_offsets(places.dst), [(one.times - 1) * one.dst for one in places.steps], dst, True),
    )
    if len(ends[0][0]) != len(ends[1][0]):
        got = f"{len(ends[0][0])} at the source, {len(ends[1][0])} at the destination"
        hint = "Pass as many firsts at either end"
        problem = "Runs have not a start at either end"
        raise AtlasError(Code.BAD_SIZE, problem, got=got, hint=hint)
    for firsts, reach, buffer, written in ends:
        _check_buffer(buffer, written=written)
        if not len(firsts):
            continue
        # Steps may go down as well as up.
        first = int(firsts.min()) + sum(min(0, far) for far in reach)
        stop = int(firsts.max()) + sum(max(0, far) for far in reach) + nbytes
        if first < 0 or stop > len(buffer):
            raise _outside(f"runs in {first}..{stop - 1} of {len(buffer)} bytes")
    return NestedSteps(ends[0][0], ends[1][0], places.steps)


def _check_buffer(buffer: Bytes, *, written: bool) -> None:
    plain = isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.ndim == 1
    if not plain or not buffer.flags.c_contiguous:
        got = (
            f"{buffer.dtype} with {buffer.ndim} axes" if isinstance(buffer, np.ndarray) else buffer
        )
        problem = "A buffer is not one contiguous row of bytes"
        hint = "Pass array.reshape(-1).view(np.uint8) of what is contiguous"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if written and not buffer.flags.writeable:
        problem, hint = "A buffer cannot be written to", "Pass memory of your own"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"{len(buffer)} bytes", hint=hint)


def _offsets(given: Places) -> Int64s:
    if isinstance(given, range):
        return np.arange(given.start, given.stop, given.step)  # asarray would walk it
    at = np.asarray(given)
    if at.ndim != 1 or (at.dtype.kind not in "iu" and at.size):
        problem = "Offsets and lengths of runs are not rows of whole numbers"
        got = f"{type(given).__name__} of {at.dtype} with {at.ndim} axes"
        raise AtlasError(Code.NOT_AN_INTEGER, problem, got=got, hint="Pass numpy arrays of int64")
    if at.dtype == np.uint64 and at.size and int(at.max()) > _LARGEST:
        raise _outside(f"an offset or a length of {at.max()}")
    return at.astype(np.int64, copy=False)


def _outside(got: str) -> AtlasError:
    hint = "Pass pools as large as the plan says, by their index"
    return AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
