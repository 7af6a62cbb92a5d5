"""Whole blocks: copied across orders, gathered, and cleared for a new owner.

Everything works on the strided views of a layer, in whatever order they lie, and
allocates no more than the blocks that move.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvatlas.cache import LayerCache, view
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.slot_rows import checked
from kvatlas.kernels.strided_copy import move_blocks


def copy_blocks(
    source: LayerCache, ids: torch.Tensor, target: LayerCache, places: torch.Tensor
) -> None:
    """Whole blocks of one layer into another's, across orders.

    Where both pack their pages alike, whole cells move; else field by field.
    """
    if gpu := gpu_kernels(source.buffer, target.buffer):
        gpu.copy_blocks(source, ids, target, places)
        return
    if ids.numel() != places.numel():
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Every block has one place to go to",
            got=f"{ids.numel()} blocks for {places.numel()} places",
            hint="Pass two lists of one length",
        )
    ids, places = block_ids(source, ids), block_ids(target, places)
    _refuse_clash(source, ids, target, places)
    for a, b in _sides(source, target):
        move_blocks((source.buffer, a), ids, (target.buffer, b), places)


def gather_blocks(
    layer: LayerCache, ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Blocks of a layer as bytes [blocks, H, N, C], one behind the other.

    Bytes keep the order that they have in the layer's pages, so that the tensor may be
    strided inside a block; `out` is what an earlier call gave, to be filled again.
    """
    ids = block_ids(layer, ids)
    cells = layer.kernel_blocks
    outward = sorted("HNC", key=cells.stride)[::-1]
    sizes = [("B", max(1, ids.numel())), *((axis, cells.size(axis)) for axis in outward)]
    rows = Placement.packed(sizes).reorder("B", "H", "N", "C")
    if out is None:
        memory = torch.empty(rows.nbytes, dtype=torch.uint8, device=layer.buffer.device)
        out = view(memory, rows, torch.uint8)[: ids.numel()]
    expected = view(torch.empty(rows.nbytes, dtype=torch.uint8, device="meta"), rows, torch.uint8)
    same = out.dtype == torch.uint8 and out.stride() == expected.stride()
    if not same or out.shape[1:] != expected.shape[1:] or len(out) != ids.numel():
        raise AtlasError(
            Code.BAD_TENSOR,
            "Blocks are gathered into bytes [blocks, H, N, C] in the order of their pages",
            got=f"{out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}",
            hint="Leave `out` away, or pass what an earlier call gave",
        )
    if ids.numel():
        flat = torch.as_strided(out, (rows.nbytes,), (1,))
        places = torch.arange(len(ids), device=ids.device)
        move_blocks((layer.buffer, cells), ids, (flat, rows), places)
    return out


def zero_blocks(layer: LayerCache, ids: torch.Tensor) -> None:
    """Clear blocks of a layer: a new owner must not read what the last one left."""
    if gpu := gpu_kernels(layer.buffer):
        gpu.zero_blocks(layer, ids)
        return
    layer.tensor.index_fill_(0, block_ids(layer, ids), 0)


def block_ids(layer: LayerCache, ids: torch.Tensor) -> torch.Tensor:
    """Ids of a layer's kernel blocks as int64, refused where there are no such blocks."""
    hint = "Ids count kernel blocks, from 0"
    return checked(ids, layer.kernel_blocks.size("B"), "Block ids", hint)


def _sides(source: LayerCache, target: LayerCache) -> Iterator[tuple[Placement, Placement]]:
    """What moves: the cells of both where their pages are alike, else each field."""
    a, b = source.page, target.page
    if [f.name for f in a.fields] != [f.name for f in b.fields]:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Blocks are copied between caches of the same fields",
            got=f"{list(source.fields)} and {list(target.fields)}",
            hint="Convert the cache dtype first",
        )
    for one, other in zip(a.fields, b.fields, strict=True):
        sizes = [{axis.name: axis.size for axis in field.axes} for field in (one, other)]
        if sizes[0] != sizes[1] or one.dtype != other.dtype:
            raise AtlasError(
                Code.UNLIKE_PLACEMENTS,
                "Blocks that are copied have the same shape and type",
                got=f"{one.name} of {one.dtype} {sizes[0]} and {other.dtype} {sizes[1]}",
                hint="Route between unlike block sizes or ranks instead",
            )
    if cells_alike(source, target):
        yield source.kernel_blocks, target.kernel_blocks
        return
    for field in a.fields:
        if not field.padding:
            yield source.place(field.name), target.place(field.name)


def cells_alike(source: LayerCache, target: LayerCache) -> bool:
    """Cells can move as they are: fields lie alike in them, in both orders.

    Where a field lies flat over a whole page, the order of heads and states must be the same
    on both sides.
    """
    a, b = source.page, target.page
    places = [[(f.axes, f.head, f.offset) for f in page.fields] for page in (a, b)]
    sizes = {(page.heads, page.states, page.content) for page in (a, b)}
    if places[0] != places[1] or len(sizes) > 1:
        return False
    sides = source.kernel_blocks, target.kernel_blocks
    order = {tuple(side.stride(axis) for axis in "HNC") for side in sides}
    return len(order) == 1 or not a.lies_flat


def _refuse_clash(
    source: LayerCache, ids: torch.Tensor, target: LayerCache, places: torch.Tensor
) -> None:
    """Refuse a block that is written twice, or both read and written."""
    count = target.kernel_blocks.size("B")
    written = torch.zeros(count, dtype=torch.bool, device=places.device)
    written[places] = True
    twice = int(written.sum()) < places.numel()
    pools = [layer.buffer.untyped_storage().data_ptr() for layer in (source, target)]
    here = pools[0] == pools[1] and source.placement == target.placement
    if twice or (here and ids.numel() and bool(written[ids].any())):
        raise AtlasError(
            Code.OVERLAP,
            "One copy writes a block once, and does not read what it writes",
            got="a block that is written twice" if twice else "a block that is read and written",
            hint="Copy in two steps",
        )
