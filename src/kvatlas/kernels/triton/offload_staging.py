"""Move blocks of layers to and from contiguous rows on the host, through a staging buffer.

A kernel gathers the blocks into the buffer, or scatters them from it. Between the buffer and the
host, the GPU's copy engine transfers one large range at the link's full speed, without occupying a
multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.kernels.triton.launch_copy import BlockCopy, CopyEnd


class Staging:
    """A buffer on the device for blocks of several layers, with one row per block.

    A row contains the layers' pages one after the other, always in head-major order, so it does not
    depend on the cache's layout. If fields span the whole page, they are stored one by one.
    """

    def __init__(self, layers: Sequence[LayerCache], blocks: int) -> None:
        inside = [
            CopyEnd(layer.buffer, placed) for layer in layers for placed in _placements(layer)
        ]
        sizes = [end.placement.nbytes // end.placement.size("B") for end in inside]
        self.row_bytes = sum(sizes)
        device = layers[0].buffer.device
        self.buffer = torch.empty(blocks * self.row_bytes, dtype=torch.uint8, device=device)
        self.places = torch.arange(blocks, device=device)
        rows = [
            CopyEnd(self.buffer, _in_rows(end.placement, blocks, sum(sizes[:i]), self.row_bytes))
            for i, end in enumerate(inside)
        ]
        self._gather, self._scatter = BlockCopy(inside, rows), BlockCopy(rows, inside)

    def store(self, ids: torch.Tensor, rows: torch.Tensor, **choice: Any) -> None:
        """Copy blocks `ids` of the layers to `rows` [blocks, bytes], pinned or on the GPU."""
        staged = self._rows(ids, rows)
        self._gather(ids, self.places[: ids.numel()], **choice)
        rows.copy_(staged, non_blocking=True)

    def load(self, rows: torch.Tensor, ids: torch.Tensor, **choice: Any) -> None:
        """Copy `rows` [blocks, bytes] back to blocks `ids` of the layers."""
        self._rows(ids, rows).copy_(rows, non_blocking=True)
        self._scatter(self.places[: ids.numel()], ids, **choice)

    def _rows(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        fits = rows.shape == (ids.numel(), self.row_bytes) and rows.is_contiguous()
        if ids.numel() > self.places.numel():
            raise AtlasError(
                Code.BAD_TENSOR,
                f"`ids` must fit in the staging buffer of {self.places.numel()} blocks",
                got=f"{ids.numel()} block ids",
                hint="Split the ids into several calls, or create a Staging with more blocks",
            )
        if rows.dtype != torch.uint8 or not fits:
            raise AtlasError(
                Code.BAD_TENSOR,
                f"Rows must be contiguous uint8 of shape ({ids.numel()}, {self.row_bytes})",
                got=f"{rows.dtype} of shape {tuple(rows.shape)}, strides {rows.stride()}",
                hint="Pass one row of `row_bytes` bytes for each block id",
            )
        return self.buffer[: rows.numel()].view(rows.shape)


def _placements(layer: LayerCache) -> list[Placement]:
    """Return the placements to copy: one of whole cells, or one per field if fields span the page.

    A cell is all bytes of one head and token.
    """
    if not layer.page.lies_flat:
        return [layer.kernel_blocks]
    return [layer.place(field.name) for field in layer.page.fields if not field.padding]


def _in_rows(placed: Placement, blocks: int, offset: int, row_bytes: int) -> Placement:
    """Return a head-major placement with the axes of `placed`, in rows of the staging buffer."""
    axes = sorted(set(placed.axes) - {"B"}, key="HNCc".index)
    sizes = [("B", blocks), *((axis, placed.size(axis)) for axis in axes)]
    return Placement.packed(sizes, offset=offset, item=placed.item, strides={"B": row_bytes})
