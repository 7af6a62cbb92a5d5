"""One end of a route: what a plan says of each layer, in the terms in which ends meet.

All tensor-parallel ranks of a stage lay their caches out alike and differ in which rows
of the model those hold. So an end keeps one view for each field, taken at page 0 of a
region, how far on a layer's page is, and the ranges of the whole that each rank holds.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry import Cells, Field, Page, Placement, Sharding, ShardRange
from kvatlas.planning import Plan, Region
from kvatlas.specs import Spec


class Home(NamedTuple):
    """Where one part of a layer lies: a region of the plan."""

    region: int
    part: int


class View(NamedTuple):
    """A field as every rank of a stage has it, at page 0 of a region."""

    field: Field
    placement: Placement
    cells: Cells


class Side:
    """A plan as one end of a route."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """What each layer keeps."""
        return {layer.name: layer.spec for r in self.plan.regions for layer in r.layers}

    @cached_property
    def shifts(self) -> dict[str, dict[Home, int]]:
        """How far on from page 0 of its region each part of each layer lies, in bytes."""
        found: dict[str, dict[Home, int]] = {}
        for index, region in enumerate(self.plan.regions):
            placed = self._placed(index)
            first = {axis: 0 for axis in placed.axes if axis != "L"}
            starts = placed(L=np.arange(len(region.layers)), **first) - placed.offset
            for page, (layer, shift) in enumerate(zip(region.layers, starts.tolist(), strict=True)):
                home = Home(index, region.parts[page] if region.parts else 0)
                found.setdefault(layer.name, {})[home] = shift
        return found

    @cached_property
    def homes(self) -> dict[str, tuple[Home, ...]]:
        """Where the parts of each layer lie, in their order."""
        return {
            name: tuple(sorted(homes, key=lambda home: home.part))
            for name, homes in self.shifts.items()
        }

    @cached_property
    def stages(self) -> dict[str, int]:
        """The pipeline stage of each layer."""
        return {layer.name: r.stage for r in self.plan.regions for layer in r.layers}

    def group(self, layer: str) -> int:
        """The group of a layer; the parts of a cut state may each have one of their own."""
        return self.region(self.homes[layer][0]).group

    def region(self, home: Home) -> Region:
        """The region of a home."""
        return self.plan.regions[home.region]

    def views(self, layer: str, home: Home) -> dict[str, View]:
        """The fields of a layer in one of its homes, padding left out."""
        region = self.region(home)
        placed = self._placed(home.region).select("L", 0)
        page = self._page(region, layer)
        return {f.name: _view(page, placed, f) for f in page.fields if not f.padding}

    def ranges(self, sharding: Sharding, home: Home, tp_rank: int) -> tuple[ShardRange, ...]:
        """What one rank holds of a field in one home, as rows of the whole model."""
        return _ranges(sharding, self.plan.tp, self.region(home).splits, tp_rank, home.part)

    def _page(self, region: Region, layer: str) -> Page:
        index = next(index for index, found in enumerate(region.layers) if found.name == layer)
        return region.page(self.plan.tp, 0, index)

    def _placed(self, index: int) -> Placement:
        if index not in self._placements:
            region = self.plan.regions[index]
            pool = next(
                pool
                for pool in self.plan.pools
                if (pool.stage, pool.index) == (region.stage, self.plan.groups[region.group].pool)
            )
            self._placements[index] = region.placement(self.plan.tp, pool.blocks)
        return self._placements[index]

    @cached_property
    def _placements(self) -> dict[int, Placement]:
        return {}


@lru_cache(maxsize=65536)
def _ranges(
    sharding: Sharding, tp: int, parts: int, tp_rank: int, part: int
) -> tuple[ShardRange, ...]:
    # A part is what one of `parts` times as many ranks would hold.
    held = sharding.ranges(tp * parts, tp_rank * parts + part)
    return held or (ShardRange(0, 0, max(1, sharding.rows if sharding.sections else 1)),)


def _view(page: Page, placed: Placement, field: Field) -> View:
    view = page.view(placed, field.name)
    if "k" in view.axes and "N" in view.axes:
        with suppress(AtlasError):  # kernel blocks whose states follow each other are one cell
            view = view.fold("k", "N", into="N")
    states = view.size("N") if "N" in view.axes else 1
    split = view.size("k") if "k" in view.axes else 1
    return View(field, view, Cells(states, split))
