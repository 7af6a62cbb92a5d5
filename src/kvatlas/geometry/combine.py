"""Operations on several placements, such as the source and the destination of a copy."""

from __future__ import annotations

from dataclasses import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement, fold_together

WIDEST_WORD = 16
"""The largest number of bytes that one load or store instruction moves."""


def stack(first: Placement, second: Placement, *, axis: str, behind: str) -> Placement:
    """Stack two placements on a new axis of size 2, listed after axis `behind`.

    If there is no axis `behind`, the new axis is listed first.

    The second placement must be the first one shifted to higher addresses. The stride of the
    new axis is the distance between them.

    >>> k = Placement.packed([("B", 4), ("C", 8)], strides={"B": 16})
    >>> stack(k, k.shift(8), axis="kv", behind="B")
    Placement(B=4:16, kv=2:8, C=8:1, offset=0, item=1)
    """
    if replace(second, offset=first.offset) != first or second.offset <= first.offset:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "The second placement must be the first one shifted to a higher address",
            got=(first, second),
            hint="Use two separate views",
        )
    place = first.axes.index(behind) + 1 if behind in first.axes else 0
    return first.replace_axes(place, place, (axis, 2, second.offset - first.offset))


def append(first: Placement, second: Placement, *, axis: str) -> Placement:
    """Append `second` to `first` along `axis`. `second` must start where `first` ends.

    >>> row = Placement.packed([("N", 4), ("C", 8)], strides={"N": 12})
    >>> append(row.narrow("C", 0, 6), row.narrow("C", 6, 2), axis="C") == row
    True
    """
    step, size = first.stride(axis) or first.item, first.size(axis)
    one_by_one = "Use two separate views"
    one_of_each = [part.narrow(axis, 0, 1) for part in (first, second)]
    moved = replace(one_of_each[1], offset=first.offset)
    if moved != one_of_each[0] or second.offset != first.offset + size * step:
        problem = f"The second placement must start where the first one ends along {axis}"
        raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=(first, second), hint=one_by_one)
    if second.size(axis) > 1 and second.stride(axis) != step:
        problem = f"The two placements must have the same stride along {axis}"
        got = f"{step} and {second.stride(axis)} bytes"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=one_by_one)
    place = first.axes.index(axis)
    return first.replace_axes(place, place + 1, (axis, size + second.size(axis), step))


def tile_alike(source: Placement, destination: Placement) -> tuple[Placement, Placement]:
    """Return both placements with equal tiles: if only one is tiled, the other one is split.

    A tiled placement has an axis C, which counts tiles, and an axis c inside a tile. If both
    placements are tiled, and one tile size is a multiple of the other, the results have a further
    axis d, which counts the small tiles in a large tile.

    >>> row, tiles = Placement.packed([("C", 8)]), Placement.packed([("C", 2), ("c", 4)])
    >>> tile_alike(row, tiles) == tile_alike(tiles, row) == (tiles, tiles)
    True
    """
    if "c" in source.axes and "c" not in destination.axes:
        return source, destination.split("C", into=("C", "c"), inner=source.size("c"))
    if "c" in destination.axes and "c" not in source.axes:
        return source.split("C", into=("C", "c"), inner=destination.size("c")), destination
    if "c" in source.axes and source.size("c") > destination.size("c"):
        finer, coarser = tile_alike(destination, source)
        return coarser, finer
    if "c" in source.axes and source.size("c") < destination.size("c"):
        small, large = source.size("c"), destination.size("c")
        if large % small == 0:
            tiles = destination.split("c", into=("d", "c"), inner=small)
            return source.split("C", into=("C", "d"), inner=large // small), tiles
    return source, destination


def fold_beside(*ends: Placement, axis: str) -> tuple[Placement, ...]:
    """Keep `axis`, and fold other axes that are contiguous in both source and destination.

    `ends` are the placements of the source and the destination. Since `axis` remains, the copy can
    select coordinates of it. Source and destination may have different sizes along `axis`, so that
    blocks can be copied between pools of different sizes.

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
    """Return the largest word size (1, 2, 4, 8 or 16 bytes) for copying between `ends`.

    The word size divides every offset, item size and byte stride of these placements.

    >>> widest_word(Placement.packed([("B", 4)], item=24, offset=8))
    8
    """
    word = WIDEST_WORD
    while any(n % word for end in ends for n in (end.offset, end.item, *end.strides)):
        word //= 2
    return word


def in_words(placement: Placement, word: int, *, axis: str = "w") -> Placement:
    """Split each item into words of `word` bytes, as a new last axis.

    >>> in_words(Placement.packed([("B", 4)], item=24), 8)
    Placement(B=4:24, w=3:8, offset=0, item=8)
    """
    if placement.item % word:
        problem, got = (
            "The word size must divide the item size",
            f"items of {placement.item} bytes and words of {word} bytes",
        )
        hint = "Use the word size that widest_word() returns"
        raise AtlasError(Code.SPLIT_ELEMENT, problem, got=got, hint=hint)
    count = len(placement.axes)
    words = (axis, placement.item // word, word)
    return replace(placement, item=word).replace_axes(count, count, words)
