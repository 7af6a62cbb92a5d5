"""Device code that copies runs: contiguous ranges of bytes or elements.

The runs are given by two short tables, starts and spans (see `address_runs`). There is one run for
every combination of a start and a span. The offset of a run is the start's offset plus the span's
offset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.quantise_device import as_element


@triton.jit
def tile_runs(
    tile, starts, spans, first_count, second_count, rows, words, WIDTH: tl.constexpr,
    TILING: tl.constexpr,
):  # fmt: skip
    """Return (start numbers, source offsets, target offsets, columns, mask) of a tile of runs.

    A run's offset is the offset of a start plus the offset of a span. The start number is the index
    of the start. Offsets are in bytes or elements, like the tables `starts` and `spans`. A word
    consists of `WIDTH` bytes or elements.
    """
    ROWS: tl.constexpr = TILING.rows
    COLUMNS: tl.constexpr = TILING.columns
    chunks = tl.cdiv(words, COLUMNS)
    row = (tile // chunks) * ROWS + tl.arange(0, ROWS)
    column = (tile % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    if TILING.starts_first:
        start = row % first_count
        span = row // first_count
    else:
        span = row % second_count
        start = row // second_count
    at = tl.load(starts + start, mask=there, other=0)
    at += tl.load(spans + span, mask=there, other=0)
    to = tl.load(starts + first_count + start, mask=there, other=0)
    to += tl.load(spans + second_count + span, mask=there, other=0)
    mask = there[:, None]
    if not TILING.whole:
        length = tl.load(spans + 2 * second_count + span, mask=there, other=0) // WIDTH
        mask = mask & (column[None, :] < length[:, None])
    return start, at, to, column, mask


# One kernel for all sizes: alignment is passed explicitly, so Triton need not specialise.
@triton.jit(do_not_specialize=["source", "target", "first_count", "second_count", "rows", "words"])
def copy_run_grid(
    source, target, starts, spans, first_count, second_count, rows, words,
    WORD: tl.constexpr, UNIT: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Copy runs of contiguous words, one for every combination of a start and a span.

    The offsets of a start and a span are added. `starts` has a row of source offsets and a row of
    target offsets. `spans` has these two rows and a row of lengths. All offsets and lengths are in
    bytes.
    """
    ROWS: tl.constexpr = TILING.rows
    COLUMNS: tl.constexpr = TILING.columns
    WIDTH: tl.constexpr = WORD.primitive_bitwidth // 8
    ALIGN: tl.constexpr = UNIT * WIDTH
    # Addresses of host memory may be small; Triton then passes them in 32 bits.
    begin = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    end = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(WORD)), ALIGN)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(words, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=TILING.stages):
        _, at, to, column, mask = tile_runs(
            tile, starts, spans, first_count, second_count, rows, words, WIDTH, TILING
        )
        # Divide and multiply: the compiler infers alignment from a product, not from a load.
        pointers = begin + ((at // ALIGN) * UNIT)[:, None] + column[None, :]
        moved = tl.load(pointers, mask=mask, eviction_policy=TILING.evict)
        pointers = end + ((to // ALIGN) * UNIT)[:, None] + column[None, :]
        tl.store(pointers, moved, mask=mask, eviction_policy=TILING.evict)


@triton.jit
def quotient(values, divisor, inverse):
    """Return values divided by a divisor, correctly rounded, given its rounded inverse.

    A division has branches and takes three times as long. The remainder of the first guess is
    exact, so the second guess is correctly rounded (P. Markstein, 1990).
    """
    guess = values * inverse
    left = tl.fma(-guess, divisor, values)
    better = tl.fma(left, inverse, guess)
    # Normally the remainder is far smaller than the value. If it is not, the value is 0, or the
    # guess underflowed or is not finite; the guess is then already correct, including its sign.
    return tl.where(tl.abs(left) < tl.abs(values), better, guess)


@triton.jit(
    do_not_specialize=["source", "target", "first_count", "second_count", "rows", "elements"]
)
def convert_run_grid(
    source, target, starts, spans, scales, first_count, second_count, rows, elements,
    CAST: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Copy runs and convert elements: one run for every combination of a start and a span.

    The tables are as in `copy_run_grid`, but offsets and lengths are in elements. `scales` [3,
    starts] has a row of factors, a row of divisors, and a row of inverses of the divisors.
    """
    FROM: tl.constexpr = CAST.source
    TO: tl.constexpr = CAST.target
    UNIT: tl.constexpr = CAST.unit
    FROM_ALIGN: tl.constexpr = UNIT * (FROM.primitive_bitwidth // 8)
    TO_ALIGN: tl.constexpr = UNIT * (TO.primitive_bitwidth // 8)
    begin = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(FROM)), FROM_ALIGN)
    end = tl.multiple_of(target.to(tl.int64).to(tl.pointer_type(TO)), TO_ALIGN)
    tiles = tl.cdiv(rows, TILING.rows) * tl.cdiv(elements, TILING.columns)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=TILING.stages):
        start, at, to, column, mask = tile_runs(
            tile, starts, spans, first_count, second_count, rows, elements, 1, TILING
        )
        pointers = begin + ((at // UNIT) * UNIT)[:, None] + column[None, :]
        values = tl.load(pointers, mask=mask, other=0.0, eviction_policy=TILING.evict)
        start = tl.minimum(start, first_count - 1)  # Rows past the end need a valid index too.
        # Two steps, as in the codecs: a single combined factor would round differently.
        exact = values.to(tl.float32) * tl.load(scales + start)[:, None]
        inverse = tl.load(scales + 2 * first_count + start)[:, None]
        if CAST.divides:
            exact = quotient(exact, tl.load(scales + first_count + start)[:, None], inverse)
        else:
            exact *= inverse
        pointers = end + ((to // UNIT) * UNIT)[:, None] + column[None, :]
        made = as_element(exact, TO, CAST.ptx)
        tl.store(pointers, made, mask=mask, eviction_policy=TILING.evict)


@triton.jit(do_not_specialize=["count", "blocks", "source_stride", "target_stride"])
def place_spans(
    source_ids, target_ids, table, count, blocks, source_stride, target_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the source and target offsets of spans (contiguous ranges in a block) from block ids.

    `table` has seven rows: source and target offsets (written here), lengths, the index of a span's
    block id at source and target, and the span's offset in its block at source and target. Source
    ids are not trusted: an id that is not in 0..blocks - 1 becomes 0, which is always readable.
    """
    span = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = span < count
    entry = tl.load(table + 3 * count + span, mask=there, other=0)
    block = tl.load(source_ids + entry, mask=there, other=0)
    block = tl.where((block >= 0) & (block < blocks), block, 0)
    inside = tl.load(table + 5 * count + span, mask=there, other=0)
    tl.store(table + span, block * source_stride + inside, mask=there)
    entry = tl.load(table + 4 * count + span, mask=there, other=0)
    block = tl.load(target_ids + entry, mask=there, other=0)
    inside = tl.load(table + 6 * count + span, mask=there, other=0)
    tl.store(table + count + span, block * target_stride + inside, mask=there)
