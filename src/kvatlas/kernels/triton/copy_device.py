"""Device code of copies: rows of words, and tiles that are transposed during the copy.

The source and the target of a copy are called its ends. An end has three parts: the address of each
layer (one address, or a table), the block ids, and the strides in units. There are strides for the
block axis, three other axes, and the two axes of a transposed tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def end_base(end, layer, WORD: tl.constexpr, ALIGN: tl.constexpr, TABLE: tl.constexpr):
    """Return the pointer to the first word of a layer at one end (source or target) of a copy."""
    address = tl.load(end.table + layer) if TABLE else end.address
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN)


@triton.jit
def row_coordinates(row, SIZES: tl.constexpr):
    """Split a row number into its block and its coordinates along three axes."""
    third = row % SIZES[2]
    row = row // SIZES[2]
    second = row % SIZES[1]
    row = row // SIZES[1]
    return row // SIZES[0], (row % SIZES[0]).to(tl.int64), second.to(tl.int64), third.to(tl.int64)


@triton.jit
def row_offset(end, block, first, second, third):
    """Return the offset of a row from the first word of `end` (source or target).

    The offset is in units of the strides: `CopyShape.unit` words.
    """
    at = block.to(tl.int64) * end.steps[0] + first * end.steps[1]
    return at + second * end.steps[2] + third * end.steps[3]


@triton.jit
def tile_rows(
    tile, count, WIDTH: tl.constexpr, SIZES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the layer, columns, masks and row coordinates of a tile; rows have `WIDTH` words.

    Rows are numbered by block, then along three axes; each layer has `count` rows.
    """
    CHUNKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    groups = (count + ROWS - 1) // ROWS
    group = tile // CHUNKS
    row = (group % groups) * ROWS + tl.arange(0, ROWS)
    column = (tile % CHUNKS) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < count
    mask = there[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (column < WIDTH)[None, :]
    block, first, second, third = row_coordinates(row, SIZES)
    return group // groups, column, there, mask, block, first, second, third


@triton.jit
def tile_count(count, layers, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the number of tiles into which a copy divides the rows of all layers."""
    return ((count + ROWS - 1) // ROWS) * layers * ((WIDTH + COLUMNS - 1) // COLUMNS)


@triton.jit
def copy_rows(
    source, target, blocks, layers, SHAPE: tl.constexpr, TILING: tl.constexpr, TABLE: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Copy rows of words that are contiguous in both source and target.

    If `FILL` is set, write zeros to the target instead. Rows are numbered by block, then along
    three axes; a program processes several at a time.
    """
    SIZES: tl.constexpr = SHAPE.sizes
    WORD: tl.constexpr = SHAPE.word
    UNIT: tl.constexpr = SHAPE.unit
    ROWS: tl.constexpr = TILING.rows
    COLUMNS: tl.constexpr = TILING.columns
    ALIGN: tl.constexpr = UNIT * (WORD.primitive_bitwidth // 8)
    count = blocks * (SIZES[0] * SIZES[1] * SIZES[2])
    tiles = tile_count(count, layers, SHAPE.words, ROWS, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=TILING.stages):
        layer, column, there, mask, block, first, second, third = tile_rows(
            tile, count, SHAPE.words, SIZES, ROWS, COLUMNS
        )
        place = tl.load(target.ids + block, mask=there, other=0)
        to = row_offset(target, place, first, second, third)
        if FILL:
            words = tl.zeros([ROWS, COLUMNS], WORD)
        else:
            chosen = tl.load(source.ids + block, mask=there, other=0)
            at = row_offset(source, chosen, first, second, third)
            begin = end_base(source, layer, WORD, ALIGN, TABLE)
            pointers = begin + (at * UNIT)[:, None] + column[None, :]
            words = tl.load(
                pointers, mask=mask, eviction_policy=TILING.evict, cache_modifier=TILING.load
            )
        pointers = end_base(target, layer, WORD, ALIGN, TABLE) + (to * UNIT)[:, None]
        tl.store(
            pointers + column[None, :], words, mask=mask, eviction_policy=TILING.evict,
            cache_modifier=TILING.store,
        )  # fmt: skip


@triton.jit
def copy_transposed(
    source, target, blocks, layers, SHAPE: tl.constexpr, TILING: tl.constexpr, TABLE: tl.constexpr
):
    """Copy items that are contiguous along one axis in the source and along another in the target.

    A tile is read along the source's contiguous axis (`ACROSS`, its last stride) and written along
    the target's (`DOWN`, its second to last stride), so both accesses are contiguous.
    """
    SIZES: tl.constexpr = SHAPE.sizes
    WORD: tl.constexpr = SHAPE.word
    DOWN: tl.constexpr = SHAPE.transposed[0]
    ACROSS: tl.constexpr = SHAPE.transposed[1]
    ROWS: tl.constexpr = TILING.rows
    COLUMNS: tl.constexpr = TILING.columns
    X: tl.constexpr = (DOWN + ROWS - 1) // ROWS
    Y: tl.constexpr = (ACROSS + COLUMNS - 1) // COLUMNS
    per_layer = blocks * (SIZES[0] * SIZES[1] * SIZES[2] * X * Y)
    for tile in range(tl.program_id(0), per_layer * layers, tl.num_programs(0)):
        layer = tile // per_layer
        rest = tile % per_layer
        down = (rest % X) * ROWS + tl.arange(0, ROWS)
        rest = rest // X
        across = (rest % Y) * COLUMNS + tl.arange(0, COLUMNS)
        block, first, second, third = row_coordinates(rest // Y, SIZES)
        mask = (down < DOWN)[:, None] & (across < ACROSS)[None, :]
        at = row_offset(source, tl.load(source.ids + block), first, second, third)
        to = row_offset(target, tl.load(target.ids + block), first, second, third)
        begin = end_base(source, layer, WORD, 1, TABLE) + at
        end = end_base(target, layer, WORD, 1, TABLE) + to
        down, across = down.to(tl.int64)[:, None], across.to(tl.int64)[None, :]
        words = tl.load(begin + down * source.steps[4] + across * source.steps[5], mask=mask)
        tl.store(end + down * target.steps[4] + across * target.steps[5], words, mask=mask)
