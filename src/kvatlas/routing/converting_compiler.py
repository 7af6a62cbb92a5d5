"""`ConvertingCompiler`: the boxes of a converting route, for one pair of ranks at a time.

A box is a range of heads or rows that one rank reads from another rank. It covers all layers that
are in the same regions, both in the source plan and in the destination plan. `ConvertedStream`
describes the order of the cells in a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvatlas.geometry import Placement, StateBlocks, StridedRuns, merge_runs
from kvatlas.geometry.combine import tile_alike
from kvatlas.routing.binding import RepeatedRuns, repeated
from kvatlas.routing.compiler import Compiler, GroupPair, NeededShard
from kvatlas.routing.conversion import Conversion, place_of_conversion, way_between
from kvatlas.routing.plan_ends import FieldView, LayerPart, PlanEnd
from kvatlas.specs import CellFormat, Recurrent, Visibility

_OPEN = ("B", "k", "N")


class BoxEnd(NamedTuple):
    """The source or the destination of a box: its cell format, bytes per state, and runs.

    A box is a range of heads or rows of some layers. One rank reads it from another rank.
    """

    cell: CellFormat
    nbytes: int
    runs: dict[StateBlocks, list[RepeatedRuns]]


class ConvertedBox(NamedTuple):
    """A box: a range of heads or rows of some layers that one rank reads from another.

    These layers are in the same regions, both in the source plan and in the destination plan.
    """

    pair: GroupPair
    ends: tuple[BoxEnd, BoxEnd]
    copied: bool
    """Whether source and destination have the same bytes, so that nothing is converted."""
    wire: int
    """The end whose format is sent: 0 for the source, 1 for the destination."""

    @property
    def by_element(self) -> bool:
        """Whether every element can be converted separately; true without a conversion."""
        return self.copied or all(end.cell.by_element for end in self.ends)

    def unit(self, end: int) -> int:
        """Return the bytes of a cell at `end` (0: source, 1: destination); 1 without conversion."""
        return 1 if self.copied else self.ends[end].cell.nbytes


class ConvertingCompiler(Compiler):
    """Compiles the copy between two plans with different formats, as boxes (`ConvertedBox`)."""

    def __init__(
        self,
        source: PlanEnd,
        destination: PlanEnd,
        visibilities: Mapping[str, Visibility],
        conversion: Conversion,
    ) -> None:
        super().__init__(source, destination, visibilities)
        self.conversion = conversion

    def fields_chosen_by(self, layer: str, part: LayerPart) -> Mapping[str, FieldView]:
        """Return the fields for which source ranks are chosen.

        For attention, this is only the first field of a row, because the whole row is read from
        one rank. For recurrent layers, it is every state.
        """
        views = self.destination.views(layer, part)
        return views if self._recurrent(layer) else dict([next(iter(views.items()))])

    def boxes(
        self, source_rank: int, destination_rank: int, layers: frozenset[str] | None = None
    ) -> list[ConvertedBox]:
        """Return the boxes that a destination rank reads from a source rank, in stream order."""
        boxes = []
        for alike, needed in self.choices(source_rank, destination_rank):
            by_scales: dict[object, list[str]] = defaultdict(list)
            for name in alike:
                if layers is None or name in layers:
                    cells = self.cells(name, needed.field)
                    by_scales[tuple(cell.scales for cell in cells)].append(name)
            boxes += [self._box(names, needed) for names in by_scales.values()]
        return boxes

    def _recurrent(self, layer: str) -> bool:
        return isinstance(self.destination.specs[layer], Recurrent)

    def cells(self, layer: str, field: str) -> tuple[CellFormat, CellFormat]:
        """Return the source and destination cell formats of a layer, or of one recurrent state."""
        return self.conversion.cells[layer, field if self._recurrent(layer) else "rows"]

    def of_field(self, layer: str, needed: NeededShard, field: str) -> NeededShard:
        """Return the same rows of another field: `needed`, with `field` and its block sizes."""
        (chosen,) = needed.sources
        here = self.source.views(layer, self.source.parts[layer][chosen.part])[field]
        there = self.destination.views(layer, self.destination.parts[layer][needed.part])[field]
        kept = (
            view.cells._replace(every=cells.every, residue=cells.residue)
            for view, cells in ((here, chosen.cells), (there, needed.cells))
        )
        source, destination = kept
        return needed._replace(
            field=field, cells=destination, sources=(chosen._replace(cells=source),)
        )

    def _box(self, names: list[str], needed: NeededShard) -> ConvertedBox:
        layer, chosen = names[0], needed.sources[0]
        cells = self.cells(layer, needed.field)
        axes = self._axes(layer, needed)
        source, destination = (
            self.source.parts[layer][chosen.part],
            self.destination.parts[layer][needed.part],
        )
        here = (self.source, source, chosen.local, chosen.cells)
        there = (self.destination, destination, needed.local, needed.cells)
        ends = [
            self._end(names, needed, cell, axes, *end)
            for cell, end in zip(cells, (here, there), strict=True)
        ]
        copied = way_between(*cells) == "copied"
        wire = 1 if place_of_conversion(*cells) == "source" else 0
        return ConvertedBox(self.group_pair(layer, needed), (ends[0], ends[1]), copied, wire)

    def _axes(self, layer: str, needed: NeededShard) -> list[tuple[str, int]]:
        """Return (name, size) of the axes along which a box is divided into cells.

        A cell is the unit of conversion. The axes are in the order of the destination.
        """
        view = self.destination.views(layer, self.destination.parts[layer][needed.part])[
            needed.field
        ]
        cut = view.field.sharding.axis
        inside = (*_OPEN,) if self._recurrent(layer) else (*_OPEN, "C", "c")
        return [
            (axis, needed.length if axis == cut else view.placement.size(axis))
            for axis in view.placement.axes
            if axis not in inside
        ]

    def _end(
        self,
        names: list[str],
        needed: NeededShard,
        cell: CellFormat,
        axes: list[tuple[str, int]],
        end: PlanEnd,
        part: LayerPart,
        local: int,
        cells: StateBlocks,
    ) -> BoxEnd:
        """Return one end of a box. `end` is the plan at this end: the source or the destination."""
        layer_bytes = cell.nbytes * int(np.prod([size for _, size in axes]))
        strips: dict[StateBlocks, list[StridedRuns]] = defaultdict(list)
        views = end.views(names[0], part)
        for row in cell.rows:
            view = views[row.name]
            mine = view.placement
            if view.field.sharding.axis is not None:
                mine = mine.narrow(view.field.sharding.axis, local, needed.length)
            outer = Placement.packed(axes, item=cell.nbytes)
            in_order = Placement(
                ("N", *outer.axes, "C"),
                (2, *outer.sizes, row.items),
                (layer_bytes * len(names), *outer.strides, row.dtype.item),
                row.at,
                row.dtype.item,
            )
            if cell.field is not None:
                in_order = in_order.select("C", 0)
            strip = StridedRuns.between(*tile_alike(mine, in_order))
            blocks = view.cells._replace(every=cells.every, residue=cells.residue)
            for place, name in enumerate(names):
                shifted = strip.shift(end.page_offsets(part, row.name)[name], place * layer_bytes)
                strips[blocks].append(shifted)
        runs = {blocks: repeated(merge_runs(own)) for blocks, own in strips.items()}
        return BoxEnd(cell, layer_bytes * len(names), runs)
