"""Arrangement of pages in a pool: the offset and strides of each kind of page.

A pool holds pages of several layers and kinds. In layouts that start with B, they are
side by side inside every block; in other layouts, each layer has a separate region for all
blocks. These functions compute the offsets and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvatlas.geometry.integers import ceil_div
from kvatlas.geometry.layout import Layout
from kvatlas.geometry.page import Page


class PoolPosition(NamedTuple):
    """Position of the pages of one kind in a pool: offset, page stride, block stride, in bytes.

    >>> shared_pages(Layout("LBHNC"), 4096, blocks=10, width=8192)
    PoolPosition(offset=0, page_stride=40960, block_stride=4096)
    """

    offset: int
    page_stride: int
    block_stride: int


class PageSet(NamedTuple):
    """A set of `pages` equal pages in every block.

    In layouts that do not start with B, `apart` is the block stride in bytes; layouts that
    start with B ignore it.

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
    """Return the position of each set of pages, in a pool with blocks of `width` bytes.

    In layouts that start with B, the sets follow each other in every block.

    If `split` is not 1, the pages belong to kernel blocks: a block consists of `split`
    kernel blocks, and each kernel block contains all sets. Blocks and kernel blocks then both
    have a constant stride.

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
        # If heads or states are outside L, the pages of one set interleave with each other,
        # but not with those of other sets.
        inside = page.nbytes if layout.block_outermost else page.nbytes * blocks * split
        offset += count * (page_stride if layout.layer_compact else inside)
    return positions


@lru_cache(maxsize=1024)
def _pool_strides(
    page: Page, layout: Layout, pages: int, blocks: int, block_stride: int | None
) -> tuple[int, int]:
    """Return `page.pool_strides(...)`; cached, because many groups of a pool have equal pages."""
    return page.pool_strides(layout, pages=pages, blocks=blocks, block_stride=block_stride)


def shared_pages(layout: Layout, page_bytes: int, *, blocks: int, width: int) -> PoolPosition:
    """Return the position of pages that layers of several kinds share.

    A shared page has `page_bytes` bytes, and stores a page of one of these layers at a time. A
    block has `width` bytes.
    """
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
    """Return where `count` small pages are stored: (number of small pages, position) per region.

    The small pages are stored in larger shared pages, `pack` of them in each. `shared` is the
    position of the shared pages. In layouts that start with B, all small pages are in one region,
    along axis L. In other layouts, each shared page is a separate region with up to `pack` small
    pages per block.
    """
    if layout.block_outermost:
        pack_pages = PageSet(page, count, page.nbytes)
        return [(count, side_by_side([pack_pages], layout, blocks=blocks, width=width)[0])]
    offsets = range(0, ceil_div(count, pack) * shared.page_stride, shared.page_stride)
    return [
        (min(pack, count - index * pack), PoolPosition(offset, page.nbytes, shared.block_stride))
        for index, offset in enumerate(offsets)
    ]
