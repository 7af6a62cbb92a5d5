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
        problem, got = "The second placement is not the first, moved upwards", (first, second)
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint="Keep them apart")
    place = first.axes.index(behind) + 1 if behind in first.axes else 0
    return first.replace_axes(place, place, (axis, 2, second.offset - first.offset))


def append(first: Placement, second: Placement, *, axis: str) -> Placement:
    """`second` as the further coordinates of `axis` of `first`, where it lies right there.

    >>> row = Placement.packed([("N", 4), ("C", 8)], strides={"N": 12})
    >>> append(row.narrow("C", 0, 6), row.narrow("C", 6, 2), axis="C") == row
    True
    """
    step, size = first.stride(axis) or first.item, first.size(axis)
    one_by_one = "Take them one by one"
    one_of_each = [part.narrow(axis, 0, 1) for part in (first, second)]
    moved = replace(one_of_each[1], offset=first.offset)
    if moved != one_of_each[0] or second.offset != first.offset + size * step:
        problem = f"The second placement does not start where the first ends along {axis}"
        raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=(first, second), hint=one_by_one)
    if second.size(axis) > 1 and second.stride(axis) != step:
        problem = f"The two placements have different strides along {axis}"
        got = f"{step} and {second.stride(axis)} bytes"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=one_by_one)
    place = first.axes.index(axis)
    return first.replace_axes(place, place + 1, (axis, size + second.size(axis), step))


def tile_alike(src: Placement, dst: Placement) -> tuple[Placement, Placement]:
    """Both ends of a copy with rows cut into tiles (axes C and c), where one of them has tiles.

    >>> row, tiles = Placement.packed([("C", 8)]), Placement.packed([("C", 2), ("c", 4)])
    >>> tile_alike(row, tiles) == tile_alike(tiles, row) == (tiles, tiles)
    True
    """
    if "c" in src.axes and "c" not in dst.axes:
        return src, dst.split("C", into=("C", "c"), inner=src.size("c"))
    if "c" in dst.axes and "c" not in src.axes:
        return src.split("C", into=("C", "c"), inner=dst.size("c")), dst
    return src, dst


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
        problem, got = "Words do not divide the items", f"{placement.item} bytes in words of {word}"
        hint = "Ask widest_word() for one that divides all of them"
        raise AtlasError(Code.SPLIT_ELEMENT, problem, got=got, hint=hint)
    count = len(placement.axes)
    words = (axis, placement.item // word, word)
    return replace(placement, item=word).replace_axes(count, count, words)
