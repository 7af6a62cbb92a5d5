"""Device code for sequences with many queries: a program for each tile of them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import (
    LOWEST,
    find,
    finish,
    first_seen,
    put,
    query_rows,
    walk,
)


@triton.jit
def prefill(
    q, q_steps, out, out_steps, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
    tables, table_step, lengths, starts, ends, sequences, sinks, scale, softcap, v_scale, bound,
    kept,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
    FIT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    ROPE: tl.constexpr, LATENT: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    BOUND: tl.constexpr, K_DOT: tl.constexpr,
    V_DOT: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows are (query, head of the group); the longest walks come first."""
    head = tl.program_id(0) % HEADS
    units = tl.load(ends + sequences)
    unit = units - 1 - tl.program_id(0) // HEADS
    if unit >= 0:
        sequence = find(ends, sequences, unit)
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
        length = tl.load(lengths + sequence).to(tl.int32)
        row = (unit - tl.load(ends + sequence)) * ROWS + tl.arange(0, ROWS)
        valid = row < count * GROUP
        position = length - count + row // GROUP
        row_before = (unit - tl.load(ends + sequence)) * ROWS
        earliest = length - count + row_before // GROUP
        latest = length - count + (row_before + ROWS - 1) // GROUP
        if BOUND == "all":
            position = position * 0 + length - 1
            earliest = length - 1
            latest = length - 1
        least = first_seen(position, bound, BOUND)
        low = first_seen(earliest, bound, BOUND)
        high = tl.minimum(latest + 1, length)
        origin = low // ALIGN * ALIGN
        # Tiles that every query of the program sees whole need no mask.
        whole = origin
        if BOUND == "none" or BOUND == "all":
            whole = (earliest + 1) // TILE * TILE
        queries = query_rows(q, q_steps, start, row, valid, head, GROUP, 0, DIM, WIDTH, K_DOT)
        rotary = queries
        if LATENT:
            rotary = query_rows(q, q_steps, start, row, valid, head, GROUP, DIM, ROPE, ROPE, K_DOT)
        acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        table = tables + sequence.to(tl.int64) * table_step
        if BOUND == "none" or BOUND == "all":
            acc, top, total = walk(
                acc, top, total, queries, rotary, position, least, kept, 0, whole, low, high,
                head, table, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
                scale, softcap, K_FORM, V_FORM, STATES, TILE, DIM, WIDTH, V_DIM, V_WIDTH, FIT, ROPE,
                LATENT, SOFTCAP, BOUND, False, K_DOT, V_DOT, PRECISION, EVICT, STAGES,
            )  # fmt: skip
        if BOUND == "kept":
            # States that stay and lie before the window's.
            stay = tl.minimum(kept, low)
            acc, top, total = walk(
                acc, top, total, queries, rotary, tl.minimum(position, stay - 1), least * 0, 0, 0,
                stay, 0, stay, head, table, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
                scale, softcap, K_FORM, V_FORM, STATES, TILE, DIM, WIDTH, V_DIM, V_WIDTH,
                FIT, ROPE, LATENT, SOFTCAP, "none", True, K_DOT, V_DOT, PRECISION, EVICT, STAGES,
            )  # fmt: skip
        acc, top, total = walk(
            acc, top, total, queries, rotary, position, least, kept, whole, high, low, high,
            head, table, buffer, k_at, k_scale_at, v_at, v_scale_at, v_zero_at,
            scale, softcap, K_FORM, V_FORM, STATES, TILE, DIM, WIDTH, V_DIM, V_WIDTH, FIT, ROPE,
            LATENT, SOFTCAP, BOUND, True, K_DOT, V_DOT, PRECISION, EVICT, STAGES,
        )  # fmt: skip
        heads = head * GROUP + row % GROUP
        rows = finish(acc, top, total, sinks, heads, valid, v_scale, SINKS)
        put(out, out_steps, start, row, valid, head, rows, GROUP, V_DIM, V_WIDTH, 0)
