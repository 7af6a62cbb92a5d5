"""Fields: the named parts of a page, and the shard of each that a rank holds.

A page has H x N cells, one for each head and state, of C bytes. A field has its own axes (heads,
states, elements, conv rows). Each axis steps through the page in one of three ways: along H or
N from cell to cell, or along C by bytes. This covers every packing in use: K and V side by side
in a cell, in head groups or in planes; K transposed or tiled; scales inline or in a separate
plane. A field that extends past its cell along C is called flat. The states (or heads) that a
flat field covers must be contiguous.

`Sharding` specifies how tensor parallelism divides a field. One rule covers all cases: an
axis consists of sections, a section consists of indivisible units (heads, groups), and
each section is divided separately. A field that is divided by heads has one section. The units
of a shared section are replicated if there are more ranks than units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.dtype import DType
from kvatlas.geometry.integers import integer, natural, positive, set_fields

Along = Literal["H", "N", "C"]


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A range of `length` rows of a sharded axis that one rank holds.

    The range starts at row `start` of the axis in the whole model, and at row `local` on the rank.

    >>> Sharding.by_heads(8).ranges(tp=2, rank=1)
    (ShardRange(local=0, start=4, length=4),)
    """

    local: int
    start: int
    length: int

    def __post_init__(self) -> None:
        set_fields(
            self,
            local=natural(self.local, "the local start of a shard range"),
            start=natural(self.start, "the start of a shard range"),
            length=positive(self.length, "the length of a shard range"),
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a sharded axis: `units` units of `rows` rows, distributed over the ranks.

    A unit, such as a head, is never divided.

    If there are more ranks than units, units are replicated if `shared` is true; if it is false, an
    error is raised.

    >>> Section(units=4, rows=128).deal(tp=2, rank=1)  # first unit, number of units
    (2, 2)
    """

    units: int
    rows: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        units = positive(self.units, "the number of units")
        set_fields(self, units=units, rows=positive(self.rows, "the number of rows of a unit"))

    def deal(self, tp: int, rank: int) -> tuple[int, int]:
        """Return the first unit that `rank` of `tp` holds, and the number of units that it holds.

        >>> Section(8).deal(tp=2, rank=1), Section(2, shared=True).deal(tp=8, rank=5)
        ((4, 4), (1, 1))
        """
        positive(tp, "the tensor-parallel size")
        if self.units % tp == 0:
            count = self.units // tp
            return rank * count, count
        if self.shared and tp % self.units == 0:
            return rank * self.units // tp, 1
        multiple = f", or that is a multiple of {self.units}" if self.shared else ""
        hint = f"Use a tensor-parallel size that divides {self.units}{multiple}"
        problem = "" if self.shared else "Heads or groups cannot be divided evenly over the ranks"
        got = f"{self.units} heads or groups and {tp} ranks"
        raise AtlasError(Code.TP_HEADS, problem, got=got, hint=hint)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A rule for dividing a field over tensor-parallel ranks.

    >>> Sharding.by_heads(8).ranges(tp=4, rank=1)
    (ShardRange(local=0, start=2, length=2),)
    >>> qkv = Sharding.by_sections("R", Section(4, 16), Section(4, 16), Section(8, 16))
    >>> qkv.ranges(tp=4, rank=1)  # doctest: +NORMALIZE_WHITESPACE
    (ShardRange(local=0, start=16, length=16),
     ShardRange(local=16, start=80, length=16),
     ShardRange(local=32, start=160, length=32))
    >>> Sharding.replicated().ranges(tp=4, rank=1)
    ()
    """

    axis: str | None
    sections: tuple[Section, ...] = ()
    whole_only: bool = False

    @classmethod
    def by_heads(cls, heads: int, *, axis: str = "H", shared: bool = True) -> Sharding:
        """Return the rule that divides a field by heads.

        If `shared` is true, heads are replicated when there are more ranks than heads.
        """
        return cls(axis, (Section(heads, shared=shared),))

    @classmethod
    def by_sections(cls, axis: str, *sections: Section) -> Sharding:
        """Return the rule that divides each section of `axis` separately.

        The sections are, for example, `q|k|v` or `x|B|C` of a convolution.
        """
        return cls(axis, sections)

    @classmethod
    def replicated(cls) -> Sharding:
        """Return the rule that replicates a field on every rank, as for MLA latents."""
        return cls(None)

    @classmethod
    def whole(cls) -> Sharding:
        """Return the rule for a field that can be used only with tp 1.

        Such a field can be neither divided nor replicated.
        """
        return cls(None, whole_only=True)

    def ranges(self, tp: int, rank: int) -> tuple[ShardRange, ...]:
        """Return the ranges of the sharded axis that `rank` holds.

        The result is empty if no axis is sharded: every rank then holds the whole field.
        """
        tp, rank = positive(tp, "the tensor-parallel size"), integer(rank, "the rank")
        if not 0 <= rank < tp:
            raise AtlasError(
                Code.BAD_RANK, got=f"rank {rank} of {tp} ranks", hint=f"Pass a rank in 0..{tp - 1}"
            )
        if self.whole_only and tp > 1:
            raise AtlasError(
                Code.TP_WHOLE, got=f"tp {tp}", hint="Use tp 1, or a field that can be sharded"
            )
        held: list[ShardRange] = []
        local = base = 0
        for section in self.sections:
            first, count = section.deal(tp, rank)
            start, length = base + first * section.rows, count * section.rows
            if held and held[-1].start + held[-1].length == start:
                held[-1] = replace(held[-1], length=held[-1].length + length)
            else:
                held.append(ShardRange(local, start, length))
            local += length
            base += section.units * section.rows
        return tuple(held)

    @property
    def rows(self) -> int:
        """Number of rows of the sharded axis in the whole model; 0 if no axis is sharded."""
        return sum(section.units * section.rows for section in self.sections)

    def size(self, tp: int) -> int:
        """Return how many rows of the sharded axis each rank holds; all ranks hold equally many."""
        return sum(held_range.length for held_range in self.ranges(tp, 0))

    def replicas(self, tp: int) -> int:
        """Return how many of `tp` ranks hold the same row.

        If this number differs between sections, return the smallest number.

        >>> Sharding.by_heads(2).replicas(8), Sharding.replicated().replicas(8)
        (4, 8)
        """
        self.ranges(tp, 0)
        return min((max(1, tp // section.units) for section in self.sections), default=tp)


@dataclass(frozen=True, slots=True)
class FieldAxis:
    """One axis of a field. It runs along one axis of the page, in regular steps.

    `along` is the page axis: H counts heads, N counts states, and C counts bytes of a cell. `step`
    is the distance between consecutive coordinates, in the same unit.

    >>> FieldAxis("C", 128, "C", 2)  # 128 contiguous elements of 2 bytes
    FieldAxis(name='C', size=128, along='C', step=2)
    """

    name: str
    size: int
    along: Along
    step: int = 1

    def __post_init__(self) -> None:
        size = positive(self.size, f"the size of field axis {self.name}")
        set_fields(self, size=size, step=natural(self.step, f"the step of field axis {self.name}"))
        if self.along not in ("H", "N", "C"):
            problem = "A field axis must run along H, N or C"
            hint = "Pass along='H', 'N' or 'C'; L and B are axes of a pool, not of a page"
            raise AtlasError(Code.BAD_FIELD, problem, got=repr(self.along), hint=hint)


@dataclass(frozen=True, slots=True)
class Field:
    """A named part of a page, as one rank holds it.

    Axis sizes count storage items: elements, or bytes if the dtype packs several elements
    into one byte. The last axis is the innermost logically, not necessarily in memory.

    >>> k = Field("k", DType.of("bf16"), (FieldAxis("H", 8, "H"), FieldAxis("C", 64, "C", 2)))
    >>> k.nbytes, k.last_content_byte
    (1024, 127)
    """

    name: str
    dtype: DType
    axes: tuple[FieldAxis, ...]
    head: int = 0
    """Head index of the first coordinate; nonzero for V in head groups or planes."""
    offset: int = 0
    """Byte offset of the first coordinate within its cell."""
    sharding: Sharding = Sharding(None)
    ranges: tuple[ShardRange, ...] = ()
    """Rows of the sharded axis that this rank holds; empty if it holds all of them."""

    def __post_init__(self) -> None:
        set_fields(
            self,
            dtype=DType.of(self.dtype),
            axes=tuple(self.axes),
            ranges=tuple(self.ranges),
            head=natural(self.head, "the first head of a field"),
            offset=natural(self.offset, "the content offset of a field"),
        )
        self._check_parts()
        names = [axis.name for axis in self.axes]
        sharded_size = sum(axis.size for axis in self.axes if axis.name == self.sharding.axis)
        held = sum(held_range.length for held_range in self.ranges)
        last = max((held_range.start + held_range.length for held_range in self.ranges), default=0)
        if len(set(names)) < len(names):
            raise AtlasError(
                Code.BAD_FIELD,
                f"The axis names of field {self.name} must differ",
                got=names,
                hint="Rename the repeated axis",
            )
        if self.ranges and (held != sharded_size or last > self.sharding.rows):
            axis = self.sharding.axis
            problem = (
                f"The ranges of field {self.name} must list exactly the rank's rows of axis {axis}"
            )
            got = (
                f"ranges with {held} rows that end before row {last}; the axis has {sharded_size} "
                f"rows on this rank, and rows 0..{self.sharding.rows - 1} in the model"
            )
            hint = "Build fields with a spec, or take the ranges from Sharding.ranges"
            raise AtlasError(Code.BAD_FIELD, problem, got=got, hint=hint)
        item, steps = self.dtype.item, [axis.step for axis in self.axes if axis.along == "C"]
        if any(step % item for step in (self.offset, *steps)):
            problem = f"The elements of field {self.name} must start at multiples of {item} bytes"
            got = f"offset {self.offset}, steps along C {steps}"
            hint = f"Make the offset and the steps multiples of {item}, or add padding"
            raise AtlasError(Code.MISALIGNED, problem, got=got, hint=hint)

    def _check_parts(self) -> None:
        parts = (
            ("Every entry of axes", self.axes, FieldAxis),
            ("The sharding", (self.sharding,), Sharding),
            ("Every entry of ranges", self.ranges, ShardRange),
        )
        for what, given, kind in parts:
            for one in given:
                if not isinstance(one, kind):
                    problem = f"{what} of a field must be a {kind.__name__}"
                    hint = "Build fields with a spec, or from FieldAxis, Sharding and ShardRange"
                    raise AtlasError(Code.BAD_FIELD, problem, got=repr(one)[:100], hint=hint)

    @property
    def padding(self) -> bool:
        """Whether the field is padding: its name starts with `pad`."""
        return self.name.startswith("pad")

    def follows(self, other: Field) -> bool:
        """Return whether the rows of this field directly follow the rows of `other`.

        This requires that both fields have contiguous rows, and that all their other axes are
        equal.

        >>> cells, one = FieldAxis("N", 4, "C", 8), DType.of("uint8")
        >>> scale = Field("scale", one, (cells, FieldAxis("C", 7, "C")))
        >>> Field("pad", one, (cells, FieldAxis("C", 1, "C")), offset=7).follows(scale)
        True
        """
        (*cells, row), (*others, before) = self.axes, other.axes
        ends = ((row, self.dtype.item), (before, other.dtype.item))
        contiguous = all(a.along == "C" and a.step == item for a, item in ends)
        start = (other.head, other.offset + before.size * before.step)
        return contiguous and cells == others and (self.head, self.offset) == start

    @property
    def shape(self) -> dict[str, int]:
        """Axis sizes in the whole model, not on one rank. N counts the states of one page.

        >>> k = FieldAxis("H", 2, "H")
        >>> eight = Sharding.by_heads(8)
        >>> Field("k", DType.of("e4m3"), (k,), sharding=eight, ranges=eight.ranges(4, 2)).shape
        {'H': 8}
        """
        whole = {self.sharding.axis: self.sharding.rows} if self.sharding.sections else {}
        return {axis.name: whole.get(axis.name, axis.size) for axis in self.axes}

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one page."""
        return math.prod(axis.size for axis in self.axes) * self.dtype.item

    @property
    def last_content_byte(self) -> int:
        """Offset of the field's last byte along C, from the start of the cell.

        This offset is outside the cell if the field is flat, that is, if it extends past its cell.
        """
        walked = sum((axis.size - 1) * axis.step for axis in self.axes if axis.along == "C")
        return self.offset + walked + self.dtype.item - 1

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes on one rank, by name; the two axes C and c of a tiled row count as one.

        >>> tiles = FieldAxis("C", 4, "C", 16), FieldAxis("c", 8, "C", 2)
        >>> Field("k", DType.of("bf16"), (FieldAxis("H", 2, "H"), *tiles)).sizes
        {'H': 2, 'C': 32}
        """
        sizes: dict[str, int] = {}
        for axis in self.axes:
            name = axis.name.upper()
            sizes[name] = sizes.get(name, 1) * axis.size
        return sizes
