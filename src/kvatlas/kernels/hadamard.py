"""Hadamard rotations of rows. They spread outliers over all channels before quantisation."""

from __future__ import annotations

from functools import lru_cache

import torch

from kvatlas.kernels.bit_packing import split


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Apply the orthonormal Hadamard transform to rows of a power-of-two length.

    The transform is its own inverse.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> rotate(x).tolist(), bool(torch.allclose(rotate(rotate(x)), x))
    ([5.0, -1.0, -2.0, 0.0], True)
    """
    return _transform(rows) * float(rows.shape[-1] ** -0.5)


def rotate_signed(rows: torch.Tensor) -> torch.Tensor:
    """Apply random signs, then a Hadamard transform per block: vLLM's rotation for int4.

    A block is the largest power of two that divides the row length. The transform is not
    normalised: it multiplies a row's norm by the square root of the block size.

    >>> x = torch.randn(3, 96)
    >>> bool(torch.allclose(rotate_signed_back(rotate_signed(x)), x, atol=1e-5))
    True
    """
    blocks = _blocks(rows)
    return _transform(blocks * signs(blocks.shape[-1], rows.device)).flatten(-2)


def rotate_signed_back(rows: torch.Tensor) -> torch.Tensor:
    """Invert `rotate_signed`."""
    blocks = _blocks(rows)
    size = blocks.shape[-1]
    return (_transform(blocks) * (signs(size, rows.device) / size)).flatten(-2)


@lru_cache(maxsize=32)
def signs(size: int, device: torch.device) -> torch.Tensor:
    """Return a random sign (1 or -1) for each of `size` elements; all processes get equal signs.

    >>> signs(4, torch.device("cpu")).abs().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    generator = torch.Generator().manual_seed(0x9E3779B9)
    # The random numbers depend on the dtype, and callers can change torch's default dtype.
    half = torch.full((size,), 0.5, dtype=torch.float32, device="cpu")
    return (half.bernoulli(generator=generator) * 2 - 1).to(device)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    size = rows.shape[-1]
    return split(rows, -1, size & -size)


def _transform(values: torch.Tensor) -> torch.Tensor:
    """Apply the unnormalised Hadamard transform to the last axis, by sums and differences."""
    size = values.shape[-1]
    width = 1
    while width < size:
        pairs = split(values, size // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        made = torch.empty_like(pairs)
        torch.add(first, second, out=made[..., 0, :])
        torch.sub(first, second, out=made[..., 1, :])
        values = made.flatten(-3)
        width *= 2
    return values
