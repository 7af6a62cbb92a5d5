"""Device code that unpacks 16-bit words of K and V into the elements of dot products.

| elements | per word | operand of the dot product |
|---|---|---|
| 16 bits | 1 | the element |
| 8 bits | 2 | the element, as float16; for int8 of K, the element plus 1152 |
| int4 of K | 4 | 1024 + code, or 1024 + 16 * code for queries that are divided by 16 |
| int4 of V, and codes of kind `range` | 4 | 1 + code / 16 |
| nvfp4 | 4 | the number, times 2**-14 |
| codes of kind `levels` | 4 | the level |

The constants that are added (1152, 1024, 1) are called offsets. Their contribution to a dot product
is known, and is subtracted afterwards. For K, it is the offset times the sum of the query's
elements. Such a sum covers one row, so a large offset is harmless. For V, it is the offset times
the sum of the softmax weights. That sum covers all states, so the offset must be small to keep
rounding errors small.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvatlas.kernels.quantise import normal_levels
from kvatlas.kernels.triton.dequantise_device import (
    E2M1_UNIT,
    elements,
    from_e2m1,
    level_of,
)

_E4M3 = tl.constexpr("""
    {
        .reg .b32 apart;
        .reg .b16 even, odd;
        prmt.b32 apart, $2, 0, 0x3120;
        mov.b32 {even, odd}, apart;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
    }
""")
_E5M2 = tl.constexpr("""
    {
        prmt.b32 $0, $2, 0, 0x2404;
        prmt.b32 $1, $2, 0, 0x3414;
    }
""")
"""An e5m2 is the upper byte of a float16."""
_INT8_RAISED = tl.constexpr("""
    {
        .reg .b32 raised;
        xor.b32 raised, $2, 0x80808080;
        prmt.b32 $0, raised, 0x64646464, 0x4240;
        prmt.b32 $1, raised, 0x64646464, 0x4341;
    }
""")
"""0x6400 is 1024 in float16, and its lowest mantissa bit is worth 1. Inserting a byte there with
its sign bit flipped yields 1024 + 128 + the number."""
_INT8 = tl.constexpr("""
    {
        .reg .b32 raised, excess;
        mov.b32 excess, 0x64806480;
        xor.b32 raised, $2, 0x80808080;
        prmt.b32 $0, raised, 0x64646464, 0x4240;
        prmt.b32 $1, raised, 0x64646464, 0x4341;
        sub.f16x2 $0, $0, excess;
        sub.f16x2 $1, $1, excess;
    }
""")
_CODES = tl.constexpr("""
    {
        .reg .b32 a, b, c, d;
        shl.b32 a, $4, 6;
        shl.b32 b, $4, 2;
        shr.u32 c, $4, 2;
        shr.u32 d, $4, 6;
        lop3.b32 $0, a, 0x03C003C0, 0x3C003C00, 0xEA;
        lop3.b32 $1, b, 0x03C003C0, 0x3C003C00, 0xEA;
        lop3.b32 $2, c, 0x03C003C0, 0x3C003C00, 0xEA;
        lop3.b32 $3, d, 0x03C003C0, 0x3C003C00, 0xEA;
    }
""")
"""0x3C00 is 1 in float16. Inserting a code in the highest mantissa bits yields 1 + code / 16."""
_CODES_IN_PLACE = tl.constexpr("""
    {
        .reg .b32 upper;
        shr.u32 upper, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 $2, upper, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $3, upper, 0x00F000F0, 0x64006400, 0xEA;
    }
""")
"""0x6400 is 1024 in float16, and its lowest mantissa bit is worth 1. Codes are not shifted, so they
yield 1024 + code, or 1024 + 16 * code for codes in upper nibbles."""
_NVFP4 = tl.constexpr("""
    {
        .reg .b32 even, odd, part, step, a, b, c, d;
        .reg .b16 pair, rest;
        shr.u32 part, $4, 3;
        and.b32 part, part, 0x0E0E0E0E;
        lop3.b32 odd, $4, 0x80808080, part, 0xEA;
        shl.b32 part, $4, 1;
        and.b32 part, part, 0x0E0E0E0E;
        shl.b32 even, $4, 4;
        lop3.b32 even, even, 0x80808080, part, 0xEA;
        prmt.b32 step, $5, $6, 0x7740;
        mov.b32 {pair, rest}, step;
        cvt.rn.f16x2.e4m3x2 step, pair;
        prmt.b32 a, even, 0, 0x2404;
        prmt.b32 b, odd, 0, 0x2404;
        prmt.b32 c, even, 0, 0x3414;
        prmt.b32 d, odd, 0, 0x3414;
        mul.f16x2 $0, a, step;
        mul.f16x2 $1, b, step;
        mul.f16x2 $2, c, step;
        mul.f16x2 $3, d, step;
    }
""")
"""The sign and the other three bits of a code form the upper byte of a float16, which is the number
times 2**-14. Times a scale, the result has at most 24 fractional bits, so float16 is exact."""


def _level_bytes(which: int) -> str:
    """Return one byte of each of the eight positive float16 levels, as two PTX constants.

    It is the lower byte if `which` is 0, and the upper byte if `which` is 1.
    """
    halves = [struct.pack("<e", level)[which] for level in normal_levels(4)[8:]]
    first, second = (int.from_bytes(bytes(halves[i : i + 4]), "little") for i in (0, 4))
    return f"0x{first:08X}, 0x{second:08X}"


_LEVELS = tl.constexpr(f"""
    {{
        .reg .b32 flip, index, ab, cd, low, high, a, b, c, d, sign;
        shr.u32 flip, $4, 3;
        not.b32 flip, flip;
        and.b32 flip, flip, 0x11111111;
        mul.lo.u32 flip, flip, 7;
        lop3.b32 index, $4, flip, 0x77777777, 0x28;
        prmt.b32 ab, index, 0, 0x4420;
        prmt.b32 cd, index, 0, 0x4431;
        prmt.b32 low, {_level_bytes(0)}, ab;
        prmt.b32 high, {_level_bytes(1)}, ab;
        prmt.b32 a, low, high, 0x6240;
        prmt.b32 b, low, high, 0x7351;
        prmt.b32 low, {_level_bytes(0)}, cd;
        prmt.b32 high, {_level_bytes(1)}, cd;
        prmt.b32 c, low, high, 0x6240;
        prmt.b32 d, low, high, 0x7351;
        shl.b32 sign, $4, 12;
        lop3.b32 a, a, sign, 0x80008000, 0xF2;
        shl.b32 sign, $4, 8;
        lop3.b32 b, b, sign, 0x80008000, 0xF2;
        shl.b32 sign, $4, 4;
        lop3.b32 c, c, sign, 0x80008000, 0xF2;
        lop3.b32 d, d, $4, 0x80008000, 0xF2;
        mov.b32 $0, a;
        mov.b32 $1, b;
        mov.b32 $2, c;
        mov.b32 $3, d;
    }}
""")
"""Looks up levels in two byte tables of the positive levels, which have codes 8 to 15. Levels are
symmetric: for codes below 8, the lower three bits are inverted and the sign is set."""
INT8_RAISE = tl.constexpr(1152.0)
CODE_RAISE = tl.constexpr(16.0)
IN_PLACE_RAISE = tl.constexpr(1024.0)


class QuerySums(NamedTuple):
    """Sums over the elements of each query, to remove the offsets of keys from logits."""

    raised: Any
    """Dot product of a query with the offsets of a key."""
    whole: Any
    """Dot product of a query with ones: the sum of its elements."""


@triton.jit
def pairs(words, ELEMENT: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr, PTX: tl.constexpr):
    """Unpack words of two elements; return (first element of each word, second element of each)."""
    if PTX:
        CODE: tl.constexpr = (
            _E4M3 if ELEMENT == tl.float8e4nv else _E5M2 if ELEMENT == tl.float8e5
            else _INT8_RAISED if RAISED else _INT8
        )  # fmt: skip
        even, odd = tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = (words & 255).to(tl.uint8).to(ELEMENT, bitcast=True)
        odd = ((words >> 8) & 255).to(tl.uint8).to(ELEMENT, bitcast=True)
    return even.to(DOT), odd.to(DOT)


@triton.jit
def numbers_of(codes, steps, KIND: tl.constexpr):
    """Convert 4-bit codes to operands of a dot product, without PTX."""
    if KIND == "nvfp4":
        step = steps.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return from_e2m1(codes) * step.to(tl.float32) / E2M1_UNIT
    if KIND == "levels":
        return level_of(codes, 4)
    return 1.0 + codes.to(tl.float32) / CODE_RAISE


@triton.jit
def quarters(words, steps, FORMAT: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr):
    """Return the four elements of each word as operands of a dot product.

    `steps` is the result of `block_steps`.
    """
    KIND: tl.constexpr = FORMAT.kind
    if RAISED and not FORMAT.ptx:
        a = IN_PLACE_RAISE + (words & 0xF).to(tl.float32)
        b = IN_PLACE_RAISE + (words & 0xF0).to(tl.float32)
        c = IN_PLACE_RAISE + ((words >> 8) & 0xF).to(tl.float32)
        d = IN_PLACE_RAISE + ((words >> 8) & 0xF0).to(tl.float32)
    elif not FORMAT.ptx:
        a = numbers_of(words & 15, steps, KIND)
        b = numbers_of((words >> 4) & 15, steps, KIND)
        c = numbers_of((words >> 8) & 15, steps, KIND)
        d = numbers_of((words >> 12) & 15, steps, KIND)
    elif KIND == "nvfp4":
        a, b, c, d = tl.inline_asm_elementwise(
            _NVFP4, "=r,=r,=r,=r,r,r,r", [words, steps],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        CODE: tl.constexpr = (
            _LEVELS if KIND == "levels" else _CODES_IN_PLACE if RAISED else _CODES
        )  # fmt: skip
        a, b, c, d = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return a.to(DOT), b.to(DOT), c.to(DOT), d.to(DOT)


@triton.jit
def block_steps(buffer, scales, states, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales of nvfp4 rows, one e4m3 byte per word.

    A scale covers 16 elements, so it is repeated for four words. Use only a load and a reshape
    here: other operations prevent the compiler from loading in the layout of the dot product.
    """
    BLOCKS: tl.constexpr = FORMAT.width // 16
    steps = elements(
        buffer, scales, states, tl.uint8, FORMAT.scale_unit, BLOCKS, BLOCKS, MASKED, ""
    )
    wide = tl.broadcast_to(steps[:, :, None], [steps.shape[0], BLOCKS, 4])
    return tl.reshape(wide, [steps.shape[0], BLOCKS * 4]).to(tl.int32)


@triton.jit
def apart(words, steps, FORMAT: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr):
    """Return the first, second, third and fourth elements of words as operands.

    There are always four results. If words have only one or two elements, results are repeated.
    """
    COUNT: tl.constexpr = 16 // FORMAT.bits
    if COUNT == 4:
        a, b, c, d = quarters(words, steps, FORMAT, DOT, RAISED)
    elif COUNT == 2:
        a, b = pairs(words, FORMAT.element, DOT, RAISED, FORMAT.ptx)
        c, d = a, b
    else:
        a = words.to(FORMAT.element, bitcast=True).to(DOT)
        b, c, d = a, a, a
    return a, b, c, d


@triton.jit
def columns_apart(tile, COUNT: tl.constexpr):
    """De-interleave the columns of a tile: return four tiles (a, b, c, d).

    If `COUNT` is 4, a has columns 0, 4, 8, ..., b has columns 1, 5, 9, ..., and so on. If it is 2,
    a and c have the even columns, b and d the odd ones. If it is 1, each result is the whole tile.
    """
    a, b, c, d = tile, tile, tile, tile
    if COUNT == 4:
        last = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 4, 2, 2])
        even, odd = tl.split(last)
        a, c = tl.split(even)
        b, d = tl.split(odd)
    elif COUNT == 2:
        a, b = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
        c, d = a, b
    return a, b, c, d


@triton.jit
def columns_together(a, b, c, d, COUNT: tl.constexpr):
    """Invert `columns_apart`: join the first `COUNT` of the four tiles."""
    tile = a
    if COUNT == 4:
        tile = tl.join(tl.join(a, c), tl.join(b, d))
    elif COUNT == 2:
        tile = tl.join(a, b)
    return tl.reshape(tile, [a.shape[0], a.shape[1] * COUNT])


@triton.jit
def query_columns(q, K: tl.constexpr, RAISED: tl.constexpr):
    """Return (columns, sums): the queries in four transposed tiles, and their `QuerySums`.

    Queries are split by `columns_apart`, like the elements of K's words.
    """
    COUNT: tl.constexpr = 16 // K.bits
    a, b, c, d = columns_apart(q, COUNT)
    whole = tl.sum(q.to(tl.float32), 1)
    raised = whole * INT8_RAISE
    if RAISED and COUNT == 4:
        b = (b.to(tl.float32) / 16.0).to(q.dtype)
        d = (d.to(tl.float32) / 16.0).to(q.dtype)
        # Uses the rounded queries of the dot product, so that the offsets cancel exactly.
        ones = tl.sum(a.to(tl.float32), 1) + tl.sum(c.to(tl.float32), 1)
        sixteenths = tl.sum(b.to(tl.float32), 1) + tl.sum(d.to(tl.float32), 1)
        raised = (ones + sixteenths) * IN_PLACE_RAISE
        whole = ones + sixteenths * 16.0
    columns = tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d)
    return columns, QuerySums(raised, whole)


@triton.jit
def dots(rows, queries, start, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """Return `start` plus the dot products of unpacked rows and queries."""
    total = tl.dot(rows[0], queries[0], start, input_precision=PRECISION)
    if COUNT >= 2:
        total = tl.dot(rows[1], queries[1], total, input_precision=PRECISION)
    if COUNT == 4:
        total = tl.dot(rows[2], queries[2], total, input_precision=PRECISION)
        total = tl.dot(rows[3], queries[3], total, input_precision=PRECISION)
    return total


@triton.jit
def squares(rows, QUERIES: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sum of squares of each row, repeated in one column per query."""
    ones = tl.full([rows[0].shape[1], QUERIES], 1.0, rows[0].dtype)
    squared = rows[0] * rows[0], rows[1] * rows[1], rows[2] * rows[2], rows[3] * rows[3]
    none = tl.zeros([rows[0].shape[0], QUERIES], tl.float32)
    return dots(squared, (ones, ones, ones, ones), none, 4, PRECISION)
