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

from kvatlas.kernels.triton.attention.walk_device import capped, pages, seen_by, state_of, within
from kvatlas.kernels.triton.dequantise_device import column_of, row_offsets

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
def pairs(words, KIND: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr,
          ASSEMBLY: tl.constexpr):  # fmt: skip
    """The even and the odd elements of words that hold two."""
    if ASSEMBLY:
        CODE: tl.constexpr = (
            _E4M3 if KIND == tl.float8e4nv else _E5M2 if KIND == tl.float8e5
            else _INT8_RAISED if RAISED else _INT8
        )  # fmt: skip
        even, odd = tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = (words & 255).to(tl.uint8).to(KIND, bitcast=True)
        odd = ((words >> 8) & 255).to(tl.uint8).to(KIND, bitcast=True)
    return even.to(DOT), odd.to(DOT)


@triton.jit
def quarters(words, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The four codes of words, each as 1 + code / 16."""
    if ASSEMBLY:
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
def apart(words, FORM: tl.constexpr, DOT: tl.constexpr, RAISED: tl.constexpr, PARTS: tl.constexpr):
    """The first, second, ... elements of words; past `PARTS` of them whatever comes."""
    if PARTS == 4:
        a, b, c, d = quarters(words, DOT, FORM[6])
    elif PARTS == 2:
        a, b = pairs(words, FORM[1], DOT, RAISED, FORM[6])
        c, d = a, b
    else:
        a = words.to(FORM[1], bitcast=True).to(DOT)
        b, c, d = a, a, a
    return a, b, c, d


@triton.jit
def columns_apart(tile, PARTS: tl.constexpr):
    """Columns by their place in a word."""
    a, b, c, d = tile, tile, tile, tile
    if PARTS == 4:
        last = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 4, 2, 2])
        even, odd = tl.split(last)
        a, c = tl.split(even)
        b, d = tl.split(odd)
    elif PARTS == 2:
        a, b = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
        c, d = a, b
    return a, b, c, d


@triton.jit
def columns_together(a, b, c, d, PARTS: tl.constexpr):
    """`columns_apart`, undone."""
    tile = a
    if PARTS == 4:
        tile = tl.join(tl.join(a, c), tl.join(b, d))
    elif PARTS == 2:
        tile = tl.join(a, b)
    return tl.reshape(tile, [a.shape[0], a.shape[1] * PARTS])


@triton.jit
def dots(rows, queries, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of the products of all parts."""
    found = tl.dot(rows[0], queries[0], input_precision=PRECISION)
    if PARTS >= 2:
        found = tl.dot(rows[1], queries[1], found, input_precision=PRECISION)
    if PARTS == 4:
        found = tl.dot(rows[2], queries[2], found, input_precision=PRECISION)
        found = tl.dot(rows[3], queries[3], found, input_precision=PRECISION)
    return found


@triton.jit
def logarithm(values, ASSEMBLY: tl.constexpr):
    """Of base 2, to within a millionth: one instruction where there is one."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(values)


@triton.jit
def first_of(tile, COUNT: tl.constexpr):
    """The first columns of a tile, a power of two of them."""
    parts = tl.reshape(tile, [tile.shape[0], tile.shape[1] // COUNT, COUNT])
    whose = tl.arange(0, tile.shape[1] // COUNT)[None, :, None]
    return tl.sum(tl.where(whose == 0, parts, 0.0), 1)


@triton.jit
def two_pages(table, begin, low, high, STATES: tl.constexpr, TILE: tl.constexpr,
              FIT: tl.constexpr):  # fmt: skip
    """The blocks of a tile; where there are two, as numbers that all threads share."""
    if FIT == "pages in tile" and TILE == 2 * STATES:
        page = pages(table, begin, low, high, STATES, STATES, "tile in page")
        after = pages(table, begin + STATES, low, high, STATES, STATES, "tile in page")
    else:
        page = pages(table, begin, low, high, STATES, TILE, FIT)
        after = 0
    return page, after


@triton.jit
def walk_words(
    acc, top, total, q, position, least, kept, begin, end, low, high, head, table, buffer,
    k_at, k_scale_at, v_scale_at, scale, softcap,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FIT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOUND: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    EVICT: tl.constexpr, DELTA: tl.constexpr, LEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What `attending.walk` does, for rows of K and V that are `DELTA` bytes apart.

    With `LEAD` V is read that many bytes early, in pieces as wide as those of K. Its last
    elements come from a tile of their own and take the places of the first.
    """
    INT4: tl.constexpr = K_FORM[0] == "int4"
    BITS: tl.constexpr = 4 if INT4 else K_FORM[1].primitive_bitwidth
    PARTS: tl.constexpr = 16 // BITS
    WORD: tl.constexpr = K_FORM[1] if PARTS == 1 else tl.int16
    LAST: tl.constexpr = LEAD * 8 // BITS
    RAISED: tl.constexpr = K_FORM[1] == tl.int8 and K_FORM[6]
    NO_NUMBERS: tl.constexpr = not INT4 and K_FORM[1] != tl.int8
    queries = columns_apart(q, PARTS)
    queries = (
        tl.trans(queries[0]), tl.trans(queries[1]), tl.trans(queries[2]), tl.trans(queries[3])
    )  # fmt: skip
    q_sum = tl.sum(q.to(tl.float32), 1)
    if INT4:
        acc = acc / INT4_RAISE
        shift = q_sum * 0.0
    if LEAD:
        ending = tl.trans(first_of(acc, LAST))
    a, b, c, d = columns_apart(acc, PARTS)
    a, b, c, d = tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d)
    lane = tl.arange(0, TILE)
    reach = tl.min(least, 0)
    words = buffer.to(tl.pointer_type(WORD))
    page, after = two_pages(table, begin, low, high, STATES, TILE, FIT)
    for n in tl.range(begin, end, TILE, num_stages=STAGES):
        states = n + lane
        there = within(states, low, high, reach, kept, BOUND)
        here = page.to(tl.int32)
        if FIT == "pages in tile" and TILE == 2 * STATES:
            here = tl.where(lane < STATES, here, after.to(tl.int32))
        page, after = two_pages(table, n + TILE, low, high, STATES, TILE, FIT)
        state = state_of(n, lane, STATES, FIT)
        k_rows = row_offsets(k_at, here, state, head, K_FORM[2] if PARTS == 1 else K_FORM[2] // 2)
        v_rows = k_rows + (DELTA - LEAD) // 2
        k_pointers = words + k_rows[:, None] + tl.arange(0, WIDTH // PARTS)[None, :]
        v_pointers = words + v_rows[None, :] + tl.arange(0, V_WIDTH // PARTS)[:, None]
        k = tl.load(k_pointers, eviction_policy=EVICT)
        # What nobody wrote may be no number, which no weight hides.
        if MASKED and NO_NUMBERS:
            v = tl.load(v_pointers, mask=there[None, :], other=0, eviction_policy=EVICT)
        else:
            v = tl.load(v_pointers, eviction_policy=EVICT)
        logits = dots(apart(k, K_FORM, DOT, RAISED, PARTS), queries, PARTS, PRECISION)
        if RAISED:
            logits = logits - (q_sum * INT8_RAISE)[None, :]
        factor = scale
        if K_FORM[0] == "scaled" or INT4:
            word = column_of(
                buffer, k_scale_at, here, state, head, there, tl.int32, K_FORM[3], False
            )
            if INT4:
                zero = (word & 15).to(tl.float32)
                logits = logits - (1.0 + zero / INT4_RAISE)[:, None] * q_sum[None, :]
                word = word & -16
                factor = scale * INT4_RAISE
            logits = logits * (word.to(tl.float32, bitcast=True) * factor)[:, None]
        else:
            logits = logits * scale
        if SOFTCAP:
            logits = capped(logits, softcap)
        if V_FORM[0] == "scaled" or INT4:
            # Scales of V are part of the weights. They are added to the logits, so that the
            # largest weight is near 1 whatever the scales are, and halves are wide enough for
            # the others; the total takes them out again.
            if LEAD:
                # The last elements and the scale behind them, as one number.
                both = tl.load(
                    buffer.to(tl.pointer_type(tl.int64)) + (v_rows // 4 + V_WIDTH // PARTS // 4)
                )
                word = (both >> 32).to(tl.int32)
            else:
                word = column_of(
                    buffer, v_scale_at, here, state, head, there, tl.int32, V_FORM[3], False
                )
            if MASKED:
                word = tl.where(there, word, 0x3F800000)
            if INT4:
                zero = (word & 15).to(tl.float32)
                word = word & -16
            step = word.to(tl.float32, bitcast=True)
            # Blocks that were cleared have scales of 0, whose logarithm no sum survives.
            power = logarithm(tl.where(step == 0.0, CLEARED, step), V_FORM[6])
            logits = logits + power[:, None]
        if MASKED:
            seen = seen_by(states[:, None], position[None, :], least[None, :], kept, BOUND)
            if BOUND == "kept":
                seen = seen & there[:, None]
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        if tl.max(higher - top, 0) > HEADROOM:
            shrink = tl.exp2(top - higher)
            total = total * shrink
            a = a * shrink[None, :]
            if PARTS >= 2:
                b = b * shrink[None, :]
            if PARTS == 4:
                c = c * shrink[None, :]
                d = d * shrink[None, :]
            if LEAD:
                ending = ending * shrink[None, :]
            if INT4:
                shift = shift * shrink
            top = higher
        weights = tl.exp2(logits - top[None, :])
        if V_FORM[0] == "scaled" or INT4:
            total = total + tl.sum(weights * tl.exp2(-power)[:, None], 0)
        else:
            total = total + tl.sum(weights, 0)
        weights = weights.to(DOT)
        if INT4:
            # Of weights as the dots see them: what was added must cancel.
            shift = shift + tl.sum(weights.to(tl.float32) * (zero + INT4_RAISE)[:, None], 0)
        parts = apart(v, V_FORM, DOT, False, PARTS)
        a = tl.dot(parts[0], weights, a, input_precision=PRECISION)
        if PARTS >= 2:
            b = tl.dot(parts[1], weights, b, input_precision=PRECISION)
        if PARTS == 4:
            c = tl.dot(parts[2], weights, c, input_precision=PRECISION)
            d = tl.dot(parts[3], weights, d, input_precision=PRECISION)
        if LEAD:
            codes = both.to(tl.int32)[None, :] >> (BITS * tl.arange(0, LAST))[:, None]
            if MASKED and NO_NUMBERS:
                codes = tl.where(there[None, :], codes, 0)
            if INT4:
                last = (1.0 + (codes & 15).to(tl.float32) / INT4_RAISE).to(DOT)
            else:
                last = codes.to(tl.int8).to(V_FORM[1], bitcast=True).to(DOT)
            ending = tl.dot(last, weights, ending, input_precision=PRECISION)
    acc = columns_together(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), PARTS)
    if LEAD:
        first = tl.arange(0, V_WIDTH) < LAST
        wide = tl.broadcast_to(tl.trans(ending)[:, None, :], [acc.shape[0], V_WIDTH // LAST, LAST])
        acc = tl.where(first[None, :], tl.reshape(wide, [acc.shape[0], V_WIDTH]), acc)
    if INT4:
        acc = acc * INT4_RAISE - shift[:, None]
    return acc, top, total
