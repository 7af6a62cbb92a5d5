"""Device code that quantises numbers and computes the scales that rows share.

The min, max and clamp instructions of a GPU drop NaN: their result is a number. The code here makes
NaN propagate instead: a scale is NaN unless all elements that share it are finite.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels

WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2**23. Adding it to a value leaves the rounded integer in the lowest bits of the sum."""
WHOLE_BITS = tl.constexpr(0x4B400000)
TINY = tl.constexpr(1e-12)
LEAST = tl.constexpr(1e-6)
E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
HALF_MAX = tl.constexpr(65504.0)
HALF_LEAST = tl.constexpr(6e-8)
SIZE_BITS = tl.constexpr(0x7FFFFFFF)
SIGN_BIT = tl.constexpr(-0x80000000)
UPPER = tl.constexpr(-0x10000)
"""Mask of the upper half of a word."""
HALF_BITS = tl.constexpr(0x3F000000)
"""Bit pattern of 0.5."""
SHARED_PART = tl.constexpr(32)
"""Number of elements of a row that its threads load together in one pass."""
EIGHT_BIT_NAN = tl.constexpr(0x7F)


def _ends_of(bits: int) -> tuple[float, ...]:
    """Return the polynomial from which `level_codes` computes the code of the nearest level.

    The levels are `normal_levels(bits)`. A boundary is half way between two of them. The polynomial
    is odd and maps the positive boundaries to 1, 2, 3, ... The result contains the coefficients of
    x, x**3, x**5 and so on, then a number above all boundaries.
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
    """Round to integers, ties to even, for values up to 2**21."""
    return (values + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def away(values):
    """Round to the nearest integers, halves away from zero."""
    half = values.to(tl.int32, bitcast=True) & SIGN_BIT | HALF_BITS
    return (values + half.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def four_bits(values):
    """Round values to the nearest 4-bit codes, halves up; NaN becomes 0."""
    return (tl.minimum(tl.maximum(values, 0.0), 15.0) + 0.5).to(tl.int32)


def _packed(kind: str, make: str = "mov.b32 n{0}, ${1};\n") -> str:
    """Return PTX that packs eight inputs, saturated to 4 bits (`kind` u4 or s4), into a word.

    `make` is the PTX that converts one input to an integer.
    """
    made = "".join(make.format(i, i + 1) for i in range(8))
    pack = f"cvt.pack.sat.{kind}.s32.b32 word"
    packed = "".join(f"{pack}, n{i + 1}, n{i}, word;\n" for i in (6, 4, 2, 0))
    return f"""
    {{
        .reg .b32 n<8>, word;
        .reg .f32 x<8>;
        mov.b32 word, 0;
        {made}{packed}
        mov.b32 $0, word;
    }}
    """


_EIGHT_CODES = tl.constexpr(_packed("u4"))
_EIGHT_SIGNED = tl.constexpr(_packed("s4"))
_EIGHT_WHOLE = tl.constexpr(
    _packed("u4", "mul.rm.f32 x{0}, ${1}, 0f00000001; mov.b32 n{0}, x{0};\n")
)
"""PTX that rounds inputs down. It multiplies a number by the smallest positive float32. The bit
pattern of the product is then the number's integer part."""
_SIGNS = tl.constexpr(-0x77777778)
"""Mask of the highest bit of each of a word's eight numbers."""


@triton.jit
def by_twos(values):
    """Split the last axis of [rows, parts, elements]; return (even elements, odd elements)."""
    pairs = tl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // 2, 2])
    return tl.split(pairs)


@triton.jit
def eight_in_word(even, odd, PACK: tl.constexpr):
    """Pack eight adjacent elements into a word, 4 bits each, the first in the lowest bits."""
    even_first, even_last = by_twos(even)
    odd_first, odd_last = by_twos(odd)
    a, e = by_twos(even_first)
    b, f = by_twos(odd_first)
    c, g = by_twos(even_last)
    d, h = by_twos(odd_last)
    return tl.inline_asm_elementwise(
        PACK, "=r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def code_words(codes):
    """Pack 4-bit codes into words of eight codes."""
    even, odd = by_twos(codes)
    return eight_in_word(even, odd, _EIGHT_CODES)


@triton.jit
def whole_words(even, odd):
    """Round values down to 4-bit codes and pack eight per word; NaN becomes an arbitrary code."""
    return eight_in_word(even, odd, _EIGHT_WHOLE)


@triton.jit
def bf16_pairs(even, odd):
    """Round to bfloat16, and pack two per word, the even element in the lower half."""
    # Converting pairs has four times the throughput of converting single elements.
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def pairs_apart(words):
    """Unpack words of two bfloat16 to two float32 tensors: the lower and the upper halves."""
    return (words << 16).to(tl.float32, bitcast=True), (words & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def smaller_pairs(a, b):
    """Return the element-wise minimum of two tensors of words; each word contains two bfloat16.

    If one operand is NaN, the result is the other.
    """
    return tl.inline_asm_elementwise(
        "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_pairs(a, b):
    """Return the element-wise maximum of two tensors of words; each word contains two bfloat16.

    If one operand is NaN, the result is NaN.
    """
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def as_element(values, ELEMENT: tl.constexpr, PTX: tl.constexpr):
    """Convert to an element type; 8-bit floats saturate instead of overflowing, and keep NaN."""
    if ELEMENT == tl.float8e4nv or ELEMENT == tl.float8e5:
        MOST: tl.constexpr = E4M3_MAX if ELEMENT == tl.float8e4nv else E5M2_MAX
        exact = tl.clamp(values.to(tl.float32), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        stored = exact.to(ELEMENT)
        if not PTX:
            # PTX keeps NaN; other backends may convert it to a number.
            code = tl.where(exact == exact, stored.to(tl.uint8, bitcast=True), EIGHT_BIT_NAN)
            stored = code.to(ELEMENT, bitcast=True)
        return stored
    return values.to(ELEMENT)


@triton.jit
def larger(a, b):
    """Return the maximum; NaN propagates."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(values, AXIS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest absolute value along an axis; not finite if any element is not."""
    if PTX:
        return tl.reduce(tl.abs(values), AXIS, larger)
    # As integers, absolute values keep their order, then infinity, then NaN.
    size = values.to(tl.int32, bitcast=True) & SIZE_BITS
    return tl.max(size, AXIS).to(tl.float32, bitcast=True)


_SIGNED_PAIR = tl.constexpr("""
    {
        .reg .b32 both;
        xor.b32 both, $2, $3;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xFFFF0000;
    }
""")


@triton.jit
def signed(rows, table, PTX: tl.constexpr):
    """Return rows in float32 with signs flipped by a table of sign bits, one per column."""
    PARTS: tl.constexpr = rows.shape[1]
    PART: tl.constexpr = rows.shape[2]
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    # The signs are loaded for each row, so that a thread holds the signs of its own elements.
    turned = tl.load(table + tl.broadcast_to(column, rows.shape))
    if PTX and rows.dtype == tl.bfloat16:
        # A register holds two elements; flip both at once.
        return tl.inline_asm_elementwise(
            _SIGNED_PAIR, "=r,=r,r,r", [rows, turned], dtype=tl.float32, is_pure=True, pack=2
        )
    bits = rows.to(turned.dtype, bitcast=True) ^ turned
    return bits.to(rows.dtype, bitcast=True).to(tl.float32)


@triton.jit
def range_of(rows, PTX: tl.constexpr):
    """Return the minimum and maximum of each row; the maximum of a row with NaN is not finite."""
    if PTX:
        high = tl.reduce(tl.reduce(rows, 1, larger), 1, larger)
    else:
        # The interpreter runs custom reductions element by element.
        rows = tl.where(rows == rows, rows, float("inf"))
        high = tl.max(tl.max(rows, 1), 1)
    return tl.min(tl.min(rows, 1), 1), high


@triton.jit
def range_of_pairs(words):
    """Return the minimum and maximum of each row as float32. A word contains two bfloat16.

    Both halves of all words of a row count. The maximum is NaN if the row contains NaN.
    """
    low = tl.reduce(tl.reduce(words, 1, smaller_pairs), 1, smaller_pairs)
    high = tl.reduce(tl.reduce(words, 1, larger_pairs), 1, larger_pairs)
    low_even, low_odd = pairs_apart(low)
    high_even, high_odd = pairs_apart(high)
    return tl.minimum(low_even, low_odd), larger(high_even, high_odd)


@triton.jit
def nan_unless_finite(values, span):
    """Return `values`, but NaN where `span` is not finite.

    `values` were computed from `span`, which is the range or the largest magnitude of each row.
    """
    return tl.where(span < float("inf"), values, float("nan"))


@triton.jit
def share_of(span, parts):
    """Divide each span (the range or largest magnitude of a row) by `parts`, correctly rounded."""
    return tl.div_rn(span, tl.full(span.shape, parts, tl.float32))


@triton.jit
def inverse_of(step):
    """Return the reciprocal of a quantisation step, correctly rounded."""
    return tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)


@triton.jit
def corrected(near, values, divisor, inverse):
    """Return `values / divisor`, correctly rounded, given approximate quotients; NaN on overflow.

    `near` contains the approximate quotients, and `inverse` the reciprocal of the divisor. The
    remainder of the approximation is computed exactly and divided in turn, which gives correct
    rounding (Markstein) for values that neither overflow nor underflow.
    """
    # Negate the divisor instead of the quotients, because it has fewer elements.
    return tl.fma(tl.fma(near, -divisor, values), inverse, near)


@triton.jit
def fifteenth_of(span, PTX: tl.constexpr):
    """Return (maximum - minimum) / 15 of each row, given that difference as `span`.

    For tiny differences the result is inexact. It is then below `LEAST`, and callers use `LEAST`
    instead.
    """
    if PTX:
        inverse = tl.full(span.shape, 1.0 / 15.0, tl.float32)
        return corrected(span * inverse, span, tl.full(span.shape, 15.0, tl.float32), inverse)
    return share_of(span, 15.0)


@triton.jit
def quick_inverse(divisor):
    """Return 1 / divisor by PTX: correctly rounded, unless the divisor is tiny or huge."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(-divisor, inverse, 1.0), inverse, inverse)


@triton.jit
def quotient(values, divisor, PTX: tl.constexpr):
    """Divide values by a shared divisor, correctly rounded."""
    if PTX:
        inverse = inverse_of(divisor)
        near = values * inverse
        exact = corrected(near, values, divisor, inverse)
        return tl.where(tl.abs(near) < float("inf"), exact, near)
    # The interpreter rounds product and sum separately.
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def quotient_or_nan(values, divisor, PTX: tl.constexpr):
    """Divide like `quotient`, but return NaN on overflow. Divisors must not be tiny or huge."""
    if PTX:
        inverse = quick_inverse(divisor)
        return corrected(values * inverse, values, divisor, inverse)
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def least(COUNT: tl.constexpr):
    """Return `COUNT` times the smallest positive float32: the float with bit pattern `COUNT`."""
    return tl.full([], COUNT, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_sizes(values, divisor, PTX: tl.constexpr):
    """Return the nearest e2m1 codes of |values / divisor|, ties to even.

    The codes are 0 to 7, without the sign bit. A result may be above 7, for example if an overflow
    gives NaN; the caller must clamp it to 7.

    Let x be |values / divisor|. The spacing of e2m1 numbers is 0.5 up to 2, then 1 up to 4, then 2.
    The code, before it is rounded, is therefore 2 * x up to 2, then x + 2 up to 4, then x / 2 + 4.
    Everywhere, the correct one of these three terms is the smallest.

    All three terms are computed as multiples of the smallest positive float32. Numbers that small
    are rounded to a whole multiple by the hardware, and their bit pattern is the number of
    multiples: the code.
    """
    half = tl.abs(quotient_or_nan(values, 2.0 * divisor, PTX))
    code = tl.minimum(half * least(4), tl.fma(half, least(2), least(2)))
    code = tl.minimum(code, tl.fma(half, least(1), least(4)))
    return code.to(tl.int32, bitcast=True)


@triton.jit
def to_e2m1(values, divisor, PTX: tl.constexpr):
    """Return the e2m1 codes nearest to values / divisor, ties to the even code."""
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.minimum(e2m1_sizes(values, divisor, PTX), 7) + sign


@triton.jit
def e2m1_words(values, divisor):
    """Pack the e2m1 codes of values / divisor into words of eight codes.

    `values` is [rows, parts, blocks, 8], and the words are [rows, parts, blocks]. A code has a sign
    bit and a size of 3 bits. The sizes are packed with an instruction for signed 4-bit numbers,
    which clamps them to 7. The signs are packed with the same instruction: clamping the bit
    pattern of a value to 4 bits keeps its sign bit.
    """
    ROWS: tl.constexpr = values.shape[0]
    PARTS: tl.constexpr = values.shape[1]
    PART: tl.constexpr = 8 * values.shape[2]
    sizes = tl.reshape(e2m1_sizes(values, divisor, True), [ROWS, PARTS, PART])
    bits = tl.reshape(values.to(tl.int32, bitcast=True), [ROWS, PARTS, PART])
    even, odd = by_twos(bits)
    signs = eight_in_word(even, odd, _EIGHT_SIGNED) & _SIGNS
    even, odd = by_twos(sizes)
    return eight_in_word(even, odd, _EIGHT_SIGNED) | signs


@triton.jit
def level_codes(values, BITS: tl.constexpr):
    """Return the code of the level nearest to each value.

    A polynomial maps the boundaries between levels to consecutive integers, and its value is
    rounded. A value within a millionth of a boundary may get the code of the neighbouring level.
    """
    ENDS: tl.constexpr = _ENDS_OF_8 if BITS == 3 else _ENDS_OF_16
    LAST: tl.constexpr = (1 << (BITS - 1)) - 2
    inside = tl.minimum(tl.maximum(values, -ENDS[LAST + 1]), ENDS[LAST + 1])
    square = inside * inside
    slope = square * ENDS[LAST] + ENDS[LAST - 1]
    for i in tl.static_range(1, LAST):
        slope = slope * square + ENDS[LAST - 1 - i]
    # A boundary belongs to the level below it.
    return nearest_code(slope * inside + (LAST + 1.4999995))
