"""Strips: bytes that two affine maps share, block by block and state by state.

A copy between two caches is a family of runs. What all runs of a family have in common
is a `Strip`: how far apart blocks, kernel blocks and states lie at either end, further
axes with a stride at either end, and an item that is gapless at both. Blocks, kernel
blocks and states stay open, since block ids and tokens are only known later; the other
axes fold here, once.

- `between` makes a strip from the same field at either end;
- `merged` joins strips that touch at both ends, such as K and V, or neighbouring layers;
- `closed` folds the states in as well, for blocks that are copied whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, join_pairs, outer_sum
from kvatlas.geometry.placement import Placement
from kvatlas.geometry.runs import coalesce
from kvatlas.geometry.state_spans import Spots, Stretches

_OPEN = ("B", "k", "N")

Ends = tuple[int, int]
"""A number for the source and one for the destination."""


class Strip(NamedTuple):
    """A family of runs, open along blocks, kernel blocks and states.

    >>> k = Placement.packed([("B", 9), ("H", 4), ("N", 16), ("C", 8)])
    >>> between(k, k.rename(B="X").rename(X="B"))
    Strip(block=(512, 512), kernel=(0, 0), state=(8, 8), sizes=(4,), steps=((128,), (128,)), \
at=(0, 0), item=8)
    """

    block: Ends
    kernel: Ends
    state: Ends
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], tuple[int, ...]]
    """Byte strides of the further axes, at either end."""
    at: Ends
    """Where the first item lies, at either end."""
    item: int

    def moved(self, src: int, dst: int) -> Strip:
        """The same strip, so many bytes further on at either end."""
        return self._replace(at=(self.at[0] + src, self.at[1] + dst))

    def rows(self, end: int) -> Int64s:
        """Where its items lie at one end, in the first state of block 0, first axis slowest."""
        steps = [np.arange(n) * s for n, s in zip(self.sizes, self.steps[end], strict=True)]
        return outer_sum(steps, self.at[end])

    def starts(self, end: int, spots: Spots, ids: Int64s) -> Int64s:
        """How far into the pool stretches start at one end, in the blocks that `ids` names."""
        total = np.zeros(len(ids), dtype=np.int64)
        for step, place in (
            (self.block, ids),
            (self.kernel, spots.kernel),
            (self.state, spots.state),
        ):
            if step[end]:
                total += place * step[end]
        return total

    def kernels(self, end: int, split: int) -> Int64s:
        """Where the kernel blocks of a block lie, from its start."""
        return np.arange(split) * self.kernel[end]

    def blocks(self, end: int, count: int) -> Int64s:
        """Where the blocks of a pool lie, from its start."""
        return np.arange(count) * self.block[end]


def between(src: Placement, dst: Placement) -> Strip:
    """What two views of one field share; both have the same axes, blocks and states apart."""
    inner = [axis for axis in src.axes if axis not in _OPEN]
    unlike = sorted(inner) != sorted(axis for axis in dst.axes if axis not in _OPEN)
    if unlike or src.item != dst.item or any(src.size(a) != dst.size(a) for a in inner):
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "The ends of a copy have the same axes, sizes and item",
            got=(src, dst),
            hint="Narrow and split both ends to the part that they share",
        )
    ends = (src, dst)
    sizes = [src.size(axis) for axis in inner]
    fold = coalesce(inner, sizes, [[end.stride(a) for a in inner] for end in ends], src.item)
    block, kernel, state = ((_stride(src, axis), _stride(dst, axis)) for axis in _OPEN)
    return Strip(
        block, kernel, state, fold.sizes, (fold.strides[0], fold.strides[1]),
        (src.offset, dst.offset), fold.item,
    )  # fmt: skip


def merged(strips: Iterable[Strip]) -> list[Strip]:
    """As few strips as possible: those that touch at both ends are one.

    >>> cell = Placement.packed([("B", 9), ("N", 4), ("C", 16)])
    >>> k, v = cell.narrow("C", 0, 8), cell.narrow("C", 8, 8)
    >>> [strip.item for strip in merged([between(k, k), between(v, v)])]
    [16]
    """
    found = list(strips)
    count = len(found) + 1
    while len(found) < count:
        count = len(found)
        alike: dict[object, list[Strip]] = defaultdict(list)
        for strip in found:
            alike[strip[:5]].append(strip)
        found = [strip for family in alike.values() for strip in _joined(family)]
    return found


def closed(strips: Iterable[Strip], states: int) -> list[Strip]:
    """Strips with `states` states as one more axis, folded and merged where that is gapless.

    >>> page = Placement.packed([("B", 9), ("H", 4), ("N", 16), ("C", 8)])
    >>> [strip.item for strip in closed([between(page, page)], 16)]
    [512]
    """
    found = []
    # Strips mostly differ in where they start alone: each kind is folded once.
    kinds: dict[tuple[object, ...], Strip] = {}
    for strip in strips:
        kind = (strip[:5], strip.item)
        if kind not in kinds:
            steps = [(*strip.steps[end], strip.state[end]) for end in (0, 1)]
            sizes = (*strip.sizes, states)
            wider = strip._replace(state=(0, 0), sizes=sizes, steps=(steps[0], steps[1]))
            kinds[kind] = folded(wider if states > 1 else strip._replace(state=(0, 0)))
        found.append(kinds[kind]._replace(at=strip.at))
    return merged(found)


def along(
    strip: Strip, found: Stretches, ids: tuple[Int64s, Int64s], *, whole: bool
) -> tuple[Int64s, Int64s, Int64s]:
    """Where the stretches of a strip lie at either end, and how long each is, in bytes.

    Stretches that touch at both ends are joined. With `whole` the strip has the states of
    a cell folded in.
    """
    src, dst = strip.starts(0, found.src, ids[0]), strip.starts(1, found.dst, ids[1])
    count = found.length
    if whole or int(count.max()) == 1:
        length = np.full(len(count), strip.item, dtype=np.int64)
    elif strip.state == (strip.item, strip.item):
        length = count * strip.item
    else:
        # States that are apart at one end or the other go one by one.
        nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        src = np.repeat(src, count) + nth * strip.state[0]
        dst = np.repeat(dst, count) + nth * strip.state[1]
        length = np.full(len(nth), strip.item, dtype=np.int64)
    return join_pairs(src, dst, length)


def folded(strip: Strip) -> Strip:
    """Axes that are gapless at both ends folded into each other and into the item."""
    if not strip.sizes:
        return strip
    fold = coalesce([""] * len(strip.sizes), strip.sizes, strip.steps, strip.item)
    return strip._replace(
        sizes=fold.sizes, steps=(fold.strides[0], fold.strides[1]), item=fold.item
    )


def _joined(family: Sequence[Strip]) -> list[Strip]:
    kept: list[Strip] = []
    longer = False
    for strip in sorted(family, key=lambda strip: strip.at[1]):
        last = kept[-1] if kept else None
        if last and all(last.at[end] + last.item == strip.at[end] for end in (0, 1)):
            kept[-1] = last._replace(item=last.item + strip.item)
            longer = True
        else:
            kept.append(strip)
    return list(map(folded, kept)) if longer else kept


def _stride(placement: Placement, axis: str) -> int:
    return placement.stride(axis) if axis in placement.axes else 0
