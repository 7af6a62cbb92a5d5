"""Device code of decode: few queries over many states, with elements packed in 16-bit words.

States (cached tokens) are the rows of the dot products and queries their columns, because a tile
needs at least 16 rows but only 8 columns. K and V are loaded as 16-bit words, so that they move
from shared memory directly into the registers of a dot product. There, each word is unpacked into
its 1, 2 or 4 elements. One dot product is computed for the first elements of all words, one for the
second, and so on (`packed_words_device`). If elements were loaded as bytes, they would have to be
gathered one by one, or written to shared memory a second time.
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
"""Bit pattern of 2**-60, a scale that is effectively 0."""
HEADROOM = tl.constexpr(8.0)
"""Maximum growth of weights, as a power of 2, before sums are rescaled. Few tiles exceed it."""


class ValueScales(NamedTuple):
    """The scales of rows of V, for formats with a scale per row."""

    power: Any
    """Base-2 logarithms of the scales."""
    inverse: Any
    """Inverse scales, which remove the scales from the weights again."""
    zero: Any
    """The code that represents 0, for formats with codes."""
    last: Any
    """One integer with the last elements of a row and its scale, if reads start early
    (`PackedWords.lead`)."""


@triton.jit
def above_zero(scale):
    """Replace scales of 0, which cleared blocks have, by a tiny positive scale.

    Otherwise the logarithm of 0 would make all sums infinite. Scales are compared as bit patterns
    (unsigned integers), which have the same order as the scales. NaN is above all other patterns,
    so NaN is kept.
    """
    bits = scale.to(tl.uint32, bitcast=True)
    return tl.maximum(bits, CLEARED_BITS).to(tl.float32, bitcast=True)


@triton.jit
def power_of(scale, PTX: tl.constexpr):
    """Return (log2(scale), 1 / scale), approximately.

    For logarithms of scales from 0.5 to 2, the absolute error is below 1e-6. For all other results,
    the relative error is below 1e-6.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2;\nrcp.approx.ftz.f32 $1, $2;", "=f,=f,f", [scale],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.log2(scale), 1.0 / scale


@triton.jit
def eights(tile):
    """Reshape a tile [rows, queries] to [rows / 8, 8, queries].

    Each thread of a dot product holds every eighth row of its queries, so a reduction over the
    first axis needs no exchange between threads.
    """
    return tl.reshape(tile, [tile.shape[0] // 8, 8, tile.shape[1]])


@triton.jit
def grows(logits, top):
    """Return whether any logit exceeds its query's running maximum `top` by more than `HEADROOM`.

    Each thread checks its own logits, and the results are combined by an integer maximum, which is
    one instruction per warp. Computing each query's new maximum for every tile would need more
    exchange between threads.
    """
    highest = tl.max(eights(logits), 0)
    above = (highest > (top + HEADROOM)[None, :]).to(tl.int32)
    return tl.max(above) > 0


@triton.jit
def word_offsets(steps, states, UNIT: tl.constexpr, STEP: tl.constexpr):
    """Return the offset of each K row of a tile from the start of the pool, in 16-bit words.

    `STEP` is the stride between tokens of a block, in units of `UNIT` words. As a constant, it
    becomes part of the load instructions. If `STEP` is 0, the stride is taken from `steps`.
    """
    if STEP == 0:
        return row_offsets(steps, states, UNIT)
    first = (steps.first + states.head.to(tl.int64) * steps.head) * UNIT
    start = tl.cast(states.start, tl.int64) * (STEP * UNIT) + first
    within_block = states.state.to(tl.int64) * (STEP * UNIT)
    return states.page.to(tl.int64) * (steps.block * UNIT) + start + within_block


@triton.jit
def scale_word(buffer, steps, states, rows, GAP: tl.constexpr, UNIT: tl.constexpr):
    """Load a 4-byte scale for each state (cached token), `GAP` bytes after the start of its K row.

    If `GAP` is 0, the addresses come from `steps`. `rows` are pointers to the rows of K, as 2-byte
    words.
    """
    if GAP:
        return tl.load((rows + GAP // 2).to(tl.pointer_type(tl.int32)))
    return column_of(buffer, steps, states, tl.int32, UNIT, False)


@triton.jit
def first_of(tile, SIZE: tl.constexpr):
    """Return the first `SIZE` columns of a tile; `SIZE` is a power of two."""
    stretches = tl.reshape(tile, [tile.shape[0], tile.shape[1] // SIZE, SIZE])
    whose = tl.arange(0, tile.shape[1] // SIZE)[None, :, None]
    return tl.sum(tl.where(whose == 0, stretches, 0.0), 1)


@triton.jit
def two_pages(stretch, begin, STATES: tl.constexpr, TILE: tl.constexpr, FIT: tl.constexpr):
    """Load the block ids of a tile of states (cached tokens).

    If a tile always covers exactly two blocks, return their ids as two scalars. Otherwise return a
    tensor with the block id of every state, and 0.
    """
    if FIT == "pages in tile" and TILE == 2 * STATES:
        page = pages(stretch, begin, STATES, STATES, "tile in page")
        after = pages(stretch, begin + STATES, STATES, STATES, "tile in page")
    else:
        page = pages(stretch, begin, STATES, TILE, FIT)
        after = 0
    return page, after


@triton.jit
def scored(k, columns, sums, cache, states, k_rows, scale, SHAPE: tl.constexpr, GAP: tl.constexpr):
    """Return the scaled logits of a tile of K: its dot products with the queries, times `scale`.

    Each row of the result is a state (cached token), and each column a query.
    """
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
        # A row of levels is normalised; its norm is stored separately.
        norm = column_of(cache.buffer, cache.k.scales, states, tl.float16, K.scale_unit, False)
        lengths = squares(rows, logits.shape[1], PRECISION)
        logits = logits * (norm.to(tl.float32) * scale)[:, None] * tl.rsqrt(lengths)
    elif K.kind == "plain":
        logits = logits * scale
    else:
        word = scale_word(cache.buffer, cache.k.scales, states, k_rows, GAP, K.scale_unit)
        if K.kind == "int4":
            # The zero point remains in the lowest bits of the scale, a relative error below 2e-6.
            logits = logits - (word & 15).to(tl.float32)[:, None] * sums.whole[None, :]
        logits = logits * (word.to(tl.float32, bitcast=True) * scale)[:, None]
    return logits


@triton.jit
def value_scales(
    cache, states, k_rows, v_rows, V: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr
):
    """Load the scales of a tile's rows of V.

    `v_rows` are offsets of rows of V in the pool, in words. `k_rows` are pointers to rows of K.
    """
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
    """Update the softmax with a stretch of states (cached tokens), read as 16-bit words.

    The result equals the result of `walk`. Each row of V starts `WORDS.delta` bytes after the row
    of K. If `WORDS.lead` is not 0, a read of V starts that many bytes before the row, so that it is
    as wide as a read of K. Such a read misses the last elements of the row, which are loaded as a
    separate tile. The bytes before the row are not elements of V, so the accumulator columns of
    these bytes are overwritten with the sums of the separate tile.
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
    # Threads accumulate their own rows of each tile; the exchange happens after the last tile.
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
        # Memory that was never written may contain NaN, which a weight of 0 does not mask.
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
            # The scales of V become part of the weights. Their logarithms are added to the logits,
            # so that the largest weight is near 1 for any scales, and the others fit in float16.
            # The total divides by the scales again.
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
            # Uses the rounded weights of the dot product, so that the offsets cancel exactly.
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
