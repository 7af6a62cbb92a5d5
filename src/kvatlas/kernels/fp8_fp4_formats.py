"""Microscaling formats: blocks of fp8 or fp4 elements, each block with its own scale."""

from __future__ import annotations

import torch

from kvatlas.kernels import bit_packing as bits

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
_TINY = 1e-12


def to_fp8(values: torch.Tensor, *, e5m2: bool = False) -> torch.Tensor:
    """Round each value to the nearest e4m3 number, or e5m2 number if `e5m2` is true.

    Large values saturate; NaN stays NaN.

    >>> to_fp8(torch.tensor([0.3, 1e9, -float("inf")])).tolist()
    [0.3125, 448.0, -448.0]
    """
    # torch casts values that are too large to NaN, but a cache must saturate them.
    if e5m2:
        return values.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def not_finite_is_nan(values: torch.Tensor) -> torch.Tensor:
    """Return values with infinities replaced by NaN."""
    return torch.where(values.isfinite(), values, torch.nan)


def power_above(values: torch.Tensor) -> torch.Tensor:
    """Return log2 of each positive value, rounded up to an integer.

    >>> power_above(torch.tensor([1.0, 1.01, 0.3])).tolist()
    [0.0, 1.0, -1.0]
    """
    fraction, exponent = torch.frexp(values)
    return (exponent - (fraction == 0.5).to(exponent.dtype)).to(values.dtype)


def to_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Encode exponents as ue8m0 bytes: exponent + 127, or 255 for NaN."""
    return (exponents + 127).clamp(0, 254).nan_to_num(255).to(torch.uint8)


def from_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Decode ue8m0 bytes to powers of two; 255 becomes NaN.

    >>> from_ue8m0(torch.tensor([127, 120, 255], dtype=torch.uint8)).tolist()
    [1.0, 0.0078125, nan]
    """
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.float() - 127))


def to_nvfp4(rows: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to nvfp4: return (packed e2m1 codes, e4m3 scales), one scale per 16 elements.

    `scale` is the per-tensor scale; an element is its e2m1 number times both scales.
    """
    blocks = bits.split(rows, -1, 16)
    largest = not_finite_is_nan(blocks.abs().amax(-1))
    step = to_fp8(largest / E2M1_MAX / scale)
    exact = (step.float() * scale).unsqueeze(-1)
    values = torch.where(exact > 0, blocks / exact.clamp(min=_TINY), 0.0)
    return bits.pack(bits.to_e2m1(values).flatten(-2), 4), step


def from_nvfp4(
    data: torch.Tensor, steps: torch.Tensor, count: int, scale: float = 1.0
) -> torch.Tensor:
    """Decode nvfp4 rows of `count` elements to float32.

    `steps` contains one e4m3 scale per 16 elements, and `scale` is the per-tensor scale.
    """
    values = bits.split(bits.from_e2m1(bits.unpack(data, 4, count)), -1, 16)
    return (values * (steps.float() * scale).unsqueeze(-1)).flatten(-2)


def to_fp8_blocks(
    rows: torch.Tensor, block: int, *, powers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to fp8: return (e4m3 elements, float32 scales), one scale per `block` elements.

    If `powers` is true, scales are rounded up to powers of two, and their exponents are returned
    instead. Blocks whose largest absolute value is below 1e-4 get the scale for 1e-4.
    """
    blocks = bits.split(rows, -1, block)
    step = not_finite_is_nan(blocks.abs().amax(-1)).clamp(min=1e-4) / E4M3_MAX
    scale = step
    if powers:
        step = torch.where(step.isnan(), step, power_above(step.nan_to_num(1)))
        scale = torch.exp2(step)
    data = to_fp8((blocks / scale.unsqueeze(-1)).nan_to_num(0)).flatten(-2)
    return data, step


def to_mxfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to mxfp4: return (packed e2m1 codes, ue8m0 scales), one scale per 32 elements."""
    blocks = bits.split(rows, -1, 32)
    largest = not_finite_is_nan(blocks.abs().amax(-1)).clamp(min=E2M1_MAX * 2.0**-126)
    exponent = torch.where(
        largest.isnan(), largest, power_above((largest / E2M1_MAX).nan_to_num(1))
    ).clamp(-127, 127)
    values = (blocks * torch.exp2(-exponent).unsqueeze(-1)).nan_to_num(0)
    return bits.pack(bits.to_e2m1(values).flatten(-2), 4), to_ue8m0(exponent)


def from_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each element by the scale of its block; a block has `block` elements."""
    return (bits.split(values, -1, block) * scales.unsqueeze(-1)).flatten(-2)
