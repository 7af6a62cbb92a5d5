"""Cut the rows of a tier into objects, in the same way for all writers and readers.

A row is one block of the tier's plan. The cut depends on which ranks would hold its bytes if the
model were distributed over `shards` tensor-parallel ranks and `stages` pipeline stages: bytes
that the same ranks hold form one object, and padding belongs to the object of the bytes before it.
A rank of any tp that divides `shards` therefore holds only whole objects. Bytes that all ranks
replicate (the latents of MLA) form one object. The cut depends only on the plan and these two
numbers, so all rows of a group are cut in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement, Sharding
from kvatlas.geometry.address_arrays import Int64s, join_ranges
from kvatlas.planning import Plan, Region
from kvatlas.planning.topology import stage_layers

MOST_SHARDS = 16
"""Upper limit of the default number of shards. Engines rarely use more ranks."""

MOST_RANKS = 1024
"""Maximum number of shards, and of stages."""

Ranges = tuple[Int64s, Int64s]
"""Starts and lengths of ranges, in ascending order and with gaps between them."""


class RowShare(NamedTuple):
    """The indices of the objects of a row that a rank writes."""

    whole: tuple[int, ...]
    """Objects of which the rank writes all needed bytes."""
    partly: tuple[int, ...]
    """Objects of which the rank writes only some of the needed bytes."""
    filled: bool
    """Whether the rank fills its whole objects completely, including bytes that are not needed."""


class GroupObjects:
    """The division of one group's rows into objects. An object has some byte ranges of a row."""

    def __init__(self, held: list[Ranges], nbytes: int) -> None:
        """Cut rows of `nbytes` bytes. `held` are the byte ranges of each object, without padding.

        Padding belongs to the object of the bytes before it, so that objects cover the whole row.
        """
        owner = [np.full(len(start), index) for index, (start, _) in enumerate(held)]
        starts = np.concatenate([start for start, _ in held])
        order = np.argsort(starts, kind="stable")
        starts, owners = starts[order], np.concatenate(owner)[order]
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        self._starts, self._owner = starts[first], owners[first]
        self._stops = np.append(self._starts[1:], nbytes)
        self.objects: list[Ranges] = []
        """The stretches of a row in each object: starts and lengths."""
        for index in range(len(held)):
            own = self._owner == index
            self.objects.append((self._starts[own], (self._stops - self._starts)[own]))
        self.sizes = [int(length.sum()) for _, length in self.objects]

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def stretches(self) -> tuple[Int64s, Int64s, Int64s]:
        """The contiguous ranges of a row by offset: arrays of starts, stops and object indices."""
        return self._starts, self._stops, self._owner

    def overlap(self, start: Int64s, length: Int64s) -> Int64s:
        """Return, for each object, how many of its bytes are in the given byte ranges of a row."""
        if not len(start):
            return np.zeros(len(self), np.int64)
        start, length = join_ranges(start, length)
        edges = np.stack([start, start + length], axis=1).ravel()
        below = np.concatenate([[0], np.repeat(np.cumsum(length), 2)[:-1]])
        inside = np.interp(self._stops, edges, below) - np.interp(self._starts, edges, below)
        return np.bincount(self._owner, inside, len(self)).astype(np.int64)

    def share(self, brought: Ranges, needed: Ranges, *, first: bool) -> RowShare:
        """Return which objects of a row a rank writes completely, and which only in part.

        `brought` are the byte ranges of the row that the rank writes, and `needed` the ranges that
        all ranks together must write. An object is complete if the rank writes all of its needed
        bytes. `first` is true for one rank only. This rank also writes the objects without needed
        bytes, so that every row has all of its objects.
        """
        mine, all_of = self.overlap(*brought), self.overlap(*needed)
        whole = (mine == all_of) & ((all_of > 0) | first)
        partly = (mine > 0) & (mine < all_of)
        filled = bool((mine == self.sizes)[whole].all())
        have, cut = (tuple(np.flatnonzero(which).tolist()) for which in (whole, partly))
        return RowShare(have, cut, filled)


class RowObjects:
    """The division of a tier's rows into objects, for each group of the tier's plan.

    >>> from kvatlas.planning import plan
    >>> made = plan("Qwen3-8B", memory="1GiB", layout="BHLNC", block_size=64, max_len=64)
    >>> cut = RowObjects(made)
    >>> cut.shards, len(cut.groups[0]), set(cut.groups[0].sizes)
    (16, 8, {1179648})
    """

    def __init__(self, plan: Plan, shards: int | None = None, stages: int = 1) -> None:
        self.plan = plan
        self.shards = _most_shards(plan) if shards is None else shards
        self.stages = stages
        for name, count in (("shards", self.shards), ("stages", stages)):
            if not 1 <= count <= MOST_RANKS:
                problem = f"The number of {name} must be between 1 and {MOST_RANKS}"
                hint = f"Open the tier with another value of {name}="
                raise AtlasError(Code.OUT_OF_RANGE, problem, got=count, hint=hint)
        self.groups = [self._group(index) for index in range(len(plan.groups))]

    def _group(self, group: int) -> GroupObjects:
        """Cut the rows of a group: bytes that the same ranks would hold form one object."""
        held: dict[tuple[int, tuple[int, ...]], list[Ranges]] = defaultdict(list)
        for region in self.plan.regions:
            if region.group == group:
                for index, layer in enumerate(region.layers):
                    stage = self._stages[layer.index]
                    for holders, view in self._pieces(region, index):
                        held[stage, holders].append(view.runs())
        objects = []
        for key in sorted(held):
            starts, lengths = (np.concatenate(all_of) for all_of in zip(*held[key], strict=True))
            objects.append(join_ranges(starts, lengths))
        return GroupObjects(objects, self.plan.pool(0, group).block_bytes)

    def _pieces(self, region: Region, index: int) -> Iterator[tuple[tuple[int, ...], Placement]]:
        """Yield (ranks, placement) for each part of a layer's page that the same ranks would hold.

        `index` is the layer's index in the region. Placements are in block 0.
        """
        placed = region.placement(1, 1).select("L", index).select("B", 0)
        page = region.page(1, 0, index)
        for field in page.fields:
            if field.padding:
                continue
            view, axis = page.view(placed, field.name), field.sharding.axis
            if axis is None:
                yield (), view
                continue
            for own in field.sharding.ranges(region.splits, region.part(index)):
                cuts = _holders(field.sharding, self.shards, own.start, own.start + own.length)
                for start, stop, holders in cuts:
                    local = own.local + start - own.start
                    yield holders, view.narrow(axis, local, stop - start)

    @cached_property
    def _stages(self) -> dict[int, int]:
        """Return the pipeline stage of each decoder layer."""
        layers = [layer.index for region in self.plan.regions for layer in region.layers]
        shares = stage_layers(1 + max(layers), self.stages)
        dealt = [stage for stage, share in enumerate(shares) for _ in range(share)]
        return dict(enumerate(dealt))


def _holders(
    sharding: Sharding, shards: int, start: int, stop: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Split the range start .. stop - 1 of a field's sharded axis by the ranks that would hold it.

    The axis counts heads or channels. Yields (start, stop, ranks) for each part.
    """
    held = [(one.start, one.start + one.length, rank)
            for rank in range(shards) for one in sharding.ranges(shards, rank)]  # fmt: skip
    edges = {start, stop} | {edge for first, last, _ in held for edge in (first, last)}
    for first, last in pairwise(sorted(edge for edge in edges if start <= edge <= stop)):
        yield first, last, tuple(rank for a, b, rank in held if a <= first and last <= b)


def _most_shards(plan: Plan) -> int:
    """Return the largest power of two up to `MOST_SHARDS` over which every field can be sharded."""
    shardings = {
        field.sharding
        for region in plan.regions
        for index in range(len(region.layers))
        for field in region.page(1, 0, index).fields
        if not field.padding and field.sharding.axis is not None
    }
    shards = MOST_SHARDS
    while shards > 1:
        try:
            for sharding in shardings:
                sharding.ranges(shards, 0)
        except AtlasError as refusal:
            if refusal.code is not Code.TP_HEADS:
                raise
            shards //= 2
        else:
            break
    return shards
