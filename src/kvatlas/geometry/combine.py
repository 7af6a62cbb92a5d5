"""Placements taken together: stacked, one behind the other, or as the ends of a copy."""

from __future__ import annotations

from dataclasses import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement, fold_together

WIDEST_WORD = 16
"""Bytes of the widest word that a processor moves as one."""


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
            "The second placement is not the first, moved upwards",
            got=f"{first} and {second}",
            hint="Keep them apart",
        )
    place = first.axes.index(behind) + 1 if behind in first.axes else 0
    return first.replace_axes(place, place, (axis, 2, second.offset - first.offset))


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
            f"The second placement does not start where the first ends along {axis}",
            got=f"{first} and {second}",
            hint="Take them one by one",
        )
    if second.size(axis) > 1 and second.stride(axis) != step:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            f"The two placements have different strides along {axis}",
            got=f"{step} and {second.stride(axis)} bytes",
            hint="Take them one by one",
        )
    place = first.axes.index(axis)
    return first.replace_axes(place, place + 1, (axis, size + second.size(axis), step))


def fold_beside(*ends: Placement, axis: str) -> tuple[Placement, ...]:
    """The ends of a copy that picks coordinates of `axis`, folded inside it.

    Each end keeps its own number of coordinates there, so that blocks of a small pool
    can go to a large one.

    >>> a = Placement.packed([("B", 9), ("N", 4), ("C", 8)])
    >>> b = Placement.packed([("B", 5), ("N", 4), ("C", 8)], strides={"B": 64})
    >>> fold_beside(a, b, axis="B")
    (Placement(B=9:32, offset=0, item=32), Placement(B=5:64, offset=0, item=32))
    """
    inner = fold_together(*(end.select(axis, 0) for end in ends))
    return tuple(
        part.replace_axes(0, 0, (axis, end.size(axis), end.stride(axis)))
        for end, part in zip(ends, inner, strict=True)
    )


def widest_word(*ends: Placement) -> int:
    """Bytes of the widest word, up to 16, in which all ends can be walked.

    >>> widest_word(Placement.packed([("B", 4)], item=24, offset=8))
    8
    """
    word = WIDEST_WORD
    while any(n % word for end in ends for n in (end.offset, end.item, *end.strides)):
        word //= 2
    return word


def in_words(placement: Placement, word: int, *, axis: str = "w") -> Placement:
    """Items as an axis of words of `word` bytes each, listed last.

    >>> in_words(Placement.packed([("B", 4)], item=24), 8)
    Placement(B=4:24, w=3:8, offset=0, item=8)
    """
    if placement.item % word:
        raise AtlasError(
            Code.SPLIT_ELEMENT,
            "Words do not divide the items",
            got=f"items of {placement.item} bytes in words of {word}",
            hint="Ask widest_word() for one that divides all of them",
        )
    count = len(placement.axes)
    words = (axis, placement.item // word, word)
    return replace(placement, item=word).replace_axes(count, count, words)
