"""Device code that prefill's groups of warps on Hopper share: their work, and what they exchange.

| group | what it does |
|---|---|
| two that multiply | each has 64 of a program's 128 query rows, and all of their softmax |
| one that loads | tiles of K and of V, as soon as both groups are done with those before |

While one group is at its softmax the other's products run: they take turns to begin products,
each the keys of a tile and the values of the one before. FlashAttention-3's ping-pong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvatlas.kernels.triton.attention.latent_groups_device import THREADS, barriers


class PrefillRoom(NamedTuple):
    """Shared memory: the query rows of each group, and tiles of K and V in stages."""

    query: Any
    k: Any
    v: Any
    k_factors: Any
    """What logits of a tile's states are multiplied by, and below their weights: in twice as many
    stages, since they are needed after the keys, with which both come, or those of V with V."""
    v_factors: Any


class PrefillSignals(NamedTuple):
    """Barriers in shared memory: of each stage, and of each of the groups that multiply."""

    there_k: Any
    there_v: Any
    free_k: Any
    free_v: Any
    turn: Any
    """It is a group's turn to begin products."""


class Work(NamedTuple):
    """A tile of query rows, packed heads of some tokens of a sequence, and what it sees."""

    sequence: Any
    head: Any
    start: Any
    """The sequence's first query in the batch."""
    rows: Any
    """Rows of the sequence; none where there is no work."""
    row: Any
    """The tile's first row in the sequence."""
    before: Any
    """States before the sequence's first query."""
    high: Any
    """States 0 .. high - 1 may be read."""
    end: Any
    """States 0 .. end - 1 are walked, in whole tiles; none where the tile sees nothing."""


@gluon.constexpr_function
def has_factors(kind):
    """Whether rows of a format are left to be multiplied by factors of their own."""
    return kind in ("scaled", "int4")


@gluon.constexpr_function
def loading_warps(kind, element, halves):
    """Warps of the group that loads: eight where four have too few registers.

    That is where whole tiles of e4m3 that become bf16 wait in them, and not halves. Nowhere
    else: they take turns with the warps that multiply, and were slower.
    """
    return 8 if kind == "scaled" and element == gl.float8e4nv and not halves else 4


@gluon.constexpr_function
def powers(begin, end):
    """Powers of two from one to before another."""
    return [1 << i for i in range(begin.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def lift_of(kind):
    """The power of two that rows of a format, taken apart, are too small by."""
    return 14.0 if kind == "nvfp4" else 0.0


@gluon.jit
def prefill_signals(STAGES: gl.constexpr):
    """Fresh barriers for the groups of a program."""
    return PrefillSignals(
        barriers(STAGES, THREADS), barriers(STAGES, THREADS), barriers(STAGES, 2),
        barriers(STAGES, 2), barriers(2, 1),
    )  # fmt: skip


@gluon.jit
def rounds_of(batch, TILING: gl.constexpr):
    """Pieces of work that a program has, at most."""
    ends = batch.ends + 2 * (batch.sequences + 1)
    units = gl.load(ends + batch.sequences)
    return gl.cdiv(units * TILING.programs, gl.num_programs(0))


@gluon.jit
def find(ends, count, wanted):
    """The sequence that unit number `wanted` belongs to; `ends` starts with 0."""
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
    """A program's piece of work number `turn`: the longest walks come first.

    Programs take pieces forwards and backwards by turns, so that all have walked as far.
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
