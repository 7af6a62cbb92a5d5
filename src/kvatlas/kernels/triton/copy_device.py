"""Device code of copies: rows of words, and tiles that are turned on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _base(address, table, layer, WORD: tl.constexpr, ALIGN: tl.constexpr, TABLE: tl.constexpr):
    """The first word of a side, from its address or from a table of them, one for each layer."""
    if TABLE:
        address = tl.load(table + layer)
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN)


@triton.jit
def _coordinates(row, SIZES: tl.constexpr):
    """A row's number as coordinates of three axes, and what is left: its block."""
    third = row % SIZES[2]
    row = row // SIZES[2]
    second = row % SIZES[1]
    row = row // SIZES[1]
    return row // SIZES[0], row % SIZES[0], second, third


@triton.jit
def copy_rows(
    source, target, source_table, target_table, ids, places, blocks, layers, from_steps, to_steps,
    SIZES: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr, FILL: tl.constexpr,
    EVICT: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of `WORDS` words that are contiguous on both sides; `FILL` writes zeros instead.

    Rows are numbered (block, three axes); a program takes `ROWS` of them at a time. Steps
    are in units, those of the block first.
    """
    ALIGN: tl.constexpr = UNIT * (WORD.primitive_bitwidth // 8)
    PER_BLOCK: tl.constexpr = SIZES[0] * SIZES[1] * SIZES[2]
    CHUNKS: tl.constexpr = (WORDS + COLUMNS - 1) // COLUMNS
    count = blocks * PER_BLOCK
    groups = (count + ROWS - 1) // ROWS
    tiles = groups * layers * CHUNKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        chunk = tile % CHUNKS
        group = tile // CHUNKS
        layer = group // groups
        row = (group % groups) * ROWS + tl.arange(0, ROWS)
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        there = row < count
        block, first, second, third = _coordinates(row, SIZES)
        place = tl.load(places + block, mask=there, other=0).to(tl.int64)
        to = place * to_steps[0] + first.to(tl.int64) * to_steps[1]
        to += second.to(tl.int64) * to_steps[2] + third.to(tl.int64) * to_steps[3]
        mask = there[:, None]
        if WORDS % COLUMNS != 0:
            mask = mask & (column < WORDS)[None, :]
        if FILL:
            words = tl.zeros([ROWS, COLUMNS], WORD)
        else:
            chosen = tl.load(ids + block, mask=there, other=0).to(tl.int64)
            at = chosen * from_steps[0] + first.to(tl.int64) * from_steps[1]
            at += second.to(tl.int64) * from_steps[2] + third.to(tl.int64) * from_steps[3]
            begin = _base(source, source_table, layer, WORD, ALIGN, TABLE)
            pointers = begin + (at * UNIT)[:, None] + column[None, :]
            words = tl.load(pointers, mask=mask, eviction_policy=EVICT, cache_modifier=LOAD)
        end = _base(target, target_table, layer, WORD, ALIGN, TABLE)
        pointers = end + (to * UNIT)[:, None] + column[None, :]
        tl.store(pointers, words, mask=mask, eviction_policy=EVICT, cache_modifier=STORE)


@triton.jit
def copy_turned(
    source, target, source_table, target_table, ids, places, blocks, layers, from_steps, to_steps,
    SIZES: tl.constexpr, WORD: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Items that are neighbours along one axis in the source and along another in the target.

    A tile is read along `ACROSS` (steps last in `from_steps`) and written along `DOWN`
    (steps last but one), so that both sides touch neighbouring bytes.
    """
    X: tl.constexpr = (DOWN + ROWS - 1) // ROWS
    Y: tl.constexpr = (ACROSS + COLUMNS - 1) // COLUMNS
    PER_BLOCK: tl.constexpr = SIZES[0] * SIZES[1] * SIZES[2] * X * Y
    per_layer = blocks * PER_BLOCK
    for tile in range(tl.program_id(0), per_layer * layers, tl.num_programs(0)):
        layer = tile // per_layer
        rest = tile % per_layer
        down = (rest % X) * ROWS + tl.arange(0, ROWS)
        rest = rest // X
        across = (rest % Y) * COLUMNS + tl.arange(0, COLUMNS)
        block, first, second, third = _coordinates(rest // Y, SIZES)
        mask = (down < DOWN)[:, None] & (across < ACROSS)[None, :]
        at = tl.load(ids + block).to(tl.int64) * from_steps[0] + first.to(tl.int64) * from_steps[1]
        at += second.to(tl.int64) * from_steps[2] + third.to(tl.int64) * from_steps[3]
        to = tl.load(places + block).to(tl.int64) * to_steps[0] + first.to(tl.int64) * to_steps[1]
        to += second.to(tl.int64) * to_steps[2] + third.to(tl.int64) * to_steps[3]
        begin = _base(source, source_table, layer, WORD, 1, TABLE) + at
        end = _base(target, target_table, layer, WORD, 1, TABLE) + to
        down, across = down.to(tl.int64)[:, None], across.to(tl.int64)[None, :]
        words = tl.load(begin + down * from_steps[4] + across * from_steps[5], mask=mask)
        tl.store(end + down * to_steps[4] + across * to_steps[5], words, mask=mask)
