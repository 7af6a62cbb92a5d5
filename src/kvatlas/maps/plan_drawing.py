"""A plan as data for a drawing: pools, groups, and every field as an offset with strides.

The HTML page computes all addresses from offsets and strides. Rows, padding and unused bytes are
therefore also described by offsets and strides. Identical regions share one `PageDrawing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvatlas.geometry import Field, Placement
from kvatlas.geometry.byte_sizes import size
from kvatlas.maps.memory_rows import BlockStretch, field_rows, page_rows, rows_of_blocks, unused
from kvatlas.planning import Plan, Region


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A placement as JSON: offset and item size in bytes, and (name, size, stride) of each axis."""

    offset: int
    item: int
    axes: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, placed: Placement) -> Box:
        """Return a placement as a box."""
        axes = zip(placed.axes, placed.sizes, placed.strides, strict=True)
        return cls(placed.offset, placed.item, tuple(axes))


class FieldDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a field in a region, and the heads or channels that each rank holds."""

    name: str
    dtype: str
    padding: bool
    box: Box
    shard: str | None
    """The axis that tensor parallelism divides; None if it divides none."""
    whole: int
    """Size of the axis `shard` in the whole model."""
    ranges: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each rank, and each part of a split state, the (local, start, length) ranges of rows that
    it holds."""


class PageDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """The drawing of one page: where its fields and padding are, and the rows to draw."""

    fields: tuple[FieldDrawing, ...]
    padding: Box | None
    block_rows: tuple[Box, ...]
    """The rows of a block: one box, or one for each field if fields are stored apart."""
    page_rows: tuple[Box, ...]


class RegionDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """A region: layers of one group whose pages have the same format, and where they are stored.

    `layers` are indices into `MapData.names`.
    """

    stage: int
    group: int
    page: int
    layers: tuple[int, ...]
    parts: tuple[int, ...]
    splits: int
    page_bytes: int
    tokens_per_state: int | None


class PlanDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """The figures and the geometry of a plan, for the HTML page."""

    label: str
    answer: str
    knobs: dict[str, str | int]
    ranks: int
    tp: int
    memory: int
    groups: tuple[dict[str, Any], ...]
    pools: tuple[dict[str, Any], ...]
    pages: tuple[PageDrawing, ...]
    regions: tuple[RegionDrawing, ...]
    unused: dict[str, tuple[Box, ...]]
    """Bytes of a block that a group does not use, by `stage/group`."""


def draw_plan(plan: Plan, names: dict[str, int]) -> PlanDrawing:
    """Return the drawing of a plan, and add its layer names to the dict `names`."""
    pages: dict[PageDrawing, int] = {}
    regions = tuple(_region(plan, region, names, pages) for region in plan.regions)
    summary = plan.summary()
    return PlanDrawing(
        label=str(plan),
        answer=summary["answer"],
        knobs=_knobs(plan),
        ranks=plan.ranks,
        tp=plan.tp,
        memory=plan.memory,
        groups=tuple(_group(group) for group in summary["groups"]),
        pools=tuple(_pool(pool) for pool in summary["pools"]),
        pages=tuple(pages),
        regions=regions,
        unused={
            f"{stage}/{group}": tuple(_stretch(stretch) for stretch in left)
            for (stage, group), left in unused(plan).items()
        },
    )


def _knobs(plan: Plan) -> dict[str, str | int]:
    """Return the values that the controls of the HTML page show for a plan."""
    dtypes = dict.fromkeys(
        field.dtype.name
        for region in plan.regions
        for field in region.page(plan.tp).fields
        if not field.padding
    )
    return {
        "order": plan.layout,
        "block": plan.block_size,
        "tp": plan.tp,
        "pp": plan.pp,
        "pack": plan.pack,
        "dtype": " ".join(dtypes),
        "policy": plan.policy,
    }


def _group(summary: dict[str, Any]) -> dict[str, Any]:
    kept = ("kind", "block_size", "pool", "window", "num_layers", "page_bytes")
    return {name: summary[name] for name in kept}


def _pool(summary: dict[str, Any]) -> dict[str, Any]:
    named = {name: summary[name] for name in ("stage", "index", "blocks", "block_bytes", "bytes")}
    return named | {"size": size(summary["bytes"])}


def _region(
    plan: Plan, region: Region, names: dict[str, int], pages: dict[PageDrawing, int]
) -> RegionDrawing:
    page = _page(plan, region)
    return RegionDrawing(
        stage=region.stage,
        group=region.group,
        page=pages.setdefault(page, len(pages)),
        layers=tuple(names.setdefault(layer.name, len(names)) for layer in region.layers),
        parts=region.parts,
        splits=region.splits,
        page_bytes=region.page_bytes,
        tokens_per_state=region.layers[0].spec.tokens_per_state,
    )


def _page(plan: Plan, region: Region) -> PageDrawing:
    page = region.page(plan.tp)
    blocks = plan.pool(region.stage * plan.tp, region.group).blocks
    views = region.views(plan.tp, blocks)
    if region.apart:
        gaps, rows = None, [field_rows(view, keep=("B", "L")) for view in views.values()]
    else:
        placed = region.placement(plan.tp, blocks)
        gaps, rows = page.gaps(placed), page_rows(page, placed)
    return PageDrawing(
        fields=tuple(_field(plan, region, page.field(name), views[name]) for name in views),
        padding=None if gaps is None else Box.of(gaps),
        block_rows=tuple(map(Box.of, rows_of_blocks(plan, region))),
        page_rows=tuple(map(Box.of, rows)),
    )


def _field(plan: Plan, region: Region, field: Field, view: Placement) -> FieldDrawing:
    sharding = field.sharding
    held: Iterable[tuple[tuple[int, int, int], ...]] = ()
    if sharding.sections:
        ranks = plan.tp * region.splits
        held = (
            tuple((own.local, own.start, own.length) for own in sharding.ranges(ranks, rank))
            for rank in range(ranks)
        )
    return FieldDrawing(
        name=field.name,
        dtype=field.dtype.name,
        padding=field.padding,
        box=Box.of(view),
        shard=sharding.axis if sharding.sections else None,
        whole=sharding.rows if sharding.sections else 0,
        ranges=tuple(held),
    )


def _stretch(stretch: BlockStretch) -> Box:
    axes = (("B", stretch.blocks, stretch.block_stride),)
    return Box(stretch.start, stretch.nbytes, axes)
