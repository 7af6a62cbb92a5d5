"""Many pages in one pool: where each kind of them starts, and how far apart they lie.

Pools hold pages of several layers and kinds. Block by block (orders that start with
B) they lie side by side inside every block; layer by layer each has a stretch of its
own for all blocks. These functions turn that into offsets and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvatlas.geometry.layout import Layout
from kvatlas.geometry.page import Page


class Spot(NamedTuple):
    """Where alike pages lie in a pool: the first byte, and the strides of slots and blocks."""

    offset: int
    slot_stride: int
    block_stride: int


class Row(NamedTuple):
    """`slots` alike pages; `apart` bytes between blocks where each has a stretch of its own."""

    page: Page
    slots: int
    apart: int


def side_by_side(
    rows: Sequence[Row], layout: Layout, *, blocks: int, width: int, split: int = 1
) -> list[Spot]:
    """Rows of pages one behind the other in blocks of `width` bytes.

    With `split`, pages are those of kernel blocks: a block is `split` of them, each with
    all rows, so that blocks and kernel blocks both have one stride.

    >>> from kvatlas.specs import FullAttention
    >>> page = FullAttention(heads=2, head_dim=64).page(16)
    >>> rows = [Row(page, 3, page.nbytes), Row(page, 2, page.nbytes)]
    >>> for spot in side_by_side(rows, Layout("BLHNC"), blocks=10, width=5 * page.nbytes):
    ...     print(spot)
    Spot(offset=0, slot_stride=8192, block_stride=40960)
    Spot(offset=24576, slot_stride=8192, block_stride=40960)
    """
    found = []
    offset = 0
    for page, slots, apart in rows:
        fixed = width // split if layout.block_outermost else None
        if fixed is None and apart != page.nbytes:
            fixed = apart
        slot, block = page.pool_strides(
            layout, slots=slots, blocks=blocks * split, block_stride=fixed
        )
        found.append(Spot(offset, slot, block * split))
        offset += slots * (page.nbytes if layout.block_outermost else slot)
    return found


def shared_pages(layout: Layout, page_bytes: int, *, blocks: int, width: int) -> Spot:
    """Pages of `page_bytes` that several kinds of layers share, in blocks of `width` bytes."""
    if layout.block_outermost:
        return Spot(0, page_bytes, width)
    return Spot(0, page_bytes * blocks, page_bytes)


def packs(
    page: Page, count: int, pack: int, layout: Layout, *, shared: Spot, blocks: int, width: int
) -> list[tuple[int, Spot]]:
    """`count` pages, `pack` of them in each shared page, as (pages, spot).

    Block by block a pack is just more slots. Layer by layer each shared page has its
    own stretch of all blocks, with the pages of a pack inside every block of it.
    """
    if layout.block_outermost:
        row = Row(page, count, page.nbytes)
        return [(count, side_by_side([row], layout, blocks=blocks, width=width)[0])]
    found = []
    for slot, first in enumerate(range(0, count, pack)):
        spot = Spot(slot * shared.slot_stride, page.nbytes, shared.block_stride)
        found.append((min(pack, count - first), spot))
    return found
