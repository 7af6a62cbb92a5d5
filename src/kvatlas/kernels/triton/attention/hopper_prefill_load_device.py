"""Device code of the warp group that loads tiles of K and V on Hopper, from any page layout.

16-bit rows are copied to shared memory unchanged, by asynchronous copies that signal completion.
Other rows are prefetched into registers and unpacked from there into shared memory. Scales per
state are stored in shared memory together with the tile of K. Rows whose scale is adjacent to the
row are loaded by `hopper_prefill_scaled_device`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kvatlas.kernels.triton.attention.hopper_dequantise_device import (
    bytes_apart,
    int4_apart,
    nvfp4_apart,
)
from kvatlas.kernels.triton.attention.hopper_prefill_groups_device import (
    has_factors,
    loading_warps,
    powers,
    rounds_of,
    work_of,
)
from kvatlas.kernels.triton.attention.hopper_prefill_scaled_device import convert_halves
from kvatlas.kernels.triton.attention.latent_load_device import (
    announce,
    begin_copy,
    row_pointers,
    row_starts,
    seen_as,
)


@gluon.constexpr_function
def loads_of(wide, count, bits, tile, warps):
    """Return the layout in which threads load the words of rows that must be unpacked.

    Each thread loads `wide` words at a time, and later stores them as 16-bit elements. Eight
    threads share a row if elements have 8 bits and `wide` is less than 4, because a warp needs one
    cache access for each row that it loads. Otherwise four threads share a row. The rows of a warp
    are ordered so that threads that store at the same time use different banks.
    """
    lanes = 8 if bits == 8 and wide < 4 else 4
    across = lanes * wide
    rows = [4, 2, 1] if 64 * wide // bits < 32 else [1, 2, 4]
    of_warp = rows[: (32 // lanes).bit_length() - 1]
    end = 32 // lanes * warps
    columns = [*powers(1, wide), *powers(across, count)]
    return gl.DistributedLinearLayout(
        [*([0, n] for n in columns), *([n, 0] for n in powers(end, tile))],
        [*([0, n] for n in powers(wide, across)), *([n, 0] for n in of_warp)],
        [[n, 0] for n in (*rows[len(of_warp) :], *powers(8, end))], [], [tile, count],
    )  # fmt: skip


@gluon.jit
def states_of(begin, work, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the positions of a tile's states (cached tokens), clamped to the readable range."""
    states = begin + gl.arange(0, TILE, layout=LAYOUT)
    return gl.maximum(gl.minimum(states, work.high - 1), 0)


@gluon.jit
def starts_of(steps, table, states, head, STATES: gl.constexpr, UNIT: gl.constexpr):
    """For each state (cached token), return the offset of its row in the pool, in elements."""
    rows = row_starts(steps, gl.load(table + states // STATES), states % STATES, UNIT)
    return rows + head.to(gl.int64) * steps.head * UNIT


@gluon.jit
def copy_rows(side, elements, pages, places, head, to, there, FORMAT: gl.constexpr):
    """Start to copy a tile's rows of K or V to shared memory, asynchronously and unchanged."""
    LOADS: gl.constexpr = pages.type.layout.parent
    rows = row_starts(side.rows, pages, places, FORMAT.unit)
    rows += head.to(gl.int64) * side.rows.head * FORMAT.unit
    begin_copy(to, row_pointers(elements, rows, 0, FORMAT.dim, LOADS))
    async_copy.mbarrier_arrive(there, increment_count=False)


@gluon.jit
def copy_tiles(cache, table, work, room, signals, tiles, SHAPE: gl.constexpr):
    """Copy the tiles of K and V that `work` reads to shared memory, the last tile first."""
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOADS)
    K: gl.constexpr = SHAPE.k
    V: gl.constexpr = SHAPE.v
    STATES: gl.constexpr = SHAPE.states
    STAGES: gl.constexpr = room.k.shape[0]
    TILE: gl.constexpr = room.k.shape[1]
    elements = cache.buffer.to(gl.pointer_type(K.element), bitcast=True)
    states = states_of(work.end - TILE, work, TILE, ROWS)
    pages = gl.load(table + states // STATES)
    for n in range(0, work.end, TILE):
        # Pages are looked up one tile ahead, because copies depend on them.
        places = states % STATES
        states = states_of(work.end - 2 * TILE - n, work, TILE, ROWS)
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
    return tiles


@gluon.jit
def load_apart(cache, side, table, begin, work, STATES: gl.constexpr, TILE: gl.constexpr,
               FORMAT: gl.constexpr):  # fmt: skip
    """Load a tile's rows of K or V; return (words, zero points or scales for `put_apart`).

    The second result is 0 for formats that need neither.
    """
    UNIT: gl.constexpr = FORMAT.unit // 4
    COUNT: gl.constexpr = FORMAT.dim * FORMAT.bits // 32
    WIDE: gl.constexpr = min(UNIT, 4)
    WARPS: gl.constexpr = loading_warps(FORMAT.kind, FORMAT.element, False)
    LOADS: gl.constexpr = loads_of(WIDE, COUNT, FORMAT.bits, TILE, WARPS)
    words = cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True)
    states = states_of(begin, work, TILE, gl.SliceLayout(1, LOADS))
    rows = starts_of(side.rows, table, states, work.head, STATES, UNIT)
    columns = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LOADS))
    offsets = rows[:, None] + columns[None, :]
    loaded = gl.load(words + gl.max_contiguous(gl.multiple_of(offsets, [1, WIDE]), [1, WIDE]))
    more = 0
    if FORMAT.kind == "int4":
        steps = starts_of(side.scales, table, states, work.head, STATES, FORMAT.scale_unit)
        more = gl.load(words + steps) & 15
    elif FORMAT.kind == "nvfp4":
        BLOCKS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])
        states = states_of(begin, work, TILE, gl.SliceLayout(1, BLOCKS))
        steps = starts_of(side.scales, table, states, work.head, STATES, FORMAT.scale_unit)
        more = gl.load(row_pointers(cache.buffer, steps, 0, FORMAT.dim // 16, BLOCKS))
    return loaded, more


@gluon.jit
def put_apart(words, with_rows, to, FORMAT: gl.constexpr, DOT: gl.constexpr):
    """Unpack the words of a tile's rows, and store the elements in shared memory as `DOT`.

    `with_rows` is the second result of `load_apart`.
    """
    if FORMAT.kind == "int4":
        to.store(int4_apart(words, with_rows, DOT))
    elif FORMAT.kind == "nvfp4":
        to.store(nvfp4_apart(words, with_rows))
    else:
        to.store(bytes_apart(words, FORMAT.element, DOT))


@gluon.jit
def load_factors(cache, side, table, begin, work, STATES: gl.constexpr, TILE: gl.constexpr,
                 FORMAT: gl.constexpr):  # fmt: skip
    """Load one scale per state (cached token) of a tile, for logits or softmax weights.

    Logits (for K) or softmax weights (for V) are later multiplied by these scales, so rows are
    unpacked without them.
    """
    WARPS: gl.constexpr = loading_warps(FORMAT.kind, FORMAT.element, False)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    states = states_of(begin, work, TILE, EACH)
    steps = starts_of(side.scales, table, states, work.head, STATES, FORMAT.scale_unit)
    scales = gl.load(cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True) + steps)
    if FORMAT.kind == "int4":
        scales = scales & -16
    return scales.to(gl.float32, bitcast=True)


@gluon.jit
def convert_tiles(cache, table, work, room, signals, tiles, SHAPE: gl.constexpr):
    """Load and unpack the tiles of K and V that `work` reads, the last tile first."""
    K: gl.constexpr = SHAPE.k
    V: gl.constexpr = SHAPE.v
    K_DOT: gl.constexpr = SHAPE.k_dot
    V_DOT: gl.constexpr = SHAPE.v_dot
    STATES: gl.constexpr = SHAPE.states
    STAGES: gl.constexpr = room.k.shape[0]
    TILE: gl.constexpr = room.k.shape[1]
    DIM: gl.constexpr = room.k.shape[2]
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FACTORS: gl.constexpr = has_factors(K.kind)
    k_room = seen_as(room.k, gl.int32, [STAGES, TILE, DIM // 2], WORDS)
    v_room = seen_as(room.v, gl.int32, [STAGES, TILE, DIM // 2], WORDS)
    begin = work.end - TILE
    k = load_apart(cache, cache.k, table, begin, work, STATES, TILE, K)
    v = load_apart(cache, cache.v, table, begin, work, STATES, TILE, V)
    if FACTORS:
        k_factor = load_factors(cache, cache.k, table, begin, work, STATES, TILE, K)
        v_factor = load_factors(cache, cache.v, table, begin, work, STATES, TILE, V)
    for n in range(0, work.end, TILE):
        begin = work.end - 2 * TILE - n
        stage = tiles % STAGES
        phase = tiles // STAGES & 1
        mbarrier.wait(signals.free_k.index(stage), phase ^ 1)
        put_apart(k[0], k[1], k_room.index(stage), K, K_DOT)
        if FACTORS:
            slot = tiles % (2 * STAGES)
            room.k_factors.index(slot).store(k_factor)
            room.v_factors.index(slot).store(v_factor)
        announce(signals.there_k.index(stage))
        k = load_apart(cache, cache.k, table, begin, work, STATES, TILE, K)
        if FACTORS:
            k_factor = load_factors(cache, cache.k, table, begin, work, STATES, TILE, K)
            v_factor = load_factors(cache, cache.v, table, begin, work, STATES, TILE, V)
        mbarrier.wait(signals.free_v.index(stage), phase ^ 1)
        put_apart(v[0], v[1], v_room.index(stage), V, V_DOT)
        announce(signals.there_v.index(stage))
        v = load_apart(cache, cache.v, table, begin, work, STATES, TILE, V)
        tiles += 1
    return tiles


@gluon.jit
def load_keys_and_values(cache, batch, room, signals, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """Run the load group: load the tiles of K and V for each `Work` (tile of query rows)."""
    tiles = 0
    for turn in range(rounds_of(batch, TILING)):
        work = work_of(batch, turn, SHAPE, TILING)
        if work.end > 0:
            table = cache.tables + work.sequence.to(gl.int64) * cache.table_stride
            if SHAPE.k.element == SHAPE.k_dot:
                tiles = copy_tiles(cache, table, work, room, signals, tiles, SHAPE)
            elif TILING.lead > 0:
                tiles = convert_halves(cache, table, work, room, signals, tiles, SHAPE)
            else:
                tiles = convert_tiles(cache, table, work, room, signals, tiles, SHAPE)
