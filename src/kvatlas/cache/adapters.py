"""The shapes that attention backends take today, as views.

Each function returns tensors in a backend's own shape, sharing the pool's storage.
K and V are affine in the same coordinates, so putting them on one axis is affine too:
its stride is the distance between them. Where a shape is not affine in a layout, the
function refuses and names a layout in which it is.
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
    """K and V, each a view."""

    k: torch.Tensor
    v: torch.Tensor


class Strided(NamedTuple):
    """What a stride-driven kernel takes: a pointer, and byte strides by axis."""

    base: torch.Tensor
    """Bytes from the field's first element on."""
    sizes: dict[str, int]
    strides: dict[str, int]


def flash_attention(layer: LayerCache) -> KV:
    """K and V as [B, N, H, D]: FlashAttention, and vLLM's name for it."""
    return flashinfer(layer, "NHD")


def flashinfer(layer: LayerCache, order: Order) -> KV:
    """K and V as a tuple, [B, N, H, D] or [B, H, N, D]."""
    return KV(_view(layer, "k", _AXES[order]), _view(layer, "v", _AXES[order]))


def flashinfer_packed(layer: LayerCache, order: Order) -> torch.Tensor:
    """K and V on one axis: [B, 2, N, H, D] or [B, 2, H, N, D]."""
    return _together(layer, "k", "v", _AXES[order])


class Quantised(NamedTuple):
    """Codes and their scales, each a view with K and V on one axis."""

    data: torch.Tensor
    scales: torch.Tensor


def flashinfer_nvfp4(layer: LayerCache, order: Order = "HND") -> Quantised:
    """Data [B, 2, H, N, D/2] and scales [B, 2, H, N, D/16] of an nvfp4 cache; N, H in NHD."""
    data = _together(layer, "k", "v", _AXES[order])
    return Quantised(data, _together(layer, "k_scale", "v_scale", _AXES[order]))


def scales(layer: LayerCache) -> KV:
    """Scales for each token and head as [B, N, H]: int8, fp8 and int4 kernels."""
    k, v = (_view(layer, name, _AXES["NHD"]) for name in ("k_scale", "v_scale"))
    if k.shape[-1] != 1 or v.shape[-1] != 1:
        got = f"{k.shape[-1]} of them in {layer.name}"
        hint = "Use flashinfer_nvfp4 for block scales"
        raise AtlasError(Code.BAD_AXES, "A row has more than one scale", got=got, hint=hint)
    return KV(k.squeeze(-1), v.squeeze(-1))


def flex_attention(layer: LayerCache) -> KV:
    """K and V as [B * N, H, D]: states of all blocks on one axis."""
    k, v = (_flat_states(layer, name, layer.place(name)) for name in "kv")
    return KV(k, v)


def sdpa(layer: LayerCache, first: int, blocks: int) -> KV:
    """K and V of neighbouring blocks as [1, H, blocks * N, D], for torch's own attention."""
    chosen = ((name, layer.place(name).narrow("B", first, blocks)) for name in "kv")
    k, v = (_flat_states(layer, name, placed).transpose(0, 1)[None] for name, placed in chosen)
    return KV(k, v)


def triton(layer: LayerCache, name: str) -> Strided:
    """A field's bytes from its first element on, and its strides."""
    placed = layer.place(name)
    return Strided(
        layer.buffer[placed.offset :],
        dict(zip(placed.axes, placed.sizes, strict=True)),
        dict(zip(placed.axes, placed.strides, strict=True)),
    )


def rocm_planes(layer: LayerCache) -> KV:
    """K as [B, H, D/x, N, x] of 16-byte tiles and V as [B, H, D, N]."""
    return KV(_view(layer, "k", ("B", "H", "C", "N", "c")), _view(layer, "v", ("B", "H", "C", "N")))


def cpu_attention(layer: LayerCache) -> KV:
    """K as [B, H, D, N] and V as [B, H, N, D]: vLLM's CPU attention, and what is packed like it."""
    k = _view(layer, "k", ("B", "H", "C", "N"))
    if k.stride(-1) != 1 and k.shape[-1] > 1:
        problem = "CPU attention needs the states of one element side by side"
        got = f"states {k.stride(-1)} elements apart in {layer.name}"
        raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=got, hint="Use packing transposed")
    return KV(k, _view(layer, "v", _AXES["HND"]))


def latent(layer: LayerCache) -> torch.Tensor:
    """Latent and rotary part as one row, [B, N, latent + rope]: MLA kernels."""
    row = append(layer.place("latent"), layer.place("rope"), axis="C")
    return view(layer.buffer, row, _dtype(layer, "latent"))


def mamba(layer: LayerCache, order: Literal["SD", "DS"]) -> tuple[torch.Tensor, ...]:
    """The states of a recurrent layer; conv as [B, taps, rows] (SD) or [B, rows, taps] (DS)."""
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
        problem = f"The backend's shape has other axes than {name}: {axes}"
        hint = "Use the adapter of the packing that the layer has"
        raise AtlasError(Code.BAD_AXES, problem, got=placed.axes, hint=hint)
    return placed.reorder(*axes)


def _together(layer: LayerCache, first: str, second: str, axes: tuple[str, ...]) -> torch.Tensor:
    """Two fields on one axis behind B, where they differ by a constant distance alone."""
    a, b = (_place(layer, name, axes) for name in (first, second))
    return view(layer.buffer, stack(a, b, axis="kv", behind="B"), _dtype(layer, first))


def _flat_states(layer: LayerCache, name: str, placed: Placement) -> torch.Tensor:
    """A field of some blocks as [B * N, H, D]."""
    try:
        folded = placed.fold("B", "N")
    except AtlasError as refusal:
        problem = "States of all blocks are not one axis: blocks do not follow state by state"
        hint = "Use LBNHC, or an adapter that keeps blocks"
        got = f"{placed} of {layer.name}"
        raise AtlasError(Code.NOT_FOLDABLE, problem, got=got, hint=hint) from refusal
    return view(layer.buffer, folded.reorder("B*N", "H", "C"), _dtype(layer, name))
