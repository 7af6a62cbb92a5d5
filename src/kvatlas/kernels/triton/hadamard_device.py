"""Device code of the Hadamard rotation: sums and differences of elements, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next


@triton.jit
def mix(tile, APART: tl.constexpr):
    """Replace pairs of elements that are `APART` columns apart by their sum and difference.

    To find the other element of a pair, an element is subtracted from the pair's sum. This is done
    on bit patterns as integers, so nothing is rounded. The compiler turns this into a shuffle
    between threads, or into a plain register access if one thread holds both elements.
    """
    pairs = tl.reshape(tile, [tile.numel // (2 * APART), 2, APART])
    bits = pairs.to(tl.int32, bitcast=True)
    other = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    return tl.reshape(tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), other), tile.shape)


@triton.jit
def hadamard(rows, STEPS: tl.constexpr):
    """Apply the unnormalised Hadamard transform to each block of 2**STEPS elements."""
    for i in tl.static_range(STEPS):
        rows = mix(rows, 2**i)
    return rows


@triton.jit
def rotate_rows(
    source, target, signs, starts, last, count, factor, SHAPE: tl.constexpr,
    BACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate rows [tokens, heads, D]: apply random signs, then the Hadamard transform.

    If `BACK` is set, apply the inverse instead. In this case, only rows between the first and the
    last of `starts` are rotated.
    """
    COUNT: tl.constexpr = SHAPE.rows
    WIDTH: tl.constexpr = SHAPE.width
    after_previous(EARLY)
    before_next(EARLY)
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    column = tl.arange(0, WIDTH)
    token = (row // SHAPE.heads).to(tl.int64)
    head = (row % SHAPE.heads).to(tl.int64)
    there = row < count
    if BACK:
        there = there & (token >= tl.load(starts)) & (token < tl.load(starts + last))
    mask = there[:, None] & (column < SHAPE.dim)[None, :]
    at = (token * source.token + head * source.head)[:, None] + column[None, :]
    rows = tl.load(source.tensor + at, mask=mask, other=0.0).to(tl.float32)
    sign = tl.load(signs + column % 2**SHAPE.steps)[None, :]
    if not BACK:
        rows = rows * sign
    rows = hadamard(rows, SHAPE.steps) * factor
    if BACK:
        rows = rows * sign
    to = (token * target.token + head * target.head)[:, None] + column[None, :]
    tl.store(target.tensor + to, rows.to(target.tensor.dtype.element_ty), mask=mask)
