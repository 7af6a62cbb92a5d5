"""Device code that MLA's kernels on Hopper share: three groups of warps, and what they exchange.

| group | what it does |
|---|---|
| two that multiply | each has the logits of every other tile, and 256 of the sums' 512 columns |
| one that loads | the next tile's half, as soon as the group that had it is done with it |

Shared memory holds the queries and two tiles. While one group is at its tile's softmax the
other's products run, and each adds both tiles' values to its columns: weights go to the other
group through shared memory, and what they are relative to goes with them. FlashMLA's schedule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""By another name in later releases of Triton than 3.6."""

LOWEST = gl.constexpr(-1.0e30)
GROWTH = gl.constexpr(8.0)
"""Powers of two that a weight may grow by before sums are scaled down."""
LATENT = gl.constexpr(512)
HALF = gl.constexpr(256)
"""Columns of the sums that a group has."""
ROPE = gl.constexpr(64)
TILE = gl.constexpr(64)
THREADS = gl.constexpr(128)
"""Of a group."""
AT_ONCE = gl.constexpr(512)
"""Sequences whose ends are loaded together."""


class Room(NamedTuple):
    """Shared memory. Of two tiles, the second index is the group whose logits they are for."""

    query: Any
    query_rope: Any
    latents: Any
    ropes: Any
    """Rotary parts."""
    weights: Any
    """Of a tile's states; may lie where its rotary part was."""
    tops: Any
    """What a tile's weights are relative to."""
    totals: Any
    """Of the weights of each group, at the end."""
    growth: Any
    """How far maxima have grown with a tile, in each warp."""


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
    turn: Any
    """The first group's logits are about done, so that the second's do not slow them down."""
    ended: Any
    """Totals are written."""


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers in shared memory, for so many arrivals each."""
    some = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(some.index(i), count=arrivals)
    return some


@gluon.jit
def signals_of():
    """Fresh barriers for the groups of a program."""
    return Signals(
        barriers(4, THREADS), barriers(4, 1), barriers(2, 1), barriers(1, 2), barriers(1, 1),
        barriers(2, 1),
    )  # fmt: skip


@gluon.jit
def after_previous(EARLY: gl.constexpr):
    """Wait for the kernel before, and let the next one be placed.

    A program has a multiprocessor to itself, so that none displaces another.
    """
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def load_ends(ends, begin, count):
    """Ends of some sequences' tiles; past the last no tile comes."""
    SOME: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = begin + gl.arange(0, AT_ONCE, layout=SOME)
    return gl.load(ends + 1 + at, mask=at < count, other=0x7FFFFFFF)


@gluon.jit
def stretch_of(batch, TILING: gl.constexpr):
    """The tiles of this program's worker, and the sequence that the first belongs to.

    All ends are looked at, many at once: a search would wait for one load after the other.
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
    """Let a tile's half be loaded anew."""
    barrier()
    mbarrier.arrive(signals.free.index(2 * OF + WHO), count=1)


@gluon.jit
def load_query(q, start, count, program, room, WHO: gl.constexpr, GROUP: gl.constexpr):
    """A group's half of the query rows into shared memory; rows past the last are the last."""
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
