"""Device code of decode: few queries over many states, the elements of a row in 16-bit words.

States are the rows of the dots and queries their columns, of which a tile needs 8 where
it would need 16 rows. Shared memory hands out matrices of 16-bit words: loaded as words,
K and V go straight into the registers of a dot, and are taken apart there into their
first, second, ... elements, with a dot for each (`packed_words_device`). Loaded as bytes they
would be gathered one by one, or be written to shared memory a second time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.packed_words_device import (
    CODE_RAISE,
    apart,
    block_steps,
    columns_apart,
    columns_together,
    dots,
    query_columns,
    squares,
)
from kvatlas.kernels.triton.attention.walk_device import (
    Softmax,
    capped,
    pages,
    seen_by,
    state_of,
    within,
)
from kvatlas.kernels.triton.dequantise_device import (
    E2M1_UNIT,
    TileStates,
    column_of,
    row_offsets,
)

CLEARED_BITS = tl.constexpr(0x21800000)
"""Bits of 2**-60, a scale that is as good as 0."""
HEADROOM = tl.constexpr(8.0)
"""Powers of 2 that weights may grow before sums are scaled down, which most tiles spare."""


class ValueScales(NamedTuple):
    """The scales of rows of V that have their own."""

    power: Any
    """Their logarithms."""
    inverse: Any
    """What takes them out of weights again."""
    zero: Any
    """The code that stands for 0, for codes."""
    last: Any
    """The last elements of rows that are read early, and the scale behind them: one number."""


@triton.jit
def above_zero(scale):
    """Scales, or one that is as good as 0 where they are: blocks that were cleared have such.

    No sum survives the logarithm of 0. As unsigned numbers the bits of scales are in the same
    order, and NaN of either sign is above them all: it stays.
    """
    bits = scale.to(tl.uint32, bitcast=True)
    return tl.maximum(bits, CLEARED_BITS).to(tl.float32, bitcast=True)


@triton.jit
def power_of(scale, PTX: tl.constexpr):
    """The logarithms of scales, of base 2, and their inverses, both to within a millionth."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2;\nrcp.approx.ftz.f32 $1, $2;", "=f,=f,f", [scale],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.log2(scale), 1.0 / scale


@triton.jit
def eights(tile):
    """A tile [rows, queries] as [rows / 8, 8, queries].

    A thread of a dot has every eighth row of its queries: to reduce the first axis asks no other.
    """
    return tl.reshape(tile, [tile.shape[0] // 8, 8, tile.shape[1]])


@triton.jit
def grows(logits, top):
    """Whether a logit is so far above its query's maximum that sums must be scaled down.

    Each thread looks at its own; the largest integer of a warp is one instruction, where the
    maximum of each query would be exchanged between threads for every tile.
    """
    highest = tl.max(eights(logits), 0)
    above = (highest > (top + HEADROOM)[None, :]).to(tl.int32)
    return tl.max(above) > 0


@triton.jit
def word_offsets(steps, states, UNIT: tl.constexpr, STEP: tl.constexpr):
    """`row_offsets` of a tile's rows of K, whose states are `STEP` units apart, or what steps say.

    Multiples of a constant become parts of the instructions that load.
    """
    if STEP == 0:
        return row_offsets(steps, states, UNIT)
    first = (steps.first + states.head.to(tl.int64) * steps.head) * UNIT
    start = tl.cast(states.start, tl.int64) * (STEP * UNIT) + first
    within_block = states.state.to(tl.int64) * (STEP * UNIT)
    return states.page.to(tl.int64) * (steps.block * UNIT) + start + within_block


@triton.jit
def scale_word(buffer, steps, states, rows, GAP: tl.constexpr, UNIT: tl.constexpr):
    """A scale of four bytes for each state, `GAP` bytes behind its row of K, or where steps say.

    `rows` point at rows of K, as words of two bytes.
    """
    if GAP:
        return tl.load((rows + GAP // 2).to(tl.pointer_type(tl.int32)))
    return column_of(buffer, steps, states, tl.int32, UNIT, False)


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
def scored(k, columns, sums, cache, states, k_rows, scale, SHAPE: tl.constexpr, GAP: tl.constexpr):
    """Logits of a tile of K, times the scale: states are rows, queries columns."""
    K: tl.constexpr = SHAPE.k
    DOT: tl.constexpr = SHAPE.k_dot
    PRECISION: tl.constexpr = SHAPE.precision
    COUNT: tl.constexpr = 16 // K.bits
    RAISED: tl.constexpr = K.kind == "int4" or (K.element == tl.int8 and K.ptx)
    steps = k
    if K.kind == "nvfp4":
        steps = block_steps(cache.buffer, cache.k.scales, states, K, False)
    rows = apart(k, steps, K, DOT, RAISED)
    start = tl.zeros([k.shape[0], columns[0].shape[1]], tl.float32)
    if RAISED:
        start -= sums.raised[None, :]
    logits = dots(rows, columns, start, COUNT, PRECISION)
    if K.kind == "nvfp4":
        logits = logits * (scale * E2M1_UNIT)
    elif K.kind == "levels":
        # A row of levels is as long as its norm says.
        norm = column_of(cache.buffer, cache.k.scales, states, tl.float16, K.scale_unit, False)
        lengths = squares(rows, logits.shape[1], PRECISION)
        logits = logits * (norm.to(tl.float32) * scale)[:, None] * tl.rsqrt(lengths)
    elif K.kind == "plain":
        logits = logits * scale
    else:
        word = scale_word(cache.buffer, cache.k.scales, states, k_rows, GAP, K.scale_unit)
        if K.kind == "int4":
            # The zero point stays in the scale's lowest bits: less than two millionths of it.
            logits = logits - (word & 15).to(tl.float32)[:, None] * sums.whole[None, :]
        logits = logits * (word.to(tl.float32, bitcast=True) * scale)[:, None]
    return logits


@triton.jit
def value_scales(
    cache, states, k_rows, v_rows, V: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr
):
    """The scales of rows of V, which start `v_rows` words into the pool; `k_rows` point at K's."""
    LEAD: tl.constexpr = WORDS.lead
    COUNT: tl.constexpr = 16 // V.bits
    last = v_rows
    if V.kind == "range":
        step = column_of(cache.buffer, cache.v.scales, states, tl.float16, V.scale_unit, MASKED)
        zero = column_of(cache.buffer, cache.v.zeros, states, tl.float16, V.zero_unit, MASKED)
        step, zero = step.to(tl.float32), zero.to(tl.float32)
    else:
        if LEAD:
            last = tl.load(
                cache.buffer.to(tl.pointer_type(tl.int64)) + (v_rows // 4 + V.width // COUNT // 4)
            )
            word = (last >> 32).to(tl.int32)
        else:
            word = scale_word(
                cache.buffer, cache.v.scales, states, k_rows, WORDS.scales[1], V.scale_unit
            )
        if MASKED:
            word = tl.where(states.there, word, 0x3F800000)
        zero = word
        if V.kind == "int4":
            zero = (word & 15).to(tl.float32)
        step = word.to(tl.float32, bitcast=True)
    step = above_zero(step)
    if V.kind == "range":
        zero = -zero / step
    power, inverse = power_of(step, V.ptx)
    return ValueScales(power, inverse, zero, last)


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
    BITS: tl.constexpr = V.bits
    COUNT: tl.constexpr = 16 // BITS
    WORD: tl.constexpr = K.element if COUNT == 1 else tl.int16
    LAST: tl.constexpr = LEAD * 8 // BITS
    CODES: tl.constexpr = V.kind == "int4" or V.kind == "range"
    V_SCALED: tl.constexpr = V.kind == "scaled" or CODES
    UNIT: tl.constexpr = CODE_RAISE if CODES else E2M1_UNIT if V.kind == "nvfp4" else 1.0
    NO_NUMBERS: tl.constexpr = COUNT < 4 and K.element != tl.int8
    acc, top, total = softmax.acc, softmax.top, softmax.total
    q = queries.rows
    columns, sums = query_columns(q, K, K.kind == "int4")
    if UNIT != 1.0:
        acc = acc / UNIT
    # Threads add up the rows of tiles that they have; who has which is looked at behind the last.
    parts = tl.zeros([8, q.shape[0]], tl.float32)
    if CODES:
        shift = tl.zeros([8, q.shape[0]], tl.float32)
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
        start, state = state_of(n, offset, STATES, FIT)
        states = TileStates(here, start, state, stretch.head, there)
        UNIT_WORDS: tl.constexpr = K.unit if COUNT == 1 else K.unit // 2
        k_rows = word_offsets(cache.k.rows, states, UNIT_WORDS, WORDS.step)
        v_rows = k_rows + (WORDS.delta - LEAD) // 2
        k_pointers = words + k_rows[:, None] + tl.arange(0, K.width // COUNT)[None, :]
        v_pointers = words + v_rows[None, :] + tl.arange(0, V_WIDTH // COUNT)[:, None]
        k = tl.load(k_pointers, eviction_policy=EVICT)
        # What nobody wrote may be no number, which no weight hides.
        if MASKED and NO_NUMBERS:
            v = tl.load(v_pointers, mask=there[None, :], other=0, eviction_policy=EVICT)
        else:
            v = tl.load(v_pointers, eviction_policy=EVICT)
        logits = scored(
            k, columns, sums, cache, states, words + k_rows, scoring.scale, SHAPE, WORDS.scales[0]
        )
        if SHAPE.softcap:
            logits = capped(logits, scoring.softcap)
        if V_SCALED:
            # Scales of V are part of the weights. They are added to the logits, so that the
            # largest weight is near 1 whatever the scales are, and halves are wide enough for
            # the others; the total takes them out again.
            scales = value_scales(cache, states, words + k_rows, v_rows, V, WORDS, MASKED)
            logits = logits + scales.power[:, None]
        if MASKED:
            seen = seen_by(
                at[:, None], queries.position[None, :], queries.least[None, :],
                scoring.sink_tokens, MASK,
            )  # fmt: skip
            if MASK == "sinks":
                seen = seen & there[:, None]
            logits = tl.where(seen, logits, float("-inf"))
        if grows(logits, top):
            higher = tl.maximum(top, tl.max(logits, 0))
            shrink = tl.exp2(top - higher)
            total = total * shrink
            parts = parts * shrink[None, :]
            a = a * shrink[None, :]
            if COUNT >= 2:
                b = b * shrink[None, :]
            if COUNT == 4:
                c = c * shrink[None, :]
                d = d * shrink[None, :]
            if LEAD:
                ending = ending * shrink[None, :]
            if CODES:
                shift = shift * shrink[None, :]
            top = higher
        weights = tl.exp2(logits - top[None, :])
        if V_SCALED:
            parts += tl.sum(eights(weights * scales.inverse[:, None]), 0)
        else:
            parts += tl.sum(eights(weights), 0)
        weights = weights.to(DOT)
        if CODES:
            # Of weights as the dots see them: what was added must cancel.
            raised = weights.to(tl.float32) * (scales.zero + CODE_RAISE)[:, None]
            shift += tl.sum(eights(raised), 0)
        steps = v
        if V.kind == "nvfp4":
            steps = tl.trans(block_steps(cache.buffer, cache.v.scales, states, V, MASKED))
        rows = apart(v, steps, V, DOT, False)
        a = tl.dot(rows[0], weights, a, input_precision=PRECISION)
        if COUNT >= 2:
            b = tl.dot(rows[1], weights, b, input_precision=PRECISION)
        if COUNT == 4:
            c = tl.dot(rows[2], weights, c, input_precision=PRECISION)
            d = tl.dot(rows[3], weights, d, input_precision=PRECISION)
        if LEAD:
            codes = scales.last.to(tl.int32)[None, :] >> (BITS * tl.arange(0, LAST))[:, None]
            if MASKED and NO_NUMBERS:
                codes = tl.where(there[None, :], codes, 0)
            last = codes.to(tl.int8).to(V.element, bitcast=True).to(DOT)
            ending = tl.dot(last, weights, ending, input_precision=PRECISION)
    acc = columns_together(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), COUNT)
    if LEAD:
        first = tl.arange(0, V_WIDTH) < LAST
        wide = tl.broadcast_to(tl.trans(ending)[:, None, :], [acc.shape[0], V_WIDTH // LAST, LAST])
        acc = tl.where(first[None, :], tl.reshape(wide, [acc.shape[0], V_WIDTH]), acc)
    if UNIT != 1.0:
        acc = acc * UNIT
    if CODES:
        acc = acc - tl.sum(shift, 0)[:, None]
    return Softmax(acc, top, total + tl.sum(parts, 0))
