"""Device code that computes a schedule: the number of tiles for each sequence in a batch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import first_seen
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next


@triton.jit
def count_tiles(
    lengths, queries, ends, sequences, SPLIT: tl.constexpr, STARTS: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the cumulative counts of queries, decode tiles and prefill tiles.

    `queries` contains query counts; if `STARTS` is set, it is the argument `starts` of `attend`.
    """
    MASK: tl.constexpr = SPLIT.mask
    after_previous(EARLY)
    before_next(EARLY)
    tokens = 0
    if STARTS:
        tokens += tl.load(queries).to(tl.int32)
    tiles = 0
    units = 0
    width = sequences + 1
    tl.store(ends, tokens)
    for row in tl.static_range(1, 3):
        tl.store(ends + row * width, 0)
    for begin in range(0, sequences, SPAN):
        at = begin + tl.arange(0, SPAN)
        there = at < sequences
        length = tl.load(lengths + at, mask=there, other=0).to(tl.int32)
        if STARTS:
            count = tl.load(queries + at + 1, mask=there, other=0)
            count = (count - tl.load(queries + at, mask=there, other=0)).to(tl.int32)
        else:
            count = tl.load(queries + at, mask=there, other=0).to(tl.int32)
        low = first_seen(length - count, SPLIT.size, MASK)
        short = count * SPLIT.group <= SPLIT.few
        walked = tl.cdiv(length - low // SPLIT.align * SPLIT.align, SPLIT.tile)
        if MASK == "sinks":
            walked += tl.cdiv(tl.minimum(SPLIT.sink_tokens, low), SPLIT.tile)
        walked = tl.where((count > 0) & short, walked, 0)
        packed = tl.where(short, 0, tl.cdiv(count * SPLIT.group, SPLIT.rows))
        tl.store(ends + at + 1, tokens + tl.cumsum(count, 0), mask=there)
        tl.store(ends + width + at + 1, tiles + tl.cumsum(walked, 0), mask=there)
        tl.store(ends + 2 * width + at + 1, units + tl.cumsum(packed, 0), mask=there)
        tokens += tl.sum(count, 0)
        tiles += tl.sum(walked, 0)
        units += tl.sum(packed, 0)
