"""How a layer's K and V are stored, as kernels take it: where rows lie, and in what format."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.geometry import DType, Page, Placement
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import RowSteps, field_rows
from kvatlas.specs import Attention, LatentAttention, sides

ELEMENTS: dict[str, Any] = {
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
E4M3_SINCE = (8, 9)
"""Compute capability of the first chips that convert e4m3."""
WIDEST = 512
"""Elements of the longest row that a program holds."""


class StorageFormat(NamedTuple):
    """How one side is stored: a constant that kernels are compiled for."""

    kind: str
    """How elements are quantised: see `dequantise_device`."""
    element: Any
    """The type in which rows are loaded: bytes for codes."""
    bits: int
    """Bits of an element or a code."""
    dim: int
    """Elements of a row."""
    width: int
    """Columns of the tile that holds a row: a power of two."""
    tile: int
    """Elements of a tile of a row (`tiled_planes`), or 0."""
    unit: int
    """Elements in a unit of the rows' steps; so for scales and for zero points."""
    scale_unit: int
    zero_unit: int
    rotation: int
    """Steps of the Hadamard transform: rows are rotated in blocks of 2**rotation elements."""
    ptx: bool
    """Whether the device takes PTX: not where Triton interprets."""


class SideRows(NamedTuple):
    """Where the rows of one side lie, their scales and zero points; rows again where none are."""

    rows: RowSteps
    scales: RowSteps
    zeros: RowSteps


class StoredSide(NamedTuple):
    """One side of a layer: its format, and where it lies."""

    format: StorageFormat
    at: SideRows


def width_of(dim: int) -> int:
    """Columns of the tile that holds rows of so many elements.

    >>> width_of(8), width_of(96), width_of(128)
    (16, 128, 128)
    """
    return max(16, int(triton.next_power_of_2(dim)))


def dot_of(q: torch.Tensor) -> Any:
    """The type of a dot's operands for queries like these."""
    if q.dtype not in _OF_TORCH:
        raise checks.no_kernel(
            "Queries are neither float32, bfloat16 nor float16", q.dtype, "Cast them first"
        )
    # The interpreter, which is what runs on CPU tensors, has no dot of bfloat16.
    return _OF_TORCH[q.dtype] if q.is_cuda else tl.float32


def stored_side(layer: LayerCache, side: str) -> StoredSide:
    """One side of an attention layer, as kernels take it."""
    spec = layer.spec_as(Attention)
    check_chip(layer)
    kind, bits = _kind(spec.cache, spec.dtype, side)
    dim = spec.head_dim if side == "k" else spec.v_dim or spec.head_dim
    return _stored(layer.page, layer.kernel_blocks, side, kind, bits, dim, takes_ptx(layer))


def stored_latent(layer: LayerCache, name: str) -> StoredSide:
    """The latent or the rotary rows of an MLA layer, whose elements stand for themselves."""
    spec = layer.spec_as(LatentAttention)
    check_chip(layer)
    dim = spec.latent if name == "latent" else spec.rope
    return _stored(layer.page, layer.kernel_blocks, name, "plain", 0, dim, takes_ptx(layer))


@lru_cache(maxsize=4096)
def _stored(
    page: Page, placed: Placement, name: str, kind: str, bits: int, dim: int, ptx: bool
) -> StoredSide:
    names = {field.name for field in page.fields}
    rows = field_rows(page, placed, name)
    scales, zeros = (
        field_rows(page, placed, other) if other in names else rows
        for other in (f"{name}_scale", f"{name}_zero")
    )
    width = width_of(dim)
    rotated = {"int4": dim & -dim, "levels": width}.get(kind, 1)
    element = ELEMENTS.get(page.field(name).dtype.name, tl.uint8)
    return StoredSide(
        StorageFormat(
            kind, element, bits, dim, width, rows.tile, rows.unit,
            scales.unit, zeros.unit,
            rotated.bit_length() - 1, ptx,
        ),
        SideRows(rows.steps, scales.steps, zeros.steps),
    )  # fmt: skip


def check_chip(layer: LayerCache) -> None:
    """Refuse e4m3 that the chip cannot convert."""
    if not takes_ptx(layer) or all(f.dtype.name != "e4m3" for f in layer.page.fields):
        return
    capability = tune.capability(layer.buffer.device)
    if capability < E4M3_SINCE:
        raise checks.no_kernel(
            "This chip cannot convert e4m3, which needs compute capability 8.9",
            ".".join(str(n) for n in capability),
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


def takes_ptx(layer: LayerCache) -> bool:
    """Whether kernels on a layer's device may be written in PTX."""
    return device_takes_ptx(layer.buffer.device)


def device_takes_ptx(device: torch.device) -> bool:
    """Whether kernels on a device may be written in PTX: not where Triton interprets."""
    return device.type == "cuda" and torch.version.hip is None


@lru_cache(maxsize=256)
def _kind(cache: str, dtype: str, side: str) -> tuple[str, int]:
    """How a side of a cache dtype is quantised, and the bits of its elements or codes."""
    both = sides(cache, DType.of(dtype), 128, 128)
    data = (both.k if side == "k" else both.v)[0].dtype
    if cache == "int4_per_token_head":
        return "int4", 4
    if cache.endswith("_per_token_head"):
        return "scaled", 8
    if cache == "nvfp4":
        return "nvfp4", 4
    if cache.startswith("turboquant") and data.bits < 8:
        return ("levels" if side == "k" else "range"), data.bits
    return "plain", data.bits


def refuse_head(dim: int, name: str) -> None:
    """Refuse rows that no tile is wide enough for."""
    if not 1 <= dim <= WIDEST:
        raise checks.no_kernel(
            f"A row of {name} is longer than {WIDEST} elements",
            f"{dim} elements",
            "Split the head, or attend with the CPU's kernels",
        )
