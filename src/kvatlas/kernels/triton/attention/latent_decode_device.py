"""Device code of MLA decode on Hopper, in Gluon, with asynchronous loads and matrix products.

The kernel computes the same as `decode` and takes the same arguments. It supports latents of
512 + 64 elements, and 64 query rows per program. `latent_groups_device` describes the warp groups
that share the work. The 64 x 256 sums of an MMA group fill half of the group's registers.

Shared memory has no separate buffer for the softmax weights of a tile. They overwrite the rotary
part of the tile's keys, which is no longer needed once the logits of the tile are computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvatlas.kernels.triton.attention.latent_groups_device import (
    GROWTH,
    HALF,
    LATENT,
    LOWEST,
    ROPE,
    TILE,
    Room,
    after_previous,
    arrivals_of,
    barrier,
    load_query,
    release,
    signals_of,
    stretch_of,
)
from kvatlas.kernels.triton.attention.latent_load_device import load_tiles

ROWS = gl.constexpr(64)


@gluon.jit
def begin_logits(room, signals, phase, zero, WHO: gl.constexpr, LOGITS: gl.constexpr):
    """Start to multiply the queries by an MMA group's tile of keys.

    A tile is loaded in two halves. The products of each half start once the half is loaded.
    """
    latents = room.latents.index(WHO + zero)
    query = room.query.index(zero)
    query_rope = room.query_rope.index(zero)
    logits = gl.zeros([ROWS, TILE], gl.float32, layout=LOGITS)
    mbarrier.wait(signals.there.index(2 * WHO), phase)
    fence_async_shared()
    logits = warpgroup_mma(
        query.slice(0, HALF, dim=1), latents.slice(0, HALF, dim=1).permute((1, 0)), logits,
        use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(signals.there.index(2 * WHO + 1), phase)
    fence_async_shared()
    logits = warpgroup_mma(
        query.slice(HALF, HALF, dim=1), latents.slice(HALF, HALF, dim=1).permute((1, 0)),
        logits, is_async=True,
    )  # fmt: skip
    return warpgroup_mma(
        query_rope, room.ropes.index(WHO + zero).permute((1, 0)), logits, is_async=True
    )


@gluon.jit
def has_grown(room, OF: gl.constexpr):
    """Return whether sums must be rescaled: the maximum of a row grew by more than `GROWTH`."""
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(room.growth.index(OF).load(EACH), 0) > GROWTH


@gluon.jit
def weigh(logits, top, begin, seen, scale, room, WHO: gl.constexpr):
    """Return (softmax weights, row maxima) of a tile.

    The weights are not normalised: a weight is 2**(scale * logit - row maximum).
    A row's maximum is updated only if it grew by more than `GROWTH`. `scale` must be positive.
    A tile is masked only if it has cached tokens after the position of the first query, or past the
    end of the sequence. Each warp stores the growth of its maxima in shared memory. Both MMA groups
    read it later, so no warp waits here for the maxima of another warp.
    """
    limit, least = seen
    if begin + TILE > least:
        at = begin + gl.arange(0, TILE, layout=gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(at[None, :] <= limit[:, None], logits, float("-inf"))
    higher = gl.max(logits, 1) * scale
    growth = higher - top
    higher = gl.where(growth > GROWTH, higher, top)
    barrier()  # All warps have finished the logits, so weights may overwrite the keys.
    room.growth.index(WHO).store(gl.max(growth.reshape([4, ROWS // 4]), 1))
    return gl.exp2(logits * scale - higher[:, None]), higher


@gluon.jit
def scaled_down(acc, total, top, higher):
    """Rescale sums and totals from the maximum `top` to the maximum `higher`."""
    shrink = gl.exp2(top - higher)
    SUMS: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None], total * shrink


@gluon.jit
def publish(rated, top, room, signals, WHO: gl.constexpr):
    """Write a tile's softmax weights and row maxima to shared memory; signal both MMA groups."""
    room.weights.index(WHO).store(rated.to(room.weights.dtype))
    room.tops.index(WHO).store(top)
    fence_async_shared()
    barrier()
    mbarrier.arrive(signals.weighed.index(WHO), count=1)


@gluon.jit
def begin_values(acc, room, WHO: gl.constexpr, OF: gl.constexpr):
    """Start to add a tile's weighted values to `acc`, for an MMA group's half of the columns."""
    values = room.latents.index(OF).slice(WHO * HALF, HALF, dim=1)
    return warpgroup_mma(room.weights.index(OF), values, acc, is_async=True)


@gluon.jit
def add_values(acc, total, top, room, signals, phase, WHO: gl.constexpr, OF: gl.constexpr):
    """Rescale `acc`, then start to add the weighted values of the other MMA group's tile."""
    mbarrier.wait(signals.weighed.index(OF), phase)
    if has_grown(room, OF):
        higher = room.tops.index(OF).load(top.type.layout)
        acc, total = scaled_down(acc, total, top, higher)
        top = higher
    return begin_values(acc, room, WHO, OF), total, top


@gluon.jit
def multiply(
    q, out, batch, partials, scoring, room, signals, WHO: gl.constexpr, SHAPE: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Run an MMA warp group: compute the logits of its tiles and its half of the output columns."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    GROUP: gl.constexpr = SHAPE.out.group
    OTHER: gl.constexpr = 1 - WHO
    program = gl.program_id(0) % TILING.programs
    row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGITS))
    ends = batch.ends + batch.sequences + 1
    tile, stop, sequence = stretch_of(batch, TILING)
    pairs = 0
    turn = 0
    while tile < stop:
        first = gl.load(ends + sequence)
        last = gl.load(ends + sequence + 1)
        start = gl.load(batch.ends + sequence)
        count = gl.load(batch.ends + sequence + 1) - start
        length = gl.load(batch.lengths + sequence).to(gl.int32)
        until = gl.minimum(stop, last)
        if until > tile:
            begin = (tile - first) * TILE
            # A query that selects no token has tiles, but the load group skips them too.
            end = gl.where(length > 0, (until - first) * TILE, begin)
            limit = gl.minimum(length - count + row // GROUP, end - 1)
            least = gl.minimum(length - count + 1, end)
            load_query(q, start, count, program, room, WHO, GROUP)
            fence_async_shared()
            barrier()
            mbarrier.arrive(signals.ready.index(0), count=1)
            acc = gl.zeros([ROWS, HALF], gl.float32, layout=SUMS)
            top = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, LOGITS))
            total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, LOGITS))
            mbarrier.wait(signals.ready.index(0), turn & 1)
            for n in range(begin, end, 2 * TILE):
                phase = pairs & 1
                if WHO == 1:
                    mbarrier.wait(signals.turn.index(0), phase)
                zero = n >> 31  # Always 0, but the compiler cannot tell; else it spills.
                logits = begin_logits(room, signals, phase, zero, WHO, LOGITS)
                if WHO == 0:
                    mbarrier.arrive(signals.turn.index(0), count=1)
                if WHO == 1:
                    acc, total, top = add_values(acc, total, top, room, signals, phase, WHO, OTHER)
                    logits = warpgroup_mma_wait(1, deps=(logits,))
                else:
                    logits = warpgroup_mma_wait(0, deps=(logits,))
                rated, higher = weigh(
                    logits, top, n + WHO * TILE, (limit, least), scoring.scale, room, WHO
                )
                publish(rated, higher, room, signals, WHO)
                if WHO == 1:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(signals, WHO, OTHER)
                if has_grown(room, WHO):
                    acc, total = scaled_down(acc, total, top, higher)
                top = higher
                acc = begin_values(acc, room, WHO, WHO)
                total += gl.sum(rated, 1)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(signals, WHO, WHO)
                if WHO == 0:
                    acc, total, top = add_values(acc, total, top, room, signals, phase, WHO, OTHER)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(signals, WHO, OTHER)
                pairs += 1
            room.totals.index(WHO).store(total)
            barrier()
            mbarrier.arrive(signals.ended.index(WHO), count=1)
            mbarrier.wait(signals.ended.index(OTHER), turn & 1)
            total += room.totals.index(OTHER).load(total.type.layout)
            put(out, partials, scoring, (acc, top, total),
                (start, count, tile == first, until == last), WHO, SHAPE, TILING)  # fmt: skip
            turn += 1
        tile = until
        sequence += 1


@gluon.jit
def put(
    out, partials, scoring, softmax, where, WHO: gl.constexpr, SHAPE: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Write the output if the worker processed the whole sequence, else a partial result.

    `where` is (first token, number of queries, whether the worker processed the first tile of the
    sequence, whether it processed the last one).
    """
    acc, top, total = softmax
    start, count, begun, ended = where
    GROUP: gl.constexpr = SHAPE.out.group
    SUMS: gl.constexpr = acc.type.layout
    PARTIAL_ROWS: gl.constexpr = TILING.rows
    program = gl.program_id(0) % TILING.programs
    worker = gl.program_id(0) // TILING.programs
    place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    row = program * ROWS + place
    column = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    valid = row < count * GROUP
    if begun & ended:
        scaled = scoring.v_scale / gl.where(total == 0.0, 1.0, total)
        scaled = gl.convert_layout(scaled, gl.SliceLayout(1, SUMS))
        token = (start + row // GROUP).to(gl.int64)
        at = token * out.token + (row % GROUP).to(gl.int64) * out.head
        values = (acc * scaled[:, None]).to(out.tensor.dtype.element_ty)
        gl.store(out.tensor + at[:, None] + column[None, :], values, mask=valid[:, None])
    else:
        number = (2 * worker + begun.to(gl.int32)) * TILING.programs + program
        at = (number * PARTIAL_ROWS + place).to(gl.int64) * LATENT
        gl.store(partials.room + at[:, None] + column[None, :], acc, mask=valid[:, None])
        if WHO == 0:
            top_place = gl.arange(0, ROWS, layout=top.type.layout)
            tops = partials.room + partials.tops + 2 * (number * PARTIAL_ROWS + top_place)
            there = program * ROWS + top_place < count * GROUP
            gl.store(tops, top, mask=there)
            gl.store(tops + 1, total, mask=there)


@gluon.jit
def decode_latent(
    q, out, cache, batch, partials, scoring, SHAPE: gl.constexpr, TILING: gl.constexpr,
    WORDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute MLA decode over a worker's range of tiles, sequence by sequence.

    A worker is a group of programs. Each worker processes an equal number of the batch's tiles of
    cached tokens.
    """
    gl.static_assert(not WORDS.packed)
    DTYPE: gl.constexpr = SHAPE.k_dot
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ropes = gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], SWIZZLED)
    room = Room(
        gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENT], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], SWIZZLED),
        ropes,
        ropes,
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, 4], PLAIN),
    )
    signals = signals_of(arrivals_of(SHAPE.k.kind))
    after_previous(EARLY)
    fence_async_shared()
    COPIED: gl.constexpr = SHAPE.k.element == SHAPE.k_dot
    gl.warp_specialize(
        [
            (multiply, (q, out, batch, partials, scoring, room, signals, 0, SHAPE, TILING)),
            (multiply, (q, out, batch, partials, scoring, room, signals, 1, SHAPE, TILING)),
            (load_tiles, (cache, batch, room, signals, SHAPE, TILING)),
        ],
        [4, 4],
        [216, 72] if COPIED else [192, 120],
    )
