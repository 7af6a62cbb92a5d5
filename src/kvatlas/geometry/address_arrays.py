"""Arrays of addresses: where numpy takes over from the algebra.

A placement stays symbolic until somebody needs one number for each run or each
block. These functions write those numbers, vectorised, and in address order
where there is a choice: transports and prefetchers like that best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

Int64s = NDArray[np.int64]

_ROWS_PER_TEMPLATE = 1 << 15
_MOST_ROWS = 1 << 28


def indices(chosen: Any, size: int, axis: str) -> Int64s:
    """Indices from outside as int64, one or a row of them, all of them below `size`.

    >>> indices(np.array([3, 1], np.uint64), 4, "B")
    array([3, 1])
    """
    try:
        array = np.asarray(chosen)
    except (ValueError, TypeError, OverflowError):
        array = np.asarray(None)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise AtlasError(
            Code.NOT_AN_INTEGER,
            f"Indices of axis {axis} are neither a whole number nor a row of them",
            got=f"{type(chosen).__name__} of {array.dtype} with {array.ndim} axes",
            hint="Pass an int, a list of ints or a numpy array of one axis",
        )
    if array.size and (array.min() < 0 or array.max() >= size):
        raise out_of_range(axis, size, f"{array.min()}..{array.max()}")
    return array.astype(np.int64)


def out_of_range(axis: str, size: int, got: object) -> AtlasError:
    """The error for a coordinate that `axis` does not have."""
    return AtlasError(
        Code.OUT_OF_RANGE,
        f"Axis {axis} has coordinates 0..{size - 1} only",
        got=got,
        hint="Coordinates start at 0 and never count from the end",
    )


def refuse_too_many(count: int, what: str) -> None:
    """Refuse to write more rows than any machine would want."""
    if count > _MOST_ROWS:
        raise AtlasError(
            Code.TOO_MANY,
            f"More than {_MOST_ROWS:,} {what} are not written at once",
            got=f"{count:,}",
            hint="Narrow the placement, or choose blocks",
        )


def outer_sum(parts: Sequence[Int64s], offset: int = 0) -> Int64s:
    """Every sum of one entry from each part, the first part slowest.

    >>> outer_sum([np.array([0, 100]), np.array([0, 8, 16])], offset=1).tolist()
    [1, 9, 17, 101, 109, 117]
    """
    total = np.array([offset], dtype=np.int64)
    for part in parts:
        total = (total[:, None] + part).reshape(-1)
    return total


def join_ranges(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Sort byte ranges by address and join those that touch.

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


def join_copies(src: Int64s, dst: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Sort byte ranges of a copy by destination and join those that touch at both ends.

    >>> join_copies(np.array([8, 0, 32]), np.array([108, 100, 200]), np.array([4, 8, 4]))
    (array([ 0, 32]), array([100, 200]), array([12,  4]))
    """
    if len(src) < 2:
        return src, dst, length
    ahead = np.diff(dst)
    nearest = int(ahead.min())
    if nearest > int(length.max()):
        return src, dst, length  # in order, and with a gap everywhere
    if nearest <= 0:
        order = np.argsort(dst, kind="stable")
        src, dst, length = src[order], dst[order], length[order]
        ahead = np.diff(dst)
    apart = (ahead != length[:-1]) | (np.diff(src) != length[:-1])
    if bool(apart.all()):
        return src, dst, length
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return src[first], dst[first], np.add.reduceat(length, first)


def fill_descriptors(
    parts: Sequence[Int64s], starts: Int64s, lengths: Int64s, base: int, device: int
) -> NDArray[np.uint64]:
    """Rows (address, length, device) for every sum of parts and starts.

    Rows of the inner parts are written once as a template; each further row
    group is that template plus a constant, so that the array is written once,
    in order, while it is still in the processor's cache.

    >>> halves, starts, lengths = np.array([0, 100]), np.array([0, 16]), np.array([8, 8])
    >>> fill_descriptors([halves], starts, lengths, base=1000, device=3).tolist()
    [[1000, 8, 3], [1016, 8, 3], [1100, 8, 3], [1116, 8, 3]]
    """
    refuse_too_many(math.prod([len(starts), *map(len, parts)]), "descriptors")
    split = len(parts)
    rows = len(starts)
    while split and rows * len(parts[split - 1]) <= _ROWS_PER_TEMPLATE:
        split -= 1
        rows *= len(parts[split])
    template = np.empty((rows // len(starts), len(starts), 3), dtype=np.uint64)
    inner = outer_sum(parts[split:], base)
    template[..., 0] = inner[:, None] + starts
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


def strided(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, int] | None:
    """(sizes, byte strides, byte offset in the storage, item) of a numpy or torch tensor.

    torch is recognised by what its tensors can do, so that it is never imported here.

    >>> strided(np.zeros((4, 8), np.float32)[1:])
    ((3, 8), (32, 4), 32, 4)
    """
    if isinstance(tensor, np.ndarray):
        root: NDArray[Any] = tensor
        base: Any = tensor.base
        # as_strided hides the array it was made from behind an object of its own.
        while base is not None:
            root = base if isinstance(base, np.ndarray) else root
            base = getattr(base, "base", None)
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
