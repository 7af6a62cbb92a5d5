"""Device code of copies that convert the element type."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.copy_device import end_base, row_offset, tile_count, tile_rows
from kvatlas.kernels.triton.quantise_device import as_element


@triton.jit
def convert_rows(
    source, target, factors, blocks, layers, SHAPE: tl.constexpr, TILING: tl.constexpr,
    TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply rows by their layer's factor and copy them; rows are contiguous at both ends.

    Rows are numbered by block, then along three axes, as in `copy_rows`.
    """
    SIZES: tl.constexpr = SHAPE.sizes
    FROM: tl.constexpr = SHAPE.source
    TO: tl.constexpr = SHAPE.target
    UNIT: tl.constexpr = SHAPE.unit
    ROWS: tl.constexpr = TILING.rows
    COLUMNS: tl.constexpr = TILING.columns
    FROM_ALIGN: tl.constexpr = UNIT * (FROM.primitive_bitwidth // 8)
    TO_ALIGN: tl.constexpr = UNIT * (TO.primitive_bitwidth // 8)
    count = blocks * (SIZES[0] * SIZES[1] * SIZES[2])
    tiles = tile_count(count, layers, SHAPE.elements, ROWS, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=TILING.stages):
        layer, column, there, mask, block, first, second, third = tile_rows(
            tile, count, SHAPE.elements, SIZES, ROWS, COLUMNS
        )
        chosen = tl.load(source.ids + block, mask=there, other=0)
        at = row_offset(source, chosen, first, second, third) * UNIT
        begin = end_base(source, layer, FROM, FROM_ALIGN, TABLE)
        values = tl.load(
            begin + at[:, None] + column[None, :], mask=mask, other=0.0,
            eviction_policy=TILING.evict, cache_modifier=TILING.load,
        )  # fmt: skip
        made = as_element(values.to(tl.float32) * tl.load(factors + layer), TO, PTX)
        place = tl.load(target.ids + block, mask=there, other=0)
        to = row_offset(target, place, first, second, third) * UNIT
        end = end_base(target, layer, TO, TO_ALIGN, TABLE)
        tl.store(
            end + to[:, None] + column[None, :], made, mask=mask, eviction_policy=TILING.evict,
            cache_modifier=TILING.store,
        )  # fmt: skip
