"""Device code that unpacks codes of K and V on Hopper: 32-bit words, row by row.

Elements keep their order, because matrix products read them from shared memory in this order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvatlas.kernels.triton.dequantise_device import FOUR_BYTES, FOUR_BYTES_BF16

E4M3_AS_HALVES = gl.constexpr("""
    {
        .reg .b16 first, second;
        mov.b32 {first, second}, $2;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
    }
""")
"""Converts the four e4m3 of a word to float16."""


def _e4m3_as_bf16(*, scaled: bool) -> str:
    """Return PTX that converts the four e4m3 of a word to bfloat16.

    If `scaled` is set, the PTX multiplies them by the float32 operand $3.
    """
    multiply = "".join(f"mul.f32 {one}, {one}, $3;\n" for one in "wxyz") if scaled else ""
    return f"""
    {{
        .reg .b16 first, second, a, b, c, d;
        .reg .b32 low, high;
        .reg .f32 w, x, y, z;
        mov.b32 {{first, second}}, $2;
        cvt.rn.f16x2.e4m3x2 low, first;
        cvt.rn.f16x2.e4m3x2 high, second;
        mov.b32 {{a, b}}, low;
        mov.b32 {{c, d}}, high;
        cvt.f32.f16 w, a;
        cvt.f32.f16 x, b;
        cvt.f32.f16 y, c;
        cvt.f32.f16 z, d;
        {multiply}
        cvt.rn.bf16x2.f32 $0, x, w;
        cvt.rn.bf16x2.f32 $1, z, y;
    }}
    """


_E4M3_AS_BF16 = gl.constexpr(_e4m3_as_bf16(scaled=False))
SCALED_E4M3_AS_BF16 = gl.constexpr(_e4m3_as_bf16(scaled=True))


def _codes(one: int, minus: int, kind: str) -> str:
    """Return PTX that converts the eight 4-bit codes of a word and subtracts operand $5 from each.

    `kind` is the PTX type of the results: "f16x2" or "bf16x2". `one` is the upper byte of a 16-bit
    float whose lowest mantissa bit is worth 1. `minus` contains the bits of -1.
    """
    ones = f"0x{one * 0x01010101:08X}"
    parts = "".join(
        f"prmt.b32 ${i}, {half}, {ones}, {pick};\nfma.rn.{kind} ${i}, $5, minus, ${i};\n"
        for i, (half, pick) in enumerate(
            (("first", "0x4140"), ("first", "0x4342"), ("last", "0x4140"), ("last", "0x4342"))
        )
    )
    return f"""
    {{
        .reg .b32 low, high, first, last, minus;
        mov.b32 minus, 0x{minus * 0x00010001:08X};
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        prmt.b32 first, low, high, 0x5140;
        prmt.b32 last, low, high, 0x7362;
        {parts}
    }}
    """


_CODES_F16 = gl.constexpr(_codes(0x64, 0xBC00, "f16x2"))
"""The PTX for float16. A code is read as 1024 + code, so operand $5 must include 1024."""
_CODES_BF16 = gl.constexpr(_codes(0x43, 0xBF80, "bf16x2"))
"""The PTX for bfloat16. A code is read as 128 + code, so operand $5 must include 128."""
_NVFP4 = gl.constexpr("""
    {
        .reg .b32 low, high, part, first, last;
        shl.b32 part, $4, 1;
        and.b32 part, part, 0x0E0E0E0E;
        shl.b32 low, $4, 4;
        lop3.b32 low, low, 0x80808080, part, 0xEA;
        shr.u32 part, $4, 3;
        and.b32 part, part, 0x0E0E0E0E;
        lop3.b32 high, $4, 0x80808080, part, 0xEA;
        prmt.b32 first, low, high, 0x5140;
        prmt.b32 last, low, high, 0x7362;
        prmt.b32 $0, first, 0, 0x1404;
        prmt.b32 $1, first, 0, 0x3424;
        prmt.b32 $2, last, 0, 0x1404;
        prmt.b32 $3, last, 0, 0x3424;
        mul.f16x2 $0, $0, $5;
        mul.f16x2 $1, $1, $5;
        mul.f16x2 $2, $2, $5;
        mul.f16x2 $3, $3, $5;
    }
""")
"""Converts the eight e2m1 codes of a word and multiplies them by operand $5. The sign and the other
three bits of a code form the upper byte of a float16 that is 2**14 times too small."""
_TWICE = gl.constexpr("""
    {
        .reg .b16 code, first, second;
        .reg .b32 both;
        cvt.u16.u32 code, $1;
        cvt.rn.f16x2.e4m3x2 both, code;
        mov.b32 {first, second}, both;
        mov.b32 $0, {first, first};
    }
""")
"""Converts an e4m3 to two equal float16."""


@gluon.jit
def pairs_of(words, CODE: gl.constexpr):
    """Convert 32-bit words of four 8-bit elements to twice as many words of two 16-bit elements.

    The PTX `CODE` converts one word.
    """
    a, b = gl.inline_asm_elementwise(
        CODE, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(a, b).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def eights_of(words, with_each, CODE: gl.constexpr):
    """Convert 32-bit words of eight 4-bit codes to four times as many words of two 16-bit elements.

    The PTX `CODE` converts one word; its second operand is `with_each`.
    """
    a, b, c, d = gl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,r,r", [words, with_each],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    both = gl.join(gl.join(a, c), gl.join(b, d))
    return both.reshape([words.shape[0], 4 * words.shape[1]])


@gluon.jit
def bytes_apart(words, ELEMENT: gl.constexpr, DOT: gl.constexpr):
    """Unpack 32-bit words of four int8 or e4m3 elements to `DOT`, the dtype of dot products."""
    if ELEMENT == gl.int8 and DOT == gl.float16:
        return pairs_of(words, FOUR_BYTES)
    if ELEMENT == gl.int8:
        return pairs_of(words, FOUR_BYTES_BF16)
    if DOT == gl.float16:
        return pairs_of(words, E4M3_AS_HALVES)
    return pairs_of(words, _E4M3_AS_BF16)


@gluon.jit
def int4_apart(words, zeros, DOT: gl.constexpr):
    """Unpack words of eight 4-bit codes to dtype `DOT`, and subtract the row's zero point."""
    zeros = (zeros + (0x6400 if DOT == gl.float16 else 0x4300)) * 0x10001
    zeros = gl.expand_dims(zeros, 1) + words * 0
    if DOT == gl.float16:
        return eights_of(words, zeros, _CODES_F16)
    return eights_of(words, zeros, _CODES_BF16)


@gluon.jit
def nvfp4_apart(words, steps):
    """Unpack 32-bit words of eight e2m1 codes to float16.

    A result is the e2m1 number, times the scale of its block (in `steps`), times 2**-14.
    """
    steps = gl.inline_asm_elementwise(
        _TWICE, "=r,r", [steps.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=1
    )
    twice = gl.join(steps, steps).reshape([words.shape[0], words.shape[1]])
    return eights_of(words, gl.convert_layout(twice, words.type.layout), _NVFP4)
