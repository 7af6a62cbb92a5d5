"""Device code shared by the warp groups of prefill on Hopper: their work and their signals.

| warp group | task |
|---|---|
| two MMA groups | each computes 64 of a program's 128 query rows: products and softmax |
| one load group | loads tiles of K and V once both MMA groups have released the buffer |

While one MMA group computes its softmax, the other group computes its matrix products. The groups
take turns: each starts the product with the keys of one tile and the product with the values of the
previous tile. This is the ping-pong schedule of FlashAttention-3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvatlas.kernels.triton.attention.latent_groups_device import THREADS, barriers


class PrefillRoom(NamedTuple):
    """Buffers in shared memory: query rows of each MMA group, and tiles of K and V."""

    query: Any
    k: Any
    v: Any
    k_factors: Any
    """The scales of K, one per state of a tile, which logits are multiplied by. These and the
    scales of V (`v_factors`) have twice as many buffers as tiles, because they are needed longer
    than the keys. Scales of V are loaded with K, or with V if `Tiling.lead` is not 0."""
    v_factors: Any


class PrefillSignals(NamedTuple):
    """Barriers with which the warp groups wait for each other.

    `turn` has one barrier per MMA group; every other field has one barrier per tile buffer.
    """

    there_k: Any
    there_v: Any
    free_k: Any
    free_v: Any
    turn: Any
    """Signals that an MMA group may start its products."""


class Work(NamedTuple):
    """A tile of query rows, and the states (cached tokens) that it reads.

    A query row is a (token, head) pair of a sequence.
    """

    sequence: Any
    head: Any
    start: Any
    """The sequence's first query in the batch."""
    rows: Any
    """Number of query rows of the sequence; 0 if there is no work."""
    row: Any
    """The tile's first row in the sequence."""
    before: Any
    """States before the sequence's first query."""
    high: Any
    """States 0 .. high - 1 may be read."""
    end: Any
    """States 0 .. end - 1 are walked, in whole tiles; 0 if the tile sees nothing."""


@gluon.constexpr_function
def has_factors(kind):
    """Return whether unpacked rows of a storage format must be multiplied by a factor per row."""
    return kind in ("scaled", "int4")


@gluon.constexpr_function
def loading_warps(kind, element, halves):
    """Return the number of warps of the load group: 8 for whole tiles of scaled e4m3 rows, else 4.

    Such rows wait in registers to be converted to bfloat16. Four warps have enough registers for
    half a tile (`halves`), but not for a whole tile. Where four are enough, eight are slower,
    because they compete with the MMA groups.
    """
    return 8 if kind == "scaled" and element == gl.float8e4nv and not halves else 4


@gluon.constexpr_function
def powers(begin, end):
    """Return the powers of two from `begin` (inclusive) to `end` (exclusive)."""
    return [1 << i for i in range(begin.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def lift_of(kind):
    """Return n such that a format's unpacked rows are 2**n times too small; 0 for most formats.

    Kernels multiply the softmax scale (for K) or the weights (for V) by 2**n to compensate.
    """
    return 14.0 if kind == "nvfp4" else 0.0


@gluon.jit
def prefill_signals(STAGES: gl.constexpr):
    """Create the barriers for the warp groups of a program."""
    return PrefillSignals(
        barriers(STAGES, THREADS), barriers(STAGES, THREADS), barriers(STAGES, 2),
        barriers(STAGES, 2), barriers(2, 1),
    )  # fmt: skip


@gluon.jit
def rounds_of(batch, TILING: gl.constexpr):
    """Return the maximum number of tiles of query rows (`Work`) that one program processes."""
    ends = batch.ends + 2 * (batch.sequences + 1)
    units = gl.load(ends + batch.sequences)
    return gl.cdiv(units * TILING.programs, gl.num_programs(0))


@gluon.jit
def find(ends, count, wanted):
    """Return the sequence that contains tile number `wanted`, by binary search.

    `ends` [count + 1] contains cumulative counts of tiles: 0, then the count after each sequence.
    """
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
def work_of(batch, turn, SHAPE: gl.constexpr, TILING: gl.constexpr):
    """Return the `Work` (a tile of query rows) of a program in round `turn`.

    Tiles that read the most states (cached tokens) come first. In every second round, programs take
    tiles in reverse order, which balances their work.
    """
    GROUP: gl.constexpr = SHAPE.out.group
    TILE: gl.constexpr = TILING.tile
    ends = batch.ends + 2 * (batch.sequences + 1)
    units = gl.load(ends + batch.sequences)
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn & 1:
        place = programs - 1 - place
    number = turn * programs + place
    unit = gl.maximum(units - 1 - number // TILING.programs, 0)
    sequence = find(ends, batch.sequences, unit)
    start = gl.load(batch.ends + sequence)
    count = gl.load(batch.ends + sequence + 1) - start
    length = gl.load(batch.lengths + sequence).to(gl.int32)
    row = (unit - gl.load(ends + sequence)) * TILING.rows
    before = length - count
    high = gl.minimum(before + (row + TILING.rows - 1) // GROUP + 1, length)
    end = gl.cdiv(high, TILE) * TILE
    rows = count * GROUP
    if number >= units * TILING.programs:
        end = 0
        rows = 0
    return Work(sequence, number % TILING.programs, start, rows, row, before, high, end)
