"""Zero-copy views in the shapes that attention backends expect.

Each function returns tensors that share the pool's storage and have the shape that one backend
expects. K and V can be stacked on one axis; the stride of this axis is the distance between K and
V. If a layout does not allow the shape without a copy, the function raises an error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kvatlas.cache.cache import LayerCache
from kvatlas.cache.tensors import torch_dtype, view
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement, append, stack

Order = Literal["NHD", "HND"]

_AXES = {"NHD": ("B", "N", "H", "C"), "HND": ("B", "H", "N", "C")}


class KV(NamedTuple):
    """A view of K and a view of V."""

    k: torch.Tensor
    v: torch.Tensor


class Strided(NamedTuple):
    """Arguments for a kernel that takes strides: a buffer, axis sizes, and strides in bytes."""

    base: torch.Tensor
    """The bytes of the pool, starting at the first element of the field."""
    sizes: dict[str, int]
    strides: dict[str, int]


def flash_attention(layer: LayerCache) -> KV:
    """Return K and V as [B, N, H, D], for FlashAttention."""
    return flashinfer(layer, "NHD")


def flashinfer(layer: LayerCache, order: Order) -> KV:
    """Return K and V as [B, N, H, D] or [B, H, N, D], for FlashInfer."""
    return KV(_view(layer, "k", _AXES[order]), _view(layer, "v", _AXES[order]))


def flashinfer_packed(layer: LayerCache, order: Order) -> torch.Tensor:
    """Return K and V in one tensor, [B, 2, N, H, D] or [B, 2, H, N, D], for FlashInfer."""
    return _together(layer, "k", "v", _AXES[order])


class Quantised(NamedTuple):
    """A view of quantised elements and a view of their scales. Both have one axis for K and V."""

    data: torch.Tensor
    scales: torch.Tensor


def flashinfer_nvfp4(layer: LayerCache, order: Order = "HND") -> Quantised:
    """Return data [B, 2, H, N, D/2] and scales [B, 2, H, N, D/16] of an nvfp4 cache.

    In order NHD, axes H and N are swapped.
    """
    data = _together(layer, "k", "v", _AXES[order])
    return Quantised(data, _together(layer, "k_scale", "v_scale", _AXES[order]))


def scales(layer: LayerCache) -> KV:
    """Return the scales of K and of V as [B, N, H], one per token and head.

    int8, fp8 and int4 kernels expect scales in this shape.
    """
    k, v = (_view(layer, name, _AXES["NHD"]) for name in ("k_scale", "v_scale"))
    if k.shape[-1] != 1 or v.shape[-1] != 1:
        got = f"{k.shape[-1]} scales per token and head in {layer.name}"
        hint = "Use flashinfer_nvfp4 for block scales"
        raise AtlasError(
            Code.BAD_AXES, "This adapter requires one scale per token and head", got=got, hint=hint
        )
    return KV(k.squeeze(-1), v.squeeze(-1))


def flex_attention(layer: LayerCache) -> KV:
    """Return K and V as [B * N, H, D], for FlexAttention."""
    k, v = (_flat_states(layer, name, layer.place(name)) for name in "kv")
    return KV(k, v)


def sdpa(layer: LayerCache, first: int, blocks: int) -> KV:
    """Return K and V of blocks first .. first + blocks - 1 as [1, H, blocks * N, D], for SDPA."""
    chosen = ((name, layer.place(name).narrow("B", first, blocks)) for name in "kv")
    k, v = (_flat_states(layer, name, placed).transpose(0, 1)[None] for name, placed in chosen)
    return KV(k, v)


def triton(layer: LayerCache, name: str) -> Strided:
    """Return the bytes of the pool from the start of field `name`, and the field's strides.

    The result has the size and the byte stride of each axis of the field.
    """
    placed = layer.place(name)
    return Strided(
        layer.buffer[placed.offset :],
        dict(zip(placed.axes, placed.sizes, strict=True)),
        dict(zip(placed.axes, placed.strides, strict=True)),
    )


def rocm_planes(layer: LayerCache) -> KV:
    """Return K as [B, H, D/x, N, x] and V as [B, H, D, N], for ROCm; x elements are 16 bytes."""
    return KV(_view(layer, "k", ("B", "H", "C", "N", "c")), _view(layer, "v", ("B", "H", "C", "N")))


def cpu_attention(layer: LayerCache) -> KV:
    """Return K as [B, H, D, N] and V as [B, H, N, D], for vLLM's CPU attention."""
    k = _view(layer, "k", ("B", "H", "C", "N"))
    if k.stride(-1) != 1 and k.shape[-1] > 1:
        problem = "vLLM's CPU attention requires K as [D, N] with a stride of 1 along N"
        got = f"a stride of {k.stride(-1)} elements in {layer.name}"
        hint = "Pass backend='CPU_ATTN' to plan(), or packing='transposed' to the spec"
        raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=got, hint=hint)
    return KV(k, _view(layer, "v", _AXES["HND"]))


def latent(layer: LayerCache) -> torch.Tensor:
    """Return the latent and rotary parts as one tensor [B, N, latent + rope], for MLA kernels."""
    row = append(layer.place("latent"), layer.place("rope"), axis="C")
    return view(layer.buffer, row, _dtype(layer, "latent"))


def mamba(layer: LayerCache, order: Literal["SD", "DS"]) -> tuple[torch.Tensor, ...]:
    """Return the states of a recurrent layer, such as `conv` and `ssm`, in the page's field order.

    The conv state has the shape [B, taps, rows] (SD) or [B, rows, taps] (DS). A tap is one
    stored input, and a row is one channel.
    """
    axes = ("B", "T", "R") if order == "SD" else ("B", "R", "T")
    states = {field.name: layer.field(field.name) for field in layer.page.fields}
    if "conv" in states:
        states["conv"] = _view(layer, "conv", axes)
    return tuple(states.values())


def _dtype(layer: LayerCache, name: str) -> torch.dtype:
    return torch_dtype(layer.page.field(name).dtype)


def _view(layer: LayerCache, name: str, axes: tuple[str, ...]) -> torch.Tensor:
    return view(layer.buffer, _place(layer, name, axes), _dtype(layer, name))


def _place(layer: LayerCache, name: str, axes: tuple[str, ...]) -> Placement:
    placed = layer.place(name)
    if set(axes) != set(placed.axes):
        problem = f"This adapter needs field {name} with the axes {', '.join(axes)}"
        got = f"axes {', '.join(placed.axes)} in {layer.name}"
        hint = "Use the adapter of the backend for which this layer was planned"
        raise AtlasError(Code.BAD_AXES, problem, got=got, hint=hint)
    return placed.reorder(*axes)


def _together(layer: LayerCache, first: str, second: str, axes: tuple[str, ...]) -> torch.Tensor:
    """Return fields `first` and `second` in one tensor, stacked on a new axis of size 2 after B.

    The two fields must have equal strides.
    """
    a, b = (_place(layer, name, axes) for name in (first, second))
    return view(layer.buffer, stack(a, b, axis="kv", behind="B"), _dtype(layer, first))


def _flat_states(layer: LayerCache, name: str, placed: Placement) -> torch.Tensor:
    """Return field `name`, whose placement is `placed`, as a tensor [B * N, H, D]."""
    try:
        folded = placed.fold("B", "N")
    except AtlasError as refusal:
        problem = "B and N cannot form one axis: states of consecutive blocks are not contiguous"
        hint = "Plan with layout='LBNHC', or use an adapter that keeps the block axis"
        got = f"{placed} of {layer.name}"
        raise AtlasError(Code.NOT_FOLDABLE, problem, got=got, hint=hint) from refusal
    return view(layer.buffer, folded.reorder("B*N", "H", "C"), _dtype(layer, name))
