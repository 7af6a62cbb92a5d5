"""Device code of the warp group that loads MLA's tiles on Hopper, from any page layout.

16-bit latents are copied to shared memory unchanged, by asynchronous copies that signal
completion. 8-bit latents are prefetched into registers and converted to float16 from there. Records
(rows with scales, cache dtype `fp8_ds_mla`) are converted to bfloat16, and their rotary parts are
copied. If tables contain slots of selected tokens instead of block ids, rows are gathered.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
)

from kvatlas.kernels.triton.attention.hopper_dequantise_device import (
    E4M3_AS_HALVES,
    SCALED_E4M3_AS_BF16,
    pairs_of,
)
from kvatlas.kernels.triton.attention.latent_groups_device import (
    HALF,
    LATENT,
    ROPE,
    THREADS,
    TILE,
    barrier,
    stretch_of,
)

# The names of these three differ in Triton releases after 3.6.
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_RECORD_WORDS = gl.constexpr(32)
"""Words of four elements of a record that share a scale."""


@gluon.jit
def states_of(begin, last, LOADS: gl.constexpr):
    """Return the positions of a tile's states (cached tokens), clamped to position `last`."""
    return gl.minimum(begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, LOADS)), last)


@gluon.jit
def load_pages(table, begin, last, STATES: gl.constexpr, LOADS: gl.constexpr):
    """Load the block ids of a tile's states (cached tokens).

    Call this function early, because loads of rows depend on the ids.
    """
    return gl.load(table + states_of(begin, last, LOADS) // STATES)


@gluon.jit
def located(pages, begin, last, SHAPE: gl.constexpr):
    """Return (block ids, indices in these blocks) of a tile's states.

    `pages` is the result of `load_pages`: block ids, or slots of selected tokens.
    """
    LOADS: gl.constexpr = pages.type.layout.parent
    if SHAPE.selected:
        return pages // SHAPE.selected, pages % SHAPE.selected
    return pages, states_of(begin, last, LOADS) % SHAPE.states


@gluon.jit
def row_starts(at, pages, places, UNIT: gl.constexpr):
    """Return the pool offsets, in elements, of the rows at indices `places` in blocks `pages`."""
    return (at.first + pages.to(gl.int64) * at.block + places * at.state) * UNIT


@gluon.jit
def row_pointers(elements, rows, FROM: gl.constexpr, COUNT: gl.constexpr, LOADS: gl.constexpr):
    """Return pointers to columns FROM .. FROM + COUNT - 1 of rows, 16 bytes per thread."""
    WIDE: gl.constexpr = LOADS.size_per_thread[1]
    columns = FROM + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LOADS))
    offsets = rows[:, None] + columns[None, :]
    return elements + gl.max_contiguous(gl.multiple_of(offsets, [1, WIDE]), [1, WIDE])


@gluon.jit
def copy_tile(cache, pages, places, room, signals, phase, TO: gl.constexpr, SHAPE: gl.constexpr):
    """Start to copy the two halves of a tile to shared memory, each once its buffer is released."""
    LOADS: gl.constexpr = pages.type.layout.parent
    elements = cache.buffer.to(gl.pointer_type(SHAPE.k.element), bitcast=True)
    rows = row_starts(cache.k.rows, pages, places, SHAPE.k.unit)
    ropes = row_starts(cache.v.rows, pages, places, SHAPE.v.unit)
    for half in gl.static_range(2):
        mbarrier.wait(signals.free.index(2 * TO + half), phase ^ 1)
        part = room.latents.index(TO).slice(half * HALF, HALF, dim=1)
        begin_copy(part, row_pointers(elements, rows, half * HALF, HALF, LOADS))
        if half == 1:
            begin_copy(room.ropes.index(TO), row_pointers(elements, ropes, 0, ROPE, LOADS))
        async_copy.mbarrier_arrive(signals.there.index(2 * TO + half), increment_count=False)


@gluon.jit
def copy_states(cache, table, states, room, signals, phase, SHAPE: gl.constexpr):
    """Copy a sequence's tiles to shared memory unchanged, two at a time."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STATES: gl.constexpr = SHAPE.states
    begin, end, last = states
    first = load_pages(table, begin, last, STATES, LOADS)
    second = load_pages(table, begin + TILE, last, STATES, LOADS)
    for n in range(begin, end, 2 * TILE):
        next_first = load_pages(table, n + 2 * TILE, last, STATES, LOADS)
        next_second = load_pages(table, n + 3 * TILE, last, STATES, LOADS)
        pages, places = located(first, n, last, SHAPE)
        copy_tile(cache, pages, places, room, signals, phase, 0, SHAPE)
        pages, places = located(second, n + TILE, last, SHAPE)
        copy_tile(cache, pages, places, room, signals, phase, 1, SHAPE)
        first, second = next_first, next_second
        phase ^= 1
    return phase


@gluon.jit
def announce(there):
    """Signal that the load group's writes to shared memory are complete.

    The MMA groups issue the fence before they read. A fence here would wait for loads in flight.
    """
    barrier()
    mbarrier.arrive(there, count=THREADS)


@gluon.jit
def convert_states(cache, table, states, room, signals, phase, SHAPE: gl.constexpr):
    """Load and convert a sequence's tiles. A half tile waits in registers for a free buffer."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    UNIT: gl.constexpr = SHAPE.k.unit // 4
    ROPE_UNIT: gl.constexpr = SHAPE.v.unit // 4
    begin, end, last = states
    words = cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True)
    all_latents = seen_as(room.latents, gl.int32, [2, TILE, LATENT // 2], WORDS)
    all_ropes = seen_as(room.ropes, gl.int32, [2, TILE, ROPE // 2], WORDS)
    STATES: gl.constexpr = SHAPE.states
    pages = load_pages(table, begin, last, STATES, LOADS)
    next_pages = load_pages(table, begin + TILE, last, STATES, LOADS)
    pages, places = located(pages, begin, last, SHAPE)
    rows = row_starts(cache.k.rows, pages, places, UNIT)
    ropes = row_starts(cache.v.rows, pages, places, ROPE_UNIT)
    left = gl.load(row_pointers(words, rows, 0, HALF // 4, LOADS))
    right = gl.load(row_pointers(words, rows, HALF // 4, HALF // 4, LOADS))
    rope = gl.load(row_pointers(words, ropes, 0, ROPE // 4, LOADS))
    for n in range(begin, end, 2 * TILE):
        for i in gl.static_range(2):
            pages, places = located(next_pages, n + (i + 1) * TILE, last, SHAPE)
            latents = all_latents.index(i)
            mbarrier.wait(signals.free.index(2 * i), phase ^ 1)
            latents.slice(0, HALF // 2, dim=1).store(pairs_of(left, E4M3_AS_HALVES))
            announce(signals.there.index(2 * i))
            rows = row_starts(cache.k.rows, pages, places, UNIT)
            ropes = row_starts(cache.v.rows, pages, places, ROPE_UNIT)
            left = gl.load(row_pointers(words, rows, 0, HALF // 4, LOADS))
            next_pages = load_pages(table, n + (i + 2) * TILE, last, STATES, LOADS)
            mbarrier.wait(signals.free.index(2 * i + 1), phase ^ 1)
            latents.slice(HALF // 2, HALF // 2, dim=1).store(pairs_of(right, E4M3_AS_HALVES))
            all_ropes.index(i).store(pairs_of(rope, E4M3_AS_HALVES))
            announce(signals.there.index(2 * i + 1))
            right = gl.load(row_pointers(words, rows, HALF // 4, HALF // 4, LOADS))
            rope = gl.load(row_pointers(words, ropes, 0, ROPE // 4, LOADS))
        phase ^= 1
    return phase


@gluon.jit
def load_block(words, scales, rows, scale_rows, BLOCK: gl.constexpr, LOADS: gl.constexpr):
    """Load one block of a tile's records: for each record, elements (as words) and their scale."""
    FROM: gl.constexpr = BLOCK * _RECORD_WORDS
    elements = gl.load(row_pointers(words, rows, FROM, _RECORD_WORDS, LOADS))
    return elements, gl.load(scales + scale_rows + BLOCK)


@gluon.jit
def store_block(latents, block, BLOCK: gl.constexpr):
    """Multiply the elements that `load_block` returned by their scales; store them as bfloat16."""
    elements, scales = block
    scales = gl.expand_dims(scales, 1) + gl.zeros_like(elements).to(gl.float32)
    pairs = gl.inline_asm_elementwise(
        SCALED_E4M3_AS_BF16, "=r,=r,r,r", [elements, scales], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    wide = gl.join(pairs[0], pairs[1]).reshape([TILE, 2 * _RECORD_WORDS])
    latents.slice(2 * BLOCK * _RECORD_WORDS, 2 * _RECORD_WORDS, dim=1).store(wide)


@gluon.jit
def convert_records(cache, table, states, room, signals, phase, SHAPE: gl.constexpr):
    """Load and convert a sequence's records, which are rows with scales (`fp8_ds_mla`).

    A half tile waits in registers for a free buffer. The rotary parts belong to the right half and
    are copied asynchronously. The barrier of that half gets a second arrival from each thread, when
    the thread's copies end.
    """
    LOADS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    UNIT: gl.constexpr = SHAPE.k.unit // 4
    SCALE_UNIT: gl.constexpr = SHAPE.k.scale_unit
    ROPE_UNIT: gl.constexpr = SHAPE.v.unit // 2
    STATES: gl.constexpr = SHAPE.states
    begin, end, last = states
    words = cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True)
    scales = cache.buffer.to(gl.pointer_type(gl.float32), bitcast=True)
    all_latents = seen_as(room.latents, gl.int32, [2, TILE, LATENT // 2], WORDS)
    all_ropes = seen_as(room.ropes, gl.int32, [2, TILE, ROPE // 2], WORDS)
    next_pages = load_pages(table, begin + TILE, last, STATES, LOADS)
    pages, places = located(load_pages(table, begin, last, STATES, LOADS), begin, last, SHAPE)
    rows = row_starts(cache.k.rows, pages, places, UNIT)
    scale_rows = row_starts(cache.k.scales, pages, places, SCALE_UNIT)
    ropes = row_starts(cache.v.rows, pages, places, ROPE_UNIT)
    first = load_block(words, scales, rows, scale_rows, 0, LOADS)
    second = load_block(words, scales, rows, scale_rows, 1, LOADS)
    third = load_block(words, scales, rows, scale_rows, 2, LOADS)
    fourth = load_block(words, scales, rows, scale_rows, 3, LOADS)
    for n in range(begin, end, 2 * TILE):
        for i in gl.static_range(2):
            latents = all_latents.index(i)
            mbarrier.wait(signals.free.index(2 * i), phase ^ 1)
            store_block(latents, first, 0)
            store_block(latents, second, 1)
            barrier()
            mbarrier.arrive(signals.there.index(2 * i), count=2 * THREADS)
            pages, places = located(next_pages, n + (i + 1) * TILE, last, SHAPE)
            rows = row_starts(cache.k.rows, pages, places, UNIT)
            scale_rows = row_starts(cache.k.scales, pages, places, SCALE_UNIT)
            first = load_block(words, scales, rows, scale_rows, 0, LOADS)
            second = load_block(words, scales, rows, scale_rows, 1, LOADS)
            next_pages = load_pages(table, n + (i + 2) * TILE, last, STATES, LOADS)
            mbarrier.wait(signals.free.index(2 * i + 1), phase ^ 1)
            begin_copy(all_ropes.index(i), row_pointers(words, ropes, 0, ROPE // 2, LOADS))
            async_copy.mbarrier_arrive(signals.there.index(2 * i + 1), increment_count=False)
            store_block(latents, third, 2)
            store_block(latents, fourth, 3)
            announce(signals.there.index(2 * i + 1))
            third = load_block(words, scales, rows, scale_rows, 2, LOADS)
            fourth = load_block(words, scales, rows, scale_rows, 3, LOADS)
            ropes = row_starts(cache.v.rows, pages, places, ROPE_UNIT)
        phase ^= 1
    return phase


@gluon.jit
def load_tiles(cache, batch, room, signals, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """Run the load group: load a worker's tiles two at a time, sequence by sequence."""
    ends = batch.ends + batch.sequences + 1
    tile, stop, sequence = stretch_of(batch, TILING)
    phase = 0
    while tile < stop:
        first = gl.load(ends + sequence)
        length = gl.load(batch.lengths + sequence).to(gl.int32)
        until = gl.minimum(stop, gl.load(ends + sequence + 1))
        if until > tile:
            table = cache.tables + sequence.to(gl.int64) * cache.table_stride
            # If a query selects no token, its tiles are skipped, but rows are prefetched.
            begin = (tile - first) * TILE
            end = gl.where(length > 0, (until - first) * TILE, begin)
            states = begin, end, gl.maximum(length - 1, 0)
            if SHAPE.k.kind == "records":
                phase = convert_records(cache, table, states, room, signals, phase, SHAPE)
            elif SHAPE.k.element == SHAPE.k_dot:
                phase = copy_states(cache, table, states, room, signals, phase, SHAPE)
            else:
                phase = convert_states(cache, table, states, room, signals, phase, SHAPE)
        tile = until
        sequence += 1
