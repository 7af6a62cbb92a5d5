"""Many pages in one pool: where each kind of them starts, and how far apart they lie.

Pools hold pages of several layers and kinds. Block by block (orders that start with
B) they lie side by side inside every block; layer by layer each has a region of its
own for all blocks. These functions turn that into offsets and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvatlas.geometry.integers import ceil_div
from kvatlas.geometry.layout import Layout
from kvatlas.geometry.page import Page


class PoolPosition(NamedTuple):
    """Where alike pages lie in a pool: the first byte, and the strides of pages and blocks.

    >>> shared_pages(Layout("LBHNC"), 4096, blocks=10, width=8192)
    PoolPosition(offset=0, page_stride=40960, block_stride=4096)
    """

    offset: int
    page_stride: int
    block_stride: int


class PageSet(NamedTuple):
    """`pages` alike pages, `apart` bytes from block to block where layers lie one by one.

    >>> from kvatlas.specs import FullAttention
    >>> page = FullAttention(heads=2, head_dim=64).page(16)
    >>> PageSet(page, pages=3, apart=page.nbytes).apart
    8192
    """

    page: Page
    pages: int
    apart: int


def side_by_side(
    sets: Sequence[PageSet], layout: Layout, *, blocks: int, width: int, split: int = 1
) -> list[PoolPosition]:
    """Sets of pages one behind the other in blocks of `width` bytes.

    With `split`, pages are those of kernel blocks: a block is `split` of them, each with
    all sets, so that blocks and kernel blocks both have one stride.

    >>> from kvatlas.specs import FullAttention
    >>> page = FullAttention(heads=2, head_dim=64).page(16)
    >>> sets = [PageSet(page, 3, page.nbytes), PageSet(page, 2, page.nbytes)]
    >>> for position in side_by_side(sets, Layout("BLHNC"), blocks=10, width=5 * page.nbytes):
    ...     print(position)
    PoolPosition(offset=0, page_stride=8192, block_stride=40960)
    PoolPosition(offset=24576, page_stride=8192, block_stride=40960)
    """
    positions = []
    offset = 0
    for page, count, apart in sets:
        fixed = width // split if layout.block_outermost else None
        if fixed is None and apart != page.nbytes:
            fixed = apart
        page_stride, block_stride = _pool_strides(page, layout, count, blocks * split, fixed)
        positions.append(PoolPosition(offset, page_stride, block_stride * split))
        # Outside all layers, heads or states interleave a set's pages, but no other set's.
        inside = page.nbytes if layout.block_outermost else page.nbytes * blocks * split
        offset += count * (page_stride if layout.layer_compact else inside)
    return positions


@lru_cache(maxsize=1024)
def _pool_strides(
    page: Page, layout: Layout, pages: int, blocks: int, block_stride: int | None
) -> tuple[int, int]:
    """`page.pool_strides`, remembered: pools have many groups of alike pages."""
    return page.pool_strides(layout, pages=pages, blocks=blocks, block_stride=block_stride)


def shared_pages(layout: Layout, page_bytes: int, *, blocks: int, width: int) -> PoolPosition:
    """Pages of `page_bytes` that several kinds of layers share, in blocks of `width` bytes."""
    if layout.block_outermost:
        return PoolPosition(0, page_bytes, width)
    return PoolPosition(0, page_bytes * blocks, page_bytes)


def pack_positions(
    page: Page,
    count: int,
    pack: int,
    layout: Layout,
    *,
    shared: PoolPosition,
    blocks: int,
    width: int,
) -> list[tuple[int, PoolPosition]]:
    """`count` pages, `pack` of them in each shared page, as (pages, position).

    Block by block a pack is just more pages along L. Layer by layer each shared page has a
    region of its own for all blocks, with the pages of a pack inside every block of it.
    """
    if layout.block_outermost:
        pack_pages = PageSet(page, count, page.nbytes)
        return [(count, side_by_side([pack_pages], layout, blocks=blocks, width=width)[0])]
    offsets = range(0, ceil_div(count, pack) * shared.page_stride, shared.page_stride)
    return [
        (min(pack, count - index * pack), PoolPosition(offset, page.nbytes, shared.block_stride))
        for index, offset in enumerate(offsets)
    ]
