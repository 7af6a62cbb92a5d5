"""Addresses as kernels take them: whole numbers of a unit that the compiler may rely on.

A compiler loads 16 bytes at once where it can prove that an address is a multiple of
them. It knows of an argument only whether 16 divides it, which says nothing of rows of
264 bytes. So strides travel divided by the largest power of two that divides them all,
and kernels multiply by it: a constant factor is a proof.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement

VECTOR = 16
"""Bytes that one thread loads at once, at most."""


class BatchRows(NamedTuple):
    """Rows [tokens, heads, elements] of a batch: a tensor, and its strides in elements."""

    tensor: torch.Tensor
    token: int
    head: int


def batch_rows(tensor: torch.Tensor) -> BatchRows:
    """A tensor [tokens, heads, elements] as kernels take it.

    >>> batch_rows(torch.empty(7, 4, 16))[1:]
    (64, 16)
    """
    token, head, _ = tensor.stride()
    return BatchRows(tensor, token, head)


class RowSteps(NamedTuple):
    """Where the rows of a field lie in their pool."""

    first: int
    """The first row, in units, as are the steps of B, N and H."""
    block: int
    state: int
    head: int
    element: int
    """Elements between neighbours of a row."""
    tile: int
    """Elements between the tiles of a row; 0 where it has none."""


class FieldRows(NamedTuple):
    """The rows of a field: their steps, and what kernels are compiled for."""

    steps: RowSteps
    unit: int
    """Elements in a unit."""
    tile: int
    """Elements of a tile, where the rows of a page are in tiles; else 0."""


def common(numbers: tuple[int, ...], most: int) -> int:
    """The largest power of two up to `most` that divides all numbers.

    >>> common((264, 132), 16), common((0, 64), 16), common((), 16)
    (4, 16, 16)
    """
    divisor = gcd(most, *numbers)
    return divisor & -divisor


def field_rows(page: Page, placed: Placement, name: str) -> FieldRows:
    """Where the rows of a field lie, in blocks of pages that are placed so.

    >>> from kvatlas.cache import allocate
    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> layer = cache["model.layers.1.self_attn.attn"]
    >>> field_rows(layer.page, layer.kernel_blocks, "v").steps
    RowSteps(first=1863696, block=4096, state=256, head=32, element=1, tile=0)
    """
    field = page.view(placed, name)
    if not set(field.axes) <= {"B", "N", "H", "C", "c"}:
        raise AtlasError(
            Code.NOT_CONTIGUOUS,
            "A kernel cannot read rows that lie along more than one axis",
            got=f"{name} with axes {field.axes}",
            hint="Select one of what the other axes count",
        )
    item = field.item
    steps = [field.offset, *_strides(field)]
    tiled = "c" in field.axes
    near = field.stride("c" if tiled else "C") or item
    far = field.stride("C") if tiled else 0
    if any(step % item for step in (*steps, near, far)):
        raise AtlasError(
            Code.MISALIGNED,
            "Elements do not start at multiples of their size",
            got=f"{field} of items of {item} bytes",
            hint="Plan pages and blocks whose sizes are multiples of the element",
        )
    if max(steps[1] // item, steps[2] // item) >= 1 << 31:
        raise AtlasError(
            Code.OVERFLOW,
            "Blocks or states are 2**31 elements apart or more",
            got=f"{field}",
            hint="Split the pool",
        )
    # Pieces of rows whose elements are apart are single elements.
    widest = max(1, VECTOR // item) if near == item else 1
    unit = common(tuple(step // item for step in steps), widest)
    first, block, state, head = (step // item // unit for step in steps)
    return FieldRows(
        RowSteps(first, block, state, head, near // item, far // item),
        unit,
        field.size("c") if tiled else 0,
    )


def _strides(field: Placement) -> list[int]:
    """Bytes from block to block, from state to state and from head to head."""
    return [field.stride(axis) if axis in field.axes else 0 for axis in "BNH"]


def gap(layer: LayerCache, one: str, other: str) -> int | None:
    """Bytes from each row of a field to that of another; None where that is not one number.

    >>> from kvatlas.cache import allocate
    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> gap(cache["model.layers.1.self_attn.attn"], "k", "v")
    256
    """
    return _gap(layer.page, layer.kernel_blocks, one, other)


@lru_cache(maxsize=4096)
def _gap(page: Page, placed: Placement, one: str, other: str) -> int | None:
    first, second = page.view(placed, one), page.view(placed, other)
    return second.offset - first.offset if _strides(first) == _strides(second) else None
