"""Device code for sequences with few queries: the work is cut into equal shares.

All tiles of all sequences stand in one row. Each worker takes an equal stretch of it,
wherever that begins and ends; a worker is one program for each kv head (or for each part
of its query heads), so that programs that run at once read neighbouring bytes. A sequence
that one worker walks to its end is written by it; of others the workers leave partial
sums, at most two each, that `merge` puts together.

`decode` itself is not launched early: beside programs of a kernel before it, its own would
be placed unevenly, and there is one for each place. `merge` is, once all of them are placed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.packed_walk_device import walk_words
from kvatlas.kernels.triton.attention.walk_device import (
    LOG2E,
    LOWEST,
    find,
    finish,
    first_seen,
    put,
    query_rows,
    walk,
)
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next


@triton.jit
def decode(
    q, q_steps, out, out_steps, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
    tables, table_step, lengths, starts, ends, sequences, sums, tops, sinks,
    scale, softcap, v_scale, bound, kept,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    FIT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, BOUND: tl.constexpr, K_DOT: tl.constexpr,
    V_DOT: tl.constexpr, PRECISION: tl.constexpr,
    EVICT: tl.constexpr, BY_WORDS: tl.constexpr, DELTA: tl.constexpr, LEAD: tl.constexpr,
    TURN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A worker's stretch of tiles, sequence by sequence."""
    before_next(EARLY)
    lane = tl.program_id(0) % LANES
    worker = tl.program_id(0) // LANES
    head = lane // PARTS
    share = tl.cdiv(tl.load(ends + sequences), tl.num_programs(0) // LANES)
    tile = worker * share
    stop = tl.minimum(tile + share, tl.load(ends + sequences))
    sequence = find(ends, sequences, tile)
    row = (lane % PARTS) * ROWS + tl.arange(0, ROWS)
    while tile < stop:
        first = tl.load(ends + sequence)
        last = tl.load(ends + sequence + 1)
        until = tl.minimum(stop, last)
        if until > tile:
            start = tl.load(starts + sequence)
            count = tl.load(starts + sequence + 1) - start
            length = tl.load(lengths + sequence).to(tl.int32)
            valid = row < count * GROUP
            position = length - count + row // GROUP
            low = first_seen(length - count, bound, BOUND)
            sure = length - count + 1
            if BOUND == "all":
                position = position * 0 + length - 1
                sure = length
            least = first_seen(position, bound, BOUND)
            origin = low // ALIGN * ALIGN
            queries = query_rows(q, q_steps, start, row, valid, head, GROUP, 0, DIM, WIDTH, K_DOT)
            rotary = queries
            if LATENT:
                rotary = query_rows(
                    q, q_steps, start, row, valid, head, GROUP, DIM, ROPE, ROPE, K_DOT
                )
            acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
            top = tl.full([ROWS], LOWEST, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            table = tables + sequence.to(tl.int64) * table_step
            begin = (tile - first) * TILE
            end = (until - first) * TILE
            if BOUND == "kept":
                # Tiles of the states that stay come first; the window's begin at `origin`.
                stay = tl.minimum(kept, low)
                ahead = tl.cdiv(stay, TILE) * TILE
                acc, top, total = some_states(
                    acc, top, total, queries, rotary, tl.minimum(position, stay - 1), least * 0, 0,
                    begin, tl.minimum(end, ahead), 0, stay, head, table, buffer, k_at, k_scale_at,
                    v_at, v_scale_at, v_zero_at, scale, softcap, K_FORM, V_FORM, STATES,
                    TILE, DIM, WIDTH, V_DIM, V_WIDTH, FIT, ROPE, LATENT, SOFTCAP, "none", True,
                    K_DOT, V_DOT, PRECISION, EVICT, BY_WORDS, DELTA, LEAD, STAGES,
                )  # fmt: skip
                begin = tl.maximum(begin - ahead, 0)
                end = tl.maximum(end - ahead, 0)
            begin += origin
            end += origin
            whole = begin
            if BY_WORDS and (BOUND == "none" or BOUND == "all"):
                # Tiles that every query sees whole need no mask.
                whole += tl.maximum(tl.minimum(sure, end) - begin, 0) // TILE * TILE
                acc, top, total = some_states(
                    acc, top, total, queries, rotary, position, least, kept, begin, whole, low,
                    length, head, table, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
                    scale, softcap, K_FORM, V_FORM, STATES, TILE, DIM, WIDTH, V_DIM,
                    V_WIDTH, FIT, ROPE, LATENT, SOFTCAP, BOUND, False, K_DOT, V_DOT, PRECISION,
                    EVICT, BY_WORDS, DELTA, LEAD, STAGES,
                )  # fmt: skip
            acc, top, total = some_states(
                acc, top, total, queries, rotary, position, least, kept, whole, end, low, length,
                head, table, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at, scale,
                softcap, K_FORM, V_FORM, STATES, TILE, DIM, WIDTH, V_DIM, V_WIDTH, FIT, ROPE,
                LATENT, SOFTCAP, BOUND, True, K_DOT, V_DOT, PRECISION, EVICT, BY_WORDS, DELTA, LEAD,
                STAGES,
            )  # fmt: skip
            if (tile == first) & (until == last):
                heads = head * GROUP + row % GROUP
                rows = finish(acc, top, total, sinks, heads, valid, v_scale, SINKS)
                put(out, out_steps, start, row, valid, head, rows, GROUP, V_DIM, V_WIDTH, TURN)
            else:
                # A worker leaves one sum of a sequence that began before it, one of the last.
                slot = 2 * worker + (tile == first).to(tl.int32)
                places = (slot * LANES + lane) * ROWS + tl.arange(0, ROWS)
                column = tl.arange(0, V_WIDTH)
                pointers = sums + places.to(tl.int64)[:, None] * V_WIDTH + column[None, :]
                tl.store(pointers, acc, mask=valid[:, None] & (column < V_DIM)[None, :])
                tl.store(tops + 2 * places, top, mask=valid)
                tl.store(tops + 2 * places + 1, total, mask=valid)
        tile = until
        sequence += 1


@triton.jit
def some_states(
    acc, top, total, q, q_rope, position, least, kept, begin, end, low, high, head, table, buffer,
    k_at, k_scale_at, v_at, v_scale_at, v_zero_at, scale, softcap,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    FIT: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOUND: tl.constexpr, MASKED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    PRECISION: tl.constexpr, EVICT: tl.constexpr, BY_WORDS: tl.constexpr, DELTA: tl.constexpr,
    LEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A walk over states begin .. end - 1, by words or as they are."""
    if BY_WORDS:
        acc, top, total = walk_words(
            acc, top, total, q, position, least, kept, begin, end, low, high, head, table, buffer,
            k_at, k_scale_at, v_scale_at, scale, softcap, K_FORM, V_FORM, STATES, TILE, WIDTH,
            V_WIDTH, FIT, SOFTCAP, BOUND, MASKED, K_DOT, PRECISION, EVICT, DELTA, LEAD, STAGES,
        )  # fmt: skip
    else:
        acc, top, total = walk(
            acc, top, total, q, q_rope, position, least, kept, begin, end, low, high, head, table,
            buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at, scale, softcap, K_FORM,
            V_FORM, STATES, TILE, DIM, WIDTH, V_DIM, V_WIDTH, FIT, ROPE, LATENT, SOFTCAP, BOUND,
            MASKED, K_DOT, V_DOT, PRECISION, EVICT, STAGES,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def merge(
    out, out_steps, starts, ends, sequences, sums, tops, sinks, v_scale, workers,
    GROUP: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    DEEP: tl.constexpr, FEW: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    SINKS: tl.constexpr, SLOTS: tl.constexpr, TURN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of one sequence, from the sums that several workers left of it."""
    after_previous(EARLY)
    before_next(EARLY)
    sequence = tl.program_id(0)
    lane = tl.program_id(1) // DEEP
    place = tl.program_id(1) % DEEP
    row = (lane % PARTS) * ROWS + place
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = tl.load(ends + sequence)
    last = tl.load(ends + sequence + 1)
    share = tl.cdiv(tl.load(ends + sequences), workers)
    if (first < last) & (row < count * GROUP):
        begin = first // share
        until = (last - 1) // share
        if begin != until:
            column = tl.arange(0, V_WIDTH)
            top = -1.0e30
            total = 0.0
            acc = tl.zeros([V_WIDTH], tl.float32)
            for some in range(begin, until + 1, SLOTS):
                worker = some + tl.arange(0, SLOTS)
                there = worker <= until
                slot = 2 * worker + (worker == begin).to(tl.int32)
                places = (slot * LANES + lane) * ROWS + place
                tops_here = tl.load(tops + 2 * places, mask=there, other=-1.0e30)
                totals = tl.load(tops + 2 * places + 1, mask=there, other=0.0)
                pointers = sums + places.to(tl.int64)[:, None] * V_WIDTH + column[None, :]
                mask = there[:, None] & (column < V_DIM)[None, :]
                rows = tl.load(pointers, mask=mask, other=0.0)
                higher = tl.maximum(top, tl.max(tops_here, 0))
                weights = tl.exp2(tops_here - higher)
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(totals * weights, 0)
                acc = acc * shrink + tl.sum(rows * weights[:, None], 0)
                top = higher
            head = (lane // PARTS) * GROUP + row % GROUP
            if SINKS:
                sink = tl.load(sinks + head).to(tl.float32) * LOG2E
                higher = tl.maximum(top, sink)
                total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
                acc = acc * tl.exp2(top - higher)
            acc = acc * (v_scale / tl.where(total == 0.0, 1.0, total))
            token = (start + row // GROUP).to(tl.int64)
            pointers = out + token * out_steps[0] + head.to(tl.int64) * out_steps[1]
            if TURN:
                pointers += (column + (V_WIDTH - TURN)) % V_WIDTH
            else:
                pointers += column
            tl.store(pointers, acc.to(out.dtype.element_ty), mask=column < V_DIM)
    if (first == last) & (row < count * GROUP) & (count * GROUP <= FEW):
        # A sequence without states attends to nothing: batches are padded with such.
        column = tl.arange(0, V_WIDTH)
        head = ((lane // PARTS) * GROUP + row % GROUP).to(tl.int64)
        pointers = out + (start + row // GROUP).to(tl.int64) * out_steps[0] + head * out_steps[1]
        nothing = tl.zeros([V_WIDTH], out.dtype.element_ty)
        tl.store(pointers + column, nothing, mask=column < V_DIM)
