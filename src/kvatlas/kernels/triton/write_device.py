"""Device code that quantises rows and puts them into pages: `reading`, the other way round.

A chip's minima, maxima and clamps pass over NaN, and so would make numbers of what is none:
scales are found in ways that do not, and are NaN where what shares them is not all finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import column_offsets, row_offsets
from kvatlas.kernels.triton.hadamard import rotate

TINY = tl.constexpr(1e-12)
LEAST = tl.constexpr(1e-6)
E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
HALF_MAX = tl.constexpr(65504.0)
HALF_LEAST = tl.constexpr(6e-8)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)
EIGHT_BIT_NAN = tl.constexpr(0x7F)


@triton.jit
def nearest(values):
    """Whole numbers, ties to the even one, for values below 2**22."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def away(values):
    """Whole numbers, halves away from zero."""
    moved = values + tl.where(values < 0.0, -0.5, 0.5)
    return tl.where(moved < 0.0, tl.ceil(moved), tl.floor(moved))


@triton.jit
def as_element(values, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers in an element's type; 8-bit floats saturate rather than overflow, and keep NaN."""
    if KIND == tl.float8e4nv or KIND == tl.float8e5:
        MOST: tl.constexpr = E4M3_MAX if KIND == tl.float8e4nv else E5M2_MAX
        exact = tl.clamp(values.to(tl.float32), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        found = exact.to(KIND)
        if not ASSEMBLY:
            # PTX converts NaN to NaN; others may make a number of it.
            code = tl.where(exact == exact, found.to(tl.uint8, bitcast=True), EIGHT_BIT_NAN)
            found = code.to(KIND, bitcast=True)
        return found
    return values.to(KIND)


@triton.jit
def largest_of(values, AXIS: tl.constexpr):
    """The largest size along an axis; not finite where one of them is not.

    Bits of sizes are in the order of sizes, infinity above them and NaN above that.
    """
    size = values.to(tl.int32, bitcast=True) & SIZE_BITS
    return tl.max(size, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def infinite_for_nan(values):
    """Values that a minimum and a maximum do not pass over."""
    return tl.where(values == values, values, float("inf"))


@triton.jit
def nan_unless_finite(found, span):
    """What was found from a span, or NaN where the span is not finite."""
    return tl.where(span < float("inf"), found, float("nan"))


@triton.jit
def share_of(span, parts):
    """One of so many parts of each span."""
    return tl.div_rn(span, tl.full(span.shape, parts, tl.float32))


@triton.jit
def inverse_of(step):
    """What a step is multiplied by to be 1."""
    return tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)


@triton.jit
def to_e2m1(values):
    """The nearest e2m1 code of each value, ties to the even code."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    negative = values.to(tl.int32, bitcast=True) < 0
    return code | (negative.to(tl.int32) << 3)


@triton.jit
def put_elements(
    buffer, at, page, state, head, there, values, KIND: tl.constexpr, UNIT: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, TILED: tl.constexpr = 0,
):  # fmt: skip
    """Tiles of `WIDTH` columns, of which `COUNT` are stored."""
    column = tl.arange(0, WIDTH)
    rows = row_offsets(at, page, state, head, UNIT)
    columns = column_offsets(column, at, TILED)
    pointers = buffer.to(tl.pointer_type(KIND)) + rows[:, None] + columns[None, :]
    mask = there[:, None]
    if COUNT != WIDTH:
        mask = mask & (column < COUNT)[None, :]
    tl.store(pointers, values, mask=mask)


@triton.jit
def put_column(
    buffer, at, page, state, head, there, values, KIND: tl.constexpr, UNIT: tl.constexpr
):
    """One element for each row."""
    pointers = buffer.to(tl.pointer_type(KIND)) + row_offsets(at, page, state, head, UNIT)
    tl.store(pointers, values, mask=there)


@triton.jit
def put_codes(
    buffer, at, page, state, head, there, codes, BITS: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Codes of 4 or 3 bits, the first one of a byte in its lowest bits."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, [COUNT, WIDTH // 2, 2]))
        put_elements(
            buffer, at, page, state, head, there, (low | (high << 4)).to(tl.uint8), tl.uint8,
            UNIT, DIM // 2, WIDTH // 2,
        )  # fmt: skip
    else:
        place = tl.arange(0, 8)[None, None, :]
        words = tl.sum(tl.reshape(codes, [COUNT, WIDTH // 8, 8]) << (3 * place), 2)
        column = 3 * tl.arange(0, WIDTH // 8)
        rows = row_offsets(at, page, state, head, UNIT)
        for i in tl.static_range(3):
            pointers = buffer + rows[:, None] + ((column + i) * at[4])[None, :]
            mask = there[:, None] & (column + i < DIM * 3 // 8)[None, :]
            tl.store(pointers, ((words >> (8 * i)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def put_side(
    buffer, at, scale_at, zero_at, bounds, page, state, head, there, rows, scale,
    FORM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
    COUNT: tl.constexpr, PER_TENSOR: tl.constexpr,
):  # fmt: skip
    """Rows of one side, with their scales, as their form wants them."""
    KIND: tl.constexpr = FORM[0]
    ELEMENT: tl.constexpr = FORM[1]
    UNIT: tl.constexpr = FORM[2]
    if KIND == "plain":
        if PER_TENSOR:
            rows = tl.div_rn(rows.to(tl.float32), scale)
        put_elements(
            buffer, at, page, state, head, there, as_element(rows, ELEMENT, FORM[6]), ELEMENT,
            UNIT, DIM, WIDTH, FORM[7],
        )  # fmt: skip
    elif KIND == "scaled":
        exact = rows.to(tl.float32)
        largest = largest_of(exact, 1)
        TOP: tl.constexpr = 127.0 if ELEMENT == tl.int8 else E4M3_MAX
        step = nan_unless_finite(tl.maximum(share_of(largest, TOP), LEAST), largest)
        stored = exact * inverse_of(step)[:, None]
        if ELEMENT == tl.int8:
            stored = tl.clamp(away(stored), -128.0, 127.0)
        else:
            stored = tl.clamp(stored, -E4M3_MAX, E4M3_MAX)
        put_elements(
            buffer, at, page, state, head, there, stored.to(ELEMENT), ELEMENT, UNIT, DIM, WIDTH
        )
        put_column(buffer, scale_at, page, state, head, there, step, tl.float32, FORM[3])
    elif KIND == "int4":
        # Turned, and rounded to the model's own type, as the torch kernels do it.
        sign = tl.load(bounds + tl.arange(0, WIDTH) % 2**STEPS)[None, :]
        turned = rotate(rows.to(tl.float32) * sign, COUNT, WIDTH, STEPS)
        exact = infinite_for_nan(turned.to(rows.dtype).to(tl.float32))
        low = tl.minimum(tl.min(exact, 1), 0.0)
        span = tl.maximum(tl.max(exact, 1), 0.0) - low
        step = nan_unless_finite(tl.maximum(share_of(span, 15.0), LEAST), span)
        zero = tl.clamp(away(tl.div_rn(-low, step)), 0.0, 15.0)
        steps = exact * inverse_of(step)[:, None]
        codes = tl.clamp(away(steps + zero[:, None]), 0.0, 15.0).to(tl.int32)
        put_codes(buffer, at, page, state, head, there, codes, 4, UNIT, DIM, WIDTH, COUNT)
        # The zero point rides in the scale's lowest bits.
        word = (step.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
        put_column(buffer, scale_at, page, state, head, there, word, tl.int32, FORM[3])
    elif KIND == "nvfp4":
        blocks = tl.reshape(rows.to(tl.float32), [COUNT, WIDTH // 16, 16])
        largest = largest_of(blocks, 2)
        share = nan_unless_finite(share_of(share_of(largest, 6.0), scale), largest)
        step = as_element(share, tl.float8e4nv, FORM[6])
        exact = step.to(tl.float32) * scale
        wide = tl.broadcast_to(tl.maximum(exact, TINY)[:, :, None], [COUNT, WIDTH // 16, 16])
        values = tl.where((exact > 0.0)[:, :, None], tl.div_rn(blocks, wide), 0.0)
        codes = to_e2m1(tl.reshape(values, [COUNT, WIDTH]))
        put_codes(buffer, at, page, state, head, there, codes, 4, UNIT, DIM, WIDTH, COUNT)
        put_elements(
            buffer, scale_at, page, state, head, there, step, tl.float8e4nv, FORM[3], DIM // 16,
            WIDTH // 16,
        )  # fmt: skip
    elif KIND == "levels":
        exact = rows.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(exact * exact, 1))
        length = tl.maximum(norm, TINY)
        # A rotation of rows of norm 1 has elements of variance 1 / D: sqrt(D) cancels.
        unit = tl.div_rn(
            rotate(exact, COUNT, WIDTH, STEPS), tl.broadcast_to(length[:, None], [COUNT, WIDTH])
        )
        codes = tl.zeros([COUNT, WIDTH], tl.int32)
        for i in tl.static_range((1 << FORM[5]) - 1):
            codes += (unit > tl.load(bounds + i)).to(tl.int32)
        put_codes(buffer, at, page, state, head, there, codes, FORM[5], UNIT, DIM, WIDTH, COUNT)
        half = nan_unless_finite(tl.minimum(norm, HALF_MAX), norm).to(tl.float16)
        put_column(buffer, scale_at, page, state, head, there, half, tl.float16, FORM[3])
    else:
        exact = infinite_for_nan(rows.to(tl.float32))
        MOST: tl.constexpr = (1 << FORM[5]) - 1
        low = tl.min(exact, 1)
        span = tl.max(exact, 1) - low
        step = tl.clamp(share_of(span, MOST), HALF_LEAST, HALF_MAX)
        half = nan_unless_finite(step, span).to(tl.float16)
        zero = tl.clamp(low, -HALF_MAX, HALF_MAX).to(tl.float16)
        wide = tl.broadcast_to(half.to(tl.float32)[:, None], [COUNT, WIDTH])
        steps = tl.div_rn(exact - zero.to(tl.float32)[:, None], wide)
        codes = tl.clamp(nearest(tl.clamp(steps, -1.0, 64.0)), 0.0, MOST).to(tl.int32)
        put_codes(buffer, at, page, state, head, there, codes, FORM[5], UNIT, DIM, WIDTH, COUNT)
        put_column(buffer, scale_at, page, state, head, there, half, tl.float16, FORM[3])
        put_column(buffer, zero_at, page, state, head, there, zero, tl.float16, FORM[4])


@triton.jit
def get_rows(values, steps, token, head, there, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a batch [tokens, heads, D], as an engine has them."""
    column = tl.arange(0, WIDTH)
    pointers = values + token.to(tl.int64) * steps[0] + head.to(tl.int64) * steps[1]
    mask = there[:, None]
    if DIM != WIDTH:
        mask = mask & (column < DIM)[None, :]
    return tl.load(
        pointers[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def write_rows(
    k, k_steps, v, v_steps, slots, tokens, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
    bounds, v_signs, k_scale, v_scale, K_FORM: tl.constexpr, V_FORM: tl.constexpr,
    HEADS: tl.constexpr, STATES: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    V_STEPS: tl.constexpr, PER_TENSOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes `COUNT` rows of K and of V; a negative slot is skipped."""
    after_previous(EARLY)
    before_next(EARLY)
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token = row // HEADS
    head = row % HEADS
    # Rows are read before it is known whether their slot wants them: no load waits for another.
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    k_rows = get_rows(k, k_steps, token, head, token < tokens, DIM, WIDTH)
    v_rows = get_rows(v, v_steps, token, head, token < tokens, V_DIM, V_WIDTH)
    there = slot >= 0
    page = (slot // STATES).to(tl.int32)
    state = (slot % STATES).to(tl.int32)
    put_side(
        buffer, k_at, k_scale_at, v_zero_at, bounds, page, state, head, there, k_rows, k_scale,
        K_FORM, DIM, WIDTH, STEPS, COUNT, PER_TENSOR,
    )  # fmt: skip
    put_side(
        buffer, v_at, v_scale_at, v_zero_at, v_signs, page, state, head, there, v_rows, v_scale,
        V_FORM, V_DIM, V_WIDTH, V_STEPS, COUNT, PER_TENSOR,
    )  # fmt: skip
