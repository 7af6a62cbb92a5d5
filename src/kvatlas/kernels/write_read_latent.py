"""Write and read latent rows, indexer keys and compressor sums by slot, with quantisation.

These caches have no heads: each state is one row. The page determines whether scales are stored
in the cells or after all rows of the page.
"""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache, torch_dtype
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page
from kvatlas.kernels import bit_packing as bits
from kvatlas.kernels import fp8_fp4_formats as formats
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.fp8_fp4_formats import to_fp8
from kvatlas.kernels.quantise import check_scales
from kvatlas.kernels.rows_by_slot import (
    find_slots,
    kept_slots,
    read_fields,
    write_fields,
)
from kvatlas.specs import CompressorState, Indexer, LatentAttention

Fields = dict[str, torch.Tensor]


def write_latent(
    layer: LayerCache,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scale: float = 1.0,
) -> None:
    """Write latents [n, latent] and rotary parts [n, rope] to `slots`, one row to each slot.

    Negative slots are skipped. `kv_scale` is the per-tensor scale of plain fp8.
    """
    check_scales(kv_scale)
    spec = layer.spec_as(LatentAttention)
    if (gpu := gpu_kernels(layer.buffer)) and gpu.writes_latent(spec):
        gpu.write_latent(layer, latent, rope, slots, kv_scale=kv_scale)
        return
    slots, latent, rope = kept_slots(slots, latent, rope)
    fields = encode_latent(spec, layer.page, latent, rope, scale=kv_scale)
    write_fields(layer, find_slots(layer, slots), fields)


def read_latent(
    layer: LayerCache, slots: torch.Tensor, *, kv_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents and rotary parts of slots, as float32."""
    spec = layer.spec_as(LatentAttention)
    return decode_latent(spec, read_fields(layer, find_slots(layer, slots)), scale=kv_scale)


def write_rows(
    layer: LayerCache, rows: torch.Tensor, slots: torch.Tensor, *, all_kept: bool = False
) -> None:
    """Write an indexer's keys or a compressor's sums, one row per slot.

    Negative slots are skipped. If `all_kept` is true, no slot may be negative, and the host does
    not wait for the device.
    """
    if not all_kept:
        slots, rows = kept_slots(slots, rows)
    write_fields(layer, find_slots(layer, slots), encode_rows(_rows_spec(layer), rows))


def read_rows(layer: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows that `write_rows` stored, as float32."""
    return decode_rows(_rows_spec(layer), read_fields(layer, find_slots(layer, slots)))


def encode_rows(spec: Indexer | CompressorState, rows: torch.Tensor) -> Fields:
    """Quantise an indexer's keys or a compressor's sums; return a tensor for each field."""
    if isinstance(spec, CompressorState):
        return {"state": _checked(rows, spec.width).to(torch_dtype(DType.of(spec.dtype)))}
    _checked(rows, spec.head_dim)
    if spec.cache in ("bf16", "fp16", "fp32"):
        return {"index": rows.to(torch_dtype(DType.of(spec.cache)))}
    if spec.cache == "mxfp4":
        data, scales = formats.to_mxfp4(rows.float())
        return {"index": data, "index_scale": scales}
    data, power = formats.to_fp8_blocks(rows.float(), spec.head_dim, powers=True)
    return {"index": data, "index_scale": torch.exp2(power)}


def decode_rows(spec: Indexer | CompressorState, fields: Fields) -> torch.Tensor:
    """Dequantise the fields that `encode_rows` returned, to float32."""
    if isinstance(spec, CompressorState):
        return fields["state"].float()
    if spec.cache == "mxfp4":
        values = bits.from_e2m1(bits.unpack(fields["index"], 4, spec.head_dim))
        return formats.from_blocks(values, formats.from_ue8m0(fields["index_scale"]), 32)
    keys = fields["index"].float()
    return keys * fields["index_scale"] if "index_scale" in fields else keys


def _rows_spec(layer: LayerCache) -> Indexer | CompressorState:
    spec = layer.spec
    return spec if isinstance(spec, CompressorState) else layer.spec_as(Indexer)


def encode_latent(
    spec: LatentAttention,
    page: Page,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    scale: float = 1.0,
) -> Fields:
    """Quantise latents and rotary parts; return a tensor for each field of the page."""
    check_scales(scale)
    _checked(latent, spec.latent)
    _checked(rope, spec.rope)
    dtype = torch_dtype(page.field("rope").dtype)
    if spec.cache == "auto":
        return {"latent": latent.to(dtype), "rope": rope.to(dtype)}
    if spec.cache in ("fp8", "fp8_e4m3"):
        return {"latent": to_fp8(latent.float() / scale), "rope": to_fp8(rope.float() / scale)}
    scaled = torch.cat((latent, rope), dim=-1) if _rope_scaled(spec) else latent
    if spec.cache == "nvfp4_ds_mla":
        data, scales = formats.to_nvfp4(scaled.float())
        width, plain = spec.latent // 2, to_fp8(rope.float())
    else:
        stored = page.field("latent_scale")
        powers = stored.dtype.name == "ue8m0"
        block = scaled.shape[-1] // stored.sizes["C"]
        data, scales = formats.to_fp8_blocks(scaled.float(), block, powers=powers)
        scales = formats.to_ue8m0(scales) if powers else scales
        width, plain = spec.latent, rope.to(dtype)
    if _rope_scaled(spec):
        plain = data[..., width:]
    return {"latent": data[..., :width], "rope": plain, "latent_scale": scales}


def decode_latent(
    spec: LatentAttention, fields: Fields, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise the fields that `encode_latent` returned: latents and rotary parts in float32."""
    check_scales(scale)
    latent, rope = fields["latent"], fields["rope"]
    if "latent_scale" not in fields:
        factor = 1.0 if spec.cache == "auto" else scale
        return latent.float() * factor, rope.float() * factor
    data = torch.cat((latent, rope), dim=-1) if _rope_scaled(spec) else latent
    scales = fields["latent_scale"]
    if spec.cache == "nvfp4_ds_mla":
        values = formats.from_nvfp4(data, scales, 2 * data.shape[-1])
    else:
        exact = formats.from_ue8m0(scales) if scales.dtype == torch.uint8 else scales
        values = formats.from_blocks(data.float(), exact, data.shape[-1] // scales.shape[-1])
    if _rope_scaled(spec):
        return values[..., : spec.latent], values[..., spec.latent :]
    return values, rope.float()


def _rope_scaled(spec: LatentAttention) -> bool:
    """Return whether the rotary part is quantised together with the latent, as in DeepSeek-V4.1."""
    return spec.version == "v4.1"


def _checked(rows: torch.Tensor, width: int) -> torch.Tensor:
    if rows.dim() != 2 or rows.shape[-1] != width:
        hint = f"Pass one row of {width} elements per state, as in the layer's spec"
        problem = f"Rows must be of shape [states, {width}]"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(rows.shape)}", hint=hint)
    return rows
