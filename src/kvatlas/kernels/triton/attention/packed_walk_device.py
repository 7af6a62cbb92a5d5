"""Device code of decode: few queries over many states, the elements of a row in 16-bit words.

States are the rows of the dots and queries their columns, of which a tile needs 8 where
it would need 16 rows. Shared memory hands out matrices of 16-bit words: loaded as words,
K and V go straight into the registers of a dot, and are taken apart there into their
first, second, ... elements, with a dot for each. Loaded as bytes they would be gathered
one by one, or be written to shared memory a second time.

| elements | in a word | what the dot sees |
|---|---|---|
| 16 bits | 1 | the element |
| 8 bits | 2 | the element, as a half; int8 of K with 1152 added |
| int4 | 4 | 1 + code / 16 |

What is added is known, and taken out again from sums: of the queries for K, of the
weights for V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import (
    Softmax,
    capped,
    pages,
    seen_by,
    state_of,
    within,
)
from kvatlas.kernels.triton.dequantise_device import TileStates, column_of, row_offsets

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
_INT8_RAISED = tl.constexpr("""
    {
        .reg .b32 raised;
        xor.b32 raised, $2, 0x80808080;
        prmt.b32 $0, raised, 0x64646464, 0x4240;
        prmt.b32 $1, raised, 0x64646464, 0x4341;
    }
""")
"""0x6400 is 1024 and its lowest bits count ones, so that a byte put there with its sign
turned is 1024 + 128 + the number."""
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
_INT4 = tl.constexpr("""
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
"""0x3C00 is 1; a code in the uppermost bits of its fraction counts sixteenths."""
INT8_RAISE = tl.constexpr(1152.0)
INT4_RAISE = tl.constexpr(16.0)
CLEARED = tl.constexpr(2.0**-60)
"""A scale that is as good as 0."""
HEADROOM = tl.constexpr(8.0)
"""Powers of 2 that weights may grow before sums are scaled down, which most tiles spare."""


@triton.jit
def pairs(words, ELEMENT: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr, PTX: tl.constexpr):
    """The even and the odd elements of words that hold two."""
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
def quarters(words, DOT: tl.constexpr, PTX: tl.constexpr):
    """The four codes of words, each as 1 + code / 16."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = 1.0 + (words & 15).to(tl.float32) / INT4_RAISE
        b = 1.0 + ((words >> 4) & 15).to(tl.float32) / INT4_RAISE
        c = 1.0 + ((words >> 8) & 15).to(tl.float32) / INT4_RAISE
        d = 1.0 + ((words >> 12) & 15).to(tl.float32) / INT4_RAISE
    return a.to(DOT), b.to(DOT), c.to(DOT), d.to(DOT)


@triton.jit
def apart(
    words, FORMAT: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr, COUNT: tl.constexpr
):
    """The first, second, ... elements of words; past `COUNT` of them whatever comes."""
    if COUNT == 4:
        a, b, c, d = quarters(words, DOT, FORMAT.ptx)
    elif COUNT == 2:
        a, b = pairs(words, FORMAT.element, DOT, RAISED, FORMAT.ptx)
        c, d = a, b
    else:
        a = words.to(FORMAT.element, bitcast=True).to(DOT)
        b, c, d = a, a, a
    return a, b, c, d


@triton.jit
def columns_apart(tile, COUNT: tl.constexpr):
    """Columns by their place in a word."""
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
    """`columns_apart`, undone."""
    tile = a
    if COUNT == 4:
        tile = tl.join(tl.join(a, c), tl.join(b, d))
    elif COUNT == 2:
        tile = tl.join(a, b)
    return tl.reshape(tile, [a.shape[0], a.shape[1] * COUNT])


@triton.jit
def dots(rows, queries, COUNT: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of the products of all elements of words."""
    total = tl.dot(rows[0], queries[0], input_precision=PRECISION)
    if COUNT >= 2:
        total = tl.dot(rows[1], queries[1], total, input_precision=PRECISION)
    if COUNT == 4:
        total = tl.dot(rows[2], queries[2], total, input_precision=PRECISION)
        total = tl.dot(rows[3], queries[3], total, input_precision=PRECISION)
    return total


@triton.jit
def logarithm(values, PTX: tl.constexpr):
    """Of base 2, to within a millionth: one instruction where there is one."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(values)


@triton.jit
def first_of(tile, SIZE: tl.constexpr):
    """The first columns of a tile, a power of two of them."""
    stretches = tl.reshape(tile, [tile.shape[0], tile.shape[1] // SIZE, SIZE])
    whose = tl.arange(0, tile.shape[1] // SIZE)[None, :, None]
    return tl.sum(tl.where(whose == 0, stretches, 0.0), 1)


@triton.jit
def two_pages(stretch, begin, STATES: tl.constexpr, TILE: tl.constexpr, FIT: tl.constexpr):
    """The blocks of a tile; where there are two, as numbers that all threads share."""
    if FIT == "pages in tile" and TILE == 2 * STATES:
        page = pages(stretch, begin, STATES, STATES, "tile in page")
        after = pages(stretch, begin + STATES, STATES, STATES, "tile in page")
    else:
        page = pages(stretch, begin, STATES, TILE, FIT)
        after = 0
    return page, after


@triton.jit
def walk_words(
    softmax, queries, stretch, cache, scoring, SHAPE: tl.constexpr, TILING: tl.constexpr,
    WORDS: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What `walk` does, for rows of K and V that are `WORDS.delta` bytes apart.

    With `WORDS.lead` V is read that many bytes early, in pieces as wide as those of K. Its last
    elements come from a tile of their own and take the places of the first.
    """
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    STATES: tl.constexpr = SHAPE.states
    TILE: tl.constexpr = TILING.tile
    FIT: tl.constexpr = TILING.fit
    EVICT: tl.constexpr = TILING.evict
    DOT: tl.constexpr = SHAPE.k_dot
    PRECISION: tl.constexpr = SHAPE.precision
    LEAD: tl.constexpr = WORDS.lead
    V_WIDTH: tl.constexpr = V.width
    INT4: tl.constexpr = K.kind == "int4"
    BITS: tl.constexpr = 4 if INT4 else K.element.primitive_bitwidth
    COUNT: tl.constexpr = 16 // BITS
    WORD: tl.constexpr = K.element if COUNT == 1 else tl.int16
    LAST: tl.constexpr = LEAD * 8 // BITS
    RAISED: tl.constexpr = K.element == tl.int8 and K.ptx
    V_SCALED: tl.constexpr = V.kind == "scaled" or INT4
    NO_NUMBERS: tl.constexpr = not INT4 and K.element != tl.int8
    acc, top, total = softmax.acc, softmax.top, softmax.total
    q = queries.rows
    columns = columns_apart(q, COUNT)
    columns = (
        tl.trans(columns[0]), tl.trans(columns[1]), tl.trans(columns[2]), tl.trans(columns[3])
    )  # fmt: skip
    q_sum = tl.sum(q.to(tl.float32), 1)
    if INT4:
        acc = acc / INT4_RAISE
        shift = q_sum * 0.0
    if LEAD:
        ending = tl.trans(first_of(acc, LAST))
    a, b, c, d = columns_apart(acc, COUNT)
    a, b, c, d = tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d)
    offset = tl.arange(0, TILE)
    reach = tl.min(queries.least, 0)
    words = cache.buffer.to(tl.pointer_type(WORD))
    page, after = two_pages(stretch, stretch.begin, STATES, TILE, FIT)
    for n in tl.range(stretch.begin, stretch.end, TILE, num_stages=TILING.stages):
        at = n + offset
        there = within(at, stretch, reach, scoring.sink_tokens, MASK)
        here = page.to(tl.int32)
        if FIT == "pages in tile" and TILE == 2 * STATES:
            here = tl.where(offset < STATES, here, after.to(tl.int32))
        page, after = two_pages(stretch, n + TILE, STATES, TILE, FIT)
        states = TileStates(here, state_of(n, offset, STATES, FIT), stretch.head, there)
        k_rows = row_offsets(cache.k.rows, states, K.unit if COUNT == 1 else K.unit // 2)
        v_rows = k_rows + (WORDS.delta - LEAD) // 2
        k_pointers = words + k_rows[:, None] + tl.arange(0, K.width // COUNT)[None, :]
        v_pointers = words + v_rows[None, :] + tl.arange(0, V_WIDTH // COUNT)[:, None]
        k = tl.load(k_pointers, eviction_policy=EVICT)
        # What nobody wrote may be no number, which no weight hides.
        if MASKED and NO_NUMBERS:
            v = tl.load(v_pointers, mask=there[None, :], other=0, eviction_policy=EVICT)
        else:
            v = tl.load(v_pointers, eviction_policy=EVICT)
        logits = dots(apart(k, K, DOT, RAISED, COUNT), columns, COUNT, PRECISION)
        if RAISED:
            logits = logits - (q_sum * INT8_RAISE)[None, :]
        factor = scoring.scale
        if K.kind == "scaled" or INT4:
            word = column_of(cache.buffer, cache.k.scales, states, tl.int32, K.scale_unit, False)
            if INT4:
                zero = (word & 15).to(tl.float32)
                logits = logits - (1.0 + zero / INT4_RAISE)[:, None] * q_sum[None, :]
                word = word & -16
                factor = scoring.scale * INT4_RAISE
            logits = logits * (word.to(tl.float32, bitcast=True) * factor)[:, None]
        else:
            logits = logits * scoring.scale
        if SHAPE.softcap:
            logits = capped(logits, scoring.softcap)
        if V_SCALED:
            # Scales of V are part of the weights. They are added to the logits, so that the
            # largest weight is near 1 whatever the scales are, and halves are wide enough for
            # the others; the total takes them out again.
            if LEAD:
                # The last elements and the scale behind them, as one number.
                both = tl.load(
                    cache.buffer.to(tl.pointer_type(tl.int64))
                    + (v_rows // 4 + V_WIDTH // COUNT // 4)
                )
                word = (both >> 32).to(tl.int32)
            else:
                word = column_of(
                    cache.buffer, cache.v.scales, states, tl.int32, V.scale_unit, False
                )
            if MASKED:
                word = tl.where(there, word, 0x3F800000)
            if INT4:
                zero = (word & 15).to(tl.float32)
                word = word & -16
            step = word.to(tl.float32, bitcast=True)
            # Blocks that were cleared have scales of 0, whose logarithm no sum survives.
            power = logarithm(tl.where(step == 0.0, CLEARED, step), V.ptx)
            logits = logits + power[:, None]
        if MASKED:
            seen = seen_by(
                at[:, None], queries.position[None, :], queries.least[None, :],
                scoring.sink_tokens, MASK,
            )  # fmt: skip
            if MASK == "sinks":
                seen = seen & there[:, None]
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        if tl.max(higher - top, 0) > HEADROOM:
            shrink = tl.exp2(top - higher)
            total = total * shrink
            a = a * shrink[None, :]
            if COUNT >= 2:
                b = b * shrink[None, :]
            if COUNT == 4:
                c = c * shrink[None, :]
                d = d * shrink[None, :]
            if LEAD:
                ending = ending * shrink[None, :]
            if INT4:
                shift = shift * shrink
            top = higher
        weights = tl.exp2(logits - top[None, :])
        if V_SCALED:
            total = total + tl.sum(weights * tl.exp2(-power)[:, None], 0)
        else:
            total = total + tl.sum(weights, 0)
        weights = weights.to(DOT)
        if INT4:
            # Of weights as the dots see them: what was added must cancel.
            shift = shift + tl.sum(weights.to(tl.float32) * (zero + INT4_RAISE)[:, None], 0)
        rows = apart(v, V, DOT, False, COUNT)
        a = tl.dot(rows[0], weights, a, input_precision=PRECISION)
        if COUNT >= 2:
            b = tl.dot(rows[1], weights, b, input_precision=PRECISION)
        if COUNT == 4:
            c = tl.dot(rows[2], weights, c, input_precision=PRECISION)
            d = tl.dot(rows[3], weights, d, input_precision=PRECISION)
        if LEAD:
            codes = both.to(tl.int32)[None, :] >> (BITS * tl.arange(0, LAST))[:, None]
            if MASKED and NO_NUMBERS:
                codes = tl.where(there[None, :], codes, 0)
            if INT4:
                last = (1.0 + (codes & 15).to(tl.float32) / INT4_RAISE).to(DOT)
            else:
                last = codes.to(tl.int8).to(V.element, bitcast=True).to(DOT)
            ending = tl.dot(last, weights, ending, input_precision=PRECISION)
    acc = columns_together(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), COUNT)
    if LEAD:
        first = tl.arange(0, V_WIDTH) < LAST
        wide = tl.broadcast_to(tl.trans(ending)[:, None, :], [acc.shape[0], V_WIDTH // LAST, LAST])
        acc = tl.where(first[None, :], tl.reshape(wide, [acc.shape[0], V_WIDTH]), acc)
    if INT4:
        acc = acc * INT4_RAISE - shift[:, None]
    return Softmax(acc, top, total)
