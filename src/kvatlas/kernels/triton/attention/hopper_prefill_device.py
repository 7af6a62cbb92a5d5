"""Device code of prefill on Hopper, in Gluon, with asynchronous loads and matrix products.

The kernel computes the same as `prefill` and takes the same arguments. It supports rows of 128
elements with 16, 8 or 4 bits each, and 128 query rows per program. `hopper_prefill_groups_device`
describes the warp groups that share the work.
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

from kvatlas.kernels.triton.attention.hopper_prefill_groups_device import (
    PrefillRoom,
    has_factors,
    lift_of,
    loading_warps,
    prefill_signals,
    rounds_of,
    work_of,
)
from kvatlas.kernels.triton.attention.hopper_prefill_load_device import load_keys_and_values
from kvatlas.kernels.triton.attention.latent_groups_device import LOWEST, barrier

ROWS = gl.constexpr(64)
"""Query rows per MMA warp group."""


@gluon.jit
def row_offsets(rows, work, row, GROUP: gl.constexpr):
    """Return the offset, in elements, of each row in the batch tensor `rows`.

    A row is a (token, head) pair. `row` contains row numbers, counted from the first row of the
    sequence to which `work` belongs.
    """
    token = (work.start + row // GROUP).to(gl.int64)
    return token * rows.token + (work.head * GROUP + row % GROUP).to(gl.int64) * rows.head


@gluon.jit
def load_queries(q, work, row, room, WHO: gl.constexpr, GROUP: gl.constexpr):
    """Load a warp group's query rows into shared memory; rows past the end repeat the last row."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    DIM: gl.constexpr = room.query.shape[2]
    to = room.query.index(WHO)
    row = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADS)), work.rows - 1)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LOADS))
    at = row_offsets(q, work, row, GROUP)
    loaded = gl.load(q.tensor + at[:, None] + column[None, :])
    barrier()  # All warps have finished the products of the previous work.
    to.store(loaded.to(to.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def wait_for(there, tiles):
    """Wait until tile number `tiles` of K or V is loaded."""
    STAGES: gl.constexpr = there.shape[0]
    mbarrier.wait(there.index(tiles % STAGES), tiles // STAGES & 1)


@gluon.jit
def begin_logits(room, tiles, WHO: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to multiply a warp group's queries by the keys of tile number `tiles`."""
    STAGES: gl.constexpr = room.k.shape[0]
    TILE: gl.constexpr = room.k.shape[1]
    logits = gl.zeros([ROWS, TILE], gl.float32, layout=LAYOUT)
    k = room.k.index(tiles % STAGES)
    return warpgroup_mma(
        room.query.index(WHO), k.permute((1, 0)), logits, use_acc=False, is_async=True
    )


@gluon.jit
def begin_values(acc, weights, room, tiles):
    """Start to add the values of tile number `tiles`, times the softmax weights, to `acc`."""
    STAGES: gl.constexpr = room.v.shape[0]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(weights.to(room.v.dtype), WEIGHTS)
    return warpgroup_mma(weights, room.v.index(tiles % STAGES), acc, is_async=True)


@gluon.jit
def release(free, tiles):
    """Signal that this warp group no longer needs the buffer of tile number `tiles`."""
    STAGES: gl.constexpr = free.shape[0]
    barrier()
    mbarrier.arrive(free.index(tiles % STAGES), count=1)


@gluon.jit
def weigh(logits, top, begin, seen, scale, LIFT: gl.constexpr):
    """Return (softmax weights, running maximum of each row) of a tile.

    The weights are 2**(scale * logit - maximum + LIFT). `scale` must be positive.
    """
    TILE: gl.constexpr = logits.shape[1]
    position, earliest = seen
    if begin + TILE - 1 > earliest:
        at = begin + gl.arange(0, TILE, layout=gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(at[None, :] <= position[:, None], logits, float("-inf"))
    higher = gl.maximum(top, gl.max(logits, 1) * scale)
    return gl.exp2(logits * scale - (higher - LIFT)[:, None]), higher


@gluon.jit
def factored(rows, factors, tiles, FACTORS: gl.constexpr):
    """Multiply the logits or softmax weights of tile `tiles` by the scale of each cached token."""
    SLOTS: gl.constexpr = factors.shape[0]
    if FACTORS:
        each = factors.index(tiles % SLOTS).load(gl.SliceLayout(0, rows.type.layout))
        rows = rows * each[None, :]
    return rows


@gluon.jit
def multiply(
    q, out, batch, scoring, room, signals, WHO: gl.constexpr, SHAPE: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Run an MMA warp group: process each `Work` (tile of query rows) of the program.

    A `Work` starts at its last tile of states (cached tokens) and ends at its first.
    """
    DIM: gl.constexpr = SHAPE.out.width
    OUT: gl.constexpr = SHAPE.out
    GROUP: gl.constexpr = OUT.group
    TILE: gl.constexpr = TILING.tile
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    PLACES: gl.constexpr = gl.SliceLayout(1, LOGITS)
    K_FACTORS: gl.constexpr = has_factors(SHAPE.k.kind)
    V_FACTORS: gl.constexpr = has_factors(SHAPE.v.kind)
    K_LIFT: gl.constexpr = lift_of(SHAPE.k.kind)
    V_LIFT: gl.constexpr = lift_of(SHAPE.v.kind)
    # With a lead, the scales of V are loaded with V instead of K, so weights must wait for V.
    V_FIRST: gl.constexpr = TILING.lead > 0
    WRAP: gl.constexpr = TILING.lead * 8 // SHAPE.v.bits
    scale = scoring.scale * 2.0**K_LIFT
    tiles = 0
    turns = 0
    for turn in range(rounds_of(batch, TILING)):
        work = work_of(batch, turn, SHAPE, TILING)
        first = work.row + WHO * ROWS
        if work.end > 0:
            row = first + gl.arange(0, ROWS, layout=PLACES)
            seen = work.before + row // GROUP, work.before + first // GROUP
            load_queries(q, work, first, room, WHO, GROUP)
            acc = gl.zeros([ROWS, DIM], gl.float32, layout=SUMS)
            top = gl.full([ROWS], LOWEST, gl.float32, layout=PLACES)
            total = gl.zeros([ROWS], gl.float32, layout=PLACES)
            wait_for(signals.there_k, tiles)
            fence_async_shared()
            logits = begin_logits(room, tiles, WHO, LOGITS)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            if K_FACTORS:
                release(signals.free_k, tiles)
            for n in range(TILE, work.end, TILE):
                begin = work.end - n
                if V_FIRST:
                    wait_for(signals.there_v, tiles)
                logits = factored(logits, room.k_factors, tiles, K_FACTORS)
                weights, higher = weigh(logits, top, begin, seen, scale, V_LIFT)
                shrink = gl.exp2(top - higher)
                total = total * shrink + gl.sum(weights, 1)
                weights = factored(weights, room.v_factors, tiles, V_FACTORS)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
                top = higher
                if not K_FACTORS:
                    release(signals.free_k, tiles)
                wait_for(signals.there_k, tiles + 1)
                if not V_FIRST:
                    wait_for(signals.there_v, tiles)
                fence_async_shared()
                mbarrier.wait(signals.turn.index(WHO), turns & 1 ^ (1 - WHO))
                logits = begin_logits(room, tiles + 1, WHO, LOGITS)
                acc = begin_values(acc, weights, room, tiles)
                mbarrier.arrive(signals.turn.index(1 - WHO), count=1)
                logits, acc = warpgroup_mma_wait(0, deps=(logits, acc))
                if K_FACTORS:
                    release(signals.free_k, tiles + 1)
                release(signals.free_v, tiles)
                tiles += 1
                turns += 1
            logits = factored(logits, room.k_factors, tiles, K_FACTORS)
            weights, higher = weigh(logits, top, 0, seen, scale, V_LIFT)
            shrink = gl.exp2(top - higher)
            total = total * shrink + gl.sum(weights, 1)
            if V_FIRST:
                wait_for(signals.there_v, tiles)
            weights = factored(weights, room.v_factors, tiles, V_FACTORS)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            if not K_FACTORS:
                release(signals.free_k, tiles)
            if not V_FIRST:
                wait_for(signals.there_v, tiles)
            fence_async_shared()
            acc = begin_values(acc, weights, room, tiles)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(signals.free_v, tiles)
            tiles += 1
            put_rows(out, acc, total * 2.0**-V_LIFT, work, first, scoring, OUT, WRAP)
        else:
            put_zeros(out, work, first, OUT)


@gluon.jit
def put_zeros(out, work, first, OUT: gl.constexpr):
    """Write zeros to a warp group's rows of a sequence without states (padding of the batch)."""
    DIM: gl.constexpr = OUT.width  # Triton 3.6 requires shapes to be constexprs.
    STORES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORES))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORES))
    at = row_offsets(out, work, row, OUT.group)
    nothing = gl.zeros([ROWS, DIM], out.tensor.dtype.element_ty, layout=STORES)
    gl.store(out.tensor + at[:, None] + column[None, :], nothing, mask=(row < work.rows)[:, None])


@gluon.jit
def put_rows(out, acc, total, work, first, scoring, OUT: gl.constexpr, WRAP: gl.constexpr):
    """Write a warp group's rows of the output.

    The first `WRAP` elements of a row in `acc` are the last elements of the output row.
    """
    DIM: gl.constexpr = OUT.width
    GROUP: gl.constexpr = OUT.group
    WIDE: gl.constexpr = WRAP if WRAP else 8
    STORES: gl.constexpr = gl.BlockedLayout([1, WIDE], [4, 8], [4, 1], [1, 0])
    scaled = scoring.v_scale / gl.where(total == 0.0, 1.0, total)
    scaled = gl.convert_layout(scaled, gl.SliceLayout(1, acc.type.layout))
    values = (acc * scaled[:, None]).to(out.tensor.dtype.element_ty)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORES))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORES))
    if WRAP:
        column = gl.max_contiguous(gl.multiple_of((column + DIM - WRAP) % DIM, WRAP), WRAP)
    at = row_offsets(out, work, row, GROUP)
    gl.store(
        out.tensor + at[:, None] + column[None, :], gl.convert_layout(values, STORES),
        mask=(row < work.rows)[:, None],
    )  # fmt: skip


@gluon.jit
def prefill_hopper(q, out, cache, batch, scoring, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """Compute prefill attention, beginning with the tiles of queries that read the most states.

    States are cached tokens.
    """
    DIM: gl.constexpr = SHAPE.out.width
    STAGES: gl.constexpr = TILING.stages
    FACTORS: gl.constexpr = TILING.tile if has_factors(SHAPE.k.kind) else 1
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = PrefillRoom(
        gl.allocate_shared_memory(SHAPE.k_dot, [2, ROWS, DIM], SWIZZLED),
        gl.allocate_shared_memory(SHAPE.k_dot, [STAGES, TILING.tile, DIM], SWIZZLED),
        gl.allocate_shared_memory(SHAPE.v_dot, [STAGES, TILING.tile, DIM], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, FACTORS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, FACTORS], PLAIN),
    )
    signals = prefill_signals(STAGES)
    fence_async_shared()
    COPIED: gl.constexpr = SHAPE.k.element == SHAPE.k_dot
    WARPS: gl.constexpr = loading_warps(SHAPE.k.kind, SHAPE.k.element, TILING.lead > 0)
    gl.warp_specialize(
        [
            (multiply, (q, out, batch, scoring, room, signals, 0, SHAPE, TILING)),
            (multiply, (q, out, batch, scoring, room, signals, 1, SHAPE, TILING)),
            (load_keys_and_values, (cache, batch, room, signals, SHAPE, TILING)),
        ],
        [4, WARPS],
        [216, 72] if COPIED else [200, 104] if WARPS == 4 else [192, 64],
    )
