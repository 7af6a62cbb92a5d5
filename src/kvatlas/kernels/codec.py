"""K and V to what a cache dtype stores, and back.

One side (K or V) at a time: `encode` gives a tensor for each field of that side,
`decode` the numbers again. Rows are [..., D] and scales sit beside them, so both work
on any batch of rows. The bytes are those that the page has room for; nothing here
knows where they lie.

| cache dtype | scale | error of a row with largest element a |
|---|---|---|
| `fp8` | one for the tensor, given | 1/16 of each element, while a / scale is below 448 |
| `int8_per_token_head` | a / 127 | a / 254 |
| `fp8_per_token_head` | a / 448 | 1/16 of each element |
| `int4_per_token_head` | (max - min) / 15, with a zero point | (max - min) / 30, zero included |
| `nvfp4` | one for 16 elements in e4m3, one for the tensor | 1/4 of the block's largest |
| `turboquant_*` | the row's norm after a rotation; V's range | see `tests/kernels` |
"""

from __future__ import annotations

from typing import Literal

import torch

from kvatlas.cache.tensors import torch_dtype
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.kernels import bits
from kvatlas.specs.attention import Attention
from kvatlas.specs.content import sides

Side = Literal["k", "v"]
Fields = dict[str, torch.Tensor]

_E4M3_MAX = 448.0
_E5M2_MAX = 57344.0
_TINY = 1e-12


def encode(spec: Attention, side: Side, rows: torch.Tensor, *, scale: float = 1.0) -> Fields:
    """What a cache stores of rows [..., D]: a tensor for each field of that side.

    `scale` is the tensor's own, for fp8 and nvfp4.
    """
    _refuse_size(spec, side, rows)
    cache = spec.cache
    exact = rows.float()
    if cache == "auto":
        return {side: rows.to(torch_dtype(DType.of(spec.dtype)))}
    if cache in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return {side: _to_fp8(exact / scale, cache)}
    if cache.endswith("_per_token_head"):
        return _token_head(cache, side, exact)
    if cache == "nvfp4":
        return _nvfp4(side, exact, scale)
    return _turboquant(spec, side, exact)


def decode(spec: Attention, side: Side, fields: Fields, *, scale: float = 1.0) -> torch.Tensor:
    """The rows that `encode` stored, as float32."""
    cache, data = spec.cache, fields[side]
    dim = _dim(spec, side)
    if cache == "auto":
        return data.float()
    if cache in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return data.float() * scale
    if cache == "int4_per_token_head":
        stored = fields[f"{side}_scale"].view(torch.int32)
        zero, step = stored & 15, (stored & ~15).view(torch.float32)
        return (bits.unpack(data, 4, dim) - zero) * step
    if cache.endswith("_per_token_head"):
        return data.float() * fields[f"{side}_scale"]
    if cache == "nvfp4":
        blocks = fields[f"{side}_scale"].float() * scale
        values = bits.split(bits.from_e2m1(bits.unpack(data, 4, dim)), -1, 16)
        return (values * blocks.unsqueeze(-1)).flatten(-2)
    return _from_turboquant(spec, side, fields)


def _to_fp8(values: torch.Tensor, cache: str) -> torch.Tensor:
    # torch's own cast turns what is too large into NaN; a cache saturates.
    if cache == "fp8_e5m2":
        return values.clamp(-_E5M2_MAX, _E5M2_MAX).to(torch.float8_e5m2)
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _token_head(cache: str, side: Side, rows: torch.Tensor) -> Fields:
    if cache == "int4_per_token_head":
        low = rows.amin(-1, keepdim=True).clamp(max=0)
        high = rows.amax(-1, keepdim=True).clamp(min=0)
        step = ((high - low) / 15).clamp(min=_TINY)
        # The zero point rides in the scale's lowest bits, which it must not disturb.
        step = (step.view(torch.int32) & ~15).view(torch.float32)
        zero = (-low / step).round().clamp(0, 15)
        codes = (rows / step + zero).round().clamp(0, 15).to(torch.uint8)
        stored = (step.view(torch.int32) | zero.to(torch.int32)).view(torch.float32)
        return {side: bits.pack(codes, 4), f"{side}_scale": stored}
    largest = rows.abs().amax(-1, keepdim=True)
    if cache == "int8_per_token_head":
        step = (largest / 127).clamp(min=_TINY)
        return {side: (rows / step).round().to(torch.int8), f"{side}_scale": step}
    step = (largest / _E4M3_MAX).clamp(min=_TINY)
    return {side: _to_fp8(rows / step, "fp8"), f"{side}_scale": step}


def _nvfp4(side: Side, rows: torch.Tensor, scale: float) -> Fields:
    blocks = bits.split(rows, -1, 16)
    largest = blocks.abs().amax(-1)
    step = _to_fp8(largest / 6 / scale, "fp8")
    exact = (step.float() * scale).unsqueeze(-1)
    values = torch.where(exact > 0, blocks / exact.clamp(min=_TINY), torch.zeros_like(blocks))
    return {side: bits.pack(bits.to_e2m1(values).flatten(-2), 4), f"{side}_scale": step}


def _turboquant(spec: Attention, side: Side, rows: torch.Tensor) -> Fields:
    width = _code_bits(spec, side)
    if width == 8:
        return {side: _to_fp8(rows, "fp8")}
    if side == "v":
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        top = (1 << width) - 1
        step = ((high - low) / top).half().float().clamp(min=6e-8)
        zero = low.half().float()
        codes = ((rows - zero) / step).round().clamp(0, top).to(torch.uint8)
        return {"v": bits.pack(codes, width), "v_scale": step.half(), "v_zero": zero.half()}
    norm = rows.norm(dim=-1, keepdim=True).half()
    # After the rotation a row of norm 1 has elements of variance 1 / D, near enough normal.
    spread = bits.rotate(rows) / norm.float().clamp(min=_TINY) * rows.shape[-1] ** 0.5
    levels = torch.tensor(bits.normal_levels(width), dtype=torch.float32, device=rows.device)
    codes = torch.bucketize(spread, (levels[1:] + levels[:-1]) / 2)
    return {"k": bits.pack(codes, width), "k_scale": norm}


def _from_turboquant(spec: Attention, side: Side, fields: Fields) -> torch.Tensor:
    width, dim = _code_bits(spec, side), _dim(spec, side)
    if width == 8:
        return fields[side].float()
    codes = bits.unpack(fields[side], width, dim)
    if side == "v":
        return codes * fields["v_scale"].float() + fields["v_zero"].float()
    levels = torch.tensor(bits.normal_levels(width), dtype=torch.float32, device=codes.device)
    unit = levels[codes.long()]
    # Rounding shortens a row; its length is known, so it is put right.
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=_TINY)
    return bits.rotate(unit) * fields["k_scale"].float()


def _code_bits(spec: Attention, side: Side) -> int:
    dims = sides(spec.cache, DType.of(spec.dtype), spec.head_dim, spec.v_dim or spec.head_dim)
    return (dims.k if side == "k" else dims.v)[0].dtype.bits


def _dim(spec: Attention, side: Side) -> int:
    return spec.head_dim if side == "k" else spec.v_dim or spec.head_dim


def _refuse_size(spec: Attention, side: Side, rows: torch.Tensor) -> None:
    dim = _dim(spec, side)
    power = dim & (dim - 1) == 0
    if rows.shape[-1] != dim or (spec.cache.startswith("turboquant") and not power):
        raise AtlasError(
            Code.BAD_TENSOR,
            "Rows are as long as the head, a power of two where they are rotated",
            got=f"{side} of {rows.shape[-1]} for a head of {dim} in {spec.cache}",
            hint="Pass [tokens, heads, head size]",
        )
