"""Latent rows, indexer keys and compressor sums: written and read by slots.

These caches have no heads: one row for each state. Their formats are those of the page
table, scales in the cell or behind all rows, and the codec here fills them.
"""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache, torch_dtype
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page
from kvatlas.kernels import bit_codes as bits
from kvatlas.kernels.block_scales import (
    from_blocks,
    from_nvfp4,
    from_ue8m0,
    to_fp8,
    to_fp8_blocks,
    to_mxfp4,
    to_nvfp4,
    to_ue8m0,
)
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.slot_rows import find_slots, kept_slots, read_fields, write_fields
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
    """Latents [states, latent] and rotary parts [states, rope] into the states of `slots`.

    A negative slot is skipped. `kv_scale` is the tensor's own, for plain fp8.
    """
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
    """Latents and rotary parts of the states of `slots`, as float32."""
    spec = layer.spec_as(LatentAttention)
    return decode_latent(spec, read_fields(layer, find_slots(layer, slots)), scale=kv_scale)


def write_rows(layer: LayerCache, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """An indexer's keys or a compressor's sums, one row for each state."""
    spec = _rows_spec(layer)
    slots, rows = kept_slots(slots, rows)
    _refuse_width(rows, spec.head_dim if isinstance(spec, Indexer) else spec.width)
    if isinstance(spec, CompressorState):
        fields = {"state": rows}
    elif spec.cache == "bf16":
        fields = {"index": rows}
    elif spec.cache == "mxfp4":
        data, scales = to_mxfp4(rows.float())
        fields = {"index": data, "index_scale": scales}
    else:
        data, power = to_fp8_blocks(rows.float(), spec.head_dim, powers=True)
        fields = {"index": data, "index_scale": torch.exp2(power)}
    write_fields(layer, find_slots(layer, slots), fields)


def read_rows(layer: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    """What `write_rows` stored, as float32."""
    spec = _rows_spec(layer)
    found = read_fields(layer, find_slots(layer, slots))
    if isinstance(spec, CompressorState):
        return found["state"].float()
    if spec.cache == "mxfp4":
        values = bits.from_e2m1(bits.unpack(found["index"], 4, spec.head_dim))
        return from_blocks(values, from_ue8m0(found["index_scale"]), 32)
    keys = found["index"].float()
    return keys * found["index_scale"] if "index_scale" in found else keys


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
    """What a latent cache stores of its rows: a tensor for each field."""
    _refuse_width(latent, spec.latent)
    _refuse_width(rope, spec.rope)
    kept = {name: torch_dtype(page.field(name).dtype) for name in ("latent", "rope")}
    if spec.cache == "auto":
        return {"latent": latent.to(kept["latent"]), "rope": rope.to(kept["rope"])}
    if spec.cache in ("fp8", "fp8_e4m3"):
        return {"latent": to_fp8(latent.float() / scale), "rope": to_fp8(rope.float() / scale)}
    scaled = torch.cat((latent, rope), dim=-1) if _rope_scaled(spec) else latent
    if spec.cache == "nvfp4_ds_mla":
        data, scales = to_nvfp4(scaled.float())
        width = spec.latent // 2
        plain = to_fp8(rope.float())
    else:
        powers = page.field("latent_scale").dtype.name == "ue8m0"
        data, scales = to_fp8_blocks(scaled.float(), _block(spec, page), powers=powers)
        scales = to_ue8m0(scales) if powers else scales
        width, plain = spec.latent, rope.to(kept["rope"])
    if _rope_scaled(spec):
        plain = data[..., width:]
    return {"latent": data[..., :width], "rope": plain, "latent_scale": scales}


def decode_latent(
    spec: LatentAttention, fields: Fields, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rotary parts again, as float32."""
    latent, rope = fields["latent"], fields["rope"]
    if "latent_scale" not in fields:
        factor = 1.0 if spec.cache == "auto" else scale
        return latent.float() * factor, rope.float() * factor
    data = torch.cat((latent, rope), dim=-1) if _rope_scaled(spec) else latent
    scales = fields["latent_scale"]
    if spec.cache == "nvfp4_ds_mla":
        values = from_nvfp4(data, scales, 2 * data.shape[-1])
    else:
        exact = from_ue8m0(scales) if scales.dtype == torch.uint8 else scales
        values = from_blocks(data.float(), exact, data.shape[-1] // scales.shape[-1])
    if _rope_scaled(spec):
        return values[..., : spec.latent], values[..., spec.latent :]
    return values, rope.float()


def _rope_scaled(spec: LatentAttention) -> bool:
    """The rotary part is quantised with the latent, as V4.1's formats have it."""
    return spec.version == "v4.1"


def _block(spec: LatentAttention, page: Page) -> int:
    """Elements that share a scale."""
    scaled = spec.latent + (spec.rope if _rope_scaled(spec) else 0)
    scales = page.field("latent_scale")
    return scaled // next(axis.size for axis in scales.axes if axis.name == "C")


def _refuse_width(rows: torch.Tensor, width: int) -> None:
    if rows.dim() != 2 or rows.shape[-1] != width:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"Rows are [states, {width}]",
            got=tuple(rows.shape),
            hint="Pass one row for each state, as wide as the spec says",
        )
