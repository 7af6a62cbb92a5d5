"""K and V of a batch into the pages that slots name, quantised on the way, in one launch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton

from kvatlas.cache import LayerCache
from kvatlas.kernels.hadamard import signs
from kvatlas.kernels.quantise import normal_levels
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton import storage_formats as forms
from kvatlas.kernels.triton.dependent_launch_device import early
from kvatlas.kernels.triton.storage_formats import Stored
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
    forms.refuse_head(spec.head_dim, "K")
    forms.refuse_head(v_dim, "V")
    odd = any(n & (n - 1) or n < 16 for n in (spec.head_dim, v_dim))
    if spec.cache.startswith("turboquant") and odd:
        raise checks.no_kernel(
            "Rows that are rotated are of a power of two, 16 at least",
            f"heads of {spec.head_dim} and {v_dim} in {spec.cache}",
            "Use another cache dtype",
        )
    checks.rows_of(k, "k", (slots.shape[0], heads, spec.head_dim))
    checks.rows_of(v, "v", (slots.shape[0], heads, v_dim))
    sides = forms.stored(layer, spec, "k"), forms.stored(layer, spec, "v")
    per_tensor = spec.cache in ("fp8", "fp8_e4m3", "fp8_e5m2")
    scales = (k_scale, v_scale) if per_tensor or spec.cache == "nvfp4" else (1.0, 1.0)
    _write(layer, k, v, slots, sides, heads, scales, per_tensor, choice)


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
    forms.refuse_head(spec.latent, "the latent")
    if not forms.writes_latent(spec):
        raise checks.no_kernel(
            "Latents stand for themselves or have one scale", spec.cache, "Use auto or fp8"
        )
    checks.rows_of(latent, "latent", (slots.shape[0], spec.latent))
    checks.rows_of(rope, "rope", (slots.shape[0], spec.rope))
    sides = forms.plain(layer, "latent"), forms.plain(layer, "rope")
    _write(
        layer, latent.unsqueeze(1), rope.unsqueeze(1), slots, sides, 1, (kv_scale, kv_scale),
        spec.cache != "auto", choice,
    )  # fmt: skip


def _write(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    sides: tuple[Stored, Stored],
    heads: int,
    scales: tuple[float, float],
    per_tensor: bool,
    choice: dict[str, Any],
) -> None:
    device = checks.same_device(layer.buffer.device, k=k, v=v, slots=slots)
    states = layer.kernel_blocks.size("N")
    checks.in_range(slots.clamp(min=0) if checks.debugging() else slots,
                    layer.kernel_blocks.size("B") * states, "Slots")  # fmt: skip
    dim, v_dim = k.shape[-1], v.shape[-1]
    width, v_width = (max(16, int(triton.next_power_of_2(n))) for n in (dim, v_dim))
    use = {**tune.choose("write", device, kind=sides[0].form.kind), **choice}
    count = max(1, use["tile"] // max(width, v_width))
    if not slots.shape[0]:
        return
    # What a row is turned by: signs of int4, the ends of a level's cell for codes of levels.
    given, blocks = [slots, slots], [width, v_width]
    if sides[0].form.kind == "levels":
        given[0] = _bounds(sides[0].form.bits, device)
    if sides[0].form.kind == "int4":
        blocks = [dim & -dim, v_dim & -v_dim]
        given = [signs(block, device) for block in blocks]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        write_rows[(triton.cdiv(slots.shape[0] * heads, count),)](
            k, (k.stride(0), k.stride(1)), v, (v.stride(0), v.stride(1)), slots, slots.shape[0],
            layer.buffer, sides[0].at, sides[0].scale_at, sides[1].at, sides[1].scale_at,
            sides[1].zero_at, *given, *scales, K_FORM=tuple(sides[0].form),
            V_FORM=tuple(sides[1].form), HEADS=heads, STATES=states, COUNT=count, DIM=dim,
            WIDTH=width, STEPS=blocks[0].bit_length() - 1, V_DIM=v_dim, V_WIDTH=v_width,
            V_STEPS=blocks[1].bit_length() - 1, PER_TENSOR=per_tensor,
            num_warps=use["warps"], **early(device),
            # A fused product and sum rounds once, and codes would differ from torch's.
            enable_fp_fusion=sides[0].form.kind not in ("scaled", "int4"),
        )  # fmt: skip


@lru_cache(maxsize=16)
def _bounds(width: int, device: torch.device) -> torch.Tensor:
    """Where the cells of a code's levels end."""
    levels = torch.tensor(normal_levels(width), dtype=torch.float32)
    return ((levels[1:] + levels[:-1]) / 2).to(device)
