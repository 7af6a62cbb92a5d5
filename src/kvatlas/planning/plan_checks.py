"""The one validator of plans: run whenever a plan is made or read.

Counts are in range, every layer is there with all its parts and tokens, groups keep what
their layers say, regions lie in bounds and apart, every field can be viewed where it lies,
and groups overlay each other block by block only.
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
"""Pages of a block, over all layers, parts and stages: real models have a few hundred."""

MOST_REGIONS = 2048
"""Regions of all stages and groups: real models have a few hundred, however they are split."""

MOST_SPECS = 256
"""Different specs of layers: real models have fewer than ten."""

_FAR = 1 << 62
_ELEMENT = 64
"""A multiple of the size of every element."""
_PARTIAL = (*LOCAL_KINDS, "cross_attention")
"""Kinds that keep other tokens than all of the request's: which ones, their specs say."""


def check_plan(plan: PlanData) -> None:
    """Refuse a plan whose parts do not fit together, in bounds and apart."""
    _check_numbers(plan)
    pools = plan.pools_by_stage
    if len(pools) < len(plan.pools):
        raise _bad("two pools with one index at one stage")
    claimed: Counter[int] = Counter()
    for pool in plan.pools:
        claimed[pool.stage] += pool.nbytes
    if max(claimed.values()) > plan.memory:
        raise _bad(f"pools of {max(claimed.values())} bytes in {plan.memory}")
    viewed: set[tuple[object, ...]] = set()
    placed_in_group: dict[tuple[int, int], dict[str, Placement]] = {}
    placed_in_pool: dict[tuple[int, int], list[tuple[Region, Placement]]] = {}
    for region in plan.regions:
        if not 0 <= region.group < len(plan.groups) or not region.layers:
            raise _bad(f"a region of group {region.group} out of {len(plan.groups)}")
        home = (region.stage, plan.groups[region.group].pool)
        if home not in pools:
            raise _bad(f"group {region.group} in pool {home[1]} at stage {region.stage}")
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
    """Counts are counts, and few enough that nothing from outside costs much."""
    if not plan.pools or not plan.groups or not plan.regions:
        raise _bad("no pools, no groups or no regions")
    pages = sum(len(region.layers) for region in plan.regions)
    parts = max(len(plan.groups), len(plan.pools), len(plan.regions))
    if parts > MOST_REGIONS or pages > MOST_PAGES:
        raise _bad("more groups, pools or layers than any model has")
    if Layout(plan.layout).order not in {region.layout for region in plan.regions}:
        raise _bad(f"layout {plan.layout}, in which no region lies")
    counts = [plan.tp, plan.pp, plan.dcp, plan.max_len, plan.block_size, plan.memory, plan.pack]
    counts += [n for pool in plan.pools for n in (pool.blocks, pool.block_bytes)]
    counts += [n for group in plan.groups for n in (group.block, group.held, group.window or 1)]
    naturals = [plan.in_flight, *(group.source for group in plan.groups)]
    if not 1 <= min(counts) <= max(counts) <= INT64_MAX or not 0 <= min(naturals) <= _FAR:
        raise _bad(f"a count outside 1..2**63 among {sorted({*counts})[:4]}")
    if plan.tp * plan.pp > MOST_RANKS or plan.tp % plan.dcp or max(naturals) > _FAR:
        raise _bad(f"tp {plan.tp}, pp {plan.pp}, dcp {plan.dcp}")
    if not all(0 <= pool.stage < plan.pp for pool in plan.pools):
        raise _bad(f"a pool at a stage that is none of {plan.pp}")


def _check_region(plan: PlanData, region: Region) -> None:
    group = plan.groups[region.group]
    if region.kernel_block < 1 or region.block < 1 or region.block % region.kernel_block:
        raise _bad(f"a block of {region.block} in kernel blocks of {region.kernel_block}")
    if region.block != group.block:
        raise _bad(f"a region with blocks of {region.block} in a group with {group.block}")
    if region.splits < 1 or region.splits * plan.tp > MOST_RANKS:
        raise _bad(f"states split into {region.splits} at tp {plan.tp}")
    if region.splits > 1 and group.kind != "recurrent":
        raise _bad(f"{group.kind} split into {region.splits}: only recurrent states are")
    if len(region.parts) != (len(region.layers) if region.splits > 1 else 0):
        raise _bad(f"{len(region.layers)} pages of {len(region.parts)} parts")
    page, split = region.first_page(plan.tp), region.block // region.kernel_block
    if split > 1 and region.page_bytes != page.nbytes * split:
        raise _bad(f"a page of {region.page_bytes} bytes for {split} of {page.nbytes}")
    for index in _unlike_layers(region):
        name, spec = region.layers[index].name, region.layers[index].spec
        own = page_of(spec, region.kernel_block, plan.tp * region.splits)
        if (own.heads, own.states, own.content) != (page.heads, page.states, page.content):
            raise _bad(f"layer {name} in a region of unlike pages")
        kind = kind_of(spec)
        if not _may_join(kind, group.kind):
            raise _bad(f"layer {name} of kind {kind} in a group of {group.kind}")
        if group.kind in _PARTIAL and spec.visibility != group.visibility:
            raise _bad(f"layer {name}, whose window or source is not its group's")
        if plan.dcp > 1:
            _check_tokens(plan, group, name, spec.replicas(plan.tp))


def _may_join(kind: Kind, group: Kind) -> bool:
    """Whether a layer may be in a group: windows and chunks are also kept at full length."""
    if group in FULL_KINDS:
        return kind in (*FULL_KINDS, *LOCAL_KINDS)
    return kind == group or (kind, group) == ("sliding_window_mla", "sliding_window")


def _check_tokens(plan: PlanData, group: Group, layer: str, replicas: int) -> None:
    """Every token of a layer is on some rank, where decode context parallelism divides them."""
    if group.kind in LOCAL_KINDS:
        raise _bad(f"dcp {plan.dcp} with {group.kind} in layer {layer}")
    if group.kind != "recurrent" and replicas < plan.dcp:
        raise _bad(f"dcp {plan.dcp} where {replicas} rank(s) hold the same of layer {layer}")


def _check_views(
    plan: PlanData, region: Region, placed: Placement, viewed: set[tuple[object, ...]]
) -> None:
    """Every field can be a view where its cells lie, its elements at multiples of their size.

    `viewed` are regions that were looked at: alike ones elsewhere are as good.
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
    """Indices of the first layer of each spec."""
    first: dict[Spec, int] = {}
    for index, layer in enumerate(region.layers):
        first.setdefault(layer.spec, index)
    yield from first.values()


def _check_layers(plan: PlanData) -> None:
    """Every layer is there once, with all parts of its state, on one stage."""
    homes: dict[str, list[tuple[int, Region, Layer]]] = {}
    for region in plan.regions:
        for index, layer in enumerate(region.layers):
            homes.setdefault(layer.name, []).append((region.part(index), region, layer))
    for name, found in homes.items():
        parts = sorted(part for part, _, _ in found)
        _, first, layer = found[0]
        if parts != list(range(first.splits)):
            raise _bad(f"layer {name} with parts {parts[:8]} of {first.splits}, each once")
        same = (first.stage, first.splits, layer)
        if any((region.stage, region.splits, other) != same for _, region, other in found):
            raise _bad(f"layer {name} with parts that differ")
        if not 0 <= layer.index <= _FAR:
            raise _bad(f"layer {name} with index {layer.index}")
    if len({found[0][2].spec for found in homes.values()}) > MOST_SPECS:
        raise _bad("more kinds of layers than any model has")


def _check_groups(plan: PlanData) -> None:
    """What groups say of tokens is what one of their layers says."""
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
            raise _bad(f"group {index} with {group.source} tokens of an encoder")
        held = 1 + max(checkpoints(spec, prefix_caching=plan.prefix_caching) for spec in specs)
        if group.held != held and (group.held, plan.policy) != (1, "foreign"):
            raise _bad(f"group {index} with {group.held} blocks held, not {held}")


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


_HINT = "Plans are made by kvatlas.plan(), not by hand"


def _bad(got: str) -> AtlasError:
    return AtlasError(Code.BAD_PLAN, got=got, hint=_HINT)
