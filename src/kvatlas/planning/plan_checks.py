"""The one validator of plans: run whenever a plan is made or read.

Counts are in range, regions lie in bounds and apart, layers are where their kind belongs,
and groups overlay each other block by block only.
"""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import INT64_MAX, Layout, Placement, keeps_to_its_blocks, validate
from kvatlas.planning.plan_data import PlanData
from kvatlas.planning.plan_parts import Region
from kvatlas.planning.sized_layers import LOCAL_KINDS, kind_of, page_of

_LIMIT = 1 << 16
"""Regions, groups, pools, ranks or stages that a plan from outside may claim to have."""

_FAR = 1 << 62
_PARTIAL = (*LOCAL_KINDS, "cross_attention")
"""Kinds that keep other tokens than all of the request's: which ones, their specs say."""

_TOGETHER = {
    ("sliding_window", "full_attention"),
    ("chunked_local_attention", "full_attention"),
    ("sliding_window_mla", "mla_attention"),
    ("mla_attention", "full_attention"),
    ("full_attention", "mla_attention"),
    ("sink_full_attention", "full_attention"),
    ("full_attention", "sink_full_attention"),
    ("sliding_window_mla", "sliding_window"),
}
"""(layer, group): kinds that may share a group of another kind, kept at full length or mixed."""


def check_plan(plan: PlanData) -> None:
    """Refuse a plan whose parts do not fit together, in bounds and apart."""
    _check_numbers(plan)
    pools = plan.pools_by_stage
    for stage in range(plan.pp):
        claimed = sum(pool.nbytes for pool in plan.pools if pool.stage == stage)
        if claimed > plan.memory:
            raise _bad(f"pools of {claimed} bytes in {plan.memory} at stage {stage}")
    if len(pools) < len(plan.pools):
        raise _bad("two pools with one index at one stage")
    names: set[tuple[str, int]] = set()
    placed_in_group: dict[tuple[int, int], dict[str, Placement]] = {}
    placed_in_pool: dict[tuple[int, int], list[tuple[Region, Placement]]] = {}
    for region in plan.regions:
        if not 0 <= region.group < len(plan.groups) or not region.layers:
            raise _bad(f"a region of group {region.group} out of {len(plan.groups)}")
        home = (region.stage, plan.groups[region.group].pool)
        if home not in pools:
            raise _bad(f"group {region.group} in pool {home[1]} at stage {region.stage}")
        _check_region(plan, region, names)
        placed = region.placement(plan.tp, pools[home].blocks)
        placed_in_pool.setdefault(home, []).append((region, placed))
        part = region.parts[0] if region.parts else 0
        key = f"{region.layers[0].name}, part {part}"
        placed_in_group.setdefault((region.stage, region.group), {})[key] = placed
    if {region.group for region in plan.regions} != set(range(len(plan.groups))):
        raise _bad("a group without layers")
    for (stage, index), placements in placed_in_group.items():
        validate(placements, size=pools[stage, plan.groups[index].pool].nbytes, holes=True)
    for home, regions in placed_in_pool.items():
        _refuse_mixed_blocks(regions, pools[home].blocks)


def _check_numbers(plan: PlanData) -> None:
    """Counts are counts, and few enough that nothing from outside costs much."""
    if not plan.pools or not plan.groups:
        raise _bad("no pools or no groups")
    if max(len(plan.groups), len(plan.pools), len(plan.regions)) > _LIMIT:
        raise _bad("more parts than any model has")
    Layout(plan.layout)
    counts = [plan.tp, plan.pp, plan.dcp, plan.max_len, plan.block_size, plan.memory, plan.pack]
    counts += [n for pool in plan.pools for n in (pool.blocks, pool.block_bytes)]
    counts += [n for group in plan.groups for n in (group.block, group.held, group.window or 1)]
    naturals = [plan.in_flight, *(group.source for group in plan.groups)]
    if not 1 <= min(counts) <= max(counts) <= INT64_MAX or not 0 <= min(naturals) <= _FAR:
        raise _bad(f"a count outside 1..2**63 among {sorted({*counts})[:4]}")
    if max(plan.tp, plan.pp) > _LIMIT or plan.tp % plan.dcp or max(naturals) > _FAR:
        raise _bad(f"tp {plan.tp}, pp {plan.pp}, dcp {plan.dcp}")
    if not all(0 <= pool.stage < plan.pp for pool in plan.pools):
        raise _bad(f"a pool at a stage that is none of {plan.pp}")


def _check_region(plan: PlanData, region: Region, names: set[tuple[str, int]]) -> None:
    group = plan.groups[region.group]
    if region.kernel_block < 1 or region.block < 1 or region.block % region.kernel_block:
        raise _bad(f"a block of {region.block} in kernel blocks of {region.kernel_block}")
    if region.block != group.block:
        raise _bad(f"a region with blocks of {region.block} in a group with {group.block}")
    parts = region.parts or (0,) * len(region.layers)
    wrong = region.splits < 1 or not all(0 <= part < region.splits for part in parts)
    if wrong or len(parts) != len(region.layers) or region.splits * plan.tp > _LIMIT:
        raise _bad(f"states split into {region.splits} with parts {parts[:8]}")
    page = region.page(plan.tp)
    for index, layer in enumerate(region.layers):
        if (layer.name, parts[index]) in names:
            raise _bad(f"layer {layer.name} twice")
        names.add((layer.name, parts[index]))
        own = page_of(layer.spec, region.kernel_block, plan.tp * region.splits)
        if (own.heads, own.states, own.content) != (page.heads, page.states, page.content):
            raise _bad(f"layer {layer.name} in a region of unlike pages")
        kind = kind_of(layer.spec)
        if kind != group.kind and (kind, group.kind) not in _TOGETHER:
            raise _bad(f"layer {layer.name} of kind {kind} in a group of {group.kind}")
        if group.kind in _PARTIAL and layer.spec.visibility != group.visibility:
            raise _bad(f"layer {layer.name}, whose window or source is not its group's")


def _refuse_mixed_blocks(regions: list[tuple[Region, Placement]], blocks: int) -> None:
    """Refuse groups that overlay each other in a pool other than block by block.

    A block id belongs to one group at a time, so a block of one group must not touch
    another block of another.
    """
    if len({region.group for region, _ in regions}) < 2:
        return
    cell = regions[0][0].block_stride
    for region, placed in regions:
        whole = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
        split = region.block // region.kernel_block
        kept = keeps_to_its_blocks(whole, cell // split, blocks * split)
        if region.block_stride != cell or not kept:
            raise _bad(f"{region.layers[0].name} in blocks that other groups also use")


def _bad(got: str) -> AtlasError:
    return AtlasError(Code.BAD_PLAN, got=got, hint="Plans are made by kvatlas.plan(), not by hand")
