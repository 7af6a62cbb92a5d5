"""Device code of MLA's decode on Hopper, in Gluon: loads and matrix products run by themselves.

It does what `decode` does, for latents of 512 + 64 elements and up to 64 query rows a program, and
takes the same arguments. Three groups of four warps share the work, as FlashMLA's do:

| group | what it does |
|---|---|
| two that multiply | each has the logits of every other tile, and 256 of the sums' 512 columns |
| one that loads | the next tile's half, as soon as the group that had it is done with it |

Sums of 64 x 256 fill half of a group's registers. While one group is at its tile's softmax the
other's products run. Weights go to the other group through shared memory, where the tile's
rotary part was, which nobody needs by then. What logits are relative to goes with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# By other names in later releases of Triton than 3.6.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LOWEST = gl.constexpr(-1.0e30)
GROWTH = gl.constexpr(8.0)
"""Powers of two that a weight may grow by before sums are scaled down."""
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the sums that a group has."""
ROPE = gl.constexpr(64)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)
THREADS = gl.constexpr(128)
"""Of a group."""

_E4M3 = gl.constexpr("""
    {
        .reg .b16 first, second;
        mov.b32 {first, second}, $2;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
    }
""")


class Room(NamedTuple):
    """Shared memory. Of two tiles, the second index is the group whose logits they are for."""

    query: Any
    query_rope: Any
    latents: Any
    ropes: Any
    """Rotary parts; then the weights."""
    tops: Any
    """What a tile's weights are relative to."""
    totals: Any
    """Of the weights of each group, at the end."""
    grown: Any
    """Whether `tops` have changed with a tile."""


class Signals(NamedTuple):
    """Barriers in shared memory, for each of two tiles or groups."""

    there: Any
    """Left and right half are loaded: 2 * tile + half."""
    free: Any
    """A group is done with its half: 2 * tile + half."""
    weighed: Any
    """Weights and tops are written."""
    ready: Any
    """A group has loaded its part of the queries."""
    ended: Any
    """Totals are written."""


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
def stretch_of(batch, TILING: gl.constexpr):
    """The tiles of this program's worker."""
    ends = batch.ends + batch.sequences + 1
    total = gl.load(ends + batch.sequences)
    share = gl.cdiv(total, gl.num_programs(0) // TILING.programs)
    share = gl.cdiv(share, TILING.together) * TILING.together
    tile = gl.program_id(0) // TILING.programs * share
    return tile, gl.minimum(tile + share, total), find(ends, batch.sequences, tile)


@gluon.jit
def load_pages(table, begin, last, STATES: gl.constexpr, LOADS: gl.constexpr):
    """The blocks of a tile's states, and which states of them; the last one past the end."""
    states = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADS))
    states = gl.minimum(states, last)
    return gl.load(table + states // STATES).to(gl.int64), states % STATES


@gluon.jit
def row_starts(at, pages, states, UNIT: gl.constexpr):
    """Elements from the pool's start to the states' rows."""
    return (at.first + pages * at.block + states * at.state) * UNIT


@gluon.jit
def row_pointers(elements, rows, FROM: gl.constexpr, COUNT: gl.constexpr, LOADS: gl.constexpr):
    """Where columns of rows lie, 16 bytes a thread."""
    WIDE: gl.constexpr = LOADS.size_per_thread[1]
    columns = FROM + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LOADS))
    offsets = rows[:, None] + columns[None, :]
    return elements + gl.max_contiguous(gl.multiple_of(offsets, [1, WIDE]), [1, WIDE])


@gluon.jit
def copy_states(cache, table, states, room, signals, phase, SHAPE: gl.constexpr):
    """Load two tiles as they are, each half when its group is done with the one before."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    begin, end, last = states
    elements = cache.buffer.to(gl.pointer_type(SHAPE.k.element), bitcast=True)
    for n in range(begin, end, 2 * TILE):
        for i in gl.static_range(2):
            pages, places = load_pages(table, n + i * TILE, last, SHAPE.states, LOADS)
            rows = row_starts(cache.k.rows, pages, places, SHAPE.k.unit)
            ropes = row_starts(cache.v.rows, pages, places, SHAPE.v.unit)
            for half in gl.static_range(2):
                mbarrier.wait(signals.free.index(2 * i + half), phase ^ 1)
                part = room.latents.index(i).slice(half * HALF, HALF, dim=1)
                begin_copy(part, row_pointers(elements, rows, half * HALF, HALF, LOADS))
                if half == 1:
                    begin_copy(room.ropes.index(i), row_pointers(elements, ropes, 0, ROPE, LOADS))
                there = signals.there.index(2 * i + half)
                async_copy.mbarrier_arrive(there, increment_count=False)
        phase ^= 1
    return phase


@gluon.jit
def as_halves(words):
    """Words of four e4m3 as words of two halves each, twice as many."""
    pairs = gl.inline_asm_elementwise(
        _E4M3, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(pairs[0], pairs[1]).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def convert_states(cache, table, states, room, signals, phase, SHAPE: gl.constexpr):
    """Load two tiles and convert them; a half is on its way while the one before is converted."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    UNIT: gl.constexpr = SHAPE.k.unit // 4
    ROPE_UNIT: gl.constexpr = SHAPE.v.unit // 4
    begin, end, last = states
    words = cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True)
    all_latents = seen_as(room.latents, gl.int32, [2, TILE, LATENT // 2], WORDS)
    all_ropes = seen_as(room.ropes, gl.int32, [2, TILE, ROPE // 2], WORDS)
    pages, places = load_pages(table, begin, last, SHAPE.states, LOADS)
    rows = row_starts(cache.k.rows, pages, places, UNIT)
    left = gl.load(row_pointers(words, rows, 0, HALF // 4, LOADS))
    for n in range(begin, end, 2 * TILE):
        for i in gl.static_range(2):
            right = gl.load(row_pointers(words, rows, HALF // 4, HALF // 4, LOADS))
            ropes = row_starts(cache.v.rows, pages, places, ROPE_UNIT)
            rope = gl.load(row_pointers(words, ropes, 0, ROPE // 4, LOADS))
            pages, places = load_pages(table, n + (i + 1) * TILE, last, SHAPE.states, LOADS)
            rows = row_starts(cache.k.rows, pages, places, UNIT)
            latents = all_latents.index(i)
            mbarrier.wait(signals.free.index(2 * i), phase ^ 1)
            latents.slice(0, HALF // 2, dim=1).store(as_halves(left))
            announce(signals.there.index(2 * i))
            left = gl.load(row_pointers(words, rows, 0, HALF // 4, LOADS))
            mbarrier.wait(signals.free.index(2 * i + 1), phase ^ 1)
            latents.slice(HALF // 2, HALF // 2, dim=1).store(as_halves(right))
            all_ropes.index(i).store(as_halves(rope))
            announce(signals.there.index(2 * i + 1))
        phase ^= 1
    return phase


@gluon.jit
def announce(there):
    """Say that what the group has written can be multiplied."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(there, count=THREADS)


@gluon.jit
def load_tiles(cache, batch, room, signals, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """The group that loads: a worker's tiles by twos, sequence by sequence."""
    ends = batch.ends + batch.sequences + 1
    tile, stop, sequence = stretch_of(batch, TILING)
    phase = 0
    while tile < stop:
        first = gl.load(ends + sequence)
        until = gl.minimum(stop, gl.load(ends + sequence + 1))
        if until > tile:
            length = gl.load(batch.lengths + sequence).to(gl.int32)
            table = cache.tables + sequence.to(gl.int64) * cache.table_stride
            states = (tile - first) * TILE, (until - first) * TILE, length - 1
            if SHAPE.k.element == SHAPE.k_dot:
                phase = copy_states(cache, table, states, room, signals, phase, SHAPE)
            else:
                phase = convert_states(cache, table, states, room, signals, phase, SHAPE)
        tile = until
        sequence += 1


@gluon.jit
def load_query(q, start, count, program, room, WHO: gl.constexpr, GROUP: gl.constexpr):
    """A group's half of the query rows into shared memory; rows past the last are the last."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADS))
    row = gl.minimum(row, count * GROUP - 1)
    at = (start + row // GROUP).to(gl.int64) * q.token + (row % GROUP).to(gl.int64) * q.head
    rows = q.tensor + at[:, None]
    columns = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LOADS))
    part = room.query.index(0).slice(WHO * HALF, HALF, dim=1)
    part.store(gl.load(rows + columns[None, :]).to(part.dtype))
    if WHO == 1:
        columns = LATENT + gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADS))
        room.query_rope.index(0).store(gl.load(rows + columns[None, :]).to(part.dtype))


@gluon.jit
def begin_logits(room, signals, phase, zero, WHO: gl.constexpr, LOGITS: gl.constexpr):
    """The products of queries and the keys of a group's tile, under way as halves arrive."""
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
def weigh(logits, top, begin, limit, scale):
    """Weights of a tile's states, and the maximum that they are relative to."""
    LOGITS: gl.constexpr = logits.type.layout
    at = begin + gl.arange(0, TILE, layout=gl.SliceLayout(0, LOGITS))
    logits = gl.where(at[None, :] <= limit[:, None], logits * scale, float("-inf"))
    higher = gl.max(logits, 1)
    grown = gl.max(higher - top, 0)
    higher = gl.maximum(top, higher) if grown > GROWTH else top
    return gl.exp2(logits - higher[:, None]), higher, grown > GROWTH


@gluon.jit
def scaled_down(acc, total, top, higher):
    """Sums and totals that are relative to a higher maximum."""
    shrink = gl.exp2(top - higher)
    SUMS: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None], total * shrink


@gluon.jit
def publish(rated, top, grown, room, signals, WHO: gl.constexpr):
    """A tile's weights, for both groups, and what they are relative to."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    weights = room.ropes.index(WHO)
    weights.store(rated.to(weights.dtype))
    room.tops.index(WHO).store(top)
    room.grown.index(WHO).store(gl.full([1], grown.to(gl.int32), gl.int32, layout=ONE))
    fence_async_shared()
    barrier()
    mbarrier.arrive(signals.weighed.index(WHO), count=1)


@gluon.jit
def add_values(acc, total, top, room, signals, phase, WHO: gl.constexpr, OF: gl.constexpr):
    """Sums with those of the other group's tile; begun, not done."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(signals.weighed.index(OF), phase)
    if gl.max(room.grown.index(OF).load(ONE), 0) > 0:
        higher = room.tops.index(OF).load(top.type.layout)
        acc, total = scaled_down(acc, total, top, higher)
        top = higher
    return begin_values(acc, room, WHO, OF), total, top


@gluon.jit
def begin_values(acc, room, WHO: gl.constexpr, OF: gl.constexpr):
    """Add the products of a tile's weights and a group's half of its values."""
    values = room.latents.index(OF).slice(WHO * HALF, HALF, dim=1)
    return warpgroup_mma(room.ropes.index(OF), values, acc, is_async=True)


@gluon.jit
def release(signals, WHO: gl.constexpr, OF: gl.constexpr):
    """Let a tile's half be loaded anew."""
    barrier()
    mbarrier.arrive(signals.free.index(2 * OF + WHO), count=1)


@gluon.jit
def multiply(
    q, out, batch, partials, scoring, room, signals, WHO: gl.constexpr, SHAPE: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its tiles' logits, its columns' sums."""
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
        until = gl.minimum(stop, last)
        if until > tile:
            start = gl.load(batch.ends + sequence)
            count = gl.load(batch.ends + sequence + 1) - start
            length = gl.load(batch.lengths + sequence).to(gl.int32)
            begin = (tile - first) * TILE
            end = (until - first) * TILE
            limit = gl.minimum(length - count + row // GROUP, end - 1)
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
                logits = begin_logits(room, signals, phase, n >> 31, WHO, LOGITS)
                if WHO == 1:
                    acc, total, top = add_values(acc, total, top, room, signals, phase, WHO, OTHER)
                    logits = warpgroup_mma_wait(1, deps=(logits,))
                else:
                    logits = warpgroup_mma_wait(0, deps=(logits,))
                rated, higher, grown = weigh(logits, top, n + WHO * TILE, limit, scoring.scale)
                publish(rated, higher, grown, room, signals, WHO)
                if WHO == 1:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    release(signals, WHO, OTHER)
                if grown:
                    acc, total = scaled_down(acc, total, top, higher)
                top = higher
                total += gl.sum(rated, 1)
                acc = begin_values(acc, room, WHO, WHO)
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
    """What a worker has of a sequence: its output where it has all, else partials for `merge`."""
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
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers in shared memory, for so many arrivals each."""
    some = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(some.index(i), count=arrivals)
    return some


@gluon.jit
def decode_latent(
    q, out, cache, batch, partials, scoring, SHAPE: gl.constexpr, TILING: gl.constexpr,
    WORDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A worker's stretch of tiles, sequence by sequence."""
    gl.static_assert(not WORDS.packed)
    DTYPE: gl.constexpr = SHAPE.k_dot
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    room = Room(
        gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENT], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], SWIZZLED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], SWIZZLED),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN),
    )
    signals = Signals(
        barriers(4, THREADS), barriers(4, 1), barriers(2, 1), barriers(1, 2), barriers(2, 1)
    )
    fence_async_shared()
    COPIED: gl.constexpr = SHAPE.k.element == SHAPE.k_dot
    gl.warp_specialize(
        [
            (multiply, (q, out, batch, partials, scoring, room, signals, 0, SHAPE, TILING)),
            (multiply, (q, out, batch, partials, scoring, room, signals, 1, SHAPE, TILING)),
            (load_tiles, (cache, batch, room, signals, SHAPE, TILING)),
        ],
        [4, 4],
        [216, 72] if COPIED else [200, 104],
    )
