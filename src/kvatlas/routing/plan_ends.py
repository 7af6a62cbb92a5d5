"""A plan as one end of a route: the placement of fields, and the ranges that each rank holds.

All tensor-parallel ranks of a stage use the same cache layout. They differ only in which heads
or rows of each field they hold. An end therefore needs three things: the placement of each field
at page 0 of a region, the offset of each layer's page from page 0, and the ranges that each rank
holds. A region is the memory of several layers with equal pages, and page 0 is its first page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry import Field, Placement, Sharding, ShardRange, StateBlocks
from kvatlas.planning import Plan, Region
from kvatlas.specs import Ring, Spec


class LayerPart(NamedTuple):
    """A part of a layer's cache: usually the whole cache, or some heads of a split state."""

    region: int
    part: int


class RegionForm(NamedTuple):
    """A key that is equal for layer parts with the same layout, even in different groups."""

    first: int
    """The index of the first region with this layout."""
    part: int


class FieldView(NamedTuple):
    """The placement of a field in page 0 of a region, the same on every rank of a stage.

    A region contains the pages of several layers, and page 0 is the first page.
    """

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

    def page_offsets(self, part: LayerPart, field: str) -> Mapping[str, int]:
        """Return, by layer, the bytes from a field of page 0 to the same field of the layer's page.

        Page 0 is the first page of the region that holds `part`. If states are split into parts,
        only pages that hold the same part as `part` are included.
        """
        apart = self.region(part).apart
        return self._page_offsets[part.region, field if apart else ""][part.part]

    @cached_property
    def _page_offsets(self) -> dict[tuple[int, str], dict[int, dict[str, int]]]:
        """Page offsets by (region, field), then part, then layer.

        The field is an empty string unless the fields of the region are stored apart.
        """
        offsets: dict[tuple[int, str], dict[int, dict[str, int]]] = {}
        for index, region in enumerate(self.plan.regions):
            for name, placed in self._placements[index].items():
                first = {axis: 0 for axis in placed.axes if axis != "L"}
                starts = placed(L=np.arange(len(region.layers)), **first) - placed.offset
                found = offsets[index, name if region.apart else ""] = {}
                for (layer, part), start in zip(
                    self._pages_of(index), starts.tolist(), strict=True
                ):
                    found.setdefault(part.part, {})[layer] = start
        return offsets

    @cached_property
    def parts(self) -> dict[str, tuple[LayerPart, ...]]:
        """The parts of each layer, in order. Most layers have one part."""
        found: dict[str, list[LayerPart]] = {}
        for index in range(len(self.plan.regions)):
            for name, part in self._pages_of(index):
                found.setdefault(name, []).append(part)
        return {
            name: tuple(sorted(parts, key=lambda part: part.part)) for name, parts in found.items()
        }

    def _pages_of(self, index: int) -> list[tuple[str, LayerPart]]:
        """Return (layer, part) of each page of a region."""
        region = self.plan.regions[index]
        parts = region.parts or (0,) * len(region.layers)
        return [
            (layer.name, LayerPart(index, part))
            for layer, part in zip(region.layers, parts, strict=True)
        ]

    def form(self, part: LayerPart) -> RegionForm:
        """Return a key for the layout of a part; parts with the same layout have equal keys."""
        return RegionForm(self._first_alike[part.region], part.part)

    def region(self, part: LayerPart) -> Region:
        """Return the region that holds a part."""
        return self.plan.regions[part.region]

    def views(self, layer: str, part: LayerPart) -> Views:
        """Return the fields of a layer's part by name, without padding. The result is cached."""
        return self._all_views(layer, part)[0]

    def padding_after(self, layer: str, part: LayerPart) -> Views:
        """Return the padding that directly follows each field in its page, by field name."""
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
            stored = self._placements[part.region]
            first = {name: placed.select("L", 0) for name, placed in stored.items()}
            ring = isinstance(self.specs[layer], Ring)

            def view(field: Field) -> FieldView:
                whole = first.get(field.name) if region.apart else None
                return _view(field, whole or page.view(first["pages"], field.name), ring)

            fields = {field.name: view(field) for field in page.fields if not field.padding}
            padding = {
                before.name: view(after)
                for before, after in pairwise(page.fields)
                if not region.apart and after.padding and after.follows(before)
            }
            self._views[key] = fields, padding
        return self._views[key]

    def ranges(self, sharding: Sharding, part: LayerPart, tp_rank: int) -> tuple[ShardRange, ...]:
        """Return the ranges of a field's rows that one rank holds, numbered as in the model."""
        return _ranges(sharding, self.plan.tp, self.region(part).splits, tp_rank, part.part)

    @cached_property
    def _first_alike(self) -> list[int]:
        """For each region of the plan, the index of the first region with the same layout."""
        first: dict[object, int] = {}
        forms = [
            (
                *at.items(),
                region.stage,
                region.splits,
                region.block,
                region.kernel_block,
                region.page_bytes,
            )
            for at, region in zip(self._placements, self.plan.regions, strict=True)
        ]
        return [first.setdefault(form, index) for index, form in enumerate(forms)]

    @cached_property
    def _placements(self) -> list[dict[str, Placement]]:
        """The placements of each region, by name.

        A region has one placement of all its pages, or one for each field if fields are stored
        apart.
        """
        tp = self.plan.tp
        return [
            region.stored(tp, self.plan.pool(region.stage * tp, region.group).blocks)
            for region in self.plan.regions
        ]


@lru_cache(maxsize=65536)
def _ranges(
    sharding: Sharding, tp: int, splits: int, tp_rank: int, part: int
) -> tuple[ShardRange, ...]:
    # A part of a state equals the shard of one rank if there were `splits` times as many ranks.
    held = sharding.ranges(tp * splits, tp_rank * splits + part)
    return held or (ShardRange(0, 0, max(1, sharding.rows if sharding.sections else 1)),)


def _view(field: Field, view: Placement, ring: bool) -> FieldView:
    if "k" in view.axes and "N" in view.axes:
        with suppress(AtlasError):  # Contiguous kernel blocks form one cell.
            view = view.fold("k", "N", into="N")
    states = view.size("N") if "N" in view.axes else 1
    split = view.size("k") if "k" in view.axes else 1
    return FieldView(field, view, StateBlocks(states, split, ring=ring))


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
