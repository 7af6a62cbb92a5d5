"""One buffer that contains the pages of all layers, like a host pool or a stored object.

The letters of `axes` name the dimensions of the buffer: L counts layers, S has size 2 for K and V,
B counts pages, N tokens, H heads and C elements. A buffer that is not divided into pages has no
axis B, and its axis N counts all slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.engines.engine_memory import (
    EngineMemory,
    Table,
    check_dtype,
    describe_tables,
    layers_at,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.geometry.allocations import cut_rows, in_pages
from kvatlas.models import Layer, Model
from kvatlas.specs import Attention, LatentAttention

Bytes = NDArray[np.uint8]


def attention_layers(model: Model, indices: Iterable[int]) -> list[Layer]:
    """Return the attention of these decoder layers, with K and V or with latent rows."""
    found = []
    for index in indices:
        latent = layers_at(model, index, LatentAttention, "", optional=True)
        found += latent or layers_at(model, index, Attention, "a paged buffer")
    return found


def describe_buffer(
    model: Model,
    layers: Sequence[Layer],
    buffer: Any,
    axes: str,
    *,
    page: int,
    tp: int,
    max_len: int | None,
    dtype: Any = None,
    own_start: bool = False,
) -> EngineMemory:
    """Return the plan of a buffer that contains the pages of `layers`.

    Axis L of the buffer has the layers in the order of `layers`. `dtype` is the dtype of the
    buffer's elements; None if the engine stores bytes.
    """
    table = Table(page)
    whole = table.place(buffer, axes, own_start=own_start)
    if whole.size("L") < len(layers):
        raise AtlasError(
            Code.BAD_TENSOR,
            "A buffer has fewer layers than the model",
            got=f"{whole.size('L')} layers in the buffer, {len(layers)} in the model",
            hint="Pass the decoder layers that the buffer contains",
        )
    for place, layer in enumerate(layers):
        own = whole.select("L", place)
        fields = [one for one in layer.spec.page(page, tp=tp).fields if not one.padding]
        if dtype is not None:
            check_dtype(layer, fields[0], dtype)
        if isinstance(layer.spec, LatentAttention):
            rows = own.select("S", 0) if "S" in own.axes else own
            rows = rows.select("H", 0) if "H" in rows.axes else rows
            table.layers[layer.name] = cut_rows(_paged(rows, page), fields)
        else:
            table.layers[layer.name] = {
                name: _paged(own.select("S", side), page) for side, name in enumerate("kv")
            }
    return describe_tables(model, [table], tp=tp, max_len=max_len)


def _paged(rows: Placement, page: int) -> Placement:
    return rows if "B" in rows.axes else in_pages(rows, page)


class PagedBuffer(NamedTuple):
    """Pages in host memory, and their plan. Each page has its bytes in the order of an object."""

    memory: EngineMemory
    pages: Bytes
    """One row of bytes for each page. Row n is block n of the plan."""

    @classmethod
    def of(
        cls,
        model: Model,
        layers: Sequence[Layer],
        axes: str,
        *,
        page: int,
        pages: int,
        tp: int = 1,
        max_len: int | None = None,
    ) -> PagedBuffer:
        """Allocate `pages` pages. Within a page, the axes are `axes`, outermost first."""
        fields = [one for one in layers[0].spec.page(page, tp=tp).fields if not one.padding]
        latent = isinstance(layers[0].spec, LatentAttention)
        item = 1 if len({one.dtype.item for one in fields}) > 1 else fields[0].dtype.item
        elements = sum(one.sizes["C"] * one.dtype.item for one in fields) // item
        sizes = {
            "B": pages,
            "L": len(layers),
            "S": 1 if latent else 2,
            "N": page,
            "H": 1 if latent else fields[0].sizes["H"],
            "C": elements if latent else fields[0].sizes["C"],
        }
        if not latent and fields[0].sizes != fields[1].sizes:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "K and V of different widths are not stored in one object",
                got=f"rows of {fields[0].sizes['C']} and {fields[1].sizes['C']} elements",
                hint="Move the request with its device pools",
            )
        shape = [sizes[axis] for axis in f"B{axes}"]
        buffer = np.zeros(shape, f"u{item}")
        more: dict[str, Any] = {"page": page, "tp": tp, "max_len": max_len}
        memory = describe_buffer(model, layers, buffer, f"B{axes}", **more)
        return cls(memory, buffer.view(np.uint8).reshape(pages, math.prod(shape[1:]) * item))
