"""K and V of attention layers, written and read by slots, quantised on the way."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.kv_formats import decode, encode
from kvatlas.kernels.slot_rows import (
    by_row,
    find_slots,
    kept_slots,
    read_fields,
    take_rows,
    write_fields,
)
from kvatlas.specs import Attention


def write(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """K and V [tokens, heads, D] into the states that `slots` name, quantised on the way.

    A slot is block * N + state, as engines number them; a negative one is skipped. Every
    packing is written where it lies, tiled and transposed keys too. Cross attention
    writes the encoder's tokens once in the same way.
    """
    if gpu := gpu_kernels(layer.buffer):
        gpu.write(layer, k, v, slots, k_scale=k_scale, v_scale=v_scale)
        return
    spec = layer.spec_as(Attention)
    slots, k, v = kept_slots(slots, k, v)
    found = find_slots(layer, slots)
    write_fields(layer, found, encode(spec, "k", k, scale=k_scale))
    write_fields(layer, found, encode(spec, "v", v, scale=v_scale))


def read(
    layer: LayerCache,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the states that `slots` name, as [tokens, heads, D] of `dtype`.

    With `out` they are put there, in its dtype.
    """
    spec = layer.spec_as(Attention)
    found = find_slots(layer, slots)
    if out is not None and spec.cache == "auto" and out[0].dtype == layer.field("k").dtype:
        for side, rows in zip(("k", "v"), out, strict=True):
            view = by_row(layer, side)
            shaped = torch.unflatten(rows, -1, view.shape[-2:]) if view.dim() == 5 else rows
            take_rows(view, found, shaped)
        return out
    fields = read_fields(layer, found)
    if spec.cache == "auto" and dtype == fields["k"].dtype:
        k, v = fields["k"], fields["v"]
    else:
        k = decode(spec, "k", fields, scale=k_scale).to(dtype)
        v = decode(spec, "v", fields, scale=v_scale).to(dtype)
    if out is None:
        return k, v
    return out[0].copy_(k), out[1].copy_(v)
