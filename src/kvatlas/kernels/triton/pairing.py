"""Device code for caches of 8-bit elements: neighbours travel in pairs, as one 16-bit word.

Shared memory hands out matrices of 16-bit words. Loaded as words, K and V go straight
into the registers of a dot and are taken apart there: one dot for the even elements of a
row, one for the odd ones. Loaded as bytes they would be gathered one by one, or be written
to shared memory a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attending import LOG2E, pages
from kvatlas.kernels.triton.reading import column_of, row_offsets

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
"""The upper byte of a half."""
_INT8 = tl.constexpr("""
    {
        .reg .b32 biased, excess;
        mov.b32 excess, 0x64806480;
        xor.b32 biased, $2, 0x80808080;
        prmt.b32 $0, biased, 0x64646464, 0x4240;
        prmt.b32 $1, biased, 0x64646464, 0x4341;
        sub.f16x2 $0, $0, excess;
        sub.f16x2 $1, $1, excess;
    }
""")
"""0x6400 is 1024 and its lowest bits count ones, so that a byte put there with its sign
turned is 1024 + 128 + the number."""


@triton.jit
def apart(words, KIND: tl.constexpr, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The even and the odd elements of words that hold two."""
    if ASSEMBLY:
        if KIND == tl.float8e4nv:
            even, odd = tl.inline_asm_elementwise(
                _E4M3, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        elif KIND == tl.float8e5:
            even, odd = tl.inline_asm_elementwise(
                _E5M2, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            even, odd = tl.inline_asm_elementwise(
                _INT8, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
    else:
        even = (words & 255).to(tl.uint8).to(KIND, bitcast=True)
        odd = ((words >> 8) & 255).to(tl.uint8).to(KIND, bitcast=True)
    return even.to(DOT), odd.to(DOT)


@triton.jit
def halves(tile):
    """The even and the odd columns of a tile."""
    return tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))


@triton.jit
def words_of(
    buffer, at, page, state, head, there, UNIT: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Rows of `WIDTH` words."""
    column = tl.arange(0, WIDTH)
    rows = row_offsets(at, page, state, head, UNIT // 2)
    pointers = buffer.to(tl.pointer_type(tl.int16)) + rows[:, None] + column[None, :]
    if MASKED:
        return tl.load(pointers, mask=there[:, None], other=0, eviction_policy=EVICT)
    return tl.load(pointers, eviction_policy=EVICT)


@triton.jit
def walk_pairs(
    acc, top, total, q, position, least, begin, end, low, high, head, table, buffer,
    k_at, k_scale_at, v_at, v_scale_at, scale, softcap,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FIT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOUNDED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """What `attending.walk` does, masked, for K and V of 8-bit elements."""
    q_even, q_odd = halves(q)
    acc_even, acc_odd = halves(acc)
    lane = tl.arange(0, TILE)
    page = pages(table, begin, low, high, STATES, TILE, FIT)
    for n in tl.range(begin, end, TILE):
        states = n + lane
        there = (states >= low) & (states < high)
        here = page.to(tl.int32)
        page = pages(table, n + TILE, low, high, STATES, TILE, FIT)
        if FIT == "tile in page":
            state = n % STATES + lane
        elif FIT == "pages in tile":
            state = lane % STATES
        else:
            state = states % STATES
        k = words_of(buffer, k_at, here, state, head, there, K_FORM[2], WIDTH // 2, False, EVICT)
        v = words_of(buffer, v_at, here, state, head, there, V_FORM[2], V_WIDTH // 2, True, EVICT)
        k_even, k_odd = apart(k, K_FORM[1], DOT, K_FORM[6])
        logits = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
        logits = tl.dot(q_odd, tl.trans(k_odd), logits, input_precision=PRECISION)
        if K_FORM[0] == "scaled":
            k_factor = column_of(
                buffer, k_scale_at, here, state, head, there, tl.float32, K_FORM[3], False
            )
            logits = logits * k_factor[None, :]
        logits = logits * scale
        if SOFTCAP:
            folded = tl.exp2(logits * (2.0 * LOG2E / softcap))
            logits = softcap * LOG2E * (1.0 - 2.0 / (folded + 1.0))
        seen = states[None, :] <= position[:, None]
        if BOUNDED:
            seen = seen & (states[None, :] >= least[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        if V_FORM[0] == "scaled":
            # Scales of V are part of the weights. Their exponents are added to the logits, so
            # that the largest weight is near 1 whatever the scales are, and halves are wide
            # enough for the others; the total takes them out again.
            factor = column_of(
                buffer, v_scale_at, here, state, head, there, tl.int32, V_FORM[3], True
            )
            power = (factor >> 23) & 255
            fraction = ((factor & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
            inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
            logits = logits + (power - 127).to(tl.float32)[None, :]
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        if V_FORM[0] == "scaled":
            total = total * shrink + tl.sum(weights * inverse[None, :], 1)
            weights = weights * fraction[None, :]
        else:
            total = total * shrink + tl.sum(weights, 1)
        top = higher
        weights = weights.to(DOT)
        v_even, v_odd = apart(v, V_FORM[1], DOT, V_FORM[6])
        acc_even = tl.dot(weights, v_even, acc_even * shrink[:, None], input_precision=PRECISION)
        acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision=PRECISION)
    acc = tl.reshape(tl.join(acc_even, acc_odd), [acc.shape[0], V_WIDTH])
    return acc, top, total
