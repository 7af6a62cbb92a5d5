"""Device code of MLA decode on Hopper for few query rows. Memory bandwidth limits its speed.

The warp groups do the same work as in `latent_decode_device`, but both matrix products are
transposed: the rows of the logits are cached tokens, and the rows of the sums are latent columns.
The reason is that a matrix instruction needs 64 rows, but accepts as few as 8 columns.
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


@gluon.jit
def begin_logits(room, signals, phase, zero, WHO: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to multiply an MMA group's tile of keys by the queries.

    A tile is loaded in two halves. The products of each half start once the half is loaded.
    """
    ROWS: gl.constexpr = room.query.shape[1]
    latents = room.latents.index(WHO + zero)
    query = room.query.index(zero)
    query_rope = room.query_rope.index(zero)
    logits = gl.zeros([TILE, ROWS], gl.float32, layout=LAYOUT)
    for half in gl.static_range(2):
        mbarrier.wait(signals.there.index(2 * WHO + half), phase)
        fence_async_shared()
        logits = warpgroup_mma(
            latents.slice(half * HALF, HALF, dim=1),
            query.slice(half * HALF, HALF, dim=1).permute((1, 0)), logits, use_acc=half == 1,
            is_async=True,
        )  # fmt: skip
    return warpgroup_mma(
        room.ropes.index(WHO + zero), query_rope.permute((1, 0)), logits, is_async=True
    )


@gluon.jit
def weigh(logits, top, begin, seen, scale):
    """Return (softmax weights, maximum of each query, largest growth of a maximum) of a tile.

    Weights are 2**(scale * logit - maximum). A query's maximum is updated only if it grew by more
    than `GROWTH`. `scale` must be positive.
    """
    limit, least = seen
    if begin + TILE > least:
        at = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, logits.type.layout))
        logits = gl.where(at[:, None] <= limit[None, :], logits, float("-inf"))
    higher = gl.max(logits, 0) * scale
    growth = higher - top
    higher = gl.where(growth > GROWTH, higher, top)
    return gl.exp2(logits * scale - higher[None, :]), higher, gl.max(growth, 0)


@gluon.jit
def scaled_down(acc, parts, top, higher):
    """Rescale sums `acc` and summed weights `parts` from the maximum `top` to `higher`."""
    shrink = gl.exp2(top - higher)
    return acc * shrink[None, :], parts * shrink[None, :]


@gluon.jit
def publish(rated, top, growth, room, signals, WHO: gl.constexpr):
    """Write a tile's softmax weights and maxima to shared memory, and signal both MMA groups."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    room.weights.index(WHO).store(rated.to(room.weights.dtype))
    room.tops.index(WHO).store(top)
    room.growth.index(WHO).store(gl.full([1], growth, gl.float32, layout=ONE))
    fence_async_shared()
    barrier()
    mbarrier.arrive(signals.weighed.index(WHO), count=1)


@gluon.jit
def begin_values(acc, room, zero, WHO: gl.constexpr, OF: gl.constexpr):
    """Start to add a tile's weighted values to `acc`, for an MMA group's half of the columns."""
    values = room.latents.index(OF + zero).slice(WHO * HALF, HALF, dim=1).permute((1, 0))
    return warpgroup_mma(values, room.weights.index(OF + zero), acc, is_async=True)


@gluon.jit
def add_values(acc, parts, top, room, signals, turns, WHO: gl.constexpr, OF: gl.constexpr):
    """Rescale `acc`, then start to add the weighted values of the other MMA group's tile."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    phase, zero = turns
    mbarrier.wait(signals.weighed.index(OF), phase)
    if gl.max(room.growth.index(OF).load(ONE), 0) > GROWTH:
        higher = room.tops.index(OF).load(top.type.layout)
        acc, parts = scaled_down(acc, parts, top, higher)
        top = higher
    return begin_values(acc, room, zero, WHO, OF), parts, top


@gluon.jit
def multiply_few(
    q, out, batch, partials, scoring, room, signals, WHO: gl.constexpr, SHAPE: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Run an MMA warp group: compute the logits of its tiles and its half of the output columns."""
    ROWS: gl.constexpr = TILING.rows
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUP: gl.constexpr = SHAPE.out.group
    OTHER: gl.constexpr = 1 - WHO
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
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
            load_query(q, start, count, 0, room, WHO, GROUP)
            fence_async_shared()
            barrier()
            mbarrier.arrive(signals.ready.index(0), count=1)
            acc = gl.zeros([HALF, ROWS], gl.float32, layout=LAYOUT)
            parts = gl.zeros([TILE, ROWS], gl.float32, layout=LAYOUT)
            top = gl.full([ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(0, LAYOUT))
            mbarrier.wait(signals.ready.index(0), turn & 1)
            for n in range(begin, end, 2 * TILE):
                phase = pairs & 1
                zero = n >> 31  # Always 0, but the compiler cannot tell; else it spills.
                logits = begin_logits(room, signals, phase, zero, WHO, LAYOUT)
                if WHO == 1:
                    acc, parts, top = add_values(
                        acc, parts, top, room, signals, (phase, zero), WHO, OTHER
                    )
                    logits = warpgroup_mma_wait(1, deps=(logits,))
                else:
                    logits = warpgroup_mma_wait(0, deps=(logits,))
                rated, higher, growth = weigh(
                    logits, top, n + WHO * TILE, (limit, least), scoring.scale
                )
                publish(rated, higher, growth, room, signals, WHO)
                if WHO == 1:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(signals, WHO, OTHER)
                if growth > GROWTH:
                    acc, parts = scaled_down(acc, parts, top, higher)
                top = higher
                parts += rated
                acc = begin_values(acc, room, zero, WHO, WHO)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(signals, WHO, WHO)
                if WHO == 0:
                    acc, parts, top = add_values(
                        acc, parts, top, room, signals, (phase, zero), WHO, OTHER
                    )
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(signals, WHO, OTHER)
                pairs += 1
            total = gl.sum(parts, 0)
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

    `where` has the same meaning as in `latent_decode_device.put`.
    """
    acc, top, total = softmax
    start, count, begun, ended = where
    GROUP: gl.constexpr = SHAPE.out.group
    LAYOUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = TILING.rows
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    column = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    valid = row < count * GROUP
    if begun & ended:
        scaled = scoring.v_scale / gl.where(total == 0.0, 1.0, total)
        token = (start + row // GROUP).to(gl.int64)
        at = token * out.token + (row % GROUP).to(gl.int64) * out.head
        values = (acc * scaled[None, :]).to(out.tensor.dtype.element_ty)
        gl.store(out.tensor + at[None, :] + column[:, None], values, mask=valid[None, :])
    else:
        place = (2 * gl.program_id(0) + begun.to(gl.int32)) * ROWS + row
        at = place.to(gl.int64) * LATENT
        gl.store(partials.room + at[None, :] + column[:, None], acc, mask=valid[None, :])
        if WHO == 0:
            tops = partials.room + partials.tops + 2 * place
            gl.store(tops, top, mask=valid)
            gl.store(tops + 1, total, mask=valid)


@gluon.jit
def decode_latent_few(
    q, out, cache, batch, partials, scoring, SHAPE: gl.constexpr, TILING: gl.constexpr,
    WORDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute MLA decode over a worker's range of tiles, sequence by sequence.

    A worker is a group of programs. Each worker processes an equal number of the batch's tiles of
    cached tokens.
    """
    gl.static_assert(not WORDS.packed)
    gl.static_assert(TILING.programs == 1)
    ROWS: gl.constexpr = TILING.rows
    DTYPE: gl.constexpr = SHAPE.k_dot
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = Room(
        gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENT], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, ROWS], NARROW),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, 1], PLAIN),
    )
    signals = signals_of(arrivals_of(SHAPE.k.kind))
    after_previous(EARLY)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_few, (q, out, batch, partials, scoring, room, signals, 0, SHAPE, TILING)),
            (multiply_few, (q, out, batch, partials, scoring, room, signals, 1, SHAPE, TILING)),
            (load_tiles, (cache, batch, room, signals, SHAPE, TILING)),
        ],
        [4, 4],
        [160, 184],
    )
