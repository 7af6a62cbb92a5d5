"""What every spec answers: its page for a block size and a rank."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Field, FieldAxis, Page, Piece
from kvatlas.geometry.field import Cut
from kvatlas.geometry.integers import positive


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """What one layer caches, whatever the block size, order or topology.

    A spec describes the whole model's layer; `page` cuts out what one rank holds.
    """

    @property
    def tokens_per_state(self) -> int | None:
        """Tokens that one stored state stands for; None where a block keeps a single state."""
        raise NotImplementedError

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """The page of a block of `block` tokens on `rank` of `tp`."""
        raise NotImplementedError

    def states(self, block: int) -> int:
        """States that a block of `block` tokens stores."""
        block = positive(block, "the block size")
        per_state = self.tokens_per_state
        if per_state is None:
            return 1
        if block % per_state:
            raise AtlasError(
                Code.NOT_DIVISIBLE,
                "A block holds whole states",
                got=f"a block of {block} tokens with {per_state} tokens per state",
                hint=f"Use a block size that is a multiple of {per_state}",
            )
        return block // per_state

    def page_bytes(self, block: int, *, tp: int = 1) -> int:
        """Bytes of a page; all ranks' pages are equally large."""
        return self.page(block, tp=tp).nbytes

    def replicas(self, tp: int) -> int:
        """How many ranks of `tp` hold each byte of this layer, at least."""
        block = self.tokens_per_state or 1
        counts = [field.cut.replicas(tp) for field in self.page(block, tp=tp).fields]
        return min(counts)

    def shares(self, tp: int, rank: int) -> dict[str, tuple[Piece, ...]]:
        """Which rows of each field's cut axis `rank` holds; empty for all of them."""
        page = self.page(self.tokens_per_state or 1, tp=tp, rank=rank)
        return {field.name: field.pieces for field in page.fields if not field.padding}


class Part(msgspec.Struct, frozen=True):
    """A row of elements in a cell: `k` of 128 e4m3, or one fp32 scale."""

    name: str
    dtype: DType
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return self.dtype.storage(self.elements)

    @property
    def items(self) -> int:
        """Storage items of the row: elements, or bytes where they are packed."""
        return self.nbytes // self.dtype.item


def row_bytes(parts: list[Part]) -> int:
    """Bytes of parts that lie behind each other."""
    return sum(part.nbytes for part in parts)


def in_cells(
    parts: list[Part],
    cells: tuple[FieldAxis, ...],
    *,
    head: int = 0,
    offset: int = 0,
    cut: Cut,
    pieces: tuple[Piece, ...],
) -> list[Field]:
    """Parts behind each other in every cell, as fields."""
    fields = []
    for part in parts:
        axis = FieldAxis("C", part.items, "C", part.dtype.item)
        fields.append(
            Field(part.name, part.dtype, (*cells, axis), head, offset, cut=cut, pieces=pieces)
        )
        offset += part.nbytes
    return fields


def in_planes(
    planes: list[list[Part]],
    rows: tuple[tuple[str, int], ...],
    *,
    head: int = 0,
    cut: Cut,
    pieces: tuple[Piece, ...],
) -> list[Field]:
    """Planes flat behind each other, each with its parts in every row, as fields.

    `rows` are the axes of a plane, outermost first.
    """
    fields: list[Field] = []
    offset = 0
    for parts in planes:
        step = row_bytes(parts)
        axes: tuple[FieldAxis, ...] = ()
        for name, size in reversed(rows):
            axes = (FieldAxis(name, size, "C", step), *axes)
            step *= size
        fields += in_cells(parts, axes, head=head, offset=offset, cut=cut, pieces=pieces)
        offset += step
    return fields


def check_positive(spec: Spec, *names: str) -> None:
    """Refuse a spec whose named numbers are not whole and positive."""
    for name in names:
        positive(getattr(spec, name), f"{name} of {type(spec).__name__}")


def bad_spec(rule: str, got: Any, hint: str) -> AtlasError:
    """A refusal of what a spec was given."""
    return AtlasError(Code.BAD_SPEC, rule, got=got, hint=hint)
