"""Device code that quantises rows and puts them into pages: `dequantise_device`, inverted.

A chip's minima, maxima and clamps pass over NaN, and so would make numbers of what is none:
scales are found in ways that do not, and are NaN where what shares them is not all finite.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next
from kvatlas.kernels.triton.dequantise_device import TileStates, column_offsets, row_offsets
from kvatlas.kernels.triton.hadamard_device import hadamard

WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2**23: what is added to it is rounded to a whole number, in its lowest bits."""
WHOLE_BITS = tl.constexpr(0x4B400000)
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
SHARED_PART = tl.constexpr(32)
"""Elements of a row that its threads have between them before the first has others."""
EIGHT_BIT_NAN = tl.constexpr(0x7F)


def _ends_of(bits: int) -> tuple[float, ...]:
    """A polynomial that is 1, 2, ... at the positive ends of levels' cells.

    Its factors of x, x**3, x**5 and so on, and at last a value above all ends.
    """
    levels = np.array(normal_levels(bits))
    ends = ((levels[1:] + levels[:-1]) / 2)[1 << (bits - 1) :]
    odd = 2 * np.arange(len(ends)) + 1
    factors = np.linalg.solve(ends[:, None] ** odd, np.arange(len(ends)) + 1.0)
    return (*factors.tolist(), float(ends[-1]) + 0.1)


_ENDS_OF_8 = tl.constexpr(_ends_of(3))
_ENDS_OF_16 = tl.constexpr(_ends_of(4))


@triton.jit
def nearest_code(values):
    """Whole numbers, ties to the even one, for values up to 2**21."""
    return (values + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def away(values):
    """The nearest integers, halves away from zero."""
    half = values.to(tl.int32, bitcast=True) & SIGN_BIT | HALF_BITS
    return (values + half.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def four_bits(values):
    """The nearest codes of 4 bits, halves upwards; 0 for NaN."""
    return (tl.minimum(tl.maximum(values, 0.0), 15.0) + 0.5).to(tl.int32)


_BF16_PAIR = tl.constexpr("""
    {
        .reg .b32 both;
        cvt.rn.bf16x2.f32 both, $3, $2;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xFFFF0000;
    }
""")


@triton.jit
def rounded_to(values, ELEMENT: tl.constexpr, PTX: tl.constexpr):
    """Numbers as an element's type has them, in float32 again."""
    if PTX and ELEMENT == tl.bfloat16:
        # Two at once; one by one they would wait for a unit that a quarter of a warp shares.
        return tl.inline_asm_elementwise(
            _BF16_PAIR, "=r,=r,r,r", [values], dtype=tl.float32, is_pure=True, pack=2
        )
    return values.to(ELEMENT).to(tl.float32)


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
def larger(a, b):
    """The larger one, NaN where one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(values, AXIS: tl.constexpr, PTX: tl.constexpr):
    """The largest size along an axis; not finite where one of them is not."""
    if PTX:
        return tl.reduce(tl.abs(values), AXIS, larger)
    # Bits of sizes are in the order of sizes, infinity above them and NaN above that.
    size = values.to(tl.int32, bitcast=True) & SIZE_BITS
    return tl.max(size, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def signed(rows, table):
    """Rows with some signs turned: `table` has a number of the elements' size for each column."""
    PARTS: tl.constexpr = rows.shape[1]
    PART: tl.constexpr = rows.shape[2]
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    # Loaded for each row, so that threads have those of their own elements.
    turned = tl.load(table + tl.broadcast_to(column, rows.shape))
    return (rows.to(turned.dtype, bitcast=True) ^ turned).to(rows.dtype, bitcast=True)


@triton.jit
def range_of(rows, PTX: tl.constexpr):
    """The lowest and the highest number of each row; the highest is not finite where one is NaN."""
    if PTX:
        high = tl.reduce(tl.reduce(rows, 1, larger), 1, larger)
    else:
        # Interpreted, a reduction of one's own takes element by element.
        rows = tl.where(rows == rows, rows, float("inf"))
        high = tl.max(tl.max(rows, 1), 1)
    return tl.min(tl.min(rows, 1), 1), high


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
def corrected(near, values, divisor, inverse):
    """Values over a divisor that many share, rounded as a division is; NaN where it overflows.

    What the product with the inverse is off by is found exactly and divided again, which rounds
    as it should (Markstein), for sizes that neither overflow nor vanish.
    """
    return tl.fma(tl.fma(-near, divisor, values), inverse, near)


@triton.jit
def quotient(values, divisor, PTX: tl.constexpr):
    """Values over a divisor that many share, rounded as a division is."""
    if PTX:
        inverse = inverse_of(divisor)
        near = values * inverse
        exact = corrected(near, values, divisor, inverse)
        return tl.where(tl.abs(near) < float("inf"), exact, near)
    # Interpreted, a product and a sum are rounded one by one.
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def quotient_or_nan(values, divisor, PTX: tl.constexpr):
    """The same for divisors that are not near the least and the largest numbers, or NaN."""
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-divisor, inverse, 1.0), inverse, inverse)
        return corrected(values * inverse, values, divisor, inverse)
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def to_e2m1(values, divisor, PTX: tl.constexpr):
    """The e2m1 codes that are nearest to values over a divisor, ties to the even code.

    Numbers up to 2 are twice as dense as up to 4, and these as above: a code is the least of
    three lines, each rounded when a large number is added. NaN is what has overflown.
    """
    size = tl.abs(quotient_or_nan(values, divisor, PTX))
    code = tl.minimum(tl.fma(size, 2.0, WHOLE), tl.fma(size, 1.0, WHOLE + 2.0))
    code = tl.minimum(tl.minimum(code, tl.fma(size, 0.5, WHOLE + 4.0)), WHOLE + 7.0)
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    return (code.to(tl.int32, bitcast=True) | sign) & 15


@triton.jit
def level_codes(values, BITS: tl.constexpr):
    """The codes of the levels that values are nearest to.

    A polynomial through the ends of levels' cells, which lie at whole numbers of it, and a
    rounding: a value within a millionth of an end may get the code of its neighbour.
    """
    ENDS: tl.constexpr = _ENDS_OF_8 if BITS == 3 else _ENDS_OF_16
    LAST: tl.constexpr = (1 << (BITS - 1)) - 2
    inside = tl.minimum(tl.maximum(values, -ENDS[LAST + 1]), ENDS[LAST + 1])
    square = inside * inside
    slope = square * ENDS[LAST] + ENDS[LAST - 1]
    for i in tl.static_range(1, LAST):
        slope = slope * square + ENDS[LAST - 1 - i]
    # An end belongs to the level below it.
    return nearest_code(slope * inside + (LAST + 1.4999995))


@triton.jit
def put_elements(
    buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    TILED: tl.constexpr = 0,
):  # fmt: skip
    """Tiles of rows in parts, of which `COUNT` columns are stored."""
    PARTS: tl.constexpr = values.shape[1]
    PART: tl.constexpr = values.shape[2]
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    rows = row_offsets(steps, states, UNIT)
    columns = column_offsets(column, steps, TILED)
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + rows[:, None, None] + columns
    mask = states.there[:, None, None]
    if COUNT != PARTS * PART:
        mask = mask & (column < COUNT)
    tl.store(pointers, values, mask=mask)


@triton.jit
def put_column(buffer, steps, states, values, ELEMENT: tl.constexpr, UNIT: tl.constexpr):
    """One element for each row."""
    pointers = buffer.to(tl.pointer_type(ELEMENT)) + row_offsets(steps, states, UNIT)
    tl.store(pointers, values, mask=states.there)


@triton.jit
def together(codes, BITS: tl.constexpr, PER: tl.constexpr):
    """So many neighbours as one number, the first one in its lowest bits."""
    PARTS: tl.constexpr = codes.shape[1]
    WORDS: tl.constexpr = codes.shape[2] // PER
    apart = tl.reshape(codes, [codes.shape[0], PARTS, WORDS, PER])
    return tl.sum(apart << BITS * tl.arange(0, PER)[None, None, None, :], 3)


@triton.jit
def put_codes(buffer, steps, states, codes, FORMAT: tl.constexpr):
    """Codes of 4 or 3 bits, the first one of a byte in its lowest bits."""
    DIM: tl.constexpr = FORMAT.dim
    if FORMAT.bits == 4:
        # Rows lie at multiples of a unit of bytes: as many codes as these have are one word.
        BYTES: tl.constexpr = 4 if FORMAT.unit % 4 == 0 else FORMAT.unit
        PER: tl.constexpr = 2 * BYTES
        WORD: tl.constexpr = tl.int32 if PER == 8 else tl.int16 if PER == 4 else tl.int8
        words = together(codes, 4, PER).to(WORD)
        put_elements(buffer, steps, states, words, WORD, FORMAT.unit * 2 // PER, DIM // PER)
    else:
        # Sixteen codes are three words of 16 bits: rows and cells of such have an even length.
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
def put_side(buffer, side, states, rows, FORMAT: tl.constexpr, PER_TENSOR: tl.constexpr):
    """Rows of one side, with their scales, as their format wants them."""
    KIND: tl.constexpr = FORMAT.kind
    ELEMENT: tl.constexpr = FORMAT.element
    UNIT: tl.constexpr = FORMAT.unit
    SCALE_UNIT: tl.constexpr = FORMAT.scale_unit
    ROTATION: tl.constexpr = FORMAT.rotation
    PARTS: tl.constexpr = rows.shape[1]
    PART: tl.constexpr = rows.shape[2]
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
        # Rotated, and rounded to the model's own type, as the torch kernels do it.
        rotated = hadamard(signed(rows, side.table).to(tl.float32), ROTATION)
        exact = rounded_to(rotated, rows.dtype, FORMAT.ptx)
        low, high = range_of(exact, FORMAT.ptx)
        low = tl.minimum(low, 0.0)
        span = larger(high, 0.0) - low
        step = nan_unless_finite(tl.maximum(share_of(span, 15.0), LEAST), span)
        zero = four_bits(tl.div_rn(-low, step))
        steps = exact * inverse_of(step)[:, None, None]
        codes = four_bits(steps + zero.to(tl.float32)[:, None, None])
        put_codes(buffer, at.rows, states, codes, FORMAT)
        # The zero point rides in the scale's lowest bits.
        word = (step.to(tl.int32, bitcast=True) & -16) | zero
        put_column(buffer, at.scales, states, word, tl.int32, SCALE_UNIT)
    elif KIND == "nvfp4":
        blocks = tl.reshape(rows.to(tl.float32), [rows.shape[0], PARTS, PART // 16, 16])
        largest = largest_of(blocks, 3, FORMAT.ptx)
        six = tl.full([1, 1, 1], 6.0, tl.float32)
        scale = tl.full([1, 1, 1], 1.0, tl.float32) * side.scale
        share = quotient(quotient(largest, six, FORMAT.ptx), scale, FORMAT.ptx)
        share = nan_unless_finite(share, largest)
        step = as_element(share, tl.float8e4nv, FORMAT.ptx)
        exact = step.to(tl.float32) * side.scale
        codes = to_e2m1(blocks, tl.expand_dims(tl.maximum(exact, TINY), 3), FORMAT.ptx)
        # Blocks without a scale, or with none that is a number, are stored as zeros.
        codes = codes & tl.expand_dims(tl.where(exact > 0.0, 15, 0), 3)
        put_codes(buffer, at.rows, states, tl.reshape(codes, rows.shape), FORMAT)
        put_elements(buffer, at.scales, states, step, tl.float8e4nv, SCALE_UNIT, FORMAT.dim // 16)
    elif KIND == "levels":
        exact = rows.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(tl.sum(exact * exact, 1), 1))
        length = tl.maximum(norm, TINY)
        # A rotation of rows of norm 1 has elements of variance 1 / D: sqrt(D) cancels. Sums of
        # squares differ with their order, so that a quotient need not be rounded as one.
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
def get_rows(batch, token, head, there, FORMAT: tl.constexpr):
    """Rows of a batch [tokens, heads, D], as an engine has them, in parts: [rows, parts, part].

    With the first part of all rows first, few threads share a row, whose maximum and whose
    scale each of them computes. What needs neither is not parted.
    """
    PART: tl.constexpr = FORMAT.width if FORMAT.kind == "plain" else min(FORMAT.width, SHARED_PART)
    PARTS: tl.constexpr = FORMAT.width // PART
    starts = batch.tensor + token.to(tl.int64) * batch.token + head.to(tl.int64) * batch.head
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    mask = there[:, None, None]
    if FORMAT.dim != FORMAT.width:
        mask = mask & (column < FORMAT.dim)
    pointers = starts[:, None, None] + column
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


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
    put_side(buffer, k, states, k_rows, K_FORMAT, PER_TENSOR)
    put_side(buffer, v, states, v_rows, V_FORMAT, PER_TENSOR)
