"""Validate a plan, whenever one is made or read.

The checks: counts are in range; every layer is present, with all of its parts and tokens;
groups match the specs of their layers; regions are in bounds and do not overlap; every field
can be a view; and groups overlay each other only block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, Placement, validate
from kvatlas.geometry.integers import INT64_MAX
from kvatlas.geometry.validation import keeps_to_its_blocks
from kvatlas.models import Layer
from kvatlas.planning.plan_data import PlanData
from kvatlas.planning.plan_parts import Group, Region
from kvatlas.planning.sized_layers import (
    FULL_KINDS,
    LOCAL_KINDS,
    Kind,
    checkpoints,
    kind_of,
    page_of,
)
from kvatlas.planning.topology import MOST_RANKS
from kvatlas.specs import Spec

MOST_PAGES = 16_384
"""Limit on the pages of a block, over all layers, parts and stages; real models have hundreds."""

MOST_REGIONS = 2048
"""Limit on the regions of all stages and groups; real models have a few hundred."""

MOST_SPECS = 256
"""Limit on different specs; real models have fewer than ten."""

_FAR = 1 << 62
_ELEMENT = 64
"""A multiple of the size of every element, in bytes."""
_PARTIAL = (*LOCAL_KINDS, "cross_attention")
"""Kinds that do not keep exactly the tokens of the request; their specs define which they keep."""


def check_plan(plan: PlanData) -> None:
    """Raise an error if the parts of a plan overlap, are out of bounds or contradict each other."""
    _check_numbers(plan)
    pools = plan.pools_by_stage
    if len(pools) < len(plan.pools):
        raise _bad("two pools with the same index on one stage")
    claimed: Counter[int] = Counter()
    for pool in plan.pools:
        claimed[pool.stage] += pool.nbytes
    if max(claimed.values()) > plan.memory:
        got = f"pools of {max(claimed.values())} bytes, more than the memory of {plan.memory}"
        raise _bad(got)
    viewed: set[tuple[object, ...]] = set()
    placed_in_group: dict[tuple[int, int], dict[str, Placement]] = {}
    placed_in_pool: dict[tuple[int, int], list[tuple[Region, Placement]]] = {}
    for region in plan.regions:
        if not 0 <= region.group < len(plan.groups) or not region.layers:
            raise _bad(
                f"a region with {len(region.layers)} layers in group {region.group}, where groups "
                f"are 0..{len(plan.groups) - 1}"
            )
        home = (region.stage, plan.groups[region.group].pool)
        if home not in pools:
            raise _bad(f"group {region.group} in pool {home[1]}, which stage {region.stage} lacks")
        _check_region(plan, region)
        placed = region.placement(plan.tp, pools[home].blocks)
        _check_views(plan, region, placed, viewed)
        placed_in_pool.setdefault(home, []).append((region, placed))
        key = f"{region.layers[0].name}, part {region.part(0)}"
        placed_in_group.setdefault((region.stage, region.group), {})[key] = placed
    _check_layers(plan)
    _check_groups(plan)
    for (stage, index), placements in placed_in_group.items():
        validate(placements, size=pools[stage, plan.groups[index].pool].nbytes, holes=True)
    for home, regions in placed_in_pool.items():
        _refuse_mixed_blocks(regions, pools[home].blocks)


def _check_numbers(plan: PlanData) -> None:
    """Check that counts are in range, and small enough that the other checks are fast."""
    if not plan.pools or not plan.groups or not plan.regions:
        raise _bad("a plan without pools, groups or regions")
    pages = sum(len(region.layers) for region in plan.regions)
    parts = max(len(plan.groups), len(plan.pools), len(plan.regions))
    if parts > MOST_REGIONS or pages > MOST_PAGES:
        raise _bad(f"{parts:,} groups, pools or regions with {pages:,} pages: too many")
    if Layout(plan.layout).order not in {region.layout for region in plan.regions}:
        raise _bad(f"layout {plan.layout}, which no region has")
    counts = [plan.tp, plan.pp, plan.dcp, plan.max_len, plan.block_size, plan.memory, plan.pack]
    counts += [n for pool in plan.pools for n in (pool.blocks, pool.block_bytes)]
    counts += [n for group in plan.groups for n in (group.block, group.held, group.window or 1)]
    naturals = [plan.in_flight, *(group.source for group in plan.groups)]
    if not 1 <= min(counts) <= max(counts) <= INT64_MAX or not 0 <= min(naturals) <= _FAR:
        raise _bad(f"a count that is out of range among {sorted({*counts, *naturals})[:4]}")
    if plan.tp * plan.pp > MOST_RANKS or plan.tp % plan.dcp or max(naturals) > _FAR:
        ranks = f"tp {plan.tp}, pp {plan.pp}, dcp {plan.dcp}"
        raise _bad(f"{ranks}: too many ranks, or a dcp that does not divide tp")
    if not all(0 <= pool.stage < plan.pp for pool in plan.pools):
        raise _bad(f"a pool on a stage outside 0..{plan.pp - 1}")


def _check_region(plan: PlanData, region: Region) -> None:
    group = plan.groups[region.group]
    if region.kernel_block < 1 or region.block < 1 or region.block % region.kernel_block:
        raise _bad(f"a block of {region.block} tokens, not a multiple of {region.kernel_block}")
    if region.block != group.block:
        raise _bad(f"blocks of {region.block} tokens in a group with blocks of {group.block}")
    if region.splits < 1 or region.splits * plan.tp > MOST_RANKS:
        got = f"states split into {region.splits} parts at tp {plan.tp}"
        raise _bad(f"{got}, where tp x parts must be in 1..{MOST_RANKS}")
    if region.splits > 1 and group.kind != "recurrent":
        raise _bad(f"{group.kind} split into {region.splits} parts: only states can be split")
    if len(region.parts) != (len(region.layers) if region.splits > 1 else 0):
        raise _bad(f"a region with {len(region.parts)} parts for {len(region.layers)} pages")
    page, split = region.first_page(plan.tp), region.block // region.kernel_block
    if split > 1 and region.page_bytes != page.nbytes * split:
        got = f"a page of {region.page_bytes} bytes instead of {split} x {page.nbytes}"
        raise _bad(got)
    for index in _unlike_layers(region):
        name, spec = region.layers[index].name, region.layers[index].spec
        own = page_of(spec, region.kernel_block, plan.tp * region.splits)
        if (own.heads, own.states, own.content) != (page.heads, page.states, page.content):
            raise _bad(f"layer {name} in a region whose pages have another shape")
        kind = kind_of(spec)
        if not _may_join(kind, group.kind):
            raise _bad(f"layer {name} of kind {kind} in a group of kind {group.kind}")
        if group.kind in _PARTIAL and spec.visibility != group.visibility:
            raise _bad(f"layer {name}, whose window or source differs from its group's")
        if plan.dcp > 1:
            _check_tokens(plan, group, name, spec.replicas(plan.tp))


def _may_join(kind: Kind, group: Kind) -> bool:
    """Whether a layer may be in a group; windows and chunks may be in a group of full attention."""
    if group in FULL_KINDS:
        return kind in (*FULL_KINDS, *LOCAL_KINDS)
    return kind == group or (kind, group) == ("sliding_window_mla", "sliding_window")


def _check_tokens(plan: PlanData, group: Group, layer: str, replicas: int) -> None:
    """Check that decode context parallelism leaves every token of a layer on some rank."""
    if group.kind in LOCAL_KINDS:
        raise _bad(f"dcp {plan.dcp}, which layer {layer} of kind {group.kind} does not support")
    if group.kind != "recurrent" and replicas < plan.dcp:
        raise _bad(f"dcp {plan.dcp}, more than the {replicas} replica(s) of layer {layer}")


def _check_views(
    plan: PlanData, region: Region, placed: Placement, viewed: set[tuple[object, ...]]
) -> None:
    """Check that every field of a region can be a view with aligned elements.

    `viewed` records the regions checked so far, so that equivalent ones are not checked again.
    """
    specs = tuple(dict.fromkeys(layer.spec for layer in region.layers))
    size, first = (region.page_bytes, region.kernel_block, region.splits), placed.offset % _ELEMENT
    alike = (specs, size, placed.axes, placed.sizes, placed.strides, first)
    if alike in viewed:
        return
    viewed.add(alike)
    for index in _unlike_layers(region):
        page = region.first_page(plan.tp, index)
        for field in page.fields:
            seen = page.view(placed, field.name)
            if any(step % seen.item for step in (seen.offset, *seen.strides)):
                got = f"{field.name} of layer {region.layers[index].name} at {seen}"
                raise AtlasError(Code.MISALIGNED, got=got, hint=_HINT)


def _unlike_layers(region: Region) -> Iterator[int]:
    """Yield the index of the first layer of each spec."""
    first: dict[Spec, int] = {}
    for index, layer in enumerate(region.layers):
        first.setdefault(layer.spec, index)
    yield from first.values()


def _check_layers(plan: PlanData) -> None:
    """Check that every layer is on one stage and has each part of its state once."""
    homes: dict[str, list[tuple[int, Region, Layer]]] = {}
    for region in plan.regions:
        for index, layer in enumerate(region.layers):
            homes.setdefault(layer.name, []).append((region.part(index), region, layer))
    for name, found in homes.items():
        parts = sorted(part for part, _, _ in found)
        _, first, layer = found[0]
        if parts != list(range(first.splits)):
            raise _bad(f"layer {name} with parts {parts[:8]} instead of 0..{first.splits - 1}")
        same = (first.stage, first.splits, layer)
        if any((region.stage, region.splits, other) != same for _, region, other in found):
            raise _bad(f"layer {name} with parts that differ in stage, split or spec")
        if not 0 <= layer.index <= _FAR:
            raise _bad(f"layer {name} with index {layer.index}, which is out of range")
    if len({found[0][2].spec for found in homes.values()}) > MOST_SPECS:
        raise _bad(f"more than {MOST_SPECS} different specs")


def _check_groups(plan: PlanData) -> None:
    """Check that the window, source and held blocks of each group match its layers."""
    members: dict[int, list[Region]] = {}
    for region in plan.regions:
        members.setdefault(region.group, []).append(region)
    if set(members) != set(range(len(plan.groups))):
        raise _bad("a group without layers")
    for index, group in enumerate(plan.groups):
        specs = {layer.spec for region in members[index] for layer in region.layers}
        seen = {spec.visibility for spec in specs}
        if group.window not in {v.window or v.chunk for v in seen}:
            raise _bad(f"group {index} with a window of {group.window}, which no layer has")
        if group.source not in {v.source or 0 for v in seen}:
            raise _bad(f"group {index} with {group.source} encoder tokens, which no layer has")
        held = 1 + max(checkpoints(spec, prefix_caching=plan.prefix_caching) for spec in specs)
        if group.held != held and (group.held, plan.policy) != (1, "foreign"):
            raise _bad(f"group {index} with {group.held} held blocks instead of {held}")


def _refuse_mixed_blocks(regions: list[tuple[Region, Placement]], blocks: int) -> None:
    """Raise an error if groups do not overlay each other block by block.

    A block id belongs to one group at a time. Therefore a block of one group must not overlap
    a block with a different id of another group.
    """
    if len({region.group for region, _ in regions}) < 2:
        return
    cell = regions[0][0].block_stride
    for region, placed in regions:
        whole = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
        split = region.block // region.kernel_block
        kept = keeps_to_its_blocks(whole, cell // split, blocks * split)
        if region.block_stride != cell or not kept:
            name = region.layers[0].name
            raise _bad(f"blocks of {name} that overlap blocks of another group with another id")


_HINT = "Create plans with kvatlas.plan(), not by hand"


def _bad(got: str) -> AtlasError:
    return AtlasError(Code.BAD_PLAN, got=got, hint=_HINT)
