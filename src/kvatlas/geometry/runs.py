"""Overlap and contiguity of affine maps, computed from plain numbers.

An affine map is a set of axes (size, byte stride) over an item of `item` bytes. This module
answers two questions about one placement, or about the source and the destination of a copy:

- Do two coordinates share a byte, or are they adjacent? (`is_nested`, `find_difference`)
- Which axes are contiguous, so that they fold into one? (`coalesce`)

All three functions inspect axes and never individual bytes. If axes are nested (each stride is at
least the extent of the axes inside it), no search is needed. For interleaved axes,
`find_difference` searches, and raises an error if the search exceeds a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code

_SEARCH_LIMIT = 100_000


class Folded(NamedTuple):
    """Axes after folding, outermost first, and the item size in bytes.

    `strides` has one tuple of byte strides for each placement, such as the source and the
    destination of a copy. All placements have the same axes.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    item: int


def is_nested(sizes: Sequence[int], strides: Sequence[int], item: int, *, apart: bool) -> bool:
    """Return whether every stride is at least the extent of all axes with smaller strides.

    If the result is true, no two coordinates share a byte. If `apart` is true, every stride must
    be larger than that extent, so that no two items are adjacent either.

    >>> is_nested((3, 4), (8, 2), 2, apart=False), is_nested((3, 4), (8, 2), 2, apart=True)
    (True, False)
    """
    span = item
    for stride, size in sorted((s, n) for n, s in zip(sizes, strides, strict=True) if n > 1):
        if stride < span or (apart and stride == span):
            return False
        span += (size - 1) * stride
    return True


def find_difference(
    sizes: Sequence[int], strides: Sequence[int], low: int, high: int
) -> tuple[int, ...] | None:
    """Find two different coordinates whose addresses differ by low..high bytes.

    Returns the difference of the coordinates, one number per axis, or None if there are no
    such coordinates. With low..high set to 0..item-1, None proves that no two items overlap.
    The search starts with the largest stride and prunes a branch as soon as the smaller
    strides cannot compensate.

    >>> find_difference((2, 2), (3, 2), 1, 1)
    (1, -1)
    >>> find_difference((2, 2), (3, 2), 0, 0) is None
    True
    """
    for axis, size in enumerate(sizes):
        if size > 1 and strides[axis] == 0 and low <= 0 <= high:
            return tuple(int(place == axis) for place in range(len(sizes)))
    order = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
    reach = [0] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        axis = order[depth]
        reach[depth] = reach[depth + 1] + (sizes[axis] - 1) * strides[axis]
    steps = [0] * len(sizes)
    budget = _SEARCH_LIMIT

    def search(depth: int, moved: int, *, still: bool) -> bool:
        nonlocal budget
        budget -= 1
        if budget < 0:
            got = f"sizes {tuple(sizes)} with strides {tuple(strides)}"
            hint = "Nest the axes: make each stride at least the span of the axes inside it"
            raise AtlasError(Code.UNDECIDED, got=got, hint=hint)
        if depth == len(order):
            return not still and low <= moved <= high
        axis, rest = order[depth], reach[depth + 1]
        stride, most = strides[axis], sizes[axis] - 1
        if stride == 0:
            first = last = 0
        else:
            first = max(-most, -((moved + rest - low) // stride))
            last = min(most, (high + rest - moved) // stride)
        for step in range(first, last + 1):
            steps[axis] = step
            if search(depth + 1, moved + step * stride, still=still and step == 0):
                return True
        steps[axis] = 0
        return False

    return tuple(steps) if search(0, 0, still=True) else None


def coalesce(
    names: Sequence[str], sizes: Sequence[int], strides: Sequence[Sequence[int]], item: int
) -> Folded:
    """Fold axes into one axis, or into the item, if they are contiguous at both ends.

    `strides` contains one list of byte strides for each placement: one placement, or the source and
    the destination of a copy.

    >>> coalesce(("B", "N", "C"), (9, 4, 8), [(64, 8, 1)], 1)
    Folded(names=('B',), sizes=(9,), strides=((64,),), item=32)
    >>> coalesce(("N", "C"), (4, 8), [(8, 1), (16, 1)], 1)
    Folded(names=('N',), sizes=(4,), strides=((8,), (16,)), item=8)
    """
    ends = range(len(strides))
    axes = [
        (name, size, tuple(strides[end][place] for end in ends))
        for place, (name, size) in enumerate(zip(names, sizes, strict=True))
        if size > 1
    ]
    axes.sort(key=lambda axis: axis[2])
    kept: list[tuple[str, int, tuple[int, ...]]] = []
    while axes:
        name, size, steps = axes.pop(0)
        if all(step == item for step in steps):
            item *= size
            continue
        one_step_out = tuple(size * step for step in steps)
        outer = next((axis for axis in axes if axis[2] == one_step_out), None)
        if outer is None:
            kept.append((name, size, steps))
        else:
            axes.remove(outer)
            axes.insert(0, (f"{outer[0]}*{name}", outer[1] * size, steps))
    kept.reverse()
    return Folded(
        tuple(name for name, _, _ in kept),
        tuple(size for _, size, _ in kept),
        tuple(tuple(steps[end] for _, _, steps in kept) for end in ends),
        item,
    )
