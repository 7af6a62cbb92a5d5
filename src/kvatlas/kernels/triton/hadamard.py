"""Hadamard rotations of rows, for caches that store rotated rows: one launch per tensor.

If keys are stored rotated, queries are rotated too, which leaves their dot products unchanged. If
values are stored rotated, the output is rotated back.
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
    """Compile-time constants of a rotation: rows per program, heads per token, elements per row."""

    rows: int
    heads: int
    dim: int
    width: int
    steps: int
    """Blocks of 2**steps elements are rotated together."""


def rotate_queries(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `hadamard.rotate_signed` of rows [tokens, heads, D], times a factor.

    bfloat16 rows become float16, because dot products with 4-bit caches use float16.
    """
    dtype = torch.float16 if rows.dtype is torch.bfloat16 else rows.dtype
    rotated = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    _rotate(rows, rotated, hadamard.signs(block_of(rows), rows.device), factor)
    return rotated


def rotate_back(rows: torch.Tensor, starts: torch.Tensor) -> None:
    """Apply `hadamard.rotate_signed_back` in place to rows [tokens, heads, D] of a batch.

    Only rows between the first and the last of `starts` are rotated.
    """
    block = block_of(rows)
    _rotate(rows, rows, hadamard.signs(block, rows.device), 1.0 / block, starts)


def rotate_without_signs(rows: torch.Tensor) -> torch.Tensor:
    """Return `hadamard.rotate` of rows [tokens, heads, D], where D is a power of two."""
    rotated = torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = rows.shape[-1]
    _rotate(rows, rotated, hadamard.signs(size, rows.device).abs(), size**-0.5)
    return rotated


def block_of(rows: torch.Tensor) -> int:
    """Return the size of a rotated block: the largest power of two that divides the row length."""
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
