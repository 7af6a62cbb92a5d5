"""The parts of a plan: groups, pools and regions, as data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from kvatlas.geometry import Page, Placement, PoolPosition
from kvatlas.geometry.integers import Whole, at_most, ceil_div
from kvatlas.models import Layer
from kvatlas.planning.sized_layers import FULL_KINDS, SLIDING_KINDS, Kind, page_of
from kvatlas.specs import Spec, Visibility


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one block table."""

    kind: Kind
    block: int
    """Tokens per block."""
    pool: int
    """The index of the pool that provides the group's blocks."""
    window: int | None = None
    """Size of the window or chunk in tokens; None if the layers have neither."""
    held: int = 1
    """For recurrent layers, the number of blocks that a request of any length holds."""
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
        if self.kind == "chunked_local_attention":
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
        if self.kind == "recurrent":
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


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One allocation on every rank of a pipeline stage."""

    stage: int
    index: int = 0
    """The pool's index, to which groups refer."""
    blocks: int
    """The number of blocks."""
    block_bytes: int
    """Bytes per block."""

    @property
    def nbytes(self) -> int:
        """Bytes to allocate for the pool on each rank."""
        return self.blocks * self.block_bytes


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

    def part(self, index: int) -> int:
        """Return which part of a state is stored in page `index`; 0 if states are not split."""
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
        padded = self.page_bytes if self.kernel_block == self.block else None
        return page_of(self.layers[index].spec, self.kernel_block, tp * self.splits, shard, padded)

    def placement(self, tp: int, blocks: int) -> Placement:
        """Return the offset, sizes and strides of all layers' pages in a pool of `blocks` blocks.

        The axes are L (layer), B (block), H (head), N (state, usually one token) and C (bytes), and
        k (kernel block in a block) if a block has several.
        """
        split = self.block // self.kernel_block
        placed = _placed(
            self.first_page(tp),
            self.layout,
            len(self.layers),
            blocks * split,
            PoolPosition(self.offset, self.page_stride, self.block_stride // split),
        )
        return placed if split == 1 else placed.split("B", into=("B", "k"), inner=split)


@lru_cache(maxsize=1024)
def _placed(page: Page, layout: str, pages: int, blocks: int, at: PoolPosition) -> Placement:
    """Return `page.place(...)`; cached, because many groups of a plan have the same placement."""
    return page.place(layout, pages=pages, blocks=blocks, **at._asdict())
