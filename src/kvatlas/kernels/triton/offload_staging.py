"""Blocks of layers as contiguous rows on the host, by way of a staging buffer.

The copy engine moves one large stretch at the link's full speed and holds no
multiprocessor; a kernel gathers the blocks for it, or puts them where they belong.
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
    """Room on the device for some blocks of some layers, each block one row.

    In a row the layers' pages follow each other, head-major whatever order the cache has;
    pages over which fields lie flat, field by field.
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
        """Blocks `ids` of the layers into `rows` [blocks, bytes]: pinned, or on the device."""
        staged = self._rows(ids, rows)
        self._gather(ids, self.places[: ids.numel()], **choice)
        rows.copy_(staged, non_blocking=True)

    def load(self, rows: torch.Tensor, ids: torch.Tensor, **choice: Any) -> None:
        """Rows back into blocks `ids` of the layers."""
        self._rows(ids, rows).copy_(rows, non_blocking=True)
        self._scatter(self.places[: ids.numel()], ids, **choice)

    def _rows(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        fits = rows.shape == (ids.numel(), self.row_bytes) and rows.is_contiguous()
        if rows.dtype != torch.uint8 or not fits or ids.numel() > self.places.numel():
            raise AtlasError(
                Code.BAD_TENSOR,
                "Rows are not contiguous bytes, one row for each block, or more than are staged",
                got=f"{rows.dtype} of shape {tuple(rows.shape)} for {ids.numel()} blocks",
                hint=f"Pass at most {self.places.numel()} rows of {self.row_bytes} bytes",
            )
        return self.buffer[: rows.numel()].view(rows.shape)


def _placements(layer: LayerCache) -> list[Placement]:
    """What means the same in every order: cells, or the fields where those lie flat."""
    if not layer.page.lies_flat:
        return [layer.kernel_blocks]
    return [layer.place(field.name) for field in layer.page.fields if not field.padding]


def _in_rows(placed: Placement, blocks: int, offset: int, row_bytes: int) -> Placement:
    """The same axes packed in rows, head-major."""
    axes = sorted(set(placed.axes) - {"B"}, key="HNCc".index)
    sizes = [("B", blocks), *((axis, placed.size(axis)) for axis in axes)]
    return Placement.packed(sizes, offset=offset, item=placed.item, strides={"B": row_bytes})
