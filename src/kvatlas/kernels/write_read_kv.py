"""Write and read K and V of attention layers by slot, with quantisation."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.quantise import check_scales, decode, encode
from kvatlas.kernels.rows_by_slot import (
    find_slots,
    kept_slots,
    read_field,
    read_fields,
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
    """Write K and V [tokens, heads, D] to slots, quantised to the layer's cache dtype.

    A slot is `block_id * N + i` for state i of a block of N states, as in vLLM's slot mapping.
    Negative slots are skipped. Every packing is supported, including tiled and transposed keys.
    For cross attention, write the encoder's tokens once.
    """
    check_scales(k_scale, v_scale)
    if gpu := gpu_kernels(layer.buffer):
        gpu.write(layer, k, v, slots, k_scale=k_scale, v_scale=v_scale)
        return
    spec = layer.spec_as(Attention)
    heads = layer.place("k").size("H")
    for name, rows, dim in (("k", k, spec.head_dim), ("v", v, spec.v_dim or spec.head_dim)):
        if rows.shape[1:] != (heads, dim):
            problem = f"`{name}` must be of shape [tokens, {heads}, {dim}]"
            hint = "Pass the heads of this rank"
            raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(rows.shape)}", hint=hint)
    slots, k, v = kept_slots(slots, k, v)
    where = find_slots(layer, slots)
    write_fields(layer, where, encode(spec, "k", k, scale=k_scale))
    write_fields(layer, where, encode(spec, "v", v, scale=v_scale))


def read(
    layer: LayerCache,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of slots, dequantised, as [tokens, heads, D] of `dtype`.

    If `out` is given, the result is written to it, and its dtype replaces `dtype`.
    """
    check_scales(k_scale, v_scale)
    spec = layer.spec_as(Attention)
    where = find_slots(layer, slots)
    if out is not None:
        _refuse_unlike(layer, spec, where.numbers.numel(), out)
        dtype = out[0].dtype
    if spec.cache == "auto" and dtype == layer.field("k").dtype:
        k_out, v_out = out or (None, None)
        return read_field(layer, "k", where, k_out), read_field(layer, "v", where, v_out)
    fields = read_fields(layer, where)
    k = decode(spec, "k", fields, scale=k_scale)
    v = decode(spec, "v", fields, scale=v_scale)
    if out is None:
        return k.to(dtype), v.to(dtype)
    return out[0].copy_(k), out[1].copy_(v)


def _refuse_unlike(
    layer: LayerCache, spec: Attention, count: int, out: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Raise an error unless `out` has the exact shapes of K and V for `count` slots."""
    heads = layer.place("k").size("H")
    dims = spec.head_dim, spec.v_dim or spec.head_dim
    wanted = [(count, heads, dim) for dim in dims]
    if [tuple(rows.shape) for rows in out] != wanted or out[0].dtype != out[1].dtype:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"`out` must be two tensors of shapes {wanted[0]} and {wanted[1]}, with the same dtype",
            got=", ".join(f"{rows.dtype} of shape {tuple(rows.shape)}" for rows in out),
            hint="Omit `out`, or pass tensors with one row per slot",
        )
