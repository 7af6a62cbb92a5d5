"""Two placements as one, where they are: stacked on a new axis, or one behind the other."""

from __future__ import annotations

from dataclasses import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement


def stack(first: Placement, second: Placement, *, axis: str, behind: str) -> Placement:
    """Both on a new axis of size 2, listed behind axis `behind`.

    That is affine exactly when one is the other, moved: the new axis steps by the
    distance between them.

    >>> k = Placement.packed([("B", 4), ("C", 8)], strides={"B": 16})
    >>> stack(k, k.shift(8), axis="kv", behind="B")
    Placement(B=4:16, kv=2:8, C=8:1, offset=0, item=1)
    """
    if replace(second, offset=first.offset) != first or second.offset <= first.offset:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Two placements share an axis where the second is the first, moved upwards",
            got=f"{first} and {second}",
            hint="Keep them apart",
        )
    place = first.axes.index(behind) + 1 if behind in first.axes else 0
    return Placement(
        (*first.axes[:place], axis, *first.axes[place:]),
        (*first.sizes[:place], 2, *first.sizes[place:]),
        (*first.strides[:place], second.offset - first.offset, *first.strides[place:]),
        first.offset,
        first.item,
    )


def append(first: Placement, second: Placement, *, axis: str) -> Placement:
    """`second` as the further coordinates of `axis` of `first`, where it lies right there.

    >>> row = Placement.packed([("N", 4), ("C", 8)], strides={"N": 12})
    >>> append(row.narrow("C", 0, 6), row.narrow("C", 6, 2), axis="C") == row
    True
    """
    step = first.stride(axis) or first.item
    size = first.size(axis)
    one_of_each = [part.narrow(axis, 0, 1) for part in (first, second)]
    moved = replace(one_of_each[1], offset=first.offset)
    if moved != one_of_each[0] or second.offset != first.offset + size * step:
        raise AtlasError(
            Code.NOT_CONTIGUOUS,
            f"One placement continues another along {axis} where it starts at its end",
            got=f"{first} and {second}",
            hint="Take them one by one",
        )
    if second.size(axis) > 1 and second.stride(axis) != step:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            f"Both step alike along {axis}",
            got=f"{step} and {second.stride(axis)} bytes",
            hint="Take them one by one",
        )
    place = first.axes.index(axis)
    total = size + second.size(axis)
    return Placement(
        first.axes,
        (*first.sizes[:place], total, *first.sizes[place + 1 :]),
        (*first.strides[:place], step, *first.strides[place + 1 :]),
        first.offset,
        first.item,
    )
