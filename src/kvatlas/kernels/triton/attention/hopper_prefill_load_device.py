"""Device code of the group of warps that loads tiles of K and V on Hopper, from pages in any order.

Rows of 16 bits are copied to shared memory as they are, by copies that signal their own end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kvatlas.kernels.triton.attention.hopper_prefill_groups_device import rounds_of, work_of
from kvatlas.kernels.triton.attention.latent_load_device import (
    begin_copy,
    row_pointers,
    row_starts,
)


@gluon.jit
def states_of(begin, work, TILE: gl.constexpr, LOADS: gl.constexpr):
    """A tile's states; the first or the last that may be read beyond the ends."""
    states = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADS))
    return gl.maximum(gl.minimum(states, work.high - 1), work.low)


@gluon.jit
def copy_rows(side, elements, pages, places, head, to, there, FORMAT: gl.constexpr):
    """Begin to copy a tile's rows of K or V as they are."""
    LOADS: gl.constexpr = pages.type.layout.parent
    rows = row_starts(side.rows, pages, places, FORMAT.unit)
    rows += head.to(gl.int64) * side.rows.head * FORMAT.unit
    begin_copy(to, row_pointers(elements, rows, 0, FORMAT.dim, LOADS))
    async_copy.mbarrier_arrive(there, increment_count=False)


@gluon.jit
def load_keys_and_values(
    cache, batch, scoring, room, signals, SHAPE: gl.constexpr, TILING: gl.constexpr
):
    """The group that loads: the tiles of each piece of work, the last one first."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    K: gl.constexpr = SHAPE.k
    V: gl.constexpr = SHAPE.v
    STATES: gl.constexpr = SHAPE.states
    STAGES: gl.constexpr = TILING.stages
    TILE: gl.constexpr = TILING.tile
    elements = cache.buffer.to(gl.pointer_type(K.element), bitcast=True)
    tiles = 0
    for turn in range(0, rounds_of(batch, TILING)):
        work = work_of(batch, scoring, turn, SHAPE, TILING)
        table = cache.tables + work.sequence.to(gl.int64) * cache.table_stride
        states = states_of(work.end - TILE, work, TILE, LOADS)
        pages = gl.load(table + states // STATES)
        for n in range(work.begin, work.end, TILE):
            places = states % STATES
            states = states_of(work.end - 2 * TILE - (n - work.begin), work, TILE, LOADS)
            next_pages = gl.load(table + states // STATES)
            stage = tiles % STAGES
            phase = tiles // STAGES & 1
            mbarrier.wait(signals.free_k.index(stage), phase ^ 1)
            copy_rows(cache.k, elements, pages, places, work.head, room.k.index(stage),
                      signals.there_k.index(stage), K)  # fmt: skip
            mbarrier.wait(signals.free_v.index(stage), phase ^ 1)
            copy_rows(cache.v, elements, pages, places, work.head, room.v.index(stage),
                      signals.there_v.index(stage), V)  # fmt: skip
            pages = next_pages
            tiles += 1
