"""Storage formats and row strides of K and V, in the form that kernels expect."""

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
from kvatlas.specs import Attention, LatentAttention
from kvatlas.specs.cell_content import sides

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
"""First compute capability with e4m3 conversions."""
WIDEST = 512
"""Maximum number of elements per row that the kernels support."""


class StorageFormat(NamedTuple):
    """Storage format of K or of V; a compile-time constant."""

    kind: str
    """Quantisation of elements; see `dequantise_device`."""
    element: Any
    """Type in which rows are loaded; uint8 for codes of fewer than 8 bits."""
    bits: int
    """Bits per element or code."""
    dim: int
    """Elements per row."""
    width: int
    """Columns of the tile into which a row is loaded; a power of two."""
    tile: int
    """Elements per tile of a row (packing `tiled_planes`); 0 if rows are not tiled."""
    unit: int
    """Elements per unit of row strides. `scale_unit` and `zero_unit` are those of scales and zero
    points."""
    scale_unit: int
    zero_unit: int
    rotation: int
    """Steps of the Hadamard transform: rows are rotated in blocks of 2**rotation elements."""
    ptx: bool
    """Whether to use PTX; False in Triton's interpreter and on AMD GPUs."""


class SideRows(NamedTuple):
    """Strides of the rows, scales and zero points of K or of V.

    If a format has no scales or no zero points, the strides of rows are repeated as placeholders.
    """

    rows: RowSteps
    scales: RowSteps
    zeros: RowSteps


class StoredSide(NamedTuple):
    """The storage format and the strides of K or of V of a layer."""

    format: StorageFormat
    at: SideRows


def width_of(dim: int) -> int:
    """Return the number of columns of a tile for rows of `dim` elements.

    >>> width_of(8), width_of(96), width_of(128)
    (16, 128, 128)
    """
    return max(16, int(triton.next_power_of_2(dim)))


def dot_of(q: torch.Tensor) -> Any:
    """Return the operand type of dot products with `q`."""
    if q.dtype not in _OF_TORCH:
        raise checks.no_kernel(
            "Queries must be float32, bfloat16 or float16", q.dtype, "Cast the queries first"
        )
    # The interpreter, which runs CPU tensors, has no bfloat16 dot product.
    return _OF_TORCH[q.dtype] if q.is_cuda else tl.float32


def stored_side(layer: LayerCache, side: str) -> StoredSide:
    """Return the storage format and strides of K or V (`side`) of an attention layer."""
    spec = layer.spec_as(Attention)
    check_chip(layer)
    kind, bits = _kind(spec.cache, spec.dtype, side)
    dim = spec.head_dim if side == "k" else spec.v_dim or spec.head_dim
    return _stored(layer.page, layer.kernel_blocks, side, kind, bits, dim, takes_ptx(layer))


def stored_latent(layer: LayerCache, name: str) -> StoredSide:
    """Return the storage format and strides of an MLA layer's latents or rotary parts (`name`)."""
    spec = layer.spec_as(LatentAttention)
    check_chip(layer)
    dim = spec.latent if name == "latent" else spec.rope
    kind = "records" if name == "latent" and spec.cache == "fp8_ds_mla" else "plain"
    return _stored(layer.page, layer.kernel_blocks, name, kind, 0, dim, takes_ptx(layer))


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
    """Raise an error if a layer stores e4m3 and the GPU cannot convert it."""
    if not takes_ptx(layer) or all(f.dtype.name != "e4m3" for f in layer.page.fields):
        return
    capability = tune.capability(layer.buffer.device)
    if capability < E4M3_SINCE:
        raise checks.no_kernel(
            "Caches with e4m3 elements require a GPU of compute capability 8.9 or higher",
            f"compute capability {'.'.join(str(n) for n in capability)}",
            "Use the cache dtype int8_per_token_head or auto",
        )


def writes_latent(spec: LatentAttention) -> bool:
    """Return whether the write kernel supports a spec: latents in the model's dtype or in fp8.

    >>> writes_latent(LatentAttention()), writes_latent(LatentAttention(cache="fp8_ds_mla"))
    (True, False)
    """
    return spec.cache in _LATENTS and spec.latent <= WIDEST


def attends_latent(spec: LatentAttention) -> bool:
    """Return whether the attention kernel supports a spec.

    Sizes must be powers of two. Latents are in the model's dtype, in fp8 with one scale, or in
    DeepSeek-V3.2's records.

    >>> attends_latent(LatentAttention()), attends_latent(LatentAttention(latent=448))
    (True, False)
    >>> attends_latent(LatentAttention(cache="fp8_ds_mla"))
    True
    """
    sizes = spec.latent, spec.rope
    known = spec.cache in _LATENTS or (spec.cache, spec.version) == ("fp8_ds_mla", "v3")
    fits = spec.latent <= WIDEST and all(size >= 16 and not size & (size - 1) for size in sizes)
    return known and fits


def takes_ptx(layer: LayerCache) -> bool:
    """Return whether kernels on a layer's device may use PTX."""
    return device_takes_ptx(layer.buffer.device)


def device_takes_ptx(device: torch.device) -> bool:
    """Return whether kernels on a device may use PTX, which only NVIDIA GPUs execute."""
    return device.type == "cuda" and torch.version.hip is None


@lru_cache(maxsize=256)
def _kind(cache: str, dtype: str, side: str) -> tuple[str, int]:
    """Return (quantisation kind, bits per stored element) of K or V (`side`)."""
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
    """Raise an error if kernels do not support rows of `dim` elements for field `name`."""
    if not 1 <= dim <= WIDEST:
        raise checks.no_kernel(
            f"GPU kernels require rows of {name} with 1 to {WIDEST} elements",
            f"{dim} elements",
            "Allocate the cache on a CPU, where the length of rows has no limit",
        )
