"""Device code shared by the MLA kernels on Hopper: three warp groups and their signals.

| group | task |
|---|---|
| two that multiply | each has the logits of every other tile, and 256 of the sums' 512 columns |
| one that loads | loads the next half tile as soon as the group that used it has released it |

Shared memory holds the queries and two tiles. While one group computes the softmax of its tile,
the products of the other run, and each group adds the values of both tiles to its columns.
Weights, and the maxima that they are relative to, pass to the other group through shared memory.
This is the schedule of FlashMLA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Named `barrier` in Triton releases after 3.6."""

LOWEST = gl.constexpr(-1.0e30)
GROWTH = gl.constexpr(8.0)
"""Maximum growth of a weight, as a power of two, before sums are scaled down."""
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the sums per group."""
ROPE = gl.constexpr(64)
TILE = gl.constexpr(64)
THREADS = gl.constexpr(128)
"""Threads per group."""
AT_ONCE = gl.constexpr(512)
"""Number of sequences whose ends are loaded together."""


class Room(NamedTuple):
    """Shared memory. An index of two tiles selects the group that computes their logits."""

    query: Any
    query_rope: Any
    latents: Any
    ropes: Any
    """Rotary parts of the tiles."""
    weights: Any
    """Weights of a tile's states; may overwrite the tile's rotary part."""
    tops: Any
    """Maxima that a tile's weights are relative to."""
    totals: Any
    """Final sums of the weights of each group."""
    growth: Any
    """Growth of the maxima with a tile, per warp."""


class Signals(NamedTuple):
    """Barriers in shared memory, for each of two tiles or groups."""

    there: Any
    """A left or right half is loaded; index 2 * tile + half."""
    free: Any
    """A group has released its half; index 2 * tile + half."""
    weighed: Any
    """Weights and maxima are written."""
    ready: Any
    """A group has loaded its part of the queries."""
    turn: Any
    """The first group's logits are nearly done; the second group then does not slow them down."""
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
def signals_of():
    """Create the barriers for the groups of a program."""
    return Signals(
        barriers(4, THREADS), barriers(4, 1), barriers(2, 1), barriers(1, 2), barriers(1, 1),
        barriers(2, 1),
    )  # fmt: skip


@gluon.jit
def after_previous(EARLY: gl.constexpr):
    """Wait for the previous kernel, and permit the launch of the next one.

    Each program occupies a multiprocessor alone, so programs do not displace each other.
    """
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def load_ends(ends, begin, count):
    """Load the tile ends of several sequences; entries past the last are the largest int32."""
    SOME: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = begin + gl.arange(0, AT_ONCE, layout=SOME)
    return gl.load(ends + 1 + at, mask=at < count, other=0x7FFFFFFF)


@gluon.jit
def stretch_of(batch, TILING: gl.constexpr):
    """Return the range of tiles of this program's worker, and the sequence of the first tile.

    All ends are loaded, many at once; a binary search would wait for one load after another.
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
    """Release a half tile, so that it can be loaded again."""
    barrier()
    mbarrier.arrive(signals.free.index(2 * OF + WHO), count=1)


@gluon.jit
def load_query(q, start, count, program, room, WHO: gl.constexpr, GROUP: gl.constexpr):
    """Load a group's half of the query rows into shared memory; rows past the last repeat it."""
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
