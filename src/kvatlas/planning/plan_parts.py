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
    """Tokens in a block."""
    pool: int
    """Which pool of its stage it draws blocks from."""
    window: int | None = None
    """Tokens of its window or chunk, where it keeps no more."""
    held: int = 1
    """Blocks that a request holds whatever its length, where the kind has such."""
    source: int = 0
    """Tokens of the encoder, for cross attention."""
    mixed: bool = False
    """Its layers have unlike pages."""

    @classmethod
    def of(
        cls, kind: Kind, spec: Spec, *, block: int, pool: int, held: int = 1, mixed: bool = False
    ) -> Group:
        """A group of layers that keep what `spec` says, as `kind`."""
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
        """Which tokens it keeps: windows and chunks may also be kept at full length.

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
        """Blocks that a request of `length` tokens holds at most; for many lengths at once, too.

        A window must also cover the tokens that are scheduled but not settled.
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
            # A chunk may start in the middle of a block: one more, if there are as many.
            return at_most(ceil_div(length, self.block), ceil_div(kept - 1, self.block) + 1)
        # A window may start in the middle of a block: one more.
        return ceil_div(at_most(length, kept - 1), self.block) + 1


def blocks_taken(
    groups: Iterable[Group], length: Whole, *, in_flight: int, dcp: int
) -> dict[int, Whole]:
    """Blocks that a request of `length` tokens takes of each pool, by the pool's index."""
    taken: dict[int, Whole] = {}
    for group in groups:
        blocks = group.blocks(length, in_flight=in_flight, dcp=dcp)
        taken[group.pool] = taken[group.pool] + blocks if group.pool in taken else blocks
    return taken


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One allocation on every rank of a pipeline stage."""

    stage: int
    index: int = 0
    """Which pool of its stage this is: what groups refer to."""
    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes to allocate."""
        return self.blocks * self.block_bytes


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alike layers of a group lie in a pool."""

    stage: int
    group: int
    layers: tuple[Layer, ...]
    block: int
    kernel_block: int
    """Tokens that a kernel reads as one block; pages are laid out for these."""
    page_bytes: int
    """Bytes of a page with its padding, for a whole block."""
    layout: str
    offset: int
    page_stride: int
    block_stride: int
    splits: int = 1
    """Parts that a layer's state is split into by heads, each in a page of its own."""
    parts: tuple[int, ...] = ()
    """Which part of its layer's state each page along L holds, where states are split."""

    def part(self, index: int) -> int:
        """Which part of its layer's state the page at `index` along L holds."""
        return self.parts[index] if self.parts else 0

    def page(self, tp: int, rank: int = 0, index: int = 0) -> Page:
        """The page of one kernel block of a layer, or of a part of it, on one rank.

        A part is what one of `splits` times as many ranks would hold.
        """
        return self._page(tp, index, rank * self.splits + self.part(index))

    def first_page(self, tp: int, index: int = 0) -> Page:
        """The page of a layer's first part on rank 0: all others are laid out alike."""
        return self._page(tp, index, 0)

    def _page(self, tp: int, index: int, shard: int) -> Page:
        padded = self.page_bytes if self.kernel_block == self.block else None
        return page_of(self.layers[index].spec, self.kernel_block, tp * self.splits, shard, padded)

    def placement(self, tp: int, blocks: int) -> Placement:
        """The cells of all its layers: axes L, B, H, N, C, and k for several kernel blocks."""
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
    """Where pages lie, remembered: a plan has many groups that lie alike."""
    return page.place(layout, pages=pages, blocks=blocks, **at._asdict())
