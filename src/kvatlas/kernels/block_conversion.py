"""Convert whole blocks between formats: by casting elements, or by decoding and encoding."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.block_copy import block_ids
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.recurrent_states import read_states, write_states
from kvatlas.kernels.table_checks import check_pairs
from kvatlas.kernels.write_read_kv import read, write
from kvatlas.kernels.write_read_latent import read_latent, read_rows, write_latent, write_rows
from kvatlas.specs import Attention, CellFormat, LatentAttention, Recurrent, TensorScales

_ONE = TensorScales()


def convert_blocks(
    source: LayerCache,
    ids: torch.Tensor,
    destination: LayerCache,
    places: torch.Tensor,
    *,
    source_scales: TensorScales = _ONE,
    destination_scales: TensorScales = _ONE,
) -> None:
    """Convert blocks `ids` of the source into blocks `places` of the destination.

    Both layers must have rows (K and V, or latents) of the same sizes, and the same number of
    tokens per block; their formats may differ. On a GPU, one kernel converts element-wise formats
    (the model's dtype, or fp8 with one scale) from page to page. Other formats are read, decoded,
    encoded and written in separate steps.
    """
    check_pairs(ids, places)
    elements = all(CellFormat(layer.spec).by_element for layer in (source, destination))
    if elements and (gpu := gpu_kernels(source.buffer, destination.buffer)):
        scales = {"source_scales": [source_scales], "destination_scales": [destination_scales]}
        gpu.BlockConversion([source], [destination], **scales)(ids, places)
        return
    ids, places = block_ids(source, ids), block_ids(destination, places)
    if isinstance(source.spec, Recurrent):
        write_states(destination, read_states(source, ids), places)
        return
    states = [layer.kernel_blocks.size("N") for layer in (source, destination)]
    if states[0] != states[1]:
        problem = "Both layers must have the same number of states per block"
        hint = "Use kvatlas.route, which converts between block sizes"
        got = f"{states[0]} and {states[1]} states"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
    within = torch.arange(states[0], device=ids.device)
    slots, into = ((some[:, None] * states[0] + within).flatten() for some in (ids, places))
    if isinstance(source.spec, Attention):
        k, v = read(source, slots, k_scale=source_scales.k, v_scale=source_scales.v)
        write(destination, k, v, into, k_scale=destination_scales.k, v_scale=destination_scales.v)
    elif isinstance(source.spec, LatentAttention):
        latent, rope = read_latent(source, slots, kv_scale=source_scales.k)
        write_latent(destination, latent, rope, into, kv_scale=destination_scales.k)
    else:
        write_rows(destination, read_rows(source, slots), into)
