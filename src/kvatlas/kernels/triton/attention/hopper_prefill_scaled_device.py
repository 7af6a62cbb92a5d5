"""Device code that loads tiles of 8-bit rows with a scale per row, for prefill on Hopper.

A head of a cached token takes 264 bytes: 128 of K, K's scale, 128 of V, V's scale. K is aligned to
8 bytes and V only to 4. To load V in 8-byte pieces like K, loads start four bytes early, at K's
scale. The last piece then contains the last four elements of V and V's scale. These four elements
overwrite K's scale in the first columns, so rows of V are rotated by four elements until the output
is stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvatlas.kernels.triton.attention.hopper_dequantise_device import bytes_apart
from kvatlas.kernels.triton.attention.hopper_prefill_groups_device import loading_warps, powers
from kvatlas.kernels.triton.attention.latent_load_device import announce, row_starts, seen_as


@gluon.constexpr_function
def pairs_of_rows(count, rows, each):
    """Return the layout in which threads load rows of `count` words, two words at a time.

    Eight threads share a row, and a thread loads parts of `each` adjacent rows. These `each` rows
    are in one page if the page size is a multiple of `each`.
    """
    return gl.DistributedLinearLayout(
        [[0, 1], *([0, n] for n in powers(16, count)), *([n, 0] for n in powers(1, each))],
        [[0, 2], [0, 4], [0, 8], [each, 0], [2 * each, 0]],
        [[n, 0] for n in powers(4 * each, rows)], [], [rows, count],
    )  # fmt: skip


@gluon.constexpr_function
def runs_of_rows(run, rows, each):
    """Return the Gluon layout of a tensor [runs, rows of a run], with one value per row.

    A run is `run` adjacent rows in one page. A thread gets the values for the rows that it loads
    when the rows have the layout of `pairs_of_rows`.
    """
    return gl.DistributedLinearLayout(
        [[n // run, n % run] for n in powers(1, each)],
        [[0, 0], [0, 0], [0, 0], [each // run, 0], [2 * each // run, 0]],
        [[n // run, 0] for n in powers(4 * each, rows)], [], [rows // run, run],
    )  # fmt: skip


@gluon.jit
def first_of_runs(begin, work, RUNS: gl.constexpr):
    """Return the first state (cached token) of each run, clamped to the range that may be read.

    A run is a number of adjacent rows in one page.
    """
    RUN: gl.constexpr = RUNS.shape[1]
    first = begin + RUN * gl.arange(0, RUNS.shape[0], layout=gl.SliceLayout(1, RUNS))
    return gl.maximum(gl.minimum(first, work.high - 1), 0)


@gluon.jit
def load_pages(table, begin, work, STATES: gl.constexpr, RUNS: gl.constexpr):
    """Load the block id of each run. A run is a stretch of adjacent rows in one block."""
    return gl.load(table + first_of_runs(begin, work, RUNS) // STATES)


@gluon.jit
def load_rows(cache, steps, pages, begin, work, SHAPE: gl.constexpr, UNIT: gl.constexpr,
              LOADS: gl.constexpr, BEHIND: gl.constexpr):  # fmt: skip
    """Load the rows of half a tile as 32-bit words, and the value after each row.

    `BEHIND` is the type of these values. `steps` contains the strides of the rows, in units of
    8 * `UNIT` bytes. `pages` contains the block id of each run of adjacent rows.
    """
    RUNS: gl.constexpr = pages.type.layout.parent
    RUN: gl.constexpr = RUNS.shape[1]
    ROWS: gl.constexpr = LOADS.shape[0]
    COUNT: gl.constexpr = LOADS.shape[1]
    IN_PAIR: gl.constexpr = 64 // BEHIND.primitive_bitwidth
    base = row_starts(steps, pages, 0, UNIT) + work.head.to(gl.int64) * steps.head * UNIT
    states = first_of_runs(begin, work, RUNS)[:, None]
    states += gl.arange(0, RUN, layout=gl.SliceLayout(0, RUNS))[None, :]
    places = gl.minimum(states, work.high - 1) % SHAPE.states
    pairs = (base[:, None] + places * steps.state * UNIT).reshape([ROWS])
    pairs = gl.convert_layout(pairs, gl.SliceLayout(1, LOADS))
    columns = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LOADS))
    offsets = (2 * pairs)[:, None] + columns[None, :]
    words = cache.buffer.to(gl.pointer_type(gl.int32), bitcast=True)
    loaded = gl.load(words + gl.max_contiguous(gl.multiple_of(offsets, [1, 2]), [1, 2]))
    behind = cache.buffer.to(gl.pointer_type(BEHIND), bitcast=True)
    return loaded, gl.load(behind + pairs * IN_PAIR + COUNT // 2 * IN_PAIR)


@gluon.jit
def load_k(cache, pages, begin, work, SHAPE: gl.constexpr, LOADS: gl.constexpr):
    """Load rows of K, each with the scale that follows it."""
    UNIT: gl.constexpr = SHAPE.k.unit // 8
    return load_rows(cache, cache.k.rows, pages, begin, work, SHAPE, UNIT, LOADS, gl.int32)


@gluon.jit
def load_v(cache, pages, begin, work, SHAPE: gl.constexpr, LOADS: gl.constexpr):
    """Load rows of V; each read starts four bytes before the row. Return (words, next 8 bytes).

    The first word of a read is K's scale. The next 8 bytes are V's last word and V's scale.
    """
    UNIT: gl.constexpr = SHAPE.k.scale_unit // 2
    return load_rows(cache, cache.k.scales, pages, begin, work, SHAPE, UNIT, LOADS, gl.int64)


@gluon.jit
def put_k(loaded, to, factors, SHAPE: gl.constexpr):
    """Store rows of K and their scales in shared memory."""
    words, scales = loaded
    to.store(bytes_apart(words, SHAPE.k.element, SHAPE.k_dot))
    factors.store(scales.to(gl.float32, bitcast=True))


@gluon.jit
def put_v(loaded, to, factors, SHAPE: gl.constexpr):
    """Store the scales of rows of V, and the rows rotated by one word, in shared memory.

    The last word of a row is stored in the first column, in place of K's scale.
    """
    words, behind = loaded
    columns = gl.arange(0, words.shape[1], layout=gl.SliceLayout(0, words.type.layout))
    words = gl.where((columns == 0)[None, :], behind.to(gl.int32)[:, None], words)
    to.store(bytes_apart(words, SHAPE.v.element, SHAPE.v_dot))
    factors.store((behind >> 32).to(gl.int32).to(gl.float32, bitcast=True))


@gluon.jit
def convert_halves(cache, table, work, room, signals, tiles, SHAPE: gl.constexpr):
    """Load and unpack the tiles of K and V that `work` reads, by half tiles, the last tile first.

    Halves of K are loaded while halves of V are unpacked, and vice versa. Registers then contain
    two halves at a time; whole tiles of K and V would not fit.
    """
    STAGES: gl.constexpr = room.k.shape[0]
    TILE: gl.constexpr = room.k.shape[1]
    DIM: gl.constexpr = room.k.shape[2]
    PART: gl.constexpr = TILE // 2
    STATES: gl.constexpr = SHAPE.states
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WARPS: gl.constexpr = loading_warps(SHAPE.k.kind, SHAPE.k.element, True)
    EACH: gl.constexpr = PART // (4 * WARPS)
    RUN: gl.constexpr = 1 if STATES % EACH else EACH
    LOADS: gl.constexpr = pairs_of_rows(DIM // 4, PART, EACH)
    RUNS: gl.constexpr = runs_of_rows(RUN, PART, EACH)
    k_room = seen_as(room.k, gl.int32, [STAGES, TILE, DIM // 2], WORDS)
    v_room = seen_as(room.v, gl.int32, [STAGES, TILE, DIM // 2], WORDS)
    begin = work.end - TILE
    left = load_pages(table, begin, work, STATES, RUNS)
    right = load_pages(table, begin + PART, work, STATES, RUNS)
    left_k = load_k(cache, left, begin, work, SHAPE, LOADS)
    right_k = load_k(cache, right, begin + PART, work, SHAPE, LOADS)
    for n in range(0, work.end, TILE):
        begin = work.end - TILE - n
        # Pages are looked up one tile ahead, because loads depend on them.
        next_left = load_pages(table, begin - TILE, work, STATES, RUNS)
        next_right = load_pages(table, begin - PART, work, STATES, RUNS)
        stage = tiles % STAGES
        phase = tiles // STAGES & 1
        k_to = k_room.index(stage)
        v_to = v_room.index(stage)
        k_factors = room.k_factors.index(tiles % (2 * STAGES))
        v_factors = room.v_factors.index(tiles % (2 * STAGES))
        mbarrier.wait(signals.free_k.index(stage), phase ^ 1)
        put_k(left_k, k_to.slice(0, PART, dim=0), k_factors.slice(0, PART), SHAPE)
        left_v = load_v(cache, left, begin, work, SHAPE, LOADS)
        put_k(right_k, k_to.slice(PART, PART, dim=0), k_factors.slice(PART, PART), SHAPE)
        announce(signals.there_k.index(stage))
        right_v = load_v(cache, right, begin + PART, work, SHAPE, LOADS)
        left, right = next_left, next_right
        mbarrier.wait(signals.free_v.index(stage), phase ^ 1)
        put_v(left_v, v_to.slice(0, PART, dim=0), v_factors.slice(0, PART), SHAPE)
        left_k = load_k(cache, left, begin - TILE, work, SHAPE, LOADS)
        put_v(right_v, v_to.slice(PART, PART, dim=0), v_factors.slice(PART, PART), SHAPE)
        announce(signals.there_v.index(stage))
        right_k = load_k(cache, right, begin - PART, work, SHAPE, LOADS)
        tiles += 1
    return tiles
