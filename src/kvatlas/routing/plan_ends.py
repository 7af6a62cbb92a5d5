"""A plan as one end of a route: the placement of fields, and the ranges that each rank holds.

All tensor-parallel ranks of a stage use the same cache layout. They differ only in which heads
or rows of each field they hold. An end therefore needs three things: the placement of each field
at page 0 of a region, the offset of each layer's page from page 0, and the ranges that each rank
holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry import Field, Page, Placement, Sharding, ShardRange, StateBlocks
from kvatlas.planning import Plan, Region
from kvatlas.specs import Spec


class LayerPart(NamedTuple):
    """A layer's whole cache in one region, or some heads of a state that is split by heads."""

    region: int
    part: int


class RegionForm(NamedTuple):
    """A key that is equal for parts of layers with the same layout, in any group."""

    first: int
    """The index of the first region with this layout."""
    part: int


class FieldView(NamedTuple):
    """The placement of a field at page 0 of a region, the same on every rank of a stage."""

    field: Field
    placement: Placement
    cells: StateBlocks


Views = dict[str, FieldView]
"""Views of fields, by field name."""


class PlanEnd:
    """A plan as the source or the destination of a route."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._views: dict[tuple[Spec, RegionForm], tuple[Views, Views]] = {}
        """Shared by layers with equal specs and layouts."""
        self._views_of: dict[tuple[str, LayerPart], tuple[Views, Views]] = {}

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The spec of each layer."""
        return {layer.name: layer.spec for r in self.plan.regions for layer in r.layers}

    @cached_property
    def page_offsets(self) -> dict[str, dict[LayerPart, int]]:
        """For each layer and part, the byte offset of its page from page 0 of its region."""
        offsets: dict[str, dict[LayerPart, int]] = {}
        for index, region in enumerate(self.plan.regions):
            placed = self._placements[index]
            first = {axis: 0 for axis in placed.axes if axis != "L"}
            starts = placed(L=np.arange(len(region.layers)), **first) - placed.offset
            parts = region.parts or (0,) * len(region.layers)
            for layer, part, start in zip(region.layers, parts, starts.tolist(), strict=True):
                offsets.setdefault(layer.name, {})[LayerPart(index, part)] = start
        return offsets

    @cached_property
    def parts(self) -> dict[str, tuple[LayerPart, ...]]:
        """The parts of each layer, in order. Most layers have one part."""
        return {
            name: tuple(sorted(parts, key=lambda part: part.part))
            for name, parts in self.page_offsets.items()
        }

    def form(self, part: LayerPart) -> RegionForm:
        """Return a key for the layout of a part; parts with the same layout have equal keys."""
        return RegionForm(self._first_alike[part.region], part.part)

    def region(self, part: LayerPart) -> Region:
        """Return the region that holds a part."""
        return self.plan.regions[part.region]

    def views(self, layer: str, part: LayerPart) -> Views:
        """Return the fields of one part of a layer by name, without padding; cached."""
        return self._all_views(layer, part)[0]

    def padding_after(self, layer: str, part: LayerPart) -> Views:
        """Return the padding that a page declares right after a field, by that field's name."""
        return self._all_views(layer, part)[1]

    def _all_views(self, layer: str, part: LayerPart) -> tuple[Views, Views]:
        found = self._views_of.get((layer, part))
        if found is None:
            found = self._views_of[layer, part] = self._shared_views(layer, part)
        return found

    def _shared_views(self, layer: str, part: LayerPart) -> tuple[Views, Views]:
        key = (self.specs[layer], self.form(part))
        if key not in self._views:
            region = self.region(part)
            names = [layer.name for layer in region.layers]
            page = region.page(self.plan.tp, 0, names.index(layer))
            placed = self._placements[part.region].select("L", 0)
            fields = {f.name: _view(page, placed, f) for f in page.fields if not f.padding}
            padding = {
                before.name: _view(page, placed, after)
                for before, after in pairwise(page.fields)
                if after.padding and after.follows(before)
            }
            self._views[key] = fields, padding
        return self._views[key]

    def ranges(self, sharding: Sharding, part: LayerPart, tp_rank: int) -> tuple[ShardRange, ...]:
        """Return the ranges of a field's rows that one rank holds, numbered as in the model."""
        return _ranges(sharding, self.plan.tp, self.region(part).splits, tp_rank, part.part)

    @cached_property
    def _first_alike(self) -> list[int]:
        """For each region, the index of the first region with the same layout."""
        first: dict[object, int] = {}
        forms = [
            (at, region.stage, region.splits, region.block, region.kernel_block, region.page_bytes)
            for at, region in zip(self._placements, self.plan.regions, strict=True)
        ]
        return [first.setdefault(form, index) for index, form in enumerate(forms)]

    @cached_property
    def _placements(self) -> list[Placement]:
        tp = self.plan.tp
        return [
            region.placement(tp, self.plan.pool(region.stage * tp, region.group).blocks)
            for region in self.plan.regions
        ]


@lru_cache(maxsize=65536)
def _ranges(
    sharding: Sharding, tp: int, splits: int, tp_rank: int, part: int
) -> tuple[ShardRange, ...]:
    # One of `splits` parts equals the shard of one rank among `splits` times as many ranks.
    held = sharding.ranges(tp * splits, tp_rank * splits + part)
    return held or (ShardRange(0, 0, max(1, sharding.rows if sharding.sections else 1)),)


def _view(page: Page, placed: Placement, field: Field) -> FieldView:
    view = page.view(placed, field.name)
    if "k" in view.axes and "N" in view.axes:
        with suppress(AtlasError):  # Contiguous kernel blocks form one cell.
            view = view.fold("k", "N", into="N")
    states = view.size("N") if "N" in view.axes else 1
    split = view.size("k") if "k" in view.axes else 1
    return FieldView(field, view, StateBlocks(states, split))


def padding_between(
    source: PlanEnd, destination: PlanEnd, layers: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return, by layer, the fields after which both ends declare the same padding.

    Copying this padding with the field is harmless: it is in the same page and the same cell.
    """
    alike: dict[object, frozenset[str]] = {}
    found = {}
    for layer in layers:
        key = tuple(
            (end.specs[layer], *map(end.form, end.parts[layer])) for end in (source, destination)
        )
        if key not in alike:
            alike[key] = _padding_between(source, destination, layer)
        if alike[key]:
            found[layer] = alike[key]
    return found


def _padding_between(source: PlanEnd, destination: PlanEnd, layer: str) -> frozenset[str]:
    first, *others = (
        {name: _unplaced(view.field) for name, view in end.padding_after(layer, part).items()}
        for end in (source, destination)
        for part in end.parts[layer]
    )
    return frozenset(
        name for name, padding in first.items() if all(o.get(name) == padding for o in others)
    )


def _unplaced(field: Field) -> object:
    """Return the properties of a field that must be equal in two plans if its padding is copied."""
    sizes = {axis: size for axis, size in field.shape.items() if axis != "N"}
    return field.dtype, field.sharding, sizes
