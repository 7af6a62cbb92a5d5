"""The runs of a copy between two caches, before block ids and tokens are known.

A run is a contiguous range of bytes. A copy between two caches repeats the same runs in every
block, kernel block and state. `StridedRuns` describes such a family of runs as one value. It
holds, for the source and the destination, the strides of blocks, kernel blocks and states, the
strides of the remaining axes, and an item that is contiguous in both. It is separate from
`Placement` because the coordinates of blocks, kernel blocks and states are known only once a
request arrives. All other axes are folded in advance.

- `StridedRuns.between` returns the runs of one field, given its source placement and its
  destination placement;
- `merge_runs` joins families that are adjacent in both source and destination, such as K and V,
  or neighbouring layers;
- `fold_states` also folds the states, for blocks that are copied whole;
- `StridedRuns.byte_ranges` applies the block ids and states of a request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, join_copies, outer_sum
from kvatlas.geometry.placement import Placement
from kvatlas.geometry.runs import coalesce
from kvatlas.geometry.state_spans import SpanStarts, StateSpans

_OPEN = ("B", "k", "N")

Ends = tuple[int, int]
"""A pair of numbers: one for the source, one for the destination."""


class StridedRuns(NamedTuple):
    """Runs of a copy that have constant strides along blocks, kernel blocks and states.

    >>> k = Placement.packed([("B", 9), ("H", 4), ("N", 16), ("C", 8)])
    >>> StridedRuns.between(k, k.shift(64))  # doctest: +NORMALIZE_WHITESPACE
    StridedRuns(block_strides=(512, 512), kernel_strides=(0, 0), state_strides=(8, 8),
                sizes=(4,), strides=((128,), (128,)), offsets=(0, 64), item=8)
    """

    block_strides: Ends
    kernel_strides: Ends
    state_strides: Ends
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    """Byte strides of the remaining axes, at the source and at the destination."""
    offsets: Ends
    """Byte offset of the first item, at the source and at the destination."""
    item: int

    @classmethod
    def between(cls, source: Placement, destination: Placement) -> StridedRuns:
        """Return the runs that copy a field from placement `source` to placement `destination`.

        Both placements must have the same axes, except for blocks, kernel blocks and states.
        """
        inner = [axis for axis in source.axes if axis not in _OPEN]
        unlike = sorted(inner) != sorted(axis for axis in destination.axes if axis not in _OPEN)
        if (
            unlike
            or source.item != destination.item
            or any(source.size(a) != destination.size(a) for a in inner)
        ):
            problem = "Both ends of a copy must have equal axes, sizes and item sizes"
            hint = "Narrow and split both placements to the part that they share"
            raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=(source, destination), hint=hint)
        ends = (source, destination)
        sizes = [source.size(axis) for axis in inner]
        fold = coalesce(inner, sizes, [[end.stride(a) for a in inner] for end in ends], source.item)
        block, kernel, state = (
            (_stride(source, axis), _stride(destination, axis)) for axis in _OPEN
        )
        strides, offsets = (fold.strides[0], fold.strides[1]), (source.offset, destination.offset)
        return cls(block, kernel, state, fold.sizes, strides, offsets, fold.item)

    def shift(self, source: int, destination: int) -> StridedRuns:
        """Add `source` bytes to the source offset, and `destination` bytes to the destination's."""
        at = (self.offsets[0] + source, self.offsets[1] + destination)
        return StridedRuns(*self[:5], at, self.item)

    def with_item(self, item: int) -> StridedRuns:
        """Set the item size to `item` bytes, and fold axes that become contiguous."""
        return self if item == self.item else self._replace(item=item).folded()

    def folded(self) -> StridedRuns:
        """Fold axes that are contiguous in both source and destination; the item may grow."""
        if not self.sizes:
            return self
        fold = coalesce([""] * len(self.sizes), self.sizes, self.strides, self.item)
        return self._replace(
            sizes=fold.sizes, strides=(fold.strides[0], fold.strides[1]), item=fold.item
        )

    @property
    def gapless(self) -> bool:
        """Whether consecutive states of a kernel block are adjacent at both ends."""
        return self.state_strides == (self.item, self.item)

    def item_offsets(self, end: int) -> Int64s:
        """Return the byte offset of every item in the first state of block 0.

        `end` is 0 for the source and 1 for the destination. The first axis varies slowest.
        """
        steps = [np.arange(n) * s for n, s in zip(self.sizes, self.strides[end], strict=True)]
        return outer_sum(steps, self.offsets[end])

    def byte_ranges(
        self, spans: StateSpans, ids: tuple[Int64s, Int64s], *, whole: bool, join: bool = True
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Return (source starts, destination starts, lengths) of runs of states, in bytes.

        Add `item_offsets` to the starts to get offsets in the pool. `ids` are the block ids of each
        span, for the source and the destination. If `join` is true, ranges that are adjacent in
        both source and destination are joined. `whole` is true if the states of a kernel block are
        already folded into the item.
        """
        source, destination = (
            self._starts(0, spans.source, ids[0]),
            self._starts(1, spans.destination, ids[1]),
        )
        count = spans.length
        if whole or int(count.max()) == 1:
            length = np.full(len(count), self.item, dtype=np.int64)
        elif self.gapless:
            length = count * self.item
        else:
            # States with gaps between them at either end are copied one by one.
            nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            source = np.repeat(source, count) + nth * self.state_strides[0]
            destination = np.repeat(destination, count) + nth * self.state_strides[1]
            length = np.full(len(nth), self.item, dtype=np.int64)
        return join_copies(source, destination, length) if join else (source, destination, length)

    def _starts(self, end: int, starts: SpanStarts, ids: Int64s) -> Int64s:
        """Return the byte offset of each span at the source (`end` 0) or the destination (1).

        Callers add these offsets to `item_offsets`.
        """
        total = np.zeros(len(ids), dtype=np.int64)
        for strides, index in (
            (self.block_strides, ids),
            (self.kernel_strides, starts.kernel),
            (self.state_strides, starts.state),
        ):
            if strides[end]:
                total += index * strides[end]
        return total


def merge_runs(families: Iterable[StridedRuns]) -> list[StridedRuns]:
    """Merge families of runs that are adjacent in both source and destination.

    >>> cell = Placement.packed([("B", 9), ("N", 4), ("C", 16)])
    >>> k, v = cell.narrow("C", 0, 8), cell.narrow("C", 8, 8)
    >>> [runs.item for runs in merge_runs(StridedRuns.between(x, x) for x in (k, v))]
    [16]
    """
    merged = list(families)
    count = len(merged) + 1
    while len(merged) < count:
        count = len(merged)
        alike: dict[object, list[StridedRuns]] = defaultdict(list)
        for runs in merged:
            alike[runs[:5]].append(runs)
        merged = [runs for members in alike.values() for runs in _joined(members)]
    return merged


def fold_states(
    families: Iterable[StridedRuns], states: int, others: Iterable[StridedRuns] = ()
) -> list[StridedRuns]:
    """Extend each family of runs to `states` consecutive states, and merge adjacent families.

    The state axis becomes part of the item, or an ordinary axis if states are not contiguous.
    `others` are families without a state axis, which are only merged.

    >>> page = Placement.packed([("B", 9), ("H", 4), ("N", 16), ("C", 8)])
    >>> [runs.item for runs in fold_states([StridedRuns.between(page, page)], 16)]
    [512]
    """
    folded = []
    # Most families differ only in their offsets, so each kind is folded once.
    kinds: dict[tuple[object, ...], StridedRuns] = {}
    for runs in families:
        kind = (runs[:5], runs.item)
        if kind not in kinds:
            source, destination = ((*runs.strides[end], runs.state_strides[end]) for end in (0, 1))
            wider = runs._replace(sizes=(*runs.sizes, states), strides=(source, destination))
            kinds[kind] = (wider if states > 1 else runs)._replace(state_strides=(0, 0)).folded()
        wide = kinds[kind]
        folded.append(StridedRuns(*wide[:5], runs.offsets, wide.item))
    return merge_runs([*folded, *others])


def _joined(families: Sequence[StridedRuns]) -> list[StridedRuns]:
    """Join families of runs that are adjacent in both source and destination.

    The families may differ only in their offsets and item sizes.
    """
    kept: list[StridedRuns] = []
    first, *others = sorted(families, key=lambda runs: runs.offsets[1])
    item = first.item
    for runs in others:
        if runs.offsets == (first.offsets[0] + item, first.offsets[1] + item):
            item += runs.item
        else:
            kept.append(first.with_item(item))
            first, item = runs, runs.item
    return [*kept, first.with_item(item)]


def _stride(placement: Placement, axis: str) -> int:
    return placement.stride(axis) if axis in placement.axes else 0
