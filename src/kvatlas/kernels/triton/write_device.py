"""Device code that quantises rows and puts them into pages: `dequantise_device`, inverted.

A chip's minima, maxima and clamps pass over NaN, and so would make numbers of what is none:
scales are found in ways that do not, and are NaN where what shares them is not all finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import TileStates, column_offsets, row_offsets
from kvatlas.kernels.triton.hadamard_device import hadamard

TINY = tl.constexpr(1e-12)
LEAST = tl.constexpr(1e-6)
E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
HALF_MAX = tl.constexpr(65504.0)
HALF_LEAST = tl.constexpr(6e-8)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)
SIGN_BIT = tl.constexpr(-0x80000000)
HALF_BITS = tl.constexpr(0x3F000000)
"""The bits of 0.5."""
EIGHT_BIT_NAN = tl.constexpr(0x7F)


@triton.jit
def nearest(values):
    """Whole numbers, ties to the even one, for values below 2**22."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def away(values):
    """The nearest integers, halves away from zero."""
    half = values.to(tl.int32, bitcast=True) & SIGN_BIT | HALF_BITS
    return (values + half.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def four_bits(codes):
    """The nearest codes of 4 bits."""
    return tl.minimum(tl.maximum(codes, 0), 15)


@triton.jit
def as_element(values, ELEMENT: tl.constexpr, PTX: tl.constexpr):
    """Numbers in an element's type; 8-bit floats saturate rather than overflow, and keep NaN."""
    if ELEMENT == tl.float8e4nv or ELEMENT == tl.float8e5:
        MOST: tl.constexpr = E4M3_MAX if ELEMENT == tl.float8e4nv else E5M2_MAX
        exact = tl.clamp(values.to(tl.float32), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        stored = exact.to(ELEMENT)
        if not PTX:
            # PTX converts NaN to NaN; others may make a number of it.
            code = tl.where(exact == exact, stored.to(tl.uint8, bitcast=True), EIGHT_BIT_NAN)
            stored = code.to(ELEMENT, bitcast=True)
        return stored
    return values.to(ELEMENT)


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
def nan_unless_finite(values, span):
    """Values, or NaN where the span that they come from is not finite."""
    return tl.where(span < float("inf"), values, float("nan"))


@triton.jit
def share_of(span, parts):
    """One of so many parts of each span."""
    return tl.div_rn(span, tl.full(span.shape, parts, tl.float32))


@triton.jit
def inverse_of(step):
    """What a step is multiplied by to be 1."""
    return tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)


@triton.jit
def quotient(values, divisor, PTX: tl.constexpr):
    """Values over a divisor that many share, rounded as a division is.

    The inverse is found once; what its product is off by is found exactly and divided again,
    which rounds as it should (Markstein), for sizes that neither overflow nor vanish.
    """
    if PTX:
        inverse = inverse_of(divisor)
        near = values * inverse
        exact = tl.fma(tl.fma(-near, divisor, values), inverse, near)
        return tl.where(tl.abs(near) < float("inf"), exact, near)
    # Interpreted, a product and a sum are rounded one by one.
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def to_e2m1(values):
    """The nearest e2m1 code of each value, ties to the even code.

    Up to 1 codes count halves, which are the last bits of 1.5 * 2**22; from there on they are
    the exponent and the first bit of the fraction, 252 more than 2 for a 1.
    """
    size = tl.minimum(tl.abs(values), 6.0)
    few = (size + 6291456.0).to(tl.int32, bitcast=True) & 3
    bits = size.to(tl.int32, bitcast=True)
    more = (bits + ((bits >> 22) & 1) + (0x1FFFFF - (252 << 22))) >> 22
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(size < 1.0, few, more) | sign


@triton.jit
def put_elements(
    buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    WIDTH: tl.constexpr, TILED: tl.constexpr = 0,
):  # fmt: skip
    """Tiles of `WIDTH` columns, of which `COUNT` are stored."""
    column = tl.arange(0, WIDTH)
    rows = row_offsets(steps, states, UNIT)
    columns = column_offsets(column, steps, TILED)
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + rows[:, None] + columns[None, :]
    mask = states.there[:, None]
    if COUNT != WIDTH:
        mask = mask & (column < COUNT)[None, :]
    tl.store(pointers, values, mask=mask)


@triton.jit
def put_column(buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr):
    """One element for each row."""
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + row_offsets(steps, states, UNIT)
    tl.store(pointers, values, mask=states.there)


@triton.jit
def put_codes(buffer, steps, states, codes, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    """Codes of 4 or 3 bits, the first one of a byte in its lowest bits."""
    DIM: tl.constexpr = FORMAT.dim
    WIDTH: tl.constexpr = FORMAT.width
    if FORMAT.bits == 4:
        low, high = tl.split(tl.reshape(codes, [COUNT, WIDTH // 2, 2]))
        both = (low | (high << 4)).to(tl.uint8)
        put_elements(buffer, steps, states, both, tl.uint8, FORMAT.unit, DIM // 2, WIDTH // 2)
    else:
        place = tl.arange(0, 8)[None, None, :]
        words = tl.sum(tl.reshape(codes, [COUNT, WIDTH // 8, 8]) << (3 * place), 2)
        column = 3 * tl.arange(0, WIDTH // 8)
        rows = row_offsets(steps, states, FORMAT.unit)
        for i in tl.static_range(3):
            pointers = buffer + rows[:, None] + ((column + i) * steps.element)[None, :]
            mask = states.there[:, None] & (column + i < DIM * 3 // 8)[None, :]
            tl.store(pointers, ((words >> (8 * i)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def put_side(
    buffer, side, states, rows, FORMAT: tl.constexpr, COUNT: tl.constexpr, PER_TENSOR: tl.constexpr
):
    """Rows of one side, with their scales, as their format wants them."""
    KIND: tl.constexpr = FORMAT.kind
    ELEMENT: tl.constexpr = FORMAT.element
    UNIT: tl.constexpr = FORMAT.unit
    SCALE_UNIT: tl.constexpr = FORMAT.scale_unit
    WIDTH: tl.constexpr = FORMAT.width
    ROTATION: tl.constexpr = FORMAT.rotation
    at = side.at
    if KIND == "plain":
        if PER_TENSOR:
            scale = tl.full([1, 1], 1.0, tl.float32) * side.scale
            rows = quotient(rows.to(tl.float32), scale, FORMAT.ptx)
        stored = as_element(rows, ELEMENT, FORMAT.ptx)
        put_elements(buffer, at.rows, states, stored, ELEMENT, UNIT, FORMAT.dim, WIDTH, FORMAT.tile)
    elif KIND == "scaled":
        exact = rows.to(tl.float32)
        largest = largest_of(exact, 1)
        TOP: tl.constexpr = 127.0 if ELEMENT == tl.int8 else E4M3_MAX
        step = nan_unless_finite(tl.maximum(share_of(largest, TOP), LEAST), largest)
        stored = exact * inverse_of(step)[:, None]
        stored = away(stored) if ELEMENT == tl.int8 else tl.clamp(stored, -E4M3_MAX, E4M3_MAX)
        put_elements(buffer, at.rows, states, stored.to(ELEMENT), ELEMENT, UNIT, FORMAT.dim, WIDTH)
        put_column(buffer, at.scales, states, step, tl.float32, SCALE_UNIT)
    elif KIND == "int4":
        # Rotated, and rounded to the model's own type, as the torch kernels do it.
        sign = tl.load(side.table + tl.arange(0, WIDTH) % 2**ROTATION)[None, :]
        rotated = hadamard(rows.to(tl.float32) * sign, COUNT, WIDTH, ROTATION)
        exact = infinite_for_nan(rotated.to(rows.dtype).to(tl.float32))
        low = tl.minimum(tl.min(exact, 1), 0.0)
        span = tl.maximum(tl.max(exact, 1), 0.0) - low
        step = nan_unless_finite(tl.maximum(share_of(span, 15.0), LEAST), span)
        zero = four_bits(away(tl.div_rn(-low, step)))
        steps = exact * inverse_of(step)[:, None]
        codes = four_bits(away(steps + zero.to(tl.float32)[:, None]))
        put_codes(buffer, at.rows, states, codes, FORMAT, COUNT)
        # The zero point rides in the scale's lowest bits.
        word = (step.to(tl.int32, bitcast=True) & -16) | zero
        put_column(buffer, at.scales, states, word, tl.int32, SCALE_UNIT)
    elif KIND == "nvfp4":
        blocks = tl.reshape(rows.to(tl.float32), [COUNT, WIDTH // 16, 16])
        largest = largest_of(blocks, 2)
        six = tl.full([1, 1], 6.0, tl.float32)
        scale = tl.full([1, 1], 1.0, tl.float32) * side.scale
        share = quotient(quotient(largest, six, FORMAT.ptx), scale, FORMAT.ptx)
        share = nan_unless_finite(share, largest)
        step = as_element(share, tl.float8e4nv, FORMAT.ptx)
        exact = step.to(tl.float32) * side.scale
        values = quotient(blocks, tl.maximum(exact, TINY)[:, :, None], FORMAT.ptx)
        values = tl.where((exact > 0.0)[:, :, None], values, 0.0)
        codes = to_e2m1(tl.reshape(values, [COUNT, WIDTH]))
        put_codes(buffer, at.rows, states, codes, FORMAT, COUNT)
        put_elements(
            buffer, at.scales, states, step, tl.float8e4nv, SCALE_UNIT, FORMAT.dim // 16,
            WIDTH // 16,
        )  # fmt: skip
    elif KIND == "levels":
        exact = rows.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(exact * exact, 1))
        length = tl.maximum(norm, TINY)
        # A rotation of rows of norm 1 has elements of variance 1 / D: sqrt(D) cancels.
        unit = quotient(hadamard(exact, COUNT, WIDTH, ROTATION), length[:, None], FORMAT.ptx)
        codes = tl.zeros([COUNT, WIDTH], tl.int32)
        for i in tl.static_range((1 << FORMAT.bits) - 1):
            codes += (unit > tl.load(side.table + i)).to(tl.int32)
        put_codes(buffer, at.rows, states, codes, FORMAT, COUNT)
        half = nan_unless_finite(tl.minimum(norm, HALF_MAX), norm).to(tl.float16)
        put_column(buffer, at.scales, states, half, tl.float16, SCALE_UNIT)
    else:
        exact = infinite_for_nan(rows.to(tl.float32))
        MOST: tl.constexpr = (1 << FORMAT.bits) - 1
        low = tl.min(exact, 1)
        span = tl.max(exact, 1) - low
        step = tl.clamp(share_of(span, MOST), HALF_LEAST, HALF_MAX)
        half = nan_unless_finite(step, span).to(tl.float16)
        zero = tl.clamp(low, -HALF_MAX, HALF_MAX).to(tl.float16)
        above = exact - zero.to(tl.float32)[:, None]
        steps = quotient(above, half.to(tl.float32)[:, None], FORMAT.ptx)
        codes = tl.clamp(nearest(tl.clamp(steps, -1.0, 64.0)), 0.0, MOST).to(tl.int32)
        put_codes(buffer, at.rows, states, codes, FORMAT, COUNT)
        put_column(buffer, at.scales, states, half, tl.float16, SCALE_UNIT)
        put_column(buffer, at.zeros, states, zero, tl.float16, FORMAT.zero_unit)


@triton.jit
def get_rows(batch, token, head, there, FORMAT: tl.constexpr):
    """Rows of a batch [tokens, heads, D], as an engine has them."""
    column = tl.arange(0, FORMAT.width)
    pointers = batch.tensor + token.to(tl.int64) * batch.token + head.to(tl.int64) * batch.head
    mask = there[:, None]
    if FORMAT.dim != FORMAT.width:
        mask = mask & (column < FORMAT.dim)[None, :]
    return tl.load(
        pointers[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def write_rows(
    k, v, slots, tokens, buffer, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    HEADS: tl.constexpr, STATES: tl.constexpr, COUNT: tl.constexpr, PER_TENSOR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes `COUNT` rows of K and of V; a negative slot is skipped."""
    after_previous(EARLY)
    before_next(EARLY)
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token = row // HEADS
    head = row % HEADS
    # Rows are read before it is known whether their slot wants them: no load waits for another.
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    k_rows = get_rows(k.rows, token, head, token < tokens, K_FORMAT)
    v_rows = get_rows(v.rows, token, head, token < tokens, V_FORMAT)
    page, state = (slot // STATES).to(tl.int32), (slot % STATES).to(tl.int32)
    states = TileStates(page, 0, state, head, slot >= 0)
    put_side(buffer, k, states, k_rows, K_FORMAT, COUNT, PER_TENSOR)
    put_side(buffer, v, states, v_rows, V_FORMAT, COUNT, PER_TENSOR)
