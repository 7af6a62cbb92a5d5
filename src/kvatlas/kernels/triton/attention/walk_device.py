"""Device code of attention: the loop over a sequence's states, shared by decode and prefill.

Softmax is online: for each query, a running maximum, a running total and a weighted sum of values
are updated tile by tile. Exponents are in base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvatlas.kernels.triton.dequantise_device import (
    E2M1_UNIT,
    TileStates,
    by_shared_memory,
    read,
)

LOWEST = tl.constexpr(-1.0e30)
"""The initial maximum: below all logits, but finite, because -inf - (-inf) would be NaN."""
LOG2E = tl.constexpr(1.4426950408889634)


class Softmax(NamedTuple):
    """An online softmax: each query's weighted sum of values, maximum and total weight so far."""

    acc: Any
    top: Any
    total: Any


class Queries(NamedTuple):
    """The query rows of a program; each row is a (token, head) pair."""

    rows: Any
    rope: Any
    """The rotary elements for latent attention; otherwise `rows` again, as a placeholder."""
    position: Any
    least: Any
    """The earliest state that each query sees, apart from sink tokens."""


class Stretch(NamedTuple):
    """States (cached tokens) begin .. end - 1 of a sequence.

    Only states low .. high - 1 may be read.
    """

    table: Any
    head: Any
    begin: Any
    end: Any
    low: Any
    high: Any


@triton.jit
def first_seen(position, size, MASK: tl.constexpr):
    """Return the first state (cached token) of a query's window or chunk; 0 if it has neither.

    The query is at `position`, and `size` is the size of the window or chunk. A mask is `causal`,
    `window`, `chunk`, `sinks` (a window and the sink tokens) or `full` (queries also see later
    states).
    """
    if MASK == "window" or MASK == "sinks":
        return tl.maximum(position - size + 1, 0)
    if MASK == "chunk":
        return position // size * size
    return position * 0


@triton.jit
def seen_by(states, position, least, sink_tokens, MASK: tl.constexpr):
    """Return whether a query at `position` sees a state (cached token).

    `least` is the result of `first_seen` for the query. Arguments are broadcast.
    """
    seen = states <= position
    if MASK == "sinks":
        seen = seen & ((states >= least) | (states < sink_tokens))
    elif MASK == "window" or MASK == "chunk":
        seen = seen & (states >= least)
    return seen


@triton.jit
def find(ends, count, wanted):
    """Return the sequence that contains tile number `wanted`, by binary search.

    `ends` [count + 1] contains cumulative counts of tiles: 0, then the count after each sequence.
    """
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
def row_pointers(batch, start, row, head, GROUP: tl.constexpr):
    """Return pointers to rows (token, head) of a batch, with `GROUP` heads per token."""
    token = (start + row // GROUP).to(tl.int64)
    heads = (head * GROUP + row % GROUP).to(tl.int64)
    return batch.tensor + token * batch.token + heads * batch.head


@triton.jit
def query_rows(
    pointers, valid, FROM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr
):
    """Load elements FROM .. FROM + DIM - 1 of query rows, converted to `DOT`."""
    column = tl.arange(0, WIDTH)
    mask = valid[:, None] & (column < DIM)[None, :]
    return tl.load(pointers[:, None] + (FROM + column)[None, :], mask=mask, other=0.0).to(DOT)


@triton.jit
def load_queries(q, start, row, valid, head, position, least, SHAPE: tl.constexpr):
    """Load the query rows of a program, with their positions."""
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    pointers = row_pointers(q, start, row, head, SHAPE.out.group)
    rows = query_rows(pointers, valid, 0, K.dim, K.width, SHAPE.k_dot)
    rope = rows
    if SHAPE.latent:
        rope = query_rows(pointers, valid, K.dim, V.dim, V.width, SHAPE.k_dot)
    return Queries(rows, rope, position, least)


@triton.jit
def no_states(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the initial softmax, before any state (cached token) is added."""
    return Softmax(
        tl.zeros([ROWS, WIDTH], tl.float32),
        tl.full([ROWS], LOWEST, tl.float32),
        tl.zeros([ROWS], tl.float32),
    )


@triton.jit
def pages(stretch, begin, STATES: tl.constexpr, TILE: tl.constexpr, FIT: tl.constexpr):
    """Load the block ids of a tile's states (cached tokens); a scalar if the tile is in one page.

    For states outside the readable range, the nearest readable block is used.
    """
    if FIT == "tile in page":
        at = begin // STATES
    elif FIT == "pages in tile":
        at = begin // STATES + tl.arange(0, TILE) // STATES
    else:
        at = (begin + tl.arange(0, TILE)) // STATES
    at = tl.minimum(at, (stretch.high - 1) // STATES)
    return tl.load(stretch.table + tl.maximum(at, stretch.low // STATES))


@triton.jit
def state_of(n, offset, STATES: tl.constexpr, FIT: tl.constexpr):
    """Return two terms that add up to the index of each state (cached token) in its page.

    The states are those of one tile. `n` is the position of the tile's first state, and `offset`
    [TILE] counts states from there. The first term is the same for all states of the tile.
    """
    if FIT == "tile in page":
        return n % STATES, offset
    if FIT == "pages in tile":
        return 0, offset % STATES
    return 0, (n + offset) % STATES


@triton.jit
def within(states, stretch, reach, sink_tokens, MASK: tl.constexpr):
    """Return, for each state (cached token), whether at least one query may see it."""
    there = (states >= stretch.low) & (states < stretch.high)
    if MASK == "sinks":
        there = there & ((states >= reach) | (states < sink_tokens))
    return there


@triton.jit
def capped(logits, softcap):
    """Return log2(e) * softcap * tanh(logits / softcap): capped logits, to be used with exp2.

    It is computed with tanh x = 1 - 2 / (exp(2 x) + 1).
    """
    folded = tl.exp2(logits * (2.0 * LOG2E / softcap))
    return softcap * LOG2E * (1.0 - 2.0 / (folded + 1.0))


@triton.jit
def walk(
    softmax, queries, stretch, cache, scoring, SHAPE: tl.constexpr, TILING: tl.constexpr,
    MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the softmax with the states (cached tokens) of a stretch, tile by tile.

    The mask is applied only if `MASKED` is set.
    """
    # Block ids are loaded one tile ahead: if loads of rows waited for them, half as many loads
    # would be in flight. Keys outside the range are read from readable pages; logits are masked.
    # Values are masked when they are loaded, because a weight of 0 does not remove NaN.
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    STATES: tl.constexpr = SHAPE.states
    TILE: tl.constexpr = TILING.tile
    FIT: tl.constexpr = TILING.fit
    EVICT: tl.constexpr = TILING.evict
    PRECISION: tl.constexpr = SHAPE.precision
    V_SCALED: tl.constexpr = V.kind == "scaled" or V.kind == "int4"
    # Values of nvfp4 are 2**14 times too small, so weights are multiplied by 2**14.
    LIFT: tl.constexpr = 14.0 if V.kind == "nvfp4" else 0.0
    acc, top, total = softmax.acc, softmax.top, softmax.total
    offset = tl.arange(0, TILE)
    reach = tl.min(queries.least, 0)
    page = pages(stretch, stretch.begin, STATES, TILE, FIT)
    for n in tl.range(stretch.begin, stretch.end, TILE, num_stages=TILING.stages):
        at = n + offset
        there = within(at, stretch, reach, scoring.sink_tokens, MASK)
        here = page.to(tl.int32)
        page = pages(stretch, n + TILE, STATES, TILE, FIT)
        start, state = state_of(n, offset, STATES, FIT)
        if SHAPE.selected:
            # Tables contain slots instead of block ids.
            state = here % SHAPE.selected
            here = here // SHAPE.selected
        states = TileStates(here, start, state, stretch.head, there)
        k, k_factor = read(
            cache.buffer, cache.k, states, K, SHAPE.k_dot, MASKED and SHAPE.latent, EVICT
        )
        # Rotary parts are multiplied first if nothing is converted, else last: this is fastest.
        if SHAPE.latent and K.element == SHAPE.k_dot:
            rope, _ = read(cache.buffer, cache.v, states, V, SHAPE.k_dot, False, EVICT)
            logits = tl.dot(queries.rope, tl.trans(rope), input_precision=PRECISION)
            logits = tl.dot(queries.rows, tl.trans(k), logits, input_precision=PRECISION)
        else:
            logits = tl.dot(queries.rows, tl.trans(k), input_precision=PRECISION)
        if SHAPE.latent and K.element != SHAPE.k_dot:
            rope, _ = read(cache.buffer, cache.v, states, V, SHAPE.k_dot, False, EVICT)
            logits = tl.dot(queries.rope, tl.trans(rope), logits, input_precision=PRECISION)
        if K.kind == "scaled" or K.kind == "int4" or K.kind == "levels":
            logits = logits * (k_factor * scoring.scale)[None, :]
        elif K.kind == "nvfp4":
            logits = logits * (scoring.scale * E2M1_UNIT)
        else:
            logits = logits * scoring.scale
        if SHAPE.softcap:
            logits = capped(logits, scoring.softcap)
        if MASKED:
            seen = seen_by(
                at[None, :], queries.position[:, None], queries.least[:, None],
                scoring.sink_tokens, MASK,
            )  # fmt: skip
            if MASK == "sinks":
                # Sink tokens before the window are processed by a separate walk.
                seen = seen & there[None, :]
            logits = tl.where(seen, logits, float("-inf"))
        if SHAPE.latent:
            v = k
        else:
            v, v_factor = read(cache.buffer, cache.v, states, V, SHAPE.v_dot, MASKED, EVICT)
            if V.element.primitive_bitwidth == 8 and (V.kind == "plain" or V.kind == "scaled"):
                v = by_shared_memory(v)
        higher = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(logits - (higher - LIFT)[:, None])
        total = total * shrink + tl.sum(weights, 1) * 2.0**-LIFT
        if V_SCALED:
            weights = weights * v_factor[None, :]
        top = higher
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(SHAPE.v_dot), v, acc, input_precision=PRECISION)
    return Softmax(acc, top, total)


@triton.jit
def put_output(out, softmax, scoring, start, row, valid, head, OUT: tl.constexpr,
               WRAP: tl.constexpr):  # fmt: skip
    """Write the output rows.

    The first `WRAP` columns of the weighted sum are the last elements of the output row. A sink
    logit contributes to the total weight only.
    """
    acc, top, total = softmax.acc, softmax.top, softmax.total
    if OUT.sink_logits:
        heads = head * OUT.group + row % OUT.group
        sink = tl.load(scoring.sink_logits + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    rows = acc * (scoring.v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    column = tl.arange(0, OUT.width)
    pointers = row_pointers(out, start, row, head, OUT.group)
    mask = valid[:, None] & (column < OUT.dim)[None, :]
    if WRAP:
        column = (column + (OUT.width - WRAP)) % OUT.width
    tl.store(pointers[:, None] + column[None, :], rows.to(out.tensor.dtype.element_ty), mask=mask)
