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

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement

VECTOR = 16
"""Bytes that one thread loads at once, at most."""


class Rows(NamedTuple):
    """Where the rows of a field lie in its pool: `unit` elements to a step."""

    steps: tuple[int, int, int, int]
    """The first row, and the steps of B, N and H, in units."""
    content: tuple[int, int]
    """Elements between neighbours of a row, and between its tiles."""
    unit: int
    tile: int
    """Elements of a tile, where the rows of a page are in tiles; else 0."""


def common(numbers: tuple[int, ...], most: int) -> int:
    """The largest power of two up to `most` that divides all numbers.

    >>> common((264, 132), 16), common((0, 64), 16), common((), 16)
    (4, 16, 16)
    """
    found = gcd(most, *numbers)
    return found & -found


def rows(layer: LayerCache, name: str) -> Rows:
    """Where the rows of a layer's field lie.

    >>> from kvatlas.cache import allocate
    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> rows(cache["model.layers.1.self_attn.attn"], "v")
    Rows(steps=(1863696, 4096, 256, 32), content=(1, 0), unit=8, tile=0)
    """
    return _rows(layer.page, layer.kernel_blocks, name)


@lru_cache(maxsize=4096)
def _rows(page: Page, placed: Placement, name: str) -> Rows:
    field = page.view(placed, name)
    if not set(field.axes) <= {"B", "N", "H", "C", "c"}:
        raise AtlasError(
            Code.NOT_CONTIGUOUS,
            "A kernel reads rows that lie along one axis, in tiles or not",
            got=f"{name} with axes {field.axes}",
            hint="Select one of what the other axes count",
        )
    item = field.item
    steps = [field.offset, *(field.stride(axis) if axis in field.axes else 0 for axis in "BNH")]
    tiled = "c" in field.axes
    near = field.stride("c" if tiled else "C") or item
    far = field.stride("C") if tiled else 0
    if any(step % item for step in (*steps, near, far)):
        raise AtlasError(
            Code.MISALIGNED,
            "Elements that kernels read start at multiples of their size",
            got=f"{field} of items of {item} bytes",
            hint="Plan pages and blocks whose sizes are multiples of the element",
        )
    if max(steps[1] // item, steps[2] // item) >= 1 << 31:
        raise AtlasError(
            Code.OVERFLOW,
            "Blocks and states lie less than 2**31 elements apart",
            got=f"{field}",
            hint="Split the pool",
        )
    unit = common(tuple(step // item for step in steps), max(1, VECTOR // item))
    first, block, state, head = (step // item // unit for step in steps)
    tile = field.size("c") if tiled else 0
    return Rows((first, block, state, head), (near // item, far // item), unit, tile)


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
    steps, others = (
        [field.stride(axis) if axis in field.axes else 0 for axis in "BNH"]
        for field in (first, second)
    )
    return second.offset - first.offset if steps == others else None
