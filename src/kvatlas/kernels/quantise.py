"""Quantise K and V to the fields of a cache dtype, and dequantise them.

Both functions work on one side (K or V) at a time: `encode` returns a tensor for each field of
that side, and `decode` returns the numbers. Rows are [..., D] with their scales in separate
fields, so both accept any batch of rows. The fields have the sizes that the page reserves; this
module does not depend on their placement.

The table lists the maximum error of an element x, where a is the largest absolute value among the
elements that share its scale.

| cache dtype | scale | error |
|---|---|---|
| `fp8` | one for the tensor, given | x / 16, while a / scale is below 448 |
| `fp8_e5m2` | one for the tensor, given | x / 8, while a / scale is below 57344 |
| `int8_per_token_head` | a / 127 | a / 254 |
| `fp8_per_token_head` | a / 448 | x / 16 + a / 448 / 1024 |
| `int4_per_token_head` | (max - min) / 15, with a zero point | one scale, in the rotated row |
| `nvfp4` | an e4m3 scale for 16 elements, and one scale for the tensor | a / 4 |
| `turboquant_*` | the row's norm after a rotation; V's range | see `docs/explanation/caches.md` |

Some values may not be finite. `auto` keeps them. fp8 with one scale saturates infinities and keeps
NaN. Formats that compute a scale return NaN for all elements with this scale. An invalid row thus
never turns into valid numbers. Scales per token and head are at least 1e-6, so elements far below
1e-6 become zero, as they do in vLLM.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Literal

import torch

from kvatlas.cache import torch_dtype
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.kernels import bit_packing as bits
from kvatlas.kernels import hadamard
from kvatlas.kernels.fp8_fp4_formats import (
    E4M3_MAX,
    from_nvfp4,
    not_finite_is_nan,
    to_fp8,
    to_nvfp4,
)
from kvatlas.specs import Attention
from kvatlas.specs.cell_content import sides

Side = Literal["k", "v"]
Fields = dict[str, torch.Tensor]

_LEAST = 1e-6
_TINY = 1e-12
_HALF_MAX = 65504.0


def encode(spec: Attention, side: Side, rows: torch.Tensor, *, scale: float = 1.0) -> Fields:
    """Quantise rows [..., D] of K or V; return a tensor for each field of that side.

    `scale` is the per-tensor scale of fp8 and nvfp4.
    """
    _check_size(spec, side, rows)
    check_scales(scale)
    cache = spec.cache
    if cache == "auto":
        return {side: rows.to(torch_dtype(DType.of(spec.dtype)))}
    if cache in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return {side: to_fp8(rows.float() / scale, e5m2=cache == "fp8_e5m2")}
    if cache == "int4_per_token_head":
        return _int4(side, rows)
    if cache.endswith("_per_token_head"):
        return _token_head(cache, side, rows.float())
    if cache == "nvfp4":
        data, step = to_nvfp4(rows.float(), scale)
        return {side: data, f"{side}_scale": step}
    return _turboquant(spec, side, rows.float())


def decode(spec: Attention, side: Side, fields: Fields, *, scale: float = 1.0) -> torch.Tensor:
    """Dequantise the fields that `encode` returned, to float32."""
    check_scales(scale)
    missing = [name for name in _field_names(spec, side) if name not in fields]
    if missing:
        problem, hint = (
            f"`fields` must contain all fields of {side.upper()}",
            "Pass all fields that encode returned",
        )
        got = f"fields without {', '.join(missing)}"
        raise AtlasError(Code.UNKNOWN_FIELD, problem, got=got, hint=hint)
    cache, data = spec.cache, fields[side]
    dim = _dim(spec, side)
    if cache == "auto":
        return data.float()
    if cache in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return data.float() * scale
    if cache == "int4_per_token_head":
        stored = fields[f"{side}_scale"].view(torch.int32)
        zero, step = stored & 15, (stored & ~15).view(torch.float32)
        return hadamard.rotate_signed_back((bits.unpack(data, 4, dim) - zero) * step)
    if cache.endswith("_per_token_head"):
        return data.float() * fields[f"{side}_scale"]
    if cache == "nvfp4":
        return from_nvfp4(data, fields[f"{side}_scale"], dim, scale)
    return _from_turboquant(spec, side, fields)


def _int4(side: Side, rows: torch.Tensor) -> Fields:
    """Quantise rotated rows to 4-bit codes, bit for bit as vLLM does, with one exception.

    If all elements of a rotated row have the same sign, the range is extended to include zero.
    vLLM's codes saturate in this case and lose the row.
    """
    # vLLM rounds the rotated row to the model's dtype before it quantises.
    rotated = hadamard.rotate_signed(rows.float()).to(rows.dtype).float()
    low = rotated.amin(-1, keepdim=True).clamp(max=0)
    high = rotated.amax(-1, keepdim=True).clamp(min=0)
    step = not_finite_is_nan(((high - low) / 15).clamp(min=_LEAST))
    zero = _codes(-low / step)
    codes = _codes(rotated * (1 / step) + zero).to(torch.uint8)
    # The zero point is stored in the lowest bits of the scale.
    stored = (step.view(torch.int32) & ~15) | zero.to(torch.int32)
    return {side: bits.pack(codes, 4), f"{side}_scale": stored.view(torch.float32)}


def round_away(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero.

    >>> round_away(torch.tensor([0.5, 2.5, -1.5])).tolist()
    [1.0, 3.0, -2.0]
    """
    return (values + torch.copysign(torch.full_like(values, 0.5), values)).trunc()


def _codes(values: torch.Tensor) -> torch.Tensor:
    return round_away(values).nan_to_num(0).clamp(0, 15)


def _token_head(cache: str, side: Side, rows: torch.Tensor) -> Fields:
    largest = rows.abs().amax(-1, keepdim=True)
    top = 127.0 if cache == "int8_per_token_head" else E4M3_MAX
    step = not_finite_is_nan((largest / top).clamp(min=_LEAST))
    scaled = rows * (1 / step)
    if cache == "int8_per_token_head":
        codes = round_away(scaled).nan_to_num(0).clamp(-128, 127).to(torch.int8)
    else:
        codes = to_fp8(scaled.nan_to_num(0))
    return {side: codes, f"{side}_scale": step}


def _turboquant(spec: Attention, side: Side, rows: torch.Tensor) -> Fields:
    width = _code_bits(spec, side)
    if width == 8:
        return {side: to_fp8(rows)}
    if side == "v":
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        top = (1 << width) - 1
        step = not_finite_is_nan((high - low) / top).clamp(6e-8, _HALF_MAX).half()
        zero = low.clamp(-_HALF_MAX, _HALF_MAX).half()
        codes = ((rows - zero.float()) / step.float()).round().nan_to_num(0).clamp(0, top)
        packed = bits.pack(codes.to(torch.uint8), width)
        return {"v": packed, "v_scale": step, "v_zero": zero}
    norm = not_finite_is_nan(rows.norm(dim=-1, keepdim=True))
    # After the rotation, elements of a row of norm 1 are nearly normal with variance 1 / D.
    unit = hadamard.rotate(rows) / norm.clamp(min=_TINY) * rows.shape[-1] ** 0.5
    levels = _levels(width, rows.device)
    codes = torch.bucketize(unit.nan_to_num(0), (levels[1:] + levels[:-1]) / 2)
    return {"k": bits.pack(codes, width), "k_scale": norm.clamp(max=_HALF_MAX).half()}


def _from_turboquant(spec: Attention, side: Side, fields: Fields) -> torch.Tensor:
    width, dim = _code_bits(spec, side), _dim(spec, side)
    if width == 8:
        return fields[side].float()
    codes = bits.unpack(fields[side], width, dim)
    if side == "v":
        return codes * fields["v_scale"].float() + fields["v_zero"].float()
    unit = _levels(width, codes.device)[codes.long()]
    # Rounding shortens a row; its norm is stored, so the length is restored.
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp(min=_TINY)
    return hadamard.rotate(unit) * fields["k_scale"].float()


@lru_cache(maxsize=8)
def normal_levels(bits: int) -> tuple[float, ...]:
    """Return the 2**bits levels that quantise a normal variable with the least squared error.

    They are computed by Lloyd's iteration: each level is the mean of an interval, and intervals
    meet half way between levels. Both steps have closed forms for a normal variable.

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


def _levels(width: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(normal_levels(width), dtype=torch.float32, device=device)


def _code_bits(spec: Attention, side: Side) -> int:
    dims = sides(spec.cache, DType.of(spec.dtype), spec.head_dim, spec.v_dim or spec.head_dim)
    return (dims.k if side == "k" else dims.v)[0].dtype.bits


def check_scales(*scales: float) -> None:
    """Raise an error for per-tensor scales that are not positive and finite."""
    for scale in scales:
        if not isinstance(scale, Real) or not 0.0 < scale < math.inf:
            problem, hint = (
                "A per-tensor scale must be a positive, finite number",
                "Pass 1.0 for no scaling",
            )
            raise AtlasError(Code.BAD_QUANTITY, problem, got=repr(scale), hint=hint)


@lru_cache(maxsize=1024)
def _field_names(spec: Attention, side: Side) -> tuple[str, ...]:
    """Return the names of the fields that store K or V."""
    if side not in ("k", "v"):
        problem, hint = "The side must be K or V", "Pass 'k' or 'v'"
        raise AtlasError(Code.UNKNOWN_FIELD, problem, got=repr(side), hint=hint)
    both = sides(spec.cache, DType.of(spec.dtype), spec.head_dim, _dim(spec, "v"))
    return tuple(row.name for row in (both.k if side == "k" else both.v))


def _dim(spec: Attention, side: Side) -> int:
    return spec.head_dim if side == "k" else spec.v_dim or spec.head_dim


def _check_size(spec: Attention, side: Side, rows: torch.Tensor) -> None:
    _field_names(spec, side)
    dim = _dim(spec, side)
    rotated_whole = spec.cache.startswith("turboquant")
    if rotated_whole and dim & (dim - 1):
        problem = f"The cache dtype {spec.cache} requires a head size that is a power of two"
        got, hint = f"a head size of {dim} for {side.upper()}", "Use another cache dtype"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if rows.shape[-1] != dim:
        problem = f"Rows of {side.upper()} must have {dim} elements, the head size"
        got, hint = f"rows of {rows.shape[-1]} elements", "Pass [tokens, heads, head size]"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
