"""Arrays of addresses, computed with numpy.

A placement stays symbolic until a caller needs an address for every run or block. These
functions compute the addresses. Unless the caller fixes their order, addresses ascend, because
transports and prefetchers are fastest with ascending addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import INT64_MAX

Int64s = NDArray[np.int64]

_ROWS_PER_TEMPLATE = 1 << 15
_MOST_ROWS = 1 << 28


def whole_numbers(given: Any, what: str, axes: Sequence[int] = (1,)) -> Int64s:
    """Convert `given` to an int64 array; raise an error if it does not consist of integers.

    `what` is the name of the integers in the error message. `axes` lists the allowed numbers of
    dimensions; 0 allows a single integer.

    >>> whole_numbers(np.array([3, 1], np.uint64), "indices"), whole_numbers([], "indices")
    (array([3, 1]), array([], dtype=int64))
    """
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        array = np.asarray(None)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # numpy gives an empty list dtype float64
    # numpy converts True to 1 in a list of ints, which is never intended.
    booleans = isinstance(given, list | tuple) and bool in set(map(type, given))
    if array.dtype.kind not in "iu" or array.ndim not in axes or booleans:
        got = f"{type(given).__name__} of {array.dtype} with {array.ndim} dimensions"
        if booleans:
            got = f"a {type(given).__name__} that contains booleans"
        hint = "Pass ints in a list or a one-dimensional numpy array"
        problem = f"The {what} must be a one-dimensional array of integers"
        if 0 in axes:
            problem = f"The {what} must be an integer or a one-dimensional array of integers"
        raise AtlasError(Code.NOT_AN_INTEGER, problem, got=got, hint=hint)
    if array.dtype.kind == "u" and array.size and int(array.max()) > INT64_MAX:
        problem = f"The {what} must not exceed 2**63 - 1"
        hint = "Pass integers that fit in int64"
        raise AtlasError(Code.OUT_OF_RANGE, problem, got=array.max(), hint=hint)
    return array.astype(np.int64)


def indices(chosen: Any, size: int, axis: str) -> Int64s:
    """Convert an index or an array of indices to int64, and check that all are in 0..size-1.

    >>> indices(np.array([3, 1], np.uint64), 4, "B")
    array([3, 1])
    """
    array = whole_numbers(chosen, f"indices of axis {axis}", axes=(0, 1))
    if array.size and (array.min() < 0 or array.max() >= size):
        raise out_of_range(axis, size, f"{array.min()}..{array.max()}")
    return array


def out_of_range(axis: str, size: int, got: object) -> AtlasError:
    """Return the error for a coordinate outside 0..size-1 of `axis`."""
    problem = f"Coordinates of axis {axis} must be in 0..{size - 1}"
    hint = "Pass an index in range; negative indices are not supported"
    return AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint=hint)


def refuse_too_many(count: int, what: str) -> None:
    """Raise an error if `count`, the number of rows to allocate, exceeds `_MOST_ROWS`.

    `what` is the name of the rows in the error message.
    """
    if count > _MOST_ROWS:
        raise AtlasError(
            Code.TOO_MANY,
            f"The number of {what} must not exceed {_MOST_ROWS:,}",
            got=f"{count:,} {what}",
            hint="Narrow the placement, or select fewer blocks",
        )


def outer_sum(parts: Sequence[Int64s], offset: int = 0) -> Int64s:
    """Return every sum of `offset` and one entry from each array in `parts`.

    The entry of the first array varies slowest.

    >>> outer_sum([np.array([0, 100]), np.array([0, 8, 16])], offset=1).tolist()
    [1, 9, 17, 101, 109, 117]
    """
    total = np.array([offset], dtype=np.int64)
    for part in parts:
        total = (total[:, None] + part).reshape(-1)
    return total


def join_ranges(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Sort byte ranges by address, join adjacent ones, and return (starts, lengths).

    >>> join_ranges(np.array([8, 0, 32]), np.array([4, 8, 4]))
    (array([ 0, 32]), array([12,  4]))
    """
    if not len(starts):
        return starts, lengths
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    first = np.ones(len(starts), dtype=bool)
    np.not_equal(starts[1:], starts[:-1] + lengths[:-1], out=first[1:])
    return starts[first], np.add.reduceat(lengths, np.flatnonzero(first))


def join_copies(
    source: Int64s, destination: Int64s, length: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the byte ranges of a copy as (source, destination, length), sorted by destination.

    Ranges that are adjacent in both the source and the destination are joined.

    >>> join_copies(np.array([8, 0, 32]), np.array([108, 100, 200]), np.array([4, 8, 4]))
    (array([ 0, 32]), array([100, 200]), array([12,  4]))
    """
    if len(source) < 2:
        return source, destination, length
    ahead = np.diff(destination)
    nearest = int(ahead.min())
    if nearest > int(length.max()):
        return source, destination, length  # sorted, with a gap after every range
    if nearest <= 0:
        order = np.argsort(destination, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
        ahead = np.diff(destination)
    apart = (ahead != length[:-1]) | (np.diff(source) != length[:-1])
    if bool(apart.all()):
        return source, destination, length
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return source[first], destination[first], np.add.reduceat(length, first)


def fill_descriptors(
    parts: Sequence[Int64s], starts: Int64s, lengths: Int64s, base: int, device: int
) -> NDArray[np.uint64]:
    """Return descriptors: rows (address, length, device).

    `parts` are arrays of byte offsets. There is one row for each combination of a start and one
    entry from each array in `parts`. The address of the row is the sum of `base`, the start and
    these entries. A row with start `starts[i]` has the length `lengths[i]`.
    Starts vary fastest, the first part slowest. The rows of the last parts are computed once as
    a template that fits in the CPU cache. All other rows are the template plus a constant.

    >>> halves, starts, lengths = np.array([0, 100]), np.array([0, 16]), np.array([8, 8])
    >>> fill_descriptors([halves], starts, lengths, base=1000, device=3).tolist()
    [[1000, 8, 3], [1016, 8, 3], [1100, 8, 3], [1116, 8, 3]]
    """
    refuse_too_many(math.prod([len(starts), *map(len, parts)]), "descriptors")
    split, rows = len(parts), len(starts)
    while split and rows * len(parts[split - 1]) <= _ROWS_PER_TEMPLATE:
        split -= 1
        rows *= len(parts[split])
    template = np.empty((rows // len(starts), len(starts), 3), dtype=np.uint64)
    template[..., 0] = outer_sum(parts[split:], base)[:, None] + starts
    template[..., 1] = lengths
    template[..., 2] = device
    outer = outer_sum(parts[:split]).astype(np.uint64)
    out = np.empty((len(outer), rows, 3), dtype=np.uint64)
    flat = template.reshape(rows, 3)
    if rows < len(outer):
        out[...] = flat
        out[..., 0] += outer[:, None]
    else:
        for group, shift in zip(out, outer, strict=True):
            group[...] = flat
            group[:, 0] += shift
    return out.reshape(-1, 3)


def root_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return the outermost array of which `array` is a view; `array` itself if it is no view.

    >>> whole = np.zeros(8)
    >>> root_array(whole[2:].reshape(2, 3)) is whole
    True
    """
    root, base = array, array.base
    # as_strided puts a wrapper object between a view and the array it was made from.
    while base is not None:
        root = base if isinstance(base, np.ndarray) else root
        base = getattr(base, "base", None)
    return root


def strided(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, int] | None:
    """Return (sizes, byte strides, byte offset in the storage, item size) of a tensor.

    Returns None for objects without strides. The tensor may be from numpy or torch. Torch
    tensors are recognised by their methods, so that this module does not import torch.

    >>> strided(np.zeros((4, 8), np.float32)[1:])
    ((3, 8), (32, 4), 32, 4)
    """
    if isinstance(tensor, np.ndarray):
        root = root_array(tensor)
        offset = tensor.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return tensor.shape, tensor.strides, offset, tensor.itemsize
    if not all(callable(getattr(tensor, name, None)) for name in ("stride", "element_size")):
        return None
    try:
        item = tensor.element_size()
        strides = tuple(step * item for step in tensor.stride())
        return tuple(tensor.shape), strides, tensor.storage_offset() * item, item
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return None  # sparse and nested tensors have no strides
