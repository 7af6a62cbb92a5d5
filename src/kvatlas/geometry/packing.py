"""How fields are packed into a page: the only place that computes their steps.

Three ways are enough. `in_cells` puts parts behind each other in every cell. `flat`
lays one part out over the bytes behind the cells in an order of its own (transposed,
tiled, a recurrent state). `in_planes` stacks whole planes of rows, such as all data
and then all scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.geometry.dtype import DType
from kvatlas.geometry.field import Cut, Field, FieldAxis, Piece
from kvatlas.geometry.integers import positive

Sizes = Sequence[tuple[str, int]]
"""Axes with their sizes, outermost first."""


@dataclass(frozen=True, slots=True)
class Part:
    """A row of elements: `k` of 128 e4m3, or one fp32 scale.

    >>> Part("k", DType.of("int4"), 128).nbytes
    64
    """

    name: str
    dtype: DType
    elements: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", positive(self.elements, f"the size of {self.name}"))

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return self.dtype.storage(self.elements)

    @property
    def items(self) -> int:
        """Storage items of the row: elements, or bytes where they are packed."""
        return self.nbytes // self.dtype.item


@dataclass(frozen=True, slots=True)
class Share:
    """How a field is cut, and which pieces this rank holds.

    >>> Share(Cut.heads(4), Cut.heads(4).pieces(tp=2, rank=0)).pieces
    (Piece(local=0, start=0, length=2),)
    """

    cut: Cut
    pieces: tuple[Piece, ...] = ()


def row_bytes(parts: Sequence[Part]) -> int:
    """Bytes of parts that lie behind each other."""
    return sum(part.nbytes for part in parts)


def in_cells(
    parts: Sequence[Part],
    cells: tuple[FieldAxis, ...],
    share: Share,
    *,
    head: int = 0,
    offset: int = 0,
) -> list[Field]:
    """Parts behind each other in every cell, or in every row that `cells` names."""
    fields = []
    for part in parts:
        axes = (*cells, FieldAxis("C", part.items, "C", part.dtype.item))
        fields.append(Field(part.name, part.dtype, axes, head, offset, share.cut, share.pieces))
        offset += part.nbytes
    return fields


def flat(
    name: str,
    dtype: DType,
    memory: Sizes,
    share: Share,
    *,
    axes: Sequence[str] = (),
    cells: tuple[FieldAxis, ...] = (),
    head: int = 0,
    offset: int = 0,
) -> Field:
    """One field laid out by bytes, its axes packed in the order of `memory`.

    `axes` lists them in another order than memory's; `cells` are axes that still walk
    from cell to cell.

    >>> k = flat("k", DType.of("fp16"), [("C", 64), ("N", 16)], Share(Cut(None)), axes="NC")
    >>> [(axis.name, axis.step) for axis in k.axes]
    [('N', 2), ('C', 32)]
    """
    step, found = dtype.item, {}
    for axis, size in reversed(memory):
        found[axis] = FieldAxis(axis, size, "C", step)
        step *= size
    order = axes or [axis for axis, _ in memory]
    listed = (*cells, *(found[axis] for axis in order))
    return Field(name, dtype, listed, head, offset, share.cut, share.pieces)


def in_planes(
    planes: Sequence[Sequence[Part]],
    rows: Sizes,
    share: Share,
    *,
    axes: Sequence[str] = (),
    offset: int = 0,
) -> list[Field]:
    """Planes behind each other from byte `offset` of a page, each with its parts in every row.

    `rows` are the axes of a plane in memory; `axes` lists them in another order.
    """
    fields: list[Field] = []
    for parts in planes:
        step, found = row_bytes(parts), {}
        for axis, size in reversed(rows):
            found[axis] = FieldAxis(axis, size, "C", step)
            step *= size
        cells = tuple(found[axis] for axis in axes or [axis for axis, _ in rows])
        fields += in_cells(parts, cells, share, offset=offset)
        offset += step
    return fields
