"""Device code shared by the MLA kernels on Hopper: three warp groups and their signals.

| warp group | task |
|---|---|
| two MMA groups | each computes the logits of every other tile, and 256 of the sums' 512 columns |
| one load group | loads half tiles; it first waits until an MMA group has released the buffer |

Shared memory contains the queries and two tiles. While one MMA group computes the softmax of its
tile, the matrix products of the other group run. Each MMA group adds the values of both tiles to
its columns. It therefore passes the softmax weights and maxima of its own tile to the other group
through shared memory. This is the schedule of FlashMLA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Synchronises the threads of a warp group. Triton releases after 3.6 call it `barrier`."""

LOWEST = gl.constexpr(-1.0e30)
GROWTH = gl.constexpr(8.0)
"""Maximum growth of a weight, as a power of two, before sums are scaled down."""
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the sums per MMA group: half of the latent."""
ROPE = gl.constexpr(64)
TILE = gl.constexpr(64)
THREADS = gl.constexpr(128)
"""Threads per warp group."""
AT_ONCE = gl.constexpr(512)
"""Number of sequences whose tile ends are loaded together."""


class Room(NamedTuple):
    """Buffers in shared memory: queries, tiles, and data that the two MMA groups exchange.

    Buffers of tiles are indexed by the tile's MMA group (0 or 1).
    """

    query: Any
    query_rope: Any
    latents: Any
    ropes: Any
    """Rotary parts of the tiles."""
    weights: Any
    """Weights of a tile's states; may overwrite the tile's rotary part."""
    tops: Any
    """Row maxima that were subtracted from a tile's logits."""
    totals: Any
    """Final sums of the weights of each MMA group."""
    growth: Any
    """Per warp, the largest increase of a row maximum by the last tile."""


class Signals(NamedTuple):
    """Barriers with which the warp groups wait for each other, one or two per tile or MMA group."""

    there: Any
    """The left or right half of a tile is loaded; index 2 * tile + half."""
    free: Any
    """An MMA group has released the half of a tile that it reads; index 2 * tile + half."""
    weighed: Any
    """Weights and maxima are written."""
    ready: Any
    """An MMA group has loaded its half of the query columns."""
    turn: Any
    """The first MMA group has issued the products of its logits. The second waits for this, so
    that it does not slow them down."""
    ended: Any
    """Totals are written."""


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Create `count` barriers in shared memory, each for `arrivals` arrivals."""
    some = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(some.index(i), count=arrivals)
    return some


@gluon.jit
def signals_of(ARRIVALS: gl.constexpr):
    """Create the barriers of a program; a half tile is loaded after `ARRIVALS` arrivals."""
    return Signals(
        barriers(4, ARRIVALS), barriers(4, 1), barriers(2, 1), barriers(1, 2), barriers(1, 1),
        barriers(2, 1),
    )  # fmt: skip


@gluon.constexpr_function
def arrivals_of(kind):
    """Return the number of arrivals at the barrier of a half tile: one per thread that loads.

    For records (`fp8_ds_mla` rows) it is two per thread: the copies of rotary parts also arrive.
    """
    return 256 if kind == "records" else 128


@gluon.jit
def after_previous(EARLY: gl.constexpr):
    """If `EARLY` is set, wait for the previous kernel, and permit the launch of the next kernel.

    The next kernel may be launched at once, because each program occupies a whole multiprocessor:
    a program of the next kernel starts only on a multiprocessor where this kernel has finished.
    """
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def load_ends(ends, begin, count):
    """Load the cumulative tile counts after sequences `begin`, `begin + 1`, and so on.

    Entries past `count`, the number of sequences, are the largest int32.
    """
    SOME: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = begin + gl.arange(0, AT_ONCE, layout=SOME)
    return gl.load(ends + 1 + at, mask=at < count, other=0x7FFFFFFF)


@gluon.jit
def stretch_of(batch, TILING: gl.constexpr):
    """Return (first tile, end tile, sequence of the first tile) of this program's worker.

    The tile ends of many sequences are loaded at once. A binary search would be slower, because
    each of its loads waits for the previous one.
    """
    ends = batch.ends + batch.sequences + 1
    some = load_ends(ends, 0, batch.sequences)
    total = gl.load(ends + batch.sequences)
    share = gl.cdiv(total, gl.num_programs(0) // TILING.programs)
    share = gl.cdiv(share, TILING.together) * TILING.together
    tile = gl.program_id(0) // TILING.programs * share
    sequence = gl.sum((some <= tile).to(gl.int32), 0)
    for begin in range(AT_ONCE, batch.sequences, AT_ONCE):
        some = load_ends(ends, begin, batch.sequences)
        sequence += gl.sum((some <= tile).to(gl.int32), 0)
    return tile, gl.minimum(tile + share, total), sequence


@gluon.jit
def release(signals, WHO: gl.constexpr, OF: gl.constexpr):
    """Release the buffer of a half tile, so that the load group can overwrite it."""
    barrier()
    mbarrier.arrive(signals.free.index(2 * OF + WHO), count=1)


@gluon.jit
def load_query(q, start, count, program, room, WHO: gl.constexpr, GROUP: gl.constexpr):
    """Load an MMA group's half of the query columns into shared memory.

    The second group also loads the rotary columns. Rows past the end repeat the last row.
    """
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COUNT: gl.constexpr = room.query.shape[1]
    row = program * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LOADS))
    row = gl.minimum(row, count * GROUP - 1)
    at = (start + row // GROUP).to(gl.int64) * q.token + (row % GROUP).to(gl.int64) * q.head
    rows = q.tensor + at[:, None]
    columns = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LOADS))
    part = room.query.index(0).slice(WHO * HALF, HALF, dim=1)
    part.store(gl.load(rows + columns[None, :]).to(part.dtype))
    if WHO == 1:
        columns = LATENT + gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADS))
        room.query_rope.index(0).store(gl.load(rows + columns[None, :]).to(part.dtype))
