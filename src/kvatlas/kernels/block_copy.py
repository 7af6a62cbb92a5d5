"""Copy, gather and clear whole blocks, across layouts.

All functions work on the strided views of a layer, in any layout, and allocate memory only for
the blocks that they copy.
"""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.cache.tensors import checked_ids, view
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.fields_to_copy import placements_to_copy
from kvatlas.kernels.strided_copy import StridedBlocks, move_blocks
from kvatlas.kernels.table_checks import check_pairs, race


def copy_blocks(
    source: LayerCache, ids: torch.Tensor, destination: LayerCache, places: torch.Tensor
) -> None:
    """Copy blocks `ids` of the source to blocks `places` of the destination, across layouts.

    A cell is all bytes of one head and token. Whole cells are copied if fields (K, V, scales) have
    the same offsets in the cells of both layers. Otherwise each field is copied separately.
    """
    if gpu := gpu_kernels(source.buffer, destination.buffer):
        gpu.copy_blocks(source, ids, destination, places)
        return
    check_pairs(ids, places)
    ids, places = block_ids(source, ids), block_ids(destination, places)
    _check_races(source, ids, destination, places)
    for a, b in placements_to_copy(source, destination):
        move_blocks(
            StridedBlocks(source.buffer, a), ids, StridedBlocks(destination.buffer, b), places
        )


def gather_blocks(
    layer: LayerCache, ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a copy of blocks `ids` as bytes [blocks, H, N, C]; each block is one range of memory.

    The axes are heads (H), tokens (N), and the bytes of one head and token (C). Inside a block,
    bytes have the same order as in the layer's pages, so H, N and C may have any order of strides.
    Pass the result of an earlier call as `out` to reuse its memory.
    """
    ids = block_ids(layer, ids)
    cells = layer.kernel_blocks
    outward = sorted("HNC", key=cells.stride)[::-1]
    sizes = [("B", max(1, ids.numel())), *((axis, cells.size(axis)) for axis in outward)]
    rows = Placement.packed(sizes).reorder("B", "H", "N", "C")
    device = "meta" if out is not None else layer.buffer.device
    memory = torch.empty(rows.nbytes, dtype=torch.uint8, device=device)
    fresh = view(memory, rows, torch.uint8)[: ids.numel()]
    if out is None:
        out = fresh
    elif (out.dtype, out.shape, out.stride()) != (fresh.dtype, fresh.shape, fresh.stride()):
        problem = f"`out` must be uint8 of shape {tuple(fresh.shape)}, strides {fresh.stride()}"
        got = f"{out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}"
        hint = "Omit `out`, or pass the result of an earlier call"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if ids.numel():
        flat = torch.as_strided(out, (rows.nbytes,), (1,))
        places = torch.arange(len(ids), device=ids.device)
        move_blocks(StridedBlocks(layer.buffer, cells), ids, StridedBlocks(flat, rows), places)
    return out


def zero_blocks(layer: LayerCache, ids: torch.Tensor) -> None:
    """Clear blocks of a layer, so that a new owner cannot read the previous owner's data."""
    if gpu := gpu_kernels(layer.buffer):
        gpu.zero_blocks(layer, ids)
        return
    layer.tensor.index_fill_(0, block_ids(layer, ids), 0)


def block_ids(layer: LayerCache, ids: torch.Tensor) -> torch.Tensor:
    """Return ids as int64; raise an error unless each is the id of a kernel block of the layer.

    A kernel block is the unit that attention kernels address; a scheduler block has one or more.
    """
    hint = "Pass ids of kernel blocks, counted from 0"
    return checked_ids(ids, layer.kernel_blocks.size("B"), "Block ids", hint)


def _check_races(
    source: LayerCache, ids: torch.Tensor, target: LayerCache, places: torch.Tensor
) -> None:
    """Raise an error if a copy would write a block twice, or read a block that it also writes."""
    count = target.kernel_blocks.size("B")
    written = torch.zeros(count, dtype=torch.bool, device=places.device)
    written[places] = True
    twice = int(written.sum()) < places.numel()
    pools = [layer.buffer.untyped_storage().data_ptr() for layer in (source, target)]
    same_layer = pools[0] == pools[1] and source.placement == target.placement
    if twice or (same_layer and ids.numel() and bool(written[ids].any())):
        raise race(ids, places, twice=twice)
