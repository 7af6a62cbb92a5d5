"""What kernels are told of a layer's K and V: where they lie, and how they are stored."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.geometry import DType
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import rows
from kvatlas.specs import Attention, LatentAttention, sides

_ELEMENTS: dict[str, Any] = {
    "fp32": tl.float32,
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "e4m3": tl.float8e4nv,
    "e5m2": tl.float8e5,
    "int8": tl.int8,
}
_OF_TORCH: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_LATENTS = ("auto", "fp8", "fp8_e4m3")

_E4M3_SINCE = (8, 9)
WIDEST = 512
"""Elements of the longest row that a program holds."""


class Form(NamedTuple):
    """How one side is stored; kernels take it as a constant."""

    kind: str
    element: Any
    unit: int
    scale_unit: int
    zero_unit: int
    bits: int
    assembly: bool
    """Whether the device takes PTX: not where Triton interprets."""
    tile: int
    """Elements of a tile of a row, or 0."""


class Stored(NamedTuple):
    """One side of a layer: its form, and where rows, scales and zero points lie."""

    form: Form
    at: tuple[int, ...]
    scale_at: tuple[int, ...]
    zero_at: tuple[int, ...]


def element_of(dtype: DType) -> Any:
    """The type in which a kernel loads a field's items; bytes for codes."""
    return _ELEMENTS.get(dtype.name, tl.uint8)


def dot_of(q: torch.Tensor) -> Any:
    """The type of a dot's operands for queries like these."""
    if q.dtype not in _OF_TORCH:
        raise checks.no_kernel(
            "Queries are float32, bfloat16 or float16", q.dtype, "Cast them before the call"
        )
    # The interpreter, which is what runs on CPU tensors, has no dot of bfloat16.
    return _OF_TORCH[q.dtype] if q.is_cuda else tl.float32


def stored(layer: LayerCache, spec: Attention, side: str) -> Stored:
    """One side of an attention layer, as kernels take it."""
    _refuse_old_chip(layer)
    kind, element, width = _kind(spec.cache, spec.dtype, side)
    found = rows(layer, side)
    names = {field.name for field in layer.page.fields}
    at = (*found.steps, *found.content)
    scale_at, scale_unit = _at(layer, f"{side}_scale") if f"{side}_scale" in names else (at, 1)
    zero_at, zero_unit = _at(layer, f"{side}_zero") if f"{side}_zero" in names else (at, 1)
    form = Form(
        kind, element, found.unit, scale_unit, zero_unit, width, _takes_ptx(layer), found.tile
    )
    return Stored(form, at, scale_at, zero_at)


def plain(layer: LayerCache, name: str) -> Stored:
    """A field whose elements stand for themselves."""
    _refuse_old_chip(layer)
    at, unit = _at(layer, name)
    element = element_of(layer.page.field(name).dtype)
    return Stored(Form("plain", element, unit, 1, 1, 0, _takes_ptx(layer), 0), at, at, at)


def _refuse_old_chip(layer: LayerCache) -> None:
    """Refuse e4m3, as elements or as scales, where the chip cannot convert it."""
    if not _takes_ptx(layer) or all(f.dtype.name != "e4m3" for f in layer.page.fields):
        return
    found = tune.capability(layer.buffer.device)
    if found < _E4M3_SINCE:
        raise checks.no_kernel(
            "Caches with e4m3 want compute capability 8.9",
            ".".join(str(n) for n in found),
            "Use int8_per_token_head, or auto",
        )


def writes_latent(spec: LatentAttention) -> bool:
    """Whether a kernel writes such latents: those that stand for themselves or have one scale.

    >>> writes_latent(LatentAttention()), writes_latent(LatentAttention(cache="fp8_ds_mla"))
    (True, False)
    """
    return spec.cache in _LATENTS and spec.latent <= WIDEST


def attends_latent(spec: LatentAttention) -> bool:
    """Whether a kernel attends to such latents: those that one writes, in rows as dots want them.

    >>> attends_latent(LatentAttention()), attends_latent(LatentAttention(latent=448))
    (True, False)
    """
    sizes = spec.latent, spec.rope
    return writes_latent(spec) and all(size >= 16 and not size & (size - 1) for size in sizes)


def _takes_ptx(layer: LayerCache) -> bool:
    return layer.buffer.is_cuda and torch.version.hip is None


def _at(layer: LayerCache, name: str) -> tuple[tuple[int, ...], int]:
    found = rows(layer, name)
    return (*found.steps, *found.content), found.unit


@lru_cache(maxsize=256)
def _kind(cache: str, dtype: str, side: str) -> tuple[str, Any, int]:
    both = sides(cache, DType.of(dtype), 128, 128)
    data = (both.k if side == "k" else both.v)[0].dtype
    if cache == "int4_per_token_head":
        return "int4", tl.uint8, 4
    if cache.endswith("_per_token_head"):
        return "scaled", element_of(data), 8
    if cache == "nvfp4":
        return "nvfp4", tl.uint8, 4
    if cache.startswith("turboquant") and data.bits < 8:
        return ("levels" if side == "k" else "range"), tl.uint8, data.bits
    return "plain", element_of(data), data.bits


def refuse_head(dim: int, name: str) -> None:
    """Refuse rows that no tile is wide enough for."""
    if not 1 <= dim <= WIDEST:
        raise checks.no_kernel(
            f"A row of {name} is of at most {WIDEST} elements",
            f"{dim} elements",
            "Split the head, or attend with the CPU's kernels",
        )
