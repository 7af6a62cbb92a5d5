"""Device code that makes codes of numbers, and finds the scales that rows of them share.

A chip's minima, maxima and clamps pass over NaN, and so would make numbers of what is none:
scales are found in ways that do not, and are NaN where what shares them is not all finite.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels

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
UPPER = tl.constexpr(-0x10000)
"""The upper half of a word."""
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


def _packed(kind: str, make: str = "mov.b32 n{0}, ${1};\n") -> str:
    """PTX for a word of eight numbers of 4 bits, made of what is given and clamped: u4 or s4."""
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
"""Rounded down: as multiples of the least float32, whose bits are the whole number."""
_SIGNS = tl.constexpr(-0x77777778)
"""The uppermost bit of each of a word's eight numbers."""


@triton.jit
def by_twos(values):
    """The first and the second ones of pairs of neighbours, of [rows, parts, part]."""
    pairs = tl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // 2, 2])
    return tl.split(pairs)


@triton.jit
def eight_in_word(even, odd, PACK: tl.constexpr):
    """Words of eight neighbours in 4 bits each, the first one in the lowest bits."""
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
    """Words of eight codes."""
    even, odd = by_twos(codes)
    return eight_in_word(even, odd, _EIGHT_CODES)


@triton.jit
def whole_words(even, odd):
    """Words of eight numbers rounded down to codes; of what is not a number, any code."""
    return eight_in_word(even, odd, _EIGHT_WHOLE)


@triton.jit
def bf16_pairs(even, odd):
    """Numbers rounded to bfloat16, two in a word."""
    # Two at once; one by one they would wait for a unit that a quarter of a warp shares.
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def pairs_apart(words):
    """The bfloat16 of words of two, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def smaller_pairs(a, b):
    """The smaller ones of words of two bfloat16."""
    return tl.inline_asm_elementwise(
        "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_pairs(a, b):
    """The larger ones, NaN where one of both is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


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
    """Rows in float32 with some signs turned, by a number of the elements' size for each column."""
    PARTS: tl.constexpr = rows.shape[1]
    PART: tl.constexpr = rows.shape[2]
    column = PART * tl.arange(0, PARTS)[None, :, None] + tl.arange(0, PART)[None, None, :]
    # Loaded for each row, so that threads have those of their own elements.
    turned = tl.load(table + tl.broadcast_to(column, rows.shape))
    if PTX and rows.dtype == tl.bfloat16:
        # Two at once, as they lie in a register.
        return tl.inline_asm_elementwise(
            _SIGNED_PAIR, "=r,=r,r,r", [rows, turned], dtype=tl.float32, is_pure=True, pack=2
        )
    bits = rows.to(turned.dtype, bitcast=True) ^ turned
    return bits.to(rows.dtype, bitcast=True).to(tl.float32)


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
def range_of_pairs(words):
    """The same of rows in words of two bfloat16."""
    low = tl.reduce(tl.reduce(words, 1, smaller_pairs), 1, smaller_pairs)
    high = tl.reduce(tl.reduce(words, 1, larger_pairs), 1, larger_pairs)
    low_even, low_odd = pairs_apart(low)
    high_even, high_odd = pairs_apart(high)
    return tl.minimum(low_even, low_odd), larger(high_even, high_odd)


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
    # Of the divisor few are turned; a minus is an instruction of its own.
    return tl.fma(tl.fma(near, -divisor, values), inverse, near)


@triton.jit
def fifteenth_of(span, PTX: tl.constexpr):
    """A fifteenth of each span, or any number below `LEAST` for one that is as small."""
    if PTX:
        inverse = tl.full(span.shape, 1.0 / 15.0, tl.float32)
        return corrected(span * inverse, span, tl.full(span.shape, 15.0, tl.float32), inverse)
    return share_of(span, 15.0)


@triton.jit
def quick_inverse(divisor):
    """What a divisor is multiplied by to be 1, in PTX; rounded if both are far from the ends."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(-divisor, inverse, 1.0), inverse, inverse)


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
        inverse = quick_inverse(divisor)
        return corrected(values * inverse, values, divisor, inverse)
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


@triton.jit
def least(COUNT: tl.constexpr):
    """So many times the least float32 above 0: its bits are this number."""
    return tl.full([], COUNT, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_sizes(values, divisor, PTX: tl.constexpr):
    """The nearest e2m1 codes of sizes over a divisor, ties to the even one; above 7 stands for 7.

    Numbers up to 2 are twice as dense as up to 4, and these as above: a code is the least of
    three lines. Each is so small a number that it is rounded to a whole multiple of the least
    one, and its bits are that whole number. NaN is what has overflown.
    """
    half = tl.abs(quotient_or_nan(values, 2.0 * divisor, PTX))
    code = tl.minimum(half * least(4), tl.fma(half, least(2), least(2)))
    code = tl.minimum(code, tl.fma(half, least(1), least(4)))
    return code.to(tl.int32, bitcast=True)


@triton.jit
def to_e2m1(values, divisor, PTX: tl.constexpr):
    """The e2m1 codes that are nearest to values over a divisor, ties to the even code."""
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.minimum(e2m1_sizes(values, divisor, PTX), 7) + sign


@triton.jit
def e2m1_words(values, divisor):
    """Words of eight such codes of [rows, parts, blocks, eight], in [rows, parts, blocks].

    Packed as signed numbers, sizes are clamped to 7, and bits of floats leave their sign.
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
