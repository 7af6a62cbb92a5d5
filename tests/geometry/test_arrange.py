"""Pages arranged in a pool, against the bytes they claim."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvatlas import Layout, Page, Placement, validate
from kvatlas.geometry import (
    ENGINE_LAYOUTS,
    PageSet,
    PoolPosition,
    pack_positions,
    shared_pages,
    side_by_side,
)
from kvatlas.geometry.validation import keeps_to_its_blocks
from kvatlas.specs import FullAttention
from tests.cases import each
from tests.oracle import byte_list

BLOCKS = 3
SMALL = FullAttention(heads=2, head_dim=2).page(4)
LARGE = FullAttention(heads=2, head_dim=3).page(4)


def placed(
    page: Page, pages: int, layout: Layout, position: PoolPosition, blocks: int = BLOCKS
) -> Placement:
    return page.place(
        layout,
        pages=pages,
        blocks=blocks,
        offset=position.offset,
        page_stride=position.page_stride,
        block_stride=position.block_stride,
    )


@each(ENGINE_LAYOUTS)
def test_rows_tile_the_pool(layout: Layout) -> None:
    sets = [
        PageSet(SMALL, 2, SMALL.nbytes),
        PageSet(LARGE, 1, LARGE.nbytes),
        PageSet(SMALL, 1, SMALL.nbytes),
    ]
    width = sum(pages_of.page.nbytes * pages_of.pages for pages_of in sets)
    positions = side_by_side(sets, layout, blocks=BLOCKS, width=width)
    parts = {
        str(i): placed(pages_of.page, pages_of.pages, layout, position)
        for i, (pages_of, position) in enumerate(zip(sets, positions, strict=True))
    }
    validate(parts, size=width * BLOCKS)
    if layout.block_outermost:
        for part, block in product(parts.values(), range(BLOCKS)):
            mine = byte_list(part.narrow("B", block, 1))
            assert min(mine) >= block * width
            assert max(mine) < (block + 1) * width


@each(["BLHNC", "BLNHC", "BHLNC"])
def test_kernel_blocks_lie_inside_their_block_at_one_stride(order: str) -> None:
    layout, pages, split = Layout(order), 3, 2
    width = pages * SMALL.nbytes * split
    pages_of = PageSet(SMALL, pages, SMALL.nbytes)
    (position,) = side_by_side([pages_of], layout, blocks=BLOCKS, width=width, split=split)
    assert position.block_stride == width
    kernel = PoolPosition(position.offset, position.page_stride, width // split)
    part = placed(SMALL, pages, layout, kernel, BLOCKS * split)
    assert sorted(byte_list(part)) == list(range(width * BLOCKS))
    for block in range(BLOCKS):
        mine = byte_list(part.narrow("B", block * split, split))
        assert sorted(mine) == list(range(block * width, (block + 1) * width))


@each(
    (order, *pack)
    for order in ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"]
    for pack in [(4, 2), (5, 2), (3, 3), (1, 1), (7, 4)]
)
def test_packs_keep_to_the_bytes_of_the_pages_they_share(order: str, count: int, pack: int) -> None:
    layout, page_bytes = Layout(order), pack * SMALL.nbytes + 16
    pages = -(-count // pack)
    ask = {"blocks": BLOCKS, "width": pages * page_bytes}
    shared = shared_pages(layout, page_bytes, **ask)
    positions = pack_positions(SMALL, count, pack, layout, shared=shared, **ask)
    assert sum(number for number, _ in positions) == count
    parts = {
        str(i): placed(SMALL, n, layout, position) for i, (n, position) in enumerate(positions)
    }
    validate(parts, size=pages * page_bytes * BLOCKS, holes=True)
    whole = Placement(
        ("L", "B"), (pages, BLOCKS), (shared.page_stride, shared.block_stride), item=page_bytes
    )
    for block in range(BLOCKS):
        home = set(byte_list(whole.narrow("B", block, 1)))
        for part in parts.values():
            assert set(byte_list(part.narrow("B", block, 1))) <= home


@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 8]), st.integers(0, 12),
    st.integers(1, 8), st.sampled_from([4, 8, 16, 32]),
)  # fmt: skip
def test_keeping_to_blocks_means_what_it_says(
    pages: int, blocks: int, cell: int, offset: int, item: int, page_stride: int
) -> None:
    """Every byte of every block lies in a cell whose number is that block's, modulo all blocks.

    A single block has nothing to meet, wherever it lies.
    """
    try:
        part = Placement(("L", "B"), (pages, blocks), (page_stride, cell), offset, item)
    except ValueError:
        return
    kept = blocks == 1 or all(
        byte // cell % blocks == block and first // cell == byte // cell
        for block, index in product(range(blocks), range(pages))
        for first in [part(L=index, B=block)]
        for byte in range(first, first + item)
    )
    assert keeps_to_its_blocks(part, cell, blocks) == kept
