"""Device code of MLA's decode on Hopper, in Gluon: loads and matrix products run by themselves.

It does what `decode` does, for latents of 16 bits and 64 query rows a program, and takes the same
arguments. Two groups of four warps share the work: each has half of a tile's logits, and 256 of
the 512 columns of the sums, which fill half of its registers. Shared memory holds the queries
and two tiles: one is loaded while the other is worked on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# By other names in later releases of Triton than 3.6.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)
GROWTH = gl.constexpr(8.0)
"""Powers of two that a weight may grow by before sums are scaled down."""
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)


@gluon.jit
def find(ends, count, wanted):
    """The sequence that tile number `wanted` belongs to; `ends` starts with 0."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if gl.load(ends + middle + 1) <= wanted:
            low = middle + 1
        else:
            high = middle
    return low


@gluon.jit
def load_query(rows, query, query_rope, LOADS: gl.constexpr):
    """Query rows into shared memory, latent and rotary parts."""
    columns = gl.arange(0, LATENT, layout=gl.SliceLayout(0, LOADS))
    query.store(gl.load(rows + columns[None, :]))
    columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADS))
    query_rope.store(gl.load(rows + LATENT + columns[None, :]))


@gluon.jit
def load_pages(table, begin, last, STATES: gl.constexpr, LOADS: gl.constexpr):
    """The blocks of a tile's states, and which states of them; the last one past the end."""
    states = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADS))
    states = gl.minimum(states, last)
    return gl.load(table + states // STATES).to(gl.int32), states % STATES


@gluon.jit
def copy_tile(
    cache, pages, states, latents, ropes, SHAPE: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Begin to load a tile."""
    UNIT: gl.constexpr = SHAPE.k.unit
    ROPE_UNIT: gl.constexpr = SHAPE.v.unit
    elements = cache.buffer.to(gl.pointer_type(SHAPE.k_dot), bitcast=True)
    at = cache.k.rows
    rows = (at.first + pages.to(gl.int64) * at.block + states * at.state) * UNIT
    rope_at = cache.v.rows
    rope_rows = (
        rope_at.first + pages.to(gl.int64) * rope_at.block + states * rope_at.state
    ) * ROPE_UNIT
    columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADS))
    pointers = elements + gl.max_contiguous(
        gl.multiple_of(rope_rows[:, None] + columns[None, :], [1, 8]), [1, 8]
    )
    begin_copy(ropes, pointers)
    columns = gl.arange(0, LATENT, layout=gl.SliceLayout(0, LOADS))
    offsets = rows[:, None] + columns[None, :]
    pointers = elements + gl.max_contiguous(gl.multiple_of(offsets, [1, 8]), [1, 8])
    begin_copy(latents, pointers)
    async_copy.commit_group()


@gluon.jit
def begin_logits(query, query_rope, latents, ropes, LOGITS: gl.constexpr):
    """The products of queries and the keys of a tile, under way."""
    logits = gl.zeros([ROWS, TILE], gl.float32, layout=LOGITS)
    logits = warpgroup_mma(query_rope, ropes.permute((1, 0)), logits, use_acc=False, is_async=True)
    return warpgroup_mma(query, latents.permute((1, 0)), logits, is_async=True)


@gluon.jit
def weigh(logits, top, begin, position, scoring):
    """Weights of a tile's states, and the maximum that they are relative to."""
    LOGITS: gl.constexpr = logits.type.layout
    at = begin + gl.arange(0, TILE, layout=gl.SliceLayout(0, LOGITS))
    logits = gl.where(at[None, :] <= position[:, None], logits * scoring.scale, float("-inf"))
    higher = gl.max(logits, 1)
    grown = gl.max(higher - top, 0)
    higher = gl.maximum(top, higher) if grown > GROWTH else top
    return gl.exp2(logits - higher[:, None]), higher, grown


@gluon.jit
def decode_latent(
    q, out, cache, batch, partials, scoring, SHAPE: gl.constexpr, TILING: gl.constexpr,
    WORDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A worker's stretch of tiles, sequence by sequence."""
    gl.static_assert(not WORDS.packed)
    GROUP: gl.constexpr = SHAPE.out.group
    STATES: gl.constexpr = SHAPE.states
    DTYPE: gl.constexpr = SHAPE.k_dot
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    query = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], SWIZZLED)
    query_rope = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], SWIZZLED)
    latents = gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], SWIZZLED)
    ropes = gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], SWIZZLED)
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, TILE], SWIZZLED)

    program = gl.program_id(0) % TILING.programs
    worker = gl.program_id(0) // TILING.programs
    ends = batch.ends + batch.sequences + 1
    total_tiles = gl.load(ends + batch.sequences)
    share = gl.cdiv(total_tiles, gl.num_programs(0) // TILING.programs)
    tile = worker * share
    stop = gl.minimum(tile + share, total_tiles)
    sequence = find(ends, batch.sequences, tile)
    row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGITS))
    load_row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADS))
    sum_row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, SUMS))
    while tile < stop:
        first = gl.load(ends + sequence)
        last = gl.load(ends + sequence + 1)
        until = gl.minimum(stop, last)
        if until > tile:
            start = gl.load(batch.ends + sequence)
            count = gl.load(batch.ends + sequence + 1) - start
            length = gl.load(batch.lengths + sequence).to(gl.int32)
            position = length - count + row // GROUP
            table = cache.tables + sequence.to(gl.int64) * cache.table_stride
            begin = (tile - first) * TILE
            end = (until - first) * TILE

            # Queries of this sequence; rows past its last are those of the last.
            some = gl.minimum(load_row, count * GROUP - 1)
            at = (start + some // GROUP).to(gl.int64) * q.token
            at += (some % GROUP).to(gl.int64) * q.head
            load_query(q.tensor + at[:, None], query, query_rope, LOADS)
            pages, states = load_pages(table, begin, length - 1, STATES, LOADS)
            copy_tile(cache, pages, states, latents.index(0), ropes.index(0), SHAPE, LOADS)
            pages, states = load_pages(table, begin + TILE, length - 1, STATES, LOADS)
            acc = warpgroup_mma_init(gl.zeros([ROWS, LATENT], gl.float32, layout=SUMS))
            top = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, LOGITS))
            parts = gl.zeros([ROWS, TILE], gl.float32, layout=LOGITS)
            here = 0
            for n in range(begin, end, TILE):
                # This tile is there, and the one before is done with: its room takes the next.
                async_copy.wait_group(0)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                fence_async_shared()
                barrier()
                logits = begin_logits(
                    query, query_rope, latents.index(here), ropes.index(here), LOGITS
                )
                if n + TILE < end:
                    copy_tile(
                        cache, pages, states, latents.index(1 - here), ropes.index(1 - here),
                        SHAPE, LOADS,
                    )  # fmt: skip
                    pages, states = load_pages(table, n + 2 * TILE, length - 1, STATES, LOADS)
                logits = warpgroup_mma_wait(0, deps=(logits,))
                rated, higher, grown = weigh(logits, top, n, position, scoring)
                if grown > GROWTH:
                    shrink = gl.exp2(top - higher)
                    parts = parts * shrink[:, None]
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
                top = higher
                parts += rated
                weights.store(rated.to(DTYPE))
                fence_async_shared()
                barrier()
                acc = warpgroup_mma(weights, latents.index(here), acc, is_async=True)
                here = 1 - here
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()  # both groups of warps: the next sequence's first tile takes the room
            total = gl.sum(parts, 1)
            put(out, partials, scoring, (acc, top, total), (row, sum_row, column),
                (start, count, worker, program, tile == first, until == last),
                SHAPE, TILING)  # fmt: skip
        tile = until
        sequence += 1


@gluon.jit
def put(out, partials, scoring, softmax, places, where, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """What a worker has of a sequence: its output where it has all, else partials for `merge`."""
    acc, top, total = softmax
    row, sum_row, column = places
    start, count, worker, program, begun, ended = where
    GROUP: gl.constexpr = SHAPE.out.group
    SUMS: gl.constexpr = acc.type.layout
    valid = sum_row < count * GROUP
    if begun & ended:
        scaled = scoring.v_scale / gl.where(total == 0.0, 1.0, total)
        scaled = gl.convert_layout(scaled, gl.SliceLayout(1, SUMS))
        token = (start + sum_row // GROUP).to(gl.int64)
        at = token * out.token + (sum_row % GROUP).to(gl.int64) * out.head
        values = (acc * scaled[:, None]).to(out.tensor.dtype.element_ty)
        gl.store(out.tensor + at[:, None] + column[None, :], values, mask=valid[:, None])
    else:
        number = (2 * worker + begun.to(gl.int32)) * TILING.programs + program
        at = (number * ROWS + sum_row - program * ROWS).to(gl.int64) * LATENT
        gl.store(partials.room + at[:, None] + column[None, :], acc, mask=valid[:, None])
        tops = partials.room + partials.tops + 2 * (number * ROWS + row - program * ROWS)
        gl.store(tops, top, mask=row < count * GROUP)
        gl.store(tops + 1, total, mask=row < count * GROUP)
