"""Device code that combines the partial results that several workers computed for a sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import LOG2E, row_pointers
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next


@triton.jit
def merge(
    out, batch, partials, scoring, workers, OUT: tl.constexpr, TILING: tl.constexpr,
    DEPTH: tl.constexpr, FEW: tl.constexpr, WRAP: tl.constexpr, AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one sequence, if several workers processed the sequence.

    A program merges some rows of the sequence. Only the first `DEPTH` rows of a tile contain
    queries. `AT_ONCE` partials are loaded together, because the loop waits for each load. A
    sequence without states is written as zeros.
    """
    WIDTH: tl.constexpr = OUT.width
    GROUP: tl.constexpr = OUT.group
    sequence = tl.program_id(0)
    ends = batch.ends + batch.sequences + 1
    start = tl.load(batch.ends + sequence)
    count = tl.load(batch.ends + sequence + 1) - start
    first = tl.load(ends + sequence)
    last = tl.load(ends + sequence + 1)
    share = tl.cdiv(tl.load(ends + batch.sequences), workers)
    share = tl.maximum(tl.cdiv(share, TILING.together) * TILING.together, 1)
    walked = first // share, (last - 1) // share
    split = (first < last) & (walked[0] != walked[1])
    # A sequence without states (padding of a batch) produces zeros.
    empty = (first == last) & (count * GROUP <= FEW)
    # The ends were written before the previous kernel began; only reads of partials must wait.
    after_previous(EARLY)
    before_next(EARLY)
    if split | empty:
        for at in range(tl.program_id(1), TILING.programs * DEPTH, tl.num_programs(1)):
            program = at // DEPTH
            place = at % DEPTH
            row = (program % TILING.row_tiles) * TILING.rows + place
            head = program // TILING.row_tiles
            if row < count * GROUP:
                pointers = row_pointers(out, start, row, head, GROUP)
                if split:
                    where = program, place, head * GROUP + row % GROUP
                    merge_row(
                        pointers, partials, scoring, walked, where, OUT, TILING, WRAP, AT_ONCE
                    )
                else:
                    column = tl.arange(0, WIDTH)
                    nothing = tl.zeros([WIDTH], out.tensor.dtype.element_ty)
                    tl.store(pointers + column, nothing, mask=column < OUT.dim)


@triton.jit
def merge_row(
    pointers, partials, scoring, walked, where, OUT: tl.constexpr, TILING: tl.constexpr,
    WRAP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row, and write the output row.

    `walked` is (first worker, last worker). `where` is (program, row of the tile, query head).
    """
    WIDTH: tl.constexpr = OUT.width
    begin, until = walked
    program, place, query_head = where
    column = tl.arange(0, WIDTH)
    top = -1.0e30
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for some in range(begin, until + 1, AT_ONCE):
        worker = some + tl.arange(0, AT_ONCE)
        there = worker <= until
        number = 2 * worker + (worker == begin).to(tl.int32)
        places = (number * TILING.programs + program) * TILING.rows + place
        pairs = partials.room + partials.tops + 2 * places
        tops = tl.load(pairs, mask=there, other=-1.0e30)
        totals = tl.load(pairs + 1, mask=there, other=0.0)
        rows = partials.room + places.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = there[:, None] & (column < OUT.dim)[None, :]
        rows = tl.load(rows, mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink + tl.sum(rows * weights[:, None], 0)
        top = higher
    if OUT.sink_logits:
        sink = tl.load(scoring.sink_logits + query_head).to(tl.float32)
        higher = tl.maximum(top, sink * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(sink * LOG2E - higher)
        acc = acc * tl.exp2(top - higher)
    acc = acc * (scoring.v_scale / tl.where(total == 0.0, 1.0, total))
    if WRAP:
        pointers += (column + (WIDTH - WRAP)) % WIDTH
    else:
        pointers += column
    tl.store(pointers, acc.to(pointers.dtype.element_ty), mask=column < OUT.dim)
