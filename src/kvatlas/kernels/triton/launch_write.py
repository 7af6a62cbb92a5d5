"""K and V of a batch into the pages that slots name, quantised on the way, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from kvatlas.cache import LayerCache
from kvatlas.kernels.hadamard import signs
from kvatlas.kernels.quantise import normal_levels
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import BatchRows, batch_rows
from kvatlas.kernels.triton.storage_formats import SideRows, StorageFormat, StoredSide
from kvatlas.kernels.triton.write_device import write_rows
from kvatlas.specs import Attention, LatentAttention


def write(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **choice: Any,
) -> None:
    """K and V [tokens, heads, D] into the states that `slots` name, quantised on the way.

    A slot is block * N + state, as engines number them; a negative one is skipped. K and V
    may be slices of a fused projection: only their last axis must be contiguous.
    """
    spec = layer.spec_as(Attention)
    checks.integers(slots, "slots", axes=1)
    heads, v_dim = layer.place("k").size("H"), spec.v_dim or spec.head_dim
    formats.refuse_head(spec.head_dim, "K")
    formats.refuse_head(v_dim, "V")
    odd = any(n & (n - 1) or n < 16 for n in (spec.head_dim, v_dim))
    if spec.cache.startswith("turboquant") and odd:
        raise checks.no_kernel(
            "Rows cannot be rotated: their length is no power of two, or less than 16",
            f"heads of {spec.head_dim} and {v_dim} in {spec.cache}",
            "Use another cache dtype",
        )
    checks.rows_of(k, "k", (slots.shape[0], heads, spec.head_dim))
    checks.rows_of(v, "v", (slots.shape[0], heads, v_dim))
    stored = formats.stored_side(layer, "k"), formats.stored_side(layer, "v")
    per_tensor = spec.cache in ("fp8", "fp8_e4m3", "fp8_e5m2")
    scales = (k_scale, v_scale) if per_tensor or spec.cache == "nvfp4" else (1.0, 1.0)
    _write(layer, (k, v), slots, stored, scales, per_tensor, choice)


def write_latent(
    layer: LayerCache,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scale: float = 1.0,
    **choice: Any,
) -> None:
    """Latent and rotary rows [states, elements] into the states that `slots` name."""
    spec = layer.spec_as(LatentAttention)
    checks.integers(slots, "slots", axes=1)
    formats.refuse_head(spec.latent, "the latent")
    if not formats.writes_latent(spec):
        raise checks.no_kernel(
            "Latents have scales by blocks, or are too long", spec.cache, "Use auto or fp8"
        )
    checks.rows_of(latent, "latent", (slots.shape[0], spec.latent))
    checks.rows_of(rope, "rope", (slots.shape[0], spec.rope))
    stored = tuple(formats.stored_latent(layer, name) for name in ("latent", "rope"))
    rows = latent.unsqueeze(1), rope.unsqueeze(1)
    _write(layer, rows, slots, stored, (kv_scale, kv_scale), spec.cache != "auto", choice)


class WrittenSide(NamedTuple):
    """New rows of K or of V, and where they go."""

    rows: BatchRows
    at: SideRows
    scale: float
    """One for the whole tensor."""
    table: torch.Tensor
    """What codes come from: signs of int4's rotation, the ends of levels' cells."""


def _write(
    layer: LayerCache,
    rows: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    stored: tuple[StoredSide, ...],
    scales: tuple[float, float],
    per_tensor: bool,
    choice: dict[str, Any],
) -> None:
    k, v = (side.format for side in stored)
    device = checks.same_device(layer.buffer.device, k=rows[0], v=rows[1], slots=slots)
    states, heads = layer.kernel_blocks.size("N"), rows[0].shape[1]
    if checks.debugging():
        checks.in_range(slots.clamp(min=0), layer.kernel_blocks.size("B") * states, "Slots")
    use = {**tune.choose("write", device, kind=k.kind), **choice}
    count = max(1, use["tile"] // max(k.width, v.width))
    if not slots.shape[0]:
        return
    sides = [
        WrittenSide(batch_rows(new), side.at, scale, _table(side.format, slots))
        for new, side, scale in zip(rows, stored, scales, strict=True)
    ]
    with tune.on(device):
        write_rows[(triton.cdiv(slots.shape[0] * heads, count),)](
            *sides, slots, slots.shape[0], layer.buffer, K_FORMAT=k, V_FORMAT=v, HEADS=heads,
            STATES=states, COUNT=count, PER_TENSOR=per_tensor, num_warps=use["warps"],
            **tune.dependent_launch(device),
            # A fused product and sum rounds once, and codes would differ from torch's.
            enable_fp_fusion=k.kind not in ("scaled", "int4"),
        )  # fmt: skip


def _table(form: StorageFormat, unused: torch.Tensor) -> torch.Tensor:
    if form.kind == "int4":
        return signs(1 << form.rotation, unused.device)
    return _bounds(form.bits, unused.device) if form.kind == "levels" else unused


@lru_cache(maxsize=16)
def _bounds(width: int, device: torch.device) -> torch.Tensor:
    """Where the cells of a code's levels end."""
    levels = torch.tensor(normal_levels(width), dtype=torch.float32)
    return ((levels[1:] + levels[:-1]) / 2).to(device)
