"""How fields are packed into a page: the only place that computes their steps.

Three ways are enough. `in_cells` puts parts behind each other in every cell. `flat_field`
lays one part out over the bytes behind the cells in an order of its own (transposed,
tiled, a recurrent state). `in_planes` stacks whole planes of rows, such as all data
and then all scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.geometry.dtype import DType
from kvatlas.geometry.field import Field, FieldAxis, Sharding, ShardRange
from kvatlas.geometry.integers import positive, set_fields

Sizes = Sequence[tuple[str, int]]
"""Axes with their sizes, outermost first."""


@dataclass(frozen=True, slots=True)
class ElementRow:
    """A row of elements: `k` of 128 e4m3, or one fp32 scale.

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
        """Storage items of the row: elements, or bytes where they are packed."""
        return self.nbytes // self.dtype.item


@dataclass(frozen=True, slots=True)
class Shard:
    """How a field is sharded, and which ranges this rank holds.

    >>> Shard(Sharding.by_heads(4), Sharding.by_heads(4).ranges(tp=2, rank=0)).ranges
    (ShardRange(local=0, start=0, length=2),)
    """

    sharding: Sharding
    ranges: tuple[ShardRange, ...] = ()


def row_bytes(parts: Sequence[ElementRow]) -> int:
    """Bytes of parts that lie behind each other."""
    return sum(part.nbytes for part in parts)


def in_cells(
    parts: Sequence[ElementRow],
    cells: tuple[FieldAxis, ...],
    shard: Shard,
    *,
    head: int = 0,
    offset: int = 0,
) -> list[Field]:
    """Parts behind each other in every cell, or in every row that `cells` names."""
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
    """One field laid out by bytes, its axes packed in the order of `memory`.

    `axes` lists them in another order than memory's; `cells` are axes that still walk
    from cell to cell.

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
    """Planes behind each other from byte `offset` of a page, each with its parts in every row.

    `rows` are the axes of a plane in memory; `axes` lists them in another order.
    """
    fields: list[Field] = []
    for parts in planes:
        row = row_bytes(parts)
        fields += in_cells(parts, _packed_axes(rows, row, axes), shard, offset=offset)
        offset += row * math.prod(size for _, size in rows)
    return fields


def _packed_axes(memory: Sizes, step: int, order: Sequence[str]) -> tuple[FieldAxis, ...]:
    """Axes by bytes, the innermost of `memory` at `step`, listed in `order`."""
    packed = {}
    for axis, size in reversed(memory):
        packed[axis] = FieldAxis(axis, size, "C", step)
        step *= size
    return tuple(packed[axis] for axis in order or [axis for axis, _ in memory])
