"""Rotations of rows, for caches that keep their rows rotated: one launch for a tensor.

A product does not change if both sides are rotated, so that queries are turned before
they meet keys; what comes out of values is turned back.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from kvatlas.kernels import hadamard as rotation
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next, early

_ELEMENTS = 2048
"""Of a program."""


@triton.jit
def mix(rows, NEAR: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Sums and differences of elements that are `NEAR` apart."""
    pairs = tl.reshape(rows, [COUNT, WIDTH // (2 * NEAR), 2, NEAR])
    first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    both = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(both, [0, 1, 3, 2]), [COUNT, WIDTH])


@triton.jit
def rotate(rows, COUNT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """The Hadamard transform of each block of 2**STEPS elements, without its factor."""
    for i in tl.static_range(STEPS):
        rows = mix(rows, 2**i, COUNT, WIDTH)
    return rows


@triton.jit
def turn_rows(
    source, source_steps, target, target_steps, signs, starts, last, count, factor,
    HEADS: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows [tokens, heads, D] under signs and a transform, or under a transform and signs.

    Those that are turned back are of a batch, whose queries start and end somewhere.
    """
    after_previous(EARLY)
    before_next(EARLY)
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    column = tl.arange(0, WIDTH)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    there = row < count
    if BACK:
        there = there & (token >= tl.load(starts)) & (token < tl.load(starts + last))
    mask = there[:, None] & (column < DIM)[None, :]
    at = (token * source_steps[0] + head * source_steps[1])[:, None] + column[None, :]
    rows = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    sign = tl.load(signs + column % 2**STEPS)[None, :]
    if not BACK:
        rows = rows * sign
    rows = rotate(rows, COUNT, WIDTH, STEPS) * factor
    if BACK:
        rows = rows * sign
    to = (token * target_steps[0] + head * target_steps[1])[:, None] + column[None, :]
    tl.store(target + to, rows.to(target.dtype.element_ty), mask=mask)


def spread(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """`rotate_signed` of rows [tokens, heads, D], times a factor; halves of bfloat16 rows.

    Dots with 4-bit caches are dots of halves, which keep more of a row than bfloat16.
    """
    dtype = torch.float16 if rows.dtype is torch.bfloat16 else rows.dtype
    found = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _turn(rows, found, rotation.signs(_block(rows), rows.device), factor)
    return found


def spread_back(rows: torch.Tensor, starts: torch.Tensor) -> None:
    """`rotate_signed_back` of a batch's rows [tokens, heads, D], where they are."""
    block = _block(rows)
    _turn(rows, rows, rotation.signs(block, rows.device), 1.0 / block, starts)


def rotated(rows: torch.Tensor) -> torch.Tensor:
    """`rotate` of rows [tokens, heads, D] of a power of two."""
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = rows.shape[-1]
    _turn(rows, found, _no_signs(size, rows.device), size**-0.5)
    return found


def _block(rows: torch.Tensor) -> int:
    size = rows.shape[-1]
    return int(size & -size)


def _no_signs(size: int, device: torch.device) -> torch.Tensor:
    return rotation.signs(size, device).abs()


def _turn(
    source: torch.Tensor,
    target: torch.Tensor,
    signs: torch.Tensor,
    factor: float,
    starts: torch.Tensor | None = None,
) -> None:
    tokens, heads, size = source.shape
    width = max(16, int(triton.next_power_of_2(size)))
    count = max(1, _ELEMENTS // width)
    if not tokens:
        return
    with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
        turn_rows[(triton.cdiv(tokens * heads, count),)](
            source, (source.stride(0), source.stride(1)), target,
            (target.stride(0), target.stride(1)), signs, signs if starts is None else starts,
            0 if starts is None else len(starts) - 1, tokens * heads, factor, HEADS=heads,
            COUNT=count, DIM=size, WIDTH=width, STEPS=len(signs).bit_length() - 1,
            BACK=starts is not None, num_warps=4, **early(source.device),
        )  # fmt: skip
