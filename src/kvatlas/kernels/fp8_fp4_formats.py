"""Microscaling formats: fp8 and fp4 elements, each block of them with a scale of its own."""

from __future__ import annotations

import torch

from kvatlas.kernels import bit_packing as bits

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
_TINY = 1e-12


def to_fp8(values: torch.Tensor, *, e5m2: bool = False) -> torch.Tensor:
    """The nearest fp8 of each value, saturating; NaN stays NaN.

    >>> to_fp8(torch.tensor([0.3, 1e9, -float("inf")])).tolist()
    [0.3125, 448.0, -448.0]
    """
    # torch's own cast turns what is too large into NaN; a cache saturates.
    if e5m2:
        return values.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def not_finite_is_nan(values: torch.Tensor) -> torch.Tensor:
    """Scales with NaN for each that is not finite."""
    return torch.where(values.isfinite(), values, torch.nan)


def power_above(values: torch.Tensor) -> torch.Tensor:
    """The exponent of the least power of two that is not below each positive value.

    >>> power_above(torch.tensor([1.0, 1.01, 0.3])).tolist()
    [0.0, 1.0, -1.0]
    """
    fraction, exponent = torch.frexp(values)
    return (exponent - (fraction == 0.5).to(exponent.dtype)).to(values.dtype)


def to_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents as bytes, 127 added; 255 for NaN."""
    return (exponents + 127).clamp(0, 254).nan_to_num(255).to(torch.uint8)


def from_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """The powers of two that bytes stand for.

    >>> from_ue8m0(torch.tensor([127, 120, 255], dtype=torch.uint8)).tolist()
    [1.0, 0.0078125, nan]
    """
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.float() - 127))


def to_nvfp4(rows: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes, and one e4m3 scale for each 16 elements; `scale` is the tensor's."""
    blocks = bits.split(rows, -1, 16)
    largest = not_finite_is_nan(blocks.abs().amax(-1))
    step = to_fp8(largest / E2M1_MAX / scale)
    exact = (step.float() * scale).unsqueeze(-1)
    values = torch.where(exact > 0, blocks / exact.clamp(min=_TINY), 0.0)
    return bits.pack(bits.to_e2m1(values).flatten(-2), 4), step


def from_nvfp4(
    data: torch.Tensor, steps: torch.Tensor, count: int, scale: float = 1.0
) -> torch.Tensor:
    """The numbers again, as float32."""
    values = bits.split(bits.from_e2m1(bits.unpack(data, 4, count)), -1, 16)
    return (values * (steps.float() * scale).unsqueeze(-1)).flatten(-2)


def to_fp8_blocks(
    rows: torch.Tensor, block: int, *, powers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 elements and one scale for each `block` of them; with `powers` its exponent.

    Scales are those of a largest element of 1e-4 at least, as kernels have them.
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
    """Packed e2m1 codes, and one ue8m0 scale for each 32 elements."""
    blocks = bits.split(rows, -1, 32)
    largest = not_finite_is_nan(blocks.abs().amax(-1)).clamp(min=E2M1_MAX * 2.0**-126)
    exponent = torch.where(
        largest.isnan(), largest, power_above((largest / E2M1_MAX).nan_to_num(1))
    ).clamp(-127, 127)
    values = (blocks * torch.exp2(-exponent).unsqueeze(-1)).nan_to_num(0)
    return bits.pack(bits.to_e2m1(values).flatten(-2), 4), to_ue8m0(exponent)


def from_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Elements times the scale of their block."""
    return (bits.split(values, -1, block) * scales.unsqueeze(-1)).flatten(-2)
