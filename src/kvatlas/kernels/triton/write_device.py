"""Device code that quantises rows and writes them to pages: the inverse of `dequantise_device`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import TileStates, column_offsets, row_offsets
from kvatlas.kernels.triton.hadamard_device import hadamard
from kvatlas.kernels.triton.quantise_device import (
    E4M3_MAX,
    HALF_LEAST,
    HALF_MAX,
    LEAST,
    SHARED_PART,
    TINY,
    as_element,
    away,
    bf16_pairs,
    by_twos,
    code_words,
    corrected,
    e2m1_words,
    fifteenth_of,
    four_bits,
    inverse_of,
    larger,
    largest_of,
    level_codes,
    nan_unless_finite,
    nearest_code,
    pairs_apart,
    quick_inverse,
    quotient,
    range_of,
    range_of_pairs,
    share_of,
    signed,
    to_e2m1,
    whole_words,
)


@triton.jit
def unaligned(offsets):
    """Return the same offsets, but hide their alignment from the compiler (in PTX).

    The compiler stores aligned data 16 bytes at a time, and first exchanges it between threads
    through shared memory. For a few bytes, this costs more than 4-byte stores.
    """
    return tl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [offsets], dtype=tl.int64, is_pure=True, pack=1
    )


@triton.jit
def put_elements(
    buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    TILED: tl.constexpr = 0, IN_PLACE: tl.constexpr = False,
):  # fmt: skip
    """Store the first `COUNT` columns of rows, given as [rows, parts, elements per part].

    If `IN_PLACE` is set, each thread stores its own elements instead of exchanging them with other
    threads for wider stores; see `unaligned`.
    """
    PARTS: tl.constexpr = values.shape[1]
    PART: tl.constexpr = values.shape[2]
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    rows = row_offsets(steps, states, UNIT)
    if IN_PLACE:
        rows = unaligned(rows)
    columns = column_offsets(column, steps, TILED)
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + rows[:, None, None] + columns
    mask = states.there[:, None, None]
    if COUNT != PARTS * PART:
        mask = mask & (column < COUNT)
    tl.store(pointers, values, mask=mask)


@triton.jit
def put_column(buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr):
    """Store one element per row: a scale, a norm or a zero point."""
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + row_offsets(steps, states, UNIT)
    tl.store(pointers, values, mask=states.there)


@triton.jit
def together(codes, BITS: tl.constexpr, PER: tl.constexpr):
    """Pack `PER` adjacent codes, at most eight, into one number, the first in the lowest bits."""
    for i in tl.static_range(3):
        if PER > 2**i:
            first, second = by_twos(codes)
            codes = first + (second << BITS * 2**i)
    return codes


@triton.jit
def words_of(codes, FORMAT: tl.constexpr):
    """Pack 4-bit codes into words as wide as the alignment of rows permits, up to 4 bytes."""
    PER: tl.constexpr = 8 if FORMAT.unit % 4 == 0 else 2 * FORMAT.unit
    WORD: tl.constexpr = tl.int32 if PER == 8 else tl.int16 if PER == 4 else tl.int8
    if FORMAT.ptx and PER == 8:
        return code_words(codes)
    return together(codes, 4, PER).to(WORD)


@triton.jit
def put_words(buffer, steps, states, words, FORMAT: tl.constexpr):
    """Store rows of words, each with several 4-bit codes."""
    BYTES: tl.constexpr = words.dtype.primitive_bitwidth // 8
    IN_PLACE: tl.constexpr = FORMAT.kind == "int4" and FORMAT.ptx
    put_elements(
        buffer, steps, states, words, words.dtype, FORMAT.unit // BYTES, FORMAT.dim // (2 * BYTES),
        0, IN_PLACE,
    )  # fmt: skip


@triton.jit
def put_codes(buffer, steps, states, codes, FORMAT: tl.constexpr):
    """Store codes of 4 or 3 bits; the first code of a byte is in its lowest bits."""
    DIM: tl.constexpr = FORMAT.dim
    if FORMAT.bits == 4:
        put_words(buffer, steps, states, words_of(codes, FORMAT), FORMAT)
    else:
        # Sixteen codes are three 16-bit words; rows and cells of 3-bit codes have an even length.
        tl.static_assert(FORMAT.unit % 2 == 0)
        COUNT: tl.constexpr = codes.shape[0]
        PARTS: tl.constexpr = codes.shape[1]
        PART: tl.constexpr = codes.shape[2] // 16
        eights = tl.reshape(together(codes, 3, 8), [COUNT, PARTS, PART, 2])
        first, second = tl.split(eights)
        column = 3 * (PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :])
        rows = row_offsets(steps, states, FORMAT.unit // 2)[:, None, None]
        pointers = buffer.to(tl.pointer_type(tl.int16)) + rows + column
        mask = states.there[:, None, None] & (column < DIM * 3 // 16)
        tl.store(pointers, first.to(tl.int16), mask=mask)
        tl.store(pointers + 1, ((first >> 16) | (second << 8)).to(tl.int16), mask=mask)
        tl.store(pointers + 2, (second >> 8).to(tl.int16), mask=mask)


@triton.jit
def int4_scale(low, high, PTX: tl.constexpr):
    """Return (step, 1 / step, zero point) of rows with minimum `low` and maximum `high`."""
    low = tl.minimum(low, 0.0)
    span = larger(high, 0.0) - low
    # A step is never close to the limits of float32, so a division without range checks is safe. It
    # is cheaper here, but was slower for 8-bit rows.
    step = nan_unless_finite(tl.maximum(fifteenth_of(span, PTX), LEAST), span)
    inverse = quick_inverse(step) if PTX else inverse_of(step)
    share = corrected(-low * inverse, -low, step, inverse) if PTX else tl.div_rn(-low, step)
    return step, inverse, four_bits(share)


@triton.jit
def put_int4(buffer, steps, states, rotated, ELEMENT: tl.constexpr, FORMAT: tl.constexpr):
    """Store rotated rows as 4-bit codes; return (quantisation steps, zero points) of the rows.

    Rows are first rounded to the model's dtype, as in the torch kernels.
    """
    if FORMAT.ptx and FORMAT.unit % 4 == 0:
        even, odd = by_twos(rotated)
        if ELEMENT == tl.bfloat16:
            pairs = bf16_pairs(even, odd)
            low, high = range_of_pairs(pairs)
            even, odd = pairs_apart(pairs)
        else:
            exact = rotated.to(ELEMENT).to(tl.float32)
            low, high = range_of(exact, FORMAT.ptx)
            even, odd = by_twos(exact)
        step, inverse, zero = int4_scale(low, high, FORMAT.ptx)
        # Adding 0.5 and rounding down gives the same codes with one addition instead of two.
        half = zero.to(tl.float32)[:, None, None] + 0.5
        factor = inverse[:, None, None]
        words = whole_words(even * factor + half, odd * factor + half)
        words = words & tl.where(step == step, -1, 0)[:, None, None]
        put_words(buffer, steps, states, words, FORMAT)
    else:
        exact = rotated.to(ELEMENT).to(tl.float32)
        low, high = range_of(exact, FORMAT.ptx)
        step, inverse, zero = int4_scale(low, high, FORMAT.ptx)
        codes = exact * inverse[:, None, None]
        codes += zero.to(tl.float32)[:, None, None]
        put_codes(buffer, steps, states, four_bits(codes), FORMAT)
    return step, zero


@triton.jit
def put_side(buffer, side, states, rows, FORMAT: tl.constexpr, PER_TENSOR: tl.constexpr):
    """Quantise rows of K or V to their storage format, and store them with their scales."""
    KIND: tl.constexpr = FORMAT.kind
    ELEMENT: tl.constexpr = FORMAT.element
    UNIT: tl.constexpr = FORMAT.unit
    SCALE_UNIT: tl.constexpr = FORMAT.scale_unit
    ROTATION: tl.constexpr = FORMAT.rotation
    at = side.at
    if KIND == "plain":
        if PER_TENSOR:
            scale = tl.full([1, 1, 1], 1.0, tl.float32) * side.scale
            rows = quotient(rows.to(tl.float32), scale, FORMAT.ptx)
        stored = as_element(rows, ELEMENT, FORMAT.ptx)
        put_elements(buffer, at.rows, states, stored, ELEMENT, UNIT, FORMAT.dim, FORMAT.tile)
    elif KIND == "scaled":
        exact = rows.to(tl.float32)
        largest = largest_of(largest_of(exact, 1, FORMAT.ptx), 1, FORMAT.ptx)
        TOP: tl.constexpr = 127.0 if ELEMENT == tl.int8 else E4M3_MAX
        step = nan_unless_finite(tl.maximum(share_of(largest, TOP), LEAST), largest)
        stored = exact * inverse_of(step)[:, None, None]
        stored = away(stored) if ELEMENT == tl.int8 else tl.clamp(stored, -E4M3_MAX, E4M3_MAX)
        put_elements(buffer, at.rows, states, stored.to(ELEMENT), ELEMENT, UNIT, FORMAT.dim)
        put_column(buffer, at.scales, states, step, tl.float32, SCALE_UNIT)
    elif KIND == "int4":
        rotated = hadamard(signed(rows, side.table, FORMAT.ptx), ROTATION)
        step, zero = put_int4(buffer, at.rows, states, rotated, rows.dtype, FORMAT)
        # The zero point is stored in the lowest bits of the scale.
        word = (step.to(tl.int32, bitcast=True) & -16) | zero
        if FORMAT.ptx:
            # The scale is broadcast to the words of a part, but only the first word is stored. The
            # threads that hold a row's codes then also hold its scale, and need not exchange it.
            words = tl.broadcast_to(word[:, None, None], [word.shape[0], 1, SHARED_PART // 8])
            put_elements(buffer, at.scales, states, words, tl.int32, SCALE_UNIT, 1, 0, True)
        else:
            put_column(buffer, at.scales, states, word, tl.int32, SCALE_UNIT)
    elif KIND == "nvfp4":
        COUNT: tl.constexpr = rows.shape[0]
        BLOCKS: tl.constexpr = FORMAT.width // 16
        halves = tl.reshape(rows.to(tl.float32), [COUNT, 2, BLOCKS, 8])
        largest = largest_of(largest_of(halves, 3, FORMAT.ptx), 1, FORMAT.ptx)
        six = tl.full([1, 1], 6.0, tl.float32)
        scale = tl.full([1, 1], 1.0, tl.float32) * side.scale
        share = quotient(quotient(largest, six, FORMAT.ptx), scale, FORMAT.ptx)
        share = nan_unless_finite(share, largest)
        step = as_element(share, tl.float8e4nv, FORMAT.ptx)
        exact = step.to(tl.float32) * side.scale
        divisor = tl.maximum(exact, TINY)[:, None, :, None]
        if FORMAT.ptx and UNIT % 4 == 0:
            words = e2m1_words(halves, divisor)
        else:
            codes = to_e2m1(halves, divisor, FORMAT.ptx)
            words = words_of(tl.reshape(codes, rows.shape), FORMAT)
        PER_HALF: tl.constexpr = words.shape[2] // BLOCKS
        words = tl.permute(tl.reshape(words, [COUNT, 2, BLOCKS, PER_HALF]), (0, 2, 1, 3))
        words = tl.reshape(words, [COUNT, BLOCKS, 2 * PER_HALF])
        # Blocks whose scale is zero or NaN are stored as zeros.
        words = words & tl.where(exact > 0.0, -1, 0).to(words.dtype)[:, :, None]
        put_words(buffer, at.rows, states, words, FORMAT)
        step = tl.reshape(step, [COUNT, 1, BLOCKS])
        put_elements(buffer, at.scales, states, step, tl.float8e4nv, SCALE_UNIT, FORMAT.dim // 16)
    elif KIND == "levels":
        exact = rows.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(tl.sum(exact * exact, 1), 1))
        length = tl.maximum(norm, TINY)
        # The unnormalised transform multiplies by sqrt(D), and elements of a unit row have variance
        # 1 / D, so both factors cancel. The sum of squares depends on its order anyway, so the
        # quotient need not be correctly rounded.
        unit = hadamard(exact, ROTATION) * inverse_of(length)[:, None, None]
        put_codes(buffer, at.rows, states, level_codes(unit, FORMAT.bits), FORMAT)
        half = nan_unless_finite(tl.minimum(norm, HALF_MAX), norm).to(tl.float16)
        put_column(buffer, at.scales, states, half, tl.float16, SCALE_UNIT)
    else:
        exact = rows.to(tl.float32)
        MOST: tl.constexpr = (1 << FORMAT.bits) - 1
        low, high = range_of(exact, FORMAT.ptx)
        span = high - low
        step = tl.clamp(share_of(span, MOST), HALF_LEAST, HALF_MAX)
        half = nan_unless_finite(step, span).to(tl.float16)
        zero = tl.clamp(low, -HALF_MAX, HALF_MAX).to(tl.float16)
        above = exact - zero.to(tl.float32)[:, None, None]
        steps = quotient(above, half.to(tl.float32)[:, None, None], FORMAT.ptx)
        codes = nearest_code(tl.minimum(tl.maximum(steps, 0.0), MOST))
        put_codes(buffer, at.rows, states, codes, FORMAT)
        put_column(buffer, at.scales, states, half, tl.float16, SCALE_UNIT)
        put_column(buffer, at.zeros, states, zero, tl.float16, FORMAT.zero_unit)


@triton.jit
def get_rows(batch, token, head, tokens, FORMAT: tl.constexpr):
    """Load rows of a batch [tokens, heads, D] as [rows, parts, elements per part].

    With several parts, few threads share a row, so its maximum and scale need little exchange.
    Formats without a scale have a single part. For nvfp4, part 0 has the first 8 elements of each
    block of 16, and part 1 the last 8, so that a thread holds whole blocks. int4 is limited by
    instructions more than by memory, so it loads without masks: rows past the end repeat the last
    token.
    """
    NVFP4: tl.constexpr = FORMAT.kind == "nvfp4"
    MOST: tl.constexpr = FORMAT.width // 2 if NVFP4 else SHARED_PART
    PART: tl.constexpr = FORMAT.width if FORMAT.kind == "plain" else min(FORMAT.width, MOST)
    PARTS: tl.constexpr = FORMAT.width // PART
    UNMASKED: tl.constexpr = FORMAT.kind == "int4" and FORMAT.dim == FORMAT.width
    there = token < tokens
    if UNMASKED:
        token = tl.minimum(token, tokens - 1)
    starts = batch.tensor + token.to(tl.int64) * batch.token + head.to(tl.int64) * batch.head
    part = tl.arange(0, PARTS)[None, :, None]
    place = tl.arange(0, PART)[None, None, :]
    column = 16 * (place // 8) + 8 * part + place % 8 if NVFP4 else PART * part + place
    pointers = starts[:, None, None] + column
    if UNMASKED:
        return tl.load(pointers)
    mask = there[:, None, None]
    if FORMAT.dim != FORMAT.width:
        mask = mask & (column < FORMAT.dim)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def write_rows(
    k, v, slots, tokens, buffer, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    HEADS: tl.constexpr, STATES: tl.constexpr, COUNT: tl.constexpr, PER_TENSOR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write `COUNT` rows of K and V per program; negative slots are skipped."""
    after_previous(EARLY)
    before_next(EARLY)
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token = row // HEADS
    head = row % HEADS
    # Rows are loaded even if their slot is negative, so that no load waits for another.
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    k_rows = get_rows(k.rows, token, head, tokens, K_FORMAT)
    v_rows = get_rows(v.rows, token, head, tokens, V_FORMAT)
    if K_FORMAT.kind == "int4":
        # Unsigned division is cheaper. It is wrong for negative slots, but these are not stored.
        place = slot.to(tl.uint64)
        page, state = (place // STATES).to(tl.uint32), (place % STATES).to(tl.uint32)
    else:
        page, state = (slot // STATES).to(tl.int32), (slot % STATES).to(tl.int32)
    states = TileStates(page, 0, state, head, slot >= 0)
    put_side(buffer, k, states, k_rows, K_FORMAT, PER_TENSOR)
    put_side(buffer, v, states, v_rows, V_FORMAT, PER_TENSOR)
