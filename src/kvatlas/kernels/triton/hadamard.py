"""Hadamard rotations of rows, for caches that keep their rows rotated: one launch for a tensor.

A product does not change if both sides are rotated, so that queries are rotated before
they meet keys; what comes out of values is rotated back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kvatlas.kernels import hadamard
from kvatlas.kernels.triton import tune
from kvatlas.kernels.triton.addresses import batch_rows
from kvatlas.kernels.triton.hadamard_device import rotate_rows
from kvatlas.kernels.triton.storage_formats import width_of

_ELEMENTS = 2048
"""Elements per program."""


class RotatedRows(NamedTuple):
    """What a rotation is compiled for: rows of a program, of a token, and their elements."""

    rows: int
    heads: int
    dim: int
    width: int
    steps: int
    """2**steps elements are rotated as one."""


def rotate_queries(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """`hadamard.rotate_signed` of rows [tokens, heads, D], times a factor; halves of bfloat16 rows.

    Dots with 4-bit caches are dots of halves, which keep more of a row than bfloat16.
    """
    dtype = torch.float16 if rows.dtype is torch.bfloat16 else rows.dtype
    rotated = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _rotate(rows, rotated, hadamard.signs(block_of(rows), rows.device), factor)
    return rotated


def rotate_back(rows: torch.Tensor, starts: torch.Tensor) -> None:
    """`hadamard.rotate_signed_back` of a batch's rows [tokens, heads, D], where they are."""
    block = block_of(rows)
    _rotate(rows, rows, hadamard.signs(block, rows.device), 1.0 / block, starts)


def rotate_without_signs(rows: torch.Tensor) -> torch.Tensor:
    """`hadamard.rotate` of rows [tokens, heads, D] of a power of two."""
    rotated = torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = rows.shape[-1]
    _rotate(rows, rotated, hadamard.signs(size, rows.device).abs(), size**-0.5)
    return rotated


def block_of(rows: torch.Tensor) -> int:
    """Elements that are rotated as one: the largest power of two that divides a row."""
    size = rows.shape[-1]
    return int(size & -size)


def _rotate(
    source: torch.Tensor,
    target: torch.Tensor,
    signs: torch.Tensor,
    factor: float,
    starts: torch.Tensor | None = None,
) -> None:
    tokens, heads, size = source.shape
    if not tokens:
        return
    width = width_of(size)
    count = max(1, _ELEMENTS // width)
    with tune.on(source.device):
        rotate_rows[(triton.cdiv(tokens * heads, count),)](
            batch_rows(source), batch_rows(target), signs, signs if starts is None else starts,
            0 if starts is None else len(starts) - 1, tokens * heads, factor,
            SHAPE=RotatedRows(count, heads, size, width, len(signs).bit_length() - 1),
            BACK=starts is not None, num_warps=4, **tune.dependent_launch(source.device),
        )  # fmt: skip
