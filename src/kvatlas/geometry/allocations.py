"""`Allocations`: the tensors of an engine, placed in one range of offsets.

An engine allocates one tensor per layer, or several layers in one tensor. `Allocations.place`
names the axes of a tensor and returns its `Placement` relative to the start of the range. Each
allocation is a segment of the range, and segments have gaps between them, so that no run extends
over two allocations. Offsets depend on the order and the sizes of the allocations only, not on
their addresses.

The functions of this module divide a placement as engines do: rows of tokens into pages, rows into
fields, and pages into the planes of several fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import root_array
from kvatlas.geometry.field import Field
from kvatlas.geometry.integers import positive, round_up
from kvatlas.geometry.placement import Placement

_GRAIN = 4096
"""Segments start at multiples of this number of bytes."""


class PlacedAllocation(NamedTuple):
    """One allocation: its offset in the range, its size in bytes, its address and its device."""

    offset: int
    nbytes: int
    address: int
    device: str = "host"
    """`host`, or a torch device name such as `cuda:0`."""


class Allocations:
    """The allocations of a pool, in the order in which their tensors were placed.

    >>> import numpy as np
    >>> k, v = np.zeros((9, 16, 64), np.float16), np.zeros((9, 16, 64), np.float16)
    >>> parts = Allocations()
    >>> parts.place(k, "BNC").offset, parts.place(v[1:], "BNC").offset
    (0, 22528)
    >>> [(segment.offset, segment.nbytes) for segment in parts.segments]
    [(0, 18432), (20480, 18432)]
    """

    def __init__(self) -> None:
        self._segments: dict[object, PlacedAllocation] = {}

    @property
    def segments(self) -> tuple[PlacedAllocation, ...]:
        """The allocations, in ascending order of their offsets."""
        return tuple(self._segments.values())

    def place(self, tensor: Any, axes: Sequence[str], *, own_start: bool = False) -> Placement:
        """Return the placement of a numpy or torch tensor whose axes have these names.

        With `own_start`, the segment starts where the tensor starts, and not where its allocation
        starts. Views of one allocation that differ only in their start then have equal placements.
        """
        placed = Placement.from_tensor(tensor, axes)
        key, nbytes, address, device = _allocation(tensor)
        if own_start:
            key, nbytes, address = placed.offset, nbytes - placed.offset, address + placed.offset
            placed = placed.shift(-placed.offset)
        if key not in self._segments:
            last = next(reversed(self._segments.values()), None)
            start = round_up(last.offset + last.nbytes + 1, _GRAIN) if last else 0
            self._segments[key] = PlacedAllocation(start, nbytes, address, device)
        return placed.shift(self._segments[key].offset)


def _allocation(tensor: Any) -> tuple[object, int, int, str]:
    """Return a key, the bytes, address and device of a numpy or torch tensor's allocation."""
    storage = getattr(tensor, "untyped_storage", None)
    if storage is None:
        root = root_array(tensor)
        address = root.__array_interface__["data"][0]
        return address, root.nbytes, address, "host"
    held = storage()
    # Meta tensors have no address; different storages are then different objects.
    key = held.data_ptr() or ("meta", held._cdata)
    device = "host" if tensor.device.type == "cpu" else str(tensor.device)
    return key, held.nbytes(), held.data_ptr(), device


def in_pages(rows: Placement, page: int, *, axis: str = "N") -> Placement:
    """Divide the rows of tokens into pages: axis N becomes B and N.

    Rows after the last whole page are left out.

    >>> in_pages(Placement.packed([("N", 70), ("C", 8)]), 16)
    Placement(B=4:128, N=16:8, C=8:1, offset=0, item=1)
    """
    page = positive(page, "the page size")
    count = rows.size(axis) // page
    if count == 0:
        raise AtlasError(
            Code.BAD_TENSOR,
            "A tensor has less than one page of tokens",
            got=f"{rows.size(axis)} rows and pages of {page} tokens",
            hint="Pass the page size of the engine",
        )
    return rows.narrow(axis, 0, count * page).split(axis, into=("B", axis), inner=page)


def cut_rows(rows: Placement, fields: Sequence[Field]) -> dict[str, Placement]:
    """Cut axis C of rows into fields that follow one another in each row.

    >>> from kvatlas.specs import LatentAttention
    >>> page = LatentAttention(latent=512, rope=64).page(16)
    >>> rows = Placement.packed([("N", 16), ("C", 576)], item=2)
    >>> {name: one.size("C") for name, one in cut_rows(rows, page.fields).items()}
    {'latent': 512, 'rope': 64}
    """
    widths = {field.name: field.sizes.get("C", 1) * field.dtype.item for field in fields}
    return {
        name: rows.narrow("C", start // rows.item, widths[name] // rows.item)
        for name, start in _starts(widths, rows).items()
    }


def cut_planes(pages: Placement, fields: Sequence[Field], states: int) -> dict[str, Placement]:
    """Cut axis C of pages into planes: all rows of the first field, then all of the next.

    >>> from kvatlas.specs import Indexer
    >>> pages = Placement.packed([("B", 4), ("C", 64 * 132)])
    >>> cut_planes(pages, Indexer().page(64).fields, 64)["index_scale"]
    Placement(B=4:8448, N=64:4, C=4:1, offset=8192, item=1)
    """
    widths = {field.name: field.sizes.get("C", 1) * field.dtype.item for field in fields}
    planes = {name: width * states for name, width in widths.items()}
    return {
        name: pages.narrow("C", start // pages.item, planes[name] // pages.item).split(
            "C", into=("N", "C"), inner=widths[name] // pages.item
        )
        for name, start in _starts(planes, pages).items()
    }


def _starts(widths: dict[str, int], placed: Placement) -> dict[str, int]:
    """Return the first byte of each part; all parts together must fill axis C."""
    starts, end = {}, 0
    for name, width in widths.items():
        starts[name], end = end, end + width
    if end != placed.size("C") * placed.item:
        raise AtlasError(
            Code.BAD_TENSOR,
            "The fields of a row must fill the row",
            got=f"rows of {placed.size('C') * placed.item} bytes, and fields {widths}",
            hint="Check the model and the dtype of its cache",
        )
    return starts
