"""Codes of fewer than 8 bits, in and out of bytes, and the rotation that spreads outliers."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def split(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last axis as several, a view.

    >>> split(torch.zeros(3, 8), 2, 4).shape
    torch.Size([3, 2, 4])
    """
    # Not by view(), which finds no size for -1 where there are no rows.
    return torch.unflatten(values, -1, sizes)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` bits along the last axis as bytes, the first code in the lowest bits.

    >>> pack(torch.tensor([1, 2, 3]), 4).tolist(), pack(torch.arange(8), 3).tolist()
    ([33, 3], [136, 198, 250])
    """
    count = codes.shape[-1]
    nbytes = -(-count * bits // 8)
    shifts = torch.arange(bits, device=codes.device)
    stream = ((codes.to(torch.int32).unsqueeze(-1) >> shifts) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, nbytes * 8 - count * bits))
    weights = 1 << torch.arange(8, device=codes.device)
    return (split(stream, nbytes, 8) * weights).sum(-1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes of `bits` bits in bytes along the last axis.

    >>> unpack(torch.tensor([136, 198, 250], dtype=torch.uint8), 3, 8).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.to(torch.int32).unsqueeze(-1) >> shifts) & 1).flatten(-2)
    weights = 1 << torch.arange(bits, device=packed.device)
    return (split(stream[..., : count * bits], count, bits) * weights).sum(-1)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 code of each value, ties to the even code.

    >>> to_e2m1(torch.tensor([0.24, 0.25, 2.5, -6.0, 9.0])).tolist()
    [0, 0, 4, 15, 7]
    """
    table = torch.tensor(_E2M1, device=values.device, dtype=values.dtype)
    size = values.abs().clamp(max=_E2M1[-1])
    above = torch.bucketize(size, table).clamp(max=7)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - size, size - table[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(up < down, above, torch.where(up > down, below, even))
    return code | (torch.signbit(values).to(code.dtype) << 3)


def from_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that e2m1 codes stand for."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device, dtype=dtype)
    return table[codes.long()]


def rotate(values: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of the last axis: its own inverse.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> rotate(x).tolist(), bool(torch.allclose(rotate(rotate(x)), x))
    ([5.0, -1.0, -2.0, 0.0], True)
    """
    return _hadamard(values) * float(values.shape[-1] ** -0.5)


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    """Sums and differences alone: exact where the numbers are."""
    size = values.shape[-1]
    found = values
    width = 1
    while width < size:
        pairs = split(found, size // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        found = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        width *= 2
    return found


def round_away(values: torch.Tensor) -> torch.Tensor:
    """The nearest whole number, halves away from zero.

    >>> round_away(torch.tensor([0.5, 2.5, -1.5])).tolist()
    [1.0, 3.0, -2.0]
    """
    return (values + torch.copysign(torch.full_like(values, 0.5), values)).trunc()


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Rows under fixed signs and a Hadamard transform, so that no channel stands out.

    The transform is not normed: it lengthens a row by the root of its block, the largest
    power of two that divides the row. That is vLLM's rotation for int4, signs included.

    >>> x = torch.randn(3, 96)
    >>> bool(torch.allclose(spread_back(spread(x)), x, atol=1e-5))
    True
    """
    blocks = split(rows, -1, _block(rows))
    return _hadamard(blocks * signs(blocks.shape[-1], rows.device)).flatten(-2)


def spread_back(rows: torch.Tensor) -> torch.Tensor:
    """Undo `spread`."""
    blocks = split(rows, -1, _block(rows))
    size = blocks.shape[-1]
    return (_hadamard(blocks) * (signs(size, rows.device) / size)).flatten(-2)


def _block(rows: torch.Tensor) -> int:
    size = rows.shape[-1]
    return int(size & -size)


@lru_cache(maxsize=32)
def signs(size: int, device: torch.device) -> torch.Tensor:
    """Signs that never change: caches outlive processes.

    >>> signs(4, torch.device("cpu")).abs().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    generator = torch.Generator().manual_seed(0x9E3779B9)
    # A generator draws other numbers for another dtype, and a process may have its own default.
    half = torch.full((size,), 0.5, dtype=torch.float32, device="cpu")
    return (half.bernoulli(generator=generator) * 2 - 1).to(device)


@lru_cache(maxsize=8)
def normal_levels(bits: int) -> tuple[float, ...]:
    """The 2**bits levels that quantise a normal variable with the least squared error.

    Lloyd's iteration: levels are the means of their cells, cells end half way between
    levels. Of a normal variable both have closed forms.

    >>> [round(level, 3) for level in normal_levels(2)]
    [-1.51, -0.453, 0.453, 1.51]
    """
    levels = [4.0 * (n + 0.5) / (1 << bits) - 2.0 for n in range(1 << bits)]
    for _ in range(5000):
        borders = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in borders]
        below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in borders]
        means = [
            (p - q) / (b - a)
            for (p, q), (a, b) in zip(pairwise(density), pairwise(below), strict=True)
        ]
        moved = max(abs(a - b) for a, b in zip(levels, means, strict=True))
        levels = means
        if moved < 1e-12:
            break
    return tuple(levels)
