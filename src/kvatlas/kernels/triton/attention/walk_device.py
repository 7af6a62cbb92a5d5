"""Device code of attention: the walk over a sequence's states that decode and prefill share.

Softmax is kept as a running maximum, a running total and an unscaled sum, all in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dequantise_device import by_shared_memory, read

LOWEST = tl.constexpr(-1.0e30)
"""A maximum below all logits that still can be subtracted from minus infinity."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, bound, BOUND: tl.constexpr):
    """The earliest state that a query at `position` sees: of its window, of its chunk, or 0.

    A bound is `none`, `window`, `chunk`, `kept` (a window, and the first states besides) or
    `all`, for queries that see states after their own.
    """
    if BOUND == "window" or BOUND == "kept":
        return tl.maximum(position - bound + 1, 0)
    if BOUND == "chunk":
        return position // bound * bound
    return position * 0


@triton.jit
def seen_by(states, position, least, kept, BOUND: tl.constexpr):
    """Which states queries see, where both have the axes of the result."""
    seen = states <= position
    if BOUND == "kept":
        seen = seen & ((states >= least) | (states < kept))
    elif BOUND == "window" or BOUND == "chunk":
        seen = seen & (states >= least)
    return seen


@triton.jit
def find(ends, count, wanted):
    """The sequence that unit number `wanted` belongs to; `ends` starts with 0."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + middle + 1) <= wanted:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def query_rows(
    q, q_steps, start, row, valid, head, GROUP: tl.constexpr, FROM: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Elements FROM .. FROM + DIM - 1 of query rows: `GROUP` heads of each token, packed."""
    column = tl.arange(0, WIDTH)
    token = (start + row // GROUP).to(tl.int64)
    heads = (head * GROUP + row % GROUP).to(tl.int64)
    pointers = q + token * q_steps[0] + heads * q_steps[1]
    mask = valid[:, None] & (column < DIM)[None, :]
    return tl.load(pointers[:, None] + (FROM + column)[None, :], mask=mask, other=0.0).to(DOT)


@triton.jit
def pages(table, begin, low, high, STATES: tl.constexpr, TILE: tl.constexpr, FIT: tl.constexpr):
    """The block of each state of a tile; past the ends the last one that may be looked up."""
    if FIT == "tile in page":
        at = begin // STATES
    elif FIT == "pages in tile":
        at = begin // STATES + tl.arange(0, TILE) // STATES
    else:
        at = (begin + tl.arange(0, TILE)) // STATES
    return tl.load(table + tl.minimum(tl.maximum(at, low // STATES), (high - 1) // STATES))


@triton.jit
def state_of(n, lane, STATES: tl.constexpr, FIT: tl.constexpr):
    """The places in their pages of the states of a tile that begins at `n`."""
    if FIT == "tile in page":
        return n % STATES + lane
    if FIT == "pages in tile":
        return lane % STATES
    return (n + lane) % STATES


@triton.jit
def within(states, low, high, reach, kept, BOUND: tl.constexpr):
    """Which states some query may see."""
    there = (states >= low) & (states < high)
    if BOUND == "kept":
        there = there & ((states >= reach) | (states < kept))
    return there


@triton.jit
def capped(logits, softcap):
    """Softcap * tanh(logits / softcap), in base 2: tanh is 1 - 2 / (exp(2 x) + 1)."""
    folded = tl.exp2(logits * (2.0 * LOG2E / softcap))
    return softcap * LOG2E * (1.0 - 2.0 / (folded + 1.0))


@triton.jit
def walk(
    acc, top, total, q, q_rope, position, least, kept, begin, end, low, high, head, table, buffer,
    k_at, k_scale_at, v_at, v_scale_at, v_zero_at, scale, softcap,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    FIT: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOUND: tl.constexpr,
    MASKED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, PRECISION: tl.constexpr,
    EVICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """States begin .. end - 1 in tiles, of which low .. high - 1 may be read."""
    # Pages are looked up a tile ahead: a load that waits for another would halve the
    # loads that the compiler keeps in flight. Keys out of reach are read all the same, in
    # pages that are within reach, and masked as logits; values would be multiplied by 0,
    # which is no mask for what is not a number.
    lane = tl.arange(0, TILE)
    reach = tl.min(least, 0)
    page = pages(table, begin, low, high, STATES, TILE, FIT)
    for n in tl.range(begin, end, TILE, num_stages=STAGES):
        states = n + lane
        there = within(states, low, high, reach, kept, BOUND)
        here = page.to(tl.int32)
        page = pages(table, n + TILE, low, high, STATES, TILE, FIT)
        state = state_of(n, lane, STATES, FIT)
        k, k_factor = read(
            buffer, k_at, k_scale_at, v_zero_at, here, state, head, there,
            K_FORM, DIM, WIDTH, K_DOT, MASKED and LATENT, EVICT,
        )  # fmt: skip
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LATENT:
            rope, _ = read(
                buffer, v_at, k_scale_at, v_zero_at, here, state, head, there,
                V_FORM, ROPE, ROPE, K_DOT, False, EVICT,
            )  # fmt: skip
            logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision=PRECISION)
        if K_FORM[0] == "scaled" or K_FORM[0] == "int4" or K_FORM[0] == "levels":
            logits = logits * k_factor[None, :]
        logits = logits * scale
        if SOFTCAP:
            logits = capped(logits, softcap)
        if MASKED:
            seen = seen_by(states[None, :], position[:, None], least[:, None], kept, BOUND)
            if BOUND == "kept":
                # States that stay and lie before the window's had a walk of their own.
                seen = seen & there[None, :]
            logits = tl.where(seen, logits, float("-inf"))
        if LATENT:
            v = k
        else:
            v, v_factor = read(
                buffer, v_at, v_scale_at, v_zero_at, here, state, head, there,
                V_FORM, V_DIM, V_WIDTH, V_DOT, MASKED, EVICT,
            )  # fmt: skip
            if V_FORM[1].primitive_bitwidth == 8 and (
                V_FORM[0] == "plain" or V_FORM[0] == "scaled"
            ):
                v = by_shared_memory(v)
        if V_FORM[0] == "scaled" or V_FORM[0] == "int4":
            # Scales of V are part of the weights. Their exponents are added to the logits, so
            # that the largest weight is near 1 whatever the scales are, and halves are wide
            # enough for the others; the total takes them out again.
            power = (v_factor.to(tl.int32, bitcast=True) >> 23) & 255
            # Blocks that were cleared have scales of 0: 2**-60 is as good.
            power = tl.where(power == 0, 67, power)
            v_factor = v_factor.to(tl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000
            v_factor = v_factor.to(tl.float32, bitcast=True)
            v_inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
            # A row whose scale is no number does not turn into numbers.
            v_inverse = tl.where(power == 255, float("nan"), v_inverse)
            logits = logits + (power - 127).to(tl.float32)[None, :]
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        if V_FORM[0] == "scaled" or V_FORM[0] == "int4":
            total = total * shrink + tl.sum(weights * v_inverse[None, :], 1)
            weights = weights * v_factor[None, :]
        else:
            total = total * shrink + tl.sum(weights, 1)
        top = higher
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(V_DOT), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def finish(acc, top, total, sinks, heads, valid, v_scale, SINKS: tl.constexpr):
    """Attention from the running sums: a sink takes part in the total alone."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    return acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def put(out, out_steps, start, row, valid, head, rows, GROUP: tl.constexpr, DIM: tl.constexpr,
        WIDTH: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """Rows into the output, where their queries were; the first `TURN` elements come last."""
    column = tl.arange(0, WIDTH)
    token = (start + row // GROUP).to(tl.int64)
    heads = (head * GROUP + row % GROUP).to(tl.int64)
    pointers = out + token * out_steps[0] + heads * out_steps[1]
    mask = valid[:, None] & (column < DIM)[None, :]
    if TURN:
        column = (column + (WIDTH - TURN)) % WIDTH
    tl.store(pointers[:, None] + column[None, :], rows.to(out.dtype.element_ty), mask=mask)
