"""Packing of fields into a page. Only this module computes the steps of field axes.

There are three ways to pack fields. `in_cells` places parts one after another in every cell.
`flat_field` lays out one part over the bytes of several cells, in its own axis order (transposed,
tiled, a recurrent state). `in_planes` stacks whole planes of rows, such as all data and then all
scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.geometry.dtype import DType
from kvatlas.geometry.field import Field, FieldAxis, Sharding, ShardRange
from kvatlas.geometry.integers import positive, set_fields

Sizes = Sequence[tuple[str, int]]
"""Pairs of axis name and size, outermost first."""


@dataclass(frozen=True, slots=True)
class ElementRow:
    """A named row of elements, such as `k` of 128 e4m3 elements or a single fp32 scale.

    >>> ElementRow("k", DType.of("int4"), 128).nbytes
    64
    """

    name: str
    dtype: DType
    elements: int

    def __post_init__(self) -> None:
        set_fields(self, elements=positive(self.elements, f"the size of {self.name}"))

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return self.dtype.storage(self.elements)

    @property
    def items(self) -> int:
        """Storage items of the row: elements, or bytes if several elements share a byte."""
        return self.nbytes // self.dtype.item


@dataclass(frozen=True, slots=True)
class Shard:
    """The sharding of a field and the ranges that this rank holds.

    >>> Shard(Sharding.by_heads(4), Sharding.by_heads(4).ranges(tp=2, rank=0)).ranges
    (ShardRange(local=0, start=0, length=2),)
    """

    sharding: Sharding
    ranges: tuple[ShardRange, ...] = ()


def row_bytes(parts: Sequence[ElementRow]) -> int:
    """Return the total number of bytes of `parts`."""
    return sum(part.nbytes for part in parts)


def in_cells(
    parts: Sequence[ElementRow],
    cells: tuple[FieldAxis, ...],
    shard: Shard,
    *,
    head: int = 0,
    offset: int = 0,
) -> list[Field]:
    """Return one field per part; the parts are stored one after another in every cell.

    `cells` are the axes that step from cell to cell. The first cell is at head `head`, and the
    parts start at byte `offset` of each cell.
    """
    fields = []
    for part in parts:
        axes = (*cells, FieldAxis("C", part.items, "C", part.dtype.item))
        fields.append(
            Field(part.name, part.dtype, axes, head, offset, shard.sharding, shard.ranges)
        )
        offset += part.nbytes
    return fields


def flat_field(
    name: str,
    dtype: DType,
    memory: Sizes,
    shard: Shard,
    *,
    axes: Sequence[str] = (),
    cells: tuple[FieldAxis, ...] = (),
    head: int = 0,
    offset: int = 0,
) -> Field:
    """Return a field whose axes are densely packed in the order of `memory`, across cells.

    `axes` is the order in which the field lists its axes, if it differs from `memory`. `cells`
    are outer axes that step from cell to cell.

    >>> whole, fp16 = Shard(Sharding.whole()), DType.of("fp16")
    >>> k = flat_field("k", fp16, [("C", 64), ("N", 16)], whole, axes="NC")
    >>> [(axis.name, axis.step) for axis in k.axes]
    [('N', 2), ('C', 32)]
    """
    by_bytes = _packed_axes(memory, dtype.item, axes)
    return Field(name, dtype, (*cells, *by_bytes), head, offset, shard.sharding, shard.ranges)


def in_planes(
    planes: Sequence[Sequence[ElementRow]],
    rows: Sizes,
    shard: Shard,
    *,
    axes: Sequence[str] = (),
    offset: int = 0,
) -> list[Field]:
    """Return the fields of a page that stores `planes` one after another, from byte `offset`.

    Each plane is a list of parts, and each row of a plane holds all of its parts, one after
    another. `rows` are the axes over which the rows of a plane are laid out, in memory order;
    `axes` is the order in which the fields list these axes, if it differs.
    """
    fields: list[Field] = []
    for parts in planes:
        row = row_bytes(parts)
        fields += in_cells(parts, _packed_axes(rows, row, axes), shard, offset=offset)
        offset += row * math.prod(size for _, size in rows)
    return fields


def _packed_axes(memory: Sizes, step: int, order: Sequence[str]) -> tuple[FieldAxis, ...]:
    """Return the field axes of a dense array of bytes, listed in `order`.

    `memory` lists the sizes of the axes in memory order. The returned axes count bytes along the
    page axis C. The innermost axis has a step of `step` bytes.
    """
    packed = {}
    for axis, size in reversed(memory):
        packed[axis] = FieldAxis(axis, size, "C", step)
        step *= size
    return tuple(packed[axis] for axis in order or [axis for axis, _ in memory])
