"""Two placements as one, where they are: stacked, one behind the other, or the sides of a copy."""

from __future__ import annotations

from dataclasses import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement, fold_together

WIDEST = 16
"""Bytes of the widest element that anything moves as one."""


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


def fold_beside(*sides: Placement, axis: str) -> tuple[Placement, ...]:
    """The sides of a copy that picks coordinates of `axis`, folded inside it.

    Each side keeps its own number of coordinates there, so that blocks of a small pool
    can go to a large one.

    >>> a = Placement.packed([("B", 9), ("N", 4), ("C", 8)])
    >>> b = Placement.packed([("B", 5), ("N", 4), ("C", 8)], strides={"B": 64})
    >>> fold_beside(a, b, axis="B")
    (Placement(B=9:32, offset=0, item=32), Placement(B=5:64, offset=0, item=32))
    """
    inner = fold_together(*(side.select(axis, 0) for side in sides))
    return tuple(
        Placement(
            (axis, *part.axes),
            (side.size(axis), *part.sizes),
            (side.stride(axis), *part.strides),
            part.offset,
            part.item,
        )
        for side, part in zip(sides, inner, strict=True)
    )


def widest(*sides: Placement) -> int:
    """Bytes of the widest element, up to 16, in which all sides can be walked.

    >>> widest(Placement.packed([("B", 4)], item=24, offset=8))
    8
    """
    lane = WIDEST
    while any(n % lane for side in sides for n in (side.offset, side.item, *side.strides)):
        lane //= 2
    return lane


def in_lanes(placement: Placement, lane: int, *, axis: str = "w") -> Placement:
    """Items as an axis of `lane` bytes each, listed last.

    >>> in_lanes(Placement.packed([("B", 4)], item=24), 8)
    Placement(B=4:24, w=3:8, offset=0, item=8)
    """
    if placement.item % lane:
        raise AtlasError(
            Code.SPLIT_ELEMENT,
            "An item is whole lanes",
            got=f"items of {placement.item} bytes in lanes of {lane}",
            hint="Ask widest() for a lane that divides all of them",
        )
    return Placement(
        (*placement.axes, axis),
        (*placement.sizes, placement.item // lane),
        (*placement.strides, lane),
        placement.offset,
        lane,
    )
