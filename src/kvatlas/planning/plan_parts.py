"""The parts of a plan: groups, pools and regions, as data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field, Page, Placement, PoolPosition
from kvatlas.geometry.integers import Whole, at_most, ceil_div
from kvatlas.models import Layer
from kvatlas.planning.sized_layers import FIXED_KINDS, FULL_KINDS, SLIDING_KINDS, Kind, page_of
from kvatlas.specs import Spec, Visibility


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one block table."""

    kind: Kind
    block: int
    """Tokens per block."""
    pool: int
    """The index of the pool that provides the group's blocks."""
    window: int | None = None
    """Size of the window, chunk or, for a ring, group in tokens; None if the layers have none."""
    held: int = 1
    """For recurrent layers and rings, the number of blocks that a request of any length holds."""
    source: int = 0
    """For cross-attention, the number of encoder tokens."""
    mixed: bool = False
    """Whether the layers of the group have different pages."""

    @classmethod
    def of(
        cls, kind: Kind, spec: Spec, *, block: int, pool: int, held: int = 1, mixed: bool = False
    ) -> Group:
        """Create a group of `kind` that keeps the tokens that `spec` needs.

        The window or chunk size and the number of encoder tokens are taken from `spec`.
        """
        seen = spec.visibility
        return cls(
            kind=kind,
            block=block,
            pool=pool,
            window=seen.window or seen.chunk,
            held=held,
            source=seen.source or 0,
            mixed=mixed,
        )

    @property
    def visibility(self) -> Visibility:
        """The tokens that the group keeps. A group of full attention ignores its window.

        >>> Group(kind="sliding_window", block=16, pool=0, window=128).visibility.first(1000)
        873
        """
        if self.kind in SLIDING_KINDS:
            return Visibility(window=self.window)
        if self.kind in ("chunked_local_attention", "ring"):
            return Visibility(chunk=self.window)
        if self.kind == "cross_attention":
            return Visibility(causal=False, source=self.source)
        return Visibility()

    def blocks(self, length: Whole, *, in_flight: int = 0, dcp: int = 1) -> Whole:
        """Return the maximum number of blocks that a request of `length` tokens holds.

        `length` may be an array. A window also holds blocks for `in_flight` tokens, which are
        scheduled but not computed. With decode context parallelism, tokens are divided over `dcp`
        ranks.
        """
        if self.kind in FIXED_KINDS:
            return length * 0 + self.held
        if self.kind == "cross_attention":
            return length * 0 + ceil_div(self.source, self.block)
        if self.kind in FULL_KINDS:
            return ceil_div(ceil_div(length, dcp), self.block)
        if self.window is None:
            return ceil_div(length, self.block)
        kept = self.window + in_flight
        if self.kind == "chunked_local_attention":
            if self.window % self.block == 0:
                return ceil_div(at_most(length, kept), self.block)
            # A chunk may start in the middle of a block, which takes one more block.
            return at_most(ceil_div(length, self.block), ceil_div(kept - 1, self.block) + 1)
        # A window may start in the middle of a block, which takes one more block.
        return ceil_div(at_most(length, kept - 1), self.block) + 1


def blocks_taken(
    groups: Iterable[Group], length: Whole, *, in_flight: int, dcp: int
) -> dict[int, Whole]:
    """Return how many blocks of each pool a request of `length` tokens takes, by pool index.

    A window also takes blocks for `in_flight` tokens, which are scheduled but not computed. With
    decode context parallelism, tokens are divided over `dcp` ranks.
    """
    taken: dict[int, Whole] = {}
    for group in groups:
        blocks = group.blocks(length, in_flight=in_flight, dcp=dcp)
        taken[group.pool] = taken[group.pool] + blocks if group.pool in taken else blocks
    return taken


class PoolSegment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several allocations of a pool. Its first byte has the offset `offset` in the pool."""

    offset: int
    nbytes: int


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory in which the blocks of some groups are stored, on each rank of a pipeline stage.

    A rank has one allocation for the whole pool, or one for each segment.
    """

    stage: int
    index: int = 0
    """The pool's index, to which groups refer."""
    blocks: int
    """The number of blocks."""
    block_bytes: int
    """Bytes per block."""
    segments: tuple[PoolSegment, ...] | msgspec.UnsetType = msgspec.UNSET
    """The allocations of a pool that has several, for example one for each tensor of an engine.
    They ascend and have gaps between them, so that no run of a route extends over two of them. Each
    layer's pages, or each of its fields, are in one segment."""

    @property
    def nbytes(self) -> int:
        """Bytes to allocate for the pool on each rank.

        If the pool has segments, this is the size of the offset range that its blocks span. The
        range includes the gaps between segments.
        """
        return self.blocks * self.block_bytes

    def locate(self, offsets: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for offsets in the pool, the index of the segment and the offset in the segment.

        Add the offset in the segment to the segment's address to get the address of a run.

        >>> parts = (PoolSegment(offset=0, nbytes=64), PoolSegment(offset=128, nbytes=64))
        >>> Pool(stage=0, blocks=2, block_bytes=96, segments=parts).locate([16, 130])
        (array([0, 1]), array([16,  2]))
        """
        starts = np.asarray(offsets, dtype=np.int64)
        if self.segments is msgspec.UNSET:
            return np.zeros_like(starts), starts
        first = np.array([segment.offset for segment in self.segments], dtype=np.int64)
        stops = np.array([s.offset + s.nbytes for s in self.segments], dtype=np.int64)
        index = np.searchsorted(first, starts, side="right") - 1
        if starts.size and (index.min() < 0 or (starts >= stops[index]).any()):
            problem = "Some offsets are outside all segments of the pool"
            hint = "Pass only offsets that were computed by a route from or to this plan"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=offsets, hint=hint)
        return index, starts - first[index]


class FieldPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of one field of a region's layers in their pool.

    A region has field placements if its fields are stored apart, for example K and V in two
    tensors. The field has the same axes as in the layer's page, but C and N may be divided. If C is
    divided, C counts tiles, and c counts the elements of a tile. If N is divided, k counts groups
    of states, and N counts the states of a group.
    """

    name: str
    offset: int
    """Bytes from the start of the pool to the field's first element in the first page."""
    page_stride: int
    """Bytes between two layers."""
    block_stride: int
    """Bytes between two blocks."""
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between two coordinates of each axis."""

    def placement(self, pages: int, blocks: int, item: int) -> Placement:
        """Return the field's placement in all pages of `pages` layers and `blocks` blocks.

        The first two axes are L and B. `item` is the number of bytes of an element.
        """
        sizes, strides = (pages, blocks), (self.page_stride, self.block_stride)
        axes = ("L", "B", *self.axes)
        return Placement(axes, (*sizes, *self.sizes), (*strides, *self.strides), self.offset, item)

    def describes(self, field: Field) -> bool:
        """Return whether the axes and sizes match `field` after divided axes are joined."""
        names = {axis.name for axis in field.axes} - {"c"}
        tiles = {"c": "C", "k": "N"}
        whole = names & ({"C", "N"} - {field.sharding.axis})
        sizes: dict[str, int] = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            outer = tiles[axis] if tiles.get(axis) in whole else axis
            sizes[outer] = sizes.get(outer, 1) * size
        return sizes == field.sizes and names <= set(self.axes)


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of one group that have the same kind of page, and their position in a pool."""

    stage: int
    group: int
    layers: tuple[Layer, ...]
    block: int
    """Tokens per block."""
    kernel_block: int
    """Tokens per kernel block; a page is laid out for one kernel block."""
    page_bytes: int
    """Bytes of a layer's page for a whole block, including padding."""
    layout: str
    offset: int
    """Bytes from the start of the pool to the first page."""
    page_stride: int
    """Bytes between the pages of two layers."""
    block_stride: int
    """Bytes between two blocks."""
    splits: int = 1
    """Number of parts into which a layer's state is split by heads; each has a separate page."""
    parts: tuple[int, ...] = ()
    """If states are split, the part of the state that each page along L holds."""
    fields: tuple[FieldPlacement, ...] | msgspec.UnsetType = msgspec.UNSET
    """The position of each field if the fields of a page are stored apart. `layout`, `offset`,
    `page_stride` and `block_stride` are then those of the first field, and `page_bytes` are the
    bytes of all fields."""

    @property
    def apart(self) -> bool:
        """Whether the fields of a page are stored apart, so that no placement covers a page."""
        return self.fields is not msgspec.UNSET

    def part(self, index: int) -> int:
        """Return the index of the state part in page `index`; 0 if states are not split."""
        return self.parts[index] if self.parts else 0

    def page(self, tp: int, rank: int = 0, index: int = 0) -> Page:
        """Return page `index` of the region, for one kernel block on rank `rank` of `tp` ranks.

        If states are split, the page of a part equals the page of a whole state at tp x `splits`
        ranks.
        """
        return self._page(tp, index, rank * self.splits + self.part(index))

    def first_page(self, tp: int, index: int = 0) -> Page:
        """Return the page of `layers[index]`, for the first part of its state on rank 0.

        The pages of other parts and ranks have the same layout.
        """
        return self._page(tp, index, 0)

    def _page(self, tp: int, index: int, shard: int) -> Page:
        whole = self.kernel_block == self.block and not self.apart
        padded = self.page_bytes if whole else None
        return page_of(self.layers[index].spec, self.kernel_block, tp * self.splits, shard, padded)

    def placement(self, tp: int, blocks: int) -> Placement:
        """Return the offset, sizes and strides of all layers' pages in a pool of `blocks` blocks.

        The axes are L (layer), B (block), H (head), N (state, usually one token) and C (bytes), and
        k (kernel block in a block) if a block has several. Raises an error if the fields of the
        pages are stored apart.
        """
        if self.fields is not msgspec.UNSET:
            raise AtlasError(
                Code.FIELDS_APART,
                got=f"{self.layers[0].name}, with {', '.join(f.name for f in self.fields)} apart",
                hint="Use the placement of each field, which Plan.view returns",
            )
        split = self.block // self.kernel_block
        placed = _placed(
            self.first_page(tp),
            self.layout,
            len(self.layers),
            blocks * split,
            PoolPosition(self.offset, self.page_stride, self.block_stride // split),
        )
        return placed if split == 1 else placed.split("B", into=("B", "k"), inner=split)

    def stored(self, tp: int, blocks: int) -> dict[str, Placement]:
        """Return the placements that together cover the region, by name.

        The result has one placement of all pages, named `pages`, or one for each field if the
        fields are stored apart.
        """
        if self.fields is msgspec.UNSET:
            return {"pages": self.placement(tp, blocks)}
        return self.views(tp, blocks)

    def views(self, tp: int, blocks: int, index: int = 0) -> dict[str, Placement]:
        """Return the placements of the fields in all pages of the region, by field name.

        The fields are those of the page of `layers[index]`. The axes are L, B and the axes of the
        field.
        """
        page = self.first_page(tp, index)
        if self.fields is msgspec.UNSET:
            placed = self.placement(tp, blocks)
            return {field.name: page.view(placed, field.name) for field in page.fields}
        pages = len(self.layers)
        return {
            own.name: own.placement(pages, blocks, page.field(own.name).dtype.item)
            for own in self.fields
        }


@lru_cache(maxsize=1024)
def _placed(page: Page, layout: str, pages: int, blocks: int, at: PoolPosition) -> Placement:
    """Return `page.place(...)`; cached, because many groups of a plan have the same placement."""
    return page.place(layout, pages=pages, blocks=blocks, **at._asdict())
