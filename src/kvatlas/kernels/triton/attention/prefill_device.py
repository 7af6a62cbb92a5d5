"""Device code for sequences with many queries: one program per tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import (
    Queries,
    Stretch,
    find,
    first_seen,
    load_queries,
    no_states,
    put_output,
    walk,
)


@triton.jit
def prefill(q, out, cache, batch, scoring, SHAPE: tl.constexpr, TILING: tl.constexpr):
    """Compute prefill attention for one tile of queries.

    Tiles that read the most states (cached tokens) come first.
    """
    MASK: tl.constexpr = SHAPE.mask
    OUT: tl.constexpr = SHAPE.out
    GROUP: tl.constexpr = OUT.group
    ROWS: tl.constexpr = TILING.rows
    TILE: tl.constexpr = TILING.tile
    head = tl.program_id(0) % TILING.programs
    ends = batch.ends + 2 * (batch.sequences + 1)
    units = tl.load(ends + batch.sequences)
    unit = units - 1 - tl.program_id(0) // TILING.programs
    if unit >= 0:
        sequence = find(ends, batch.sequences, unit)
        start = tl.load(batch.ends + sequence)
        count = tl.load(batch.ends + sequence + 1) - start
        length = tl.load(batch.lengths + sequence).to(tl.int32)
        row_before = (unit - tl.load(ends + sequence)) * ROWS
        row = row_before + tl.arange(0, ROWS)
        valid = row < count * GROUP
        position = length - count + row // GROUP
        earliest = length - count + row_before // GROUP
        latest = length - count + (row_before + ROWS - 1) // GROUP
        if MASK == "full":
            position = position * 0 + length - 1
            earliest = length - 1
            latest = length - 1
        least = first_seen(position, scoring.size, MASK)
        low = first_seen(earliest, scoring.size, MASK)
        high = tl.minimum(latest + 1, length)
        queries = load_queries(q, start, row, valid, head, position, least, SHAPE)
        softmax = no_states(ROWS, OUT.width)
        table = cache.tables + sequence.to(tl.int64) * cache.table_stride
        whole = low // TILING.align * TILING.align
        if MASK == "causal" or MASK == "full":
            # Tiles that every query of the program sees entirely need no mask.
            whole = (earliest + 1) // TILE * TILE
            softmax = walk(
                softmax, queries, Stretch(table, head, 0, whole, low, high), cache, scoring,
                SHAPE, TILING, MASK, False,
            )  # fmt: skip
        if MASK == "sinks":
            # Walk over the sink tokens before the window.
            sinks = tl.minimum(scoring.sink_tokens, low)
            softmax = walk(
                softmax,
                Queries(queries.rows, queries.rope, tl.minimum(position, sinks - 1), least * 0),
                Stretch(table, head, 0, sinks, 0, sinks),
                cache, scoring, SHAPE, TILING, "causal", True,
            )  # fmt: skip
        softmax = walk(
            softmax, queries, Stretch(table, head, whole, high, low, high), cache, scoring, SHAPE,
            TILING, MASK, True,
        )  # fmt: skip
        put_output(out, softmax, scoring, start, row, valid, head, OUT, 0)
