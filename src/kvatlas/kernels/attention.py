"""K and V of attention layers, written and read by slots, quantised on the way."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.codec import Side, decode, encode
from kvatlas.kernels.rows import by_row, find_slots, put_rows, take_rows
from kvatlas.specs.attention import Attention


def write(
    layer: LayerCache,
    spec: Attention,
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
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], v[kept]
    if not len(slots) == len(k) == len(v):
        raise AtlasError(
            Code.BAD_TENSOR,
            "Every row has a slot",
            got=f"{len(k)} rows of K and {len(v)} of V for {len(slots)} slots",
            hint="Pass one slot for each token, negative where it is not stored",
        )
    found = find_slots(layer, slots)
    sides: tuple[tuple[Side, torch.Tensor, float], ...] = (("k", k, k_scale), ("v", v, v_scale))
    for side, rows, scale in sides:
        for name, values in encode(spec, side, rows, scale=scale).items():
            view = by_row(layer, name)
            put_rows(view, found, values.to(view.dtype))


def read(
    layer: LayerCache,
    spec: Attention,
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
    found = find_slots(layer, slots)
    if out is not None and spec.cache == "auto" and out[0].dtype == layer.field("k").dtype:
        for side, rows in zip(("k", "v"), out, strict=True):
            view = by_row(layer, side)
            shaped = rows.unflatten(-1, view.shape[-2:]) if view.dim() == 5 else rows
            take_rows(view, found, shaped)
        return out
    fields = {
        f.name: _whole_rows(take_rows(by_row(layer, f.name), found))
        for f in layer.page.fields
        if not f.padding
    }
    if spec.cache == "auto" and dtype == fields["k"].dtype:
        k, v = fields["k"], fields["v"]
    else:
        k = decode(spec, "k", fields, scale=k_scale).to(dtype)
        v = decode(spec, "v", fields, scale=v_scale).to(dtype)
    if out is None:
        return k, v
    return out[0].copy_(k), out[1].copy_(v)


def _whole_rows(rows: torch.Tensor) -> torch.Tensor:
    """Tiles of a row on one axis again."""
    return rows.flatten(-2) if rows.dim() == 4 else rows
