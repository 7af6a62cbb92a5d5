"""Strides in the form that kernels expect: multiples of a unit that is a compile-time constant.

The compiler uses wide loads only if it can prove the alignment of addresses. Triton checks only
whether 16 divides an argument, which does not help with rows of 264 bytes. Strides are therefore
divided by a unit, the largest power of two that divides all of them. Kernels multiply by the unit,
which is a constant, so the compiler can infer the alignment of the product.
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
"""Maximum bytes that one thread loads at once."""


class BatchRows(NamedTuple):
    """Rows [tokens, heads, elements] of a batch: a tensor, and its strides in elements."""

    tensor: torch.Tensor
    token: int
    head: int


def batch_rows(tensor: torch.Tensor) -> BatchRows:
    """Return a tensor [tokens, heads, elements] with its strides, in the form that kernels expect.

    >>> batch_rows(torch.empty(7, 4, 16))[1:]
    (64, 16)
    """
    token, head, _ = tensor.stride()
    return BatchRows(tensor, token, head)


class RowSteps(NamedTuple):
    """Strides of a field's rows in their pool, in units of `FieldRows.unit` elements.

    Strides inside a row (`element` and `tile`) are in elements.
    """

    first: int
    """Offset of the first row in the pool, in units, like the strides `block`, `state`, `head`."""
    block: int
    state: int
    head: int
    element: int
    """Stride of consecutive elements of a row, in elements."""
    tile: int
    """Stride of the tiles of a row, in elements; 0 if rows are not tiled."""


class FieldRows(NamedTuple):
    """The rows of a field: their strides, and the compile-time constants of kernels."""

    steps: RowSteps
    unit: int
    """Elements per unit."""
    tile: int
    """Elements per tile of a row; 0 if rows are not tiled."""


def common(numbers: tuple[int, ...], most: int) -> int:
    """Return the largest power of two up to `most` that divides all numbers.

    >>> common((264, 132), 16), common((0, 64), 16), common((), 16)
    (4, 16, 16)
    """
    divisor = gcd(most, *numbers)
    return divisor & -divisor


def field_rows(page: Page, placed: Placement, name: str) -> FieldRows:
    """Return the strides of a field's rows, for the blocks at placement `placed`.

    In this example, a unit is 8 elements of bfloat16.

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
            "The kernels read and write only fields whose axes are B, N, H and C",
            got=f"field {name!r} with axes {field.axes}",
            hint="Select one index of each further axis first",
        )
    item = field.item
    steps = [field.offset, *_strides(field)]
    tiled = "c" in field.axes
    near = field.stride("c" if tiled else "C") or item
    far = field.stride("C") if tiled else 0
    if any(step % item for step in (*steps, near, far)):
        raise AtlasError(
            Code.MISALIGNED,
            f"Offsets and strides of a field must be multiples of its element size, {item} bytes",
            got=f"field {name!r} at {field}",
            hint="Plan pages and blocks whose sizes are multiples of the element size",
        )
    if max(steps[1] // item, steps[2] // item) >= 1 << 31:
        raise AtlasError(
            Code.OVERFLOW,
            "The strides of axes B and N must be less than 2**31 elements",
            got=f"{steps[1] // item} and {steps[2] // item} for field {name!r}",
            hint="Use a layout with smaller strides, or split the pool",
        )
    # Rows with strided elements are read one element at a time.
    widest = max(1, VECTOR // item) if near == item else 1
    unit = common(tuple(step // item for step in steps), widest)
    first, block, state, head = (step // item // unit for step in steps)
    return FieldRows(
        RowSteps(first, block, state, head, near // item, far // item),
        unit,
        field.size("c") if tiled else 0,
    )


def _strides(field: Placement) -> list[int]:
    """Return the byte strides of blocks, tokens and heads; 0 for an axis that the field lacks."""
    return [field.stride(axis) if axis in field.axes else 0 for axis in "BNH"]


def gap(layer: LayerCache, one: str, other: str) -> int | None:
    """Return the distance in bytes from a token's row of field `one` to its row of field `other`.

    Return None if the distance is not the same for all tokens.

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
