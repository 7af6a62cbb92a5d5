"""Validation of plans, whenever a plan is built or read.

These rules are checked: counts are in range; every layer has all of its parts and tokens; groups
match the specs of their layers; regions are in bounds and do not overlap; every field, such as K or
V, can be a strided view; and blocks of different groups overlap only if they have the same id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, Placement, validate
from kvatlas.geometry.integers import INT64_MAX
from kvatlas.geometry.validation import keeps_to_its_blocks
from kvatlas.models import Layer
from kvatlas.planning.plan_data import PlanData
from kvatlas.planning.plan_parts import FieldPlacement, Group, Pool, Region
from kvatlas.planning.sized_layers import (
    FIXED_KINDS,
    FULL_KINDS,
    LOCAL_KINDS,
    Kind,
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
_PARTIAL = (*LOCAL_KINDS, "cross_attention", "ring")
"""Kinds that do not keep all tokens of a request; their specs define which tokens they keep."""


def check_plan(plan: PlanData) -> None:
    """Raise an error if the parts of a plan overlap, are out of bounds or contradict each other."""
    _check_numbers(plan)
    pools = plan.pools_by_stage
    if len(pools) < len(plan.pools):
        raise _bad_plan("two pools on one stage with the same index")
    claimed: Counter[int] = Counter()
    for pool in plan.pools:
        claimed[pool.stage] += pool.nbytes
    if max(claimed.values()) > plan.memory:
        got = f"pools of {max(claimed.values()):,} bytes, more than the memory of {plan.memory:,}"
        raise _bad_plan(got)
    viewed: set[tuple[object, ...]] = set()
    placed_in_group: dict[tuple[int, int], dict[str, Placement]] = {}
    placed_in_pool: dict[tuple[int, int], list[tuple[Region, Placement]]] = {}
    for region in plan.regions:
        if not region.layers:
            raise _bad_plan(f"an empty region in group {region.group}; a region must have layers")
        if not 0 <= region.group < len(plan.groups):
            last = len(plan.groups) - 1
            raise _bad_plan(f"a region of group {region.group}; group indices are 0..{last}")
        home = (region.stage, plan.groups[region.group].pool)
        if home not in pools:
            raise _bad_plan(
                f"group {region.group} in pool {home[1]}, but stage {region.stage} has no such pool"
            )
        _check_region(plan, region)
        stored = region.stored(plan.tp, pools[home].blocks)
        _check_views(plan, region, stored, viewed)
        key = f"{region.layers[0].name}, part {region.part(0)}"
        for what, placed in stored.items():
            placed_in_pool.setdefault(home, []).append((region, placed))
            name = f"{key}, field {what}" if region.apart else key
            placed_in_group.setdefault((region.stage, region.group), {})[name] = placed
    _check_layers(plan)
    _check_groups(plan)
    for (stage, index), placements in placed_in_group.items():
        validate(placements, size=pools[stage, plan.groups[index].pool].nbytes, holes=True)
    for home, regions in placed_in_pool.items():
        _check_segments(pools[home], regions)
        _refuse_mixed_blocks(regions, pools[home].blocks)


def _check_numbers(plan: PlanData) -> None:
    """Check that counts are in range, and small enough that the other checks are fast."""
    sizes = {"pools": plan.pools, "groups": plan.groups, "regions": plan.regions}
    for what, parts in sizes.items():
        if not 1 <= len(parts) <= MOST_REGIONS:
            raise _bad_plan(f"{len(parts):,} {what}; a plan must have 1 to {MOST_REGIONS:,}")
    pages = sum(len(region.layers) for region in plan.regions)
    if pages > MOST_PAGES:
        raise _bad_plan(f"{pages:,} pages per block; the limit is {MOST_PAGES:,}")
    if Layout(plan.layout).order not in {region.layout for region in plan.regions}:
        raise _bad_plan(f"layout {plan.layout}, but no region with this layout")
    for what, number in _positive_numbers(plan):
        if not 1 <= number <= INT64_MAX:
            raise _bad_plan(f"{what} {number}, which must be in 1..2**63 - 1")
    for what, number in [
        ("in_flight", plan.in_flight),
        *(("source", g.source) for g in plan.groups),
    ]:
        if not 0 <= number <= _FAR:
            raise _bad_plan(f"{what} {number}, which must be in 0..2**62")
    if plan.tp * plan.pp > MOST_RANKS:
        raise _bad_plan(
            f"tp {plan.tp} x pp {plan.pp} = {plan.tp * plan.pp:,} ranks; the limit is "
            f"{MOST_RANKS:,}"
        )
    if plan.tp % plan.dcp:
        raise _bad_plan(f"tp {plan.tp} and dcp {plan.dcp}; dcp must divide tp")
    for pool in plan.pools:
        if not 0 <= pool.stage < plan.pp:
            raise _bad_plan(f"a pool on stage {pool.stage}; stages are 0..{plan.pp - 1}")


def _positive_numbers(plan: PlanData) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of all numbers of a plan that must be at least 1."""
    for name in ("tp", "pp", "dcp", "max_len", "block_size", "memory", "pack"):
        yield name, getattr(plan, name)
    for pool in plan.pools:
        yield "pool.blocks", pool.blocks
        yield "pool.block_bytes", pool.block_bytes
    for group in plan.groups:
        yield "group.block", group.block
        yield "group.held", group.held
        yield "group.window", group.window or 1


def _check_region(plan: PlanData, region: Region) -> None:
    group = plan.groups[region.group]
    if region.kernel_block < 1 or region.block < 1 or region.block % region.kernel_block:
        raise _bad_plan(
            f"blocks of {region.block} tokens and kernel blocks of {region.kernel_block} tokens; "
            "a block must be a multiple of a kernel block"
        )
    if region.block != group.block:
        raise _bad_plan(
            f"a region with blocks of {region.block} tokens in a group with blocks of "
            f"{group.block} tokens"
        )
    if region.splits < 1 or region.splits * plan.tp > MOST_RANKS:
        raise _bad_plan(
            f"states split into {region.splits} parts at tp {plan.tp}; tp x parts must be in "
            f"1..{MOST_RANKS}"
        )
    if region.splits > 1 and group.kind != "recurrent":
        raise _bad_plan(f"{group.kind} split into parts; only recurrent states can be split")
    if len(region.parts) != (len(region.layers) if region.splits > 1 else 0):
        raise _bad_plan(
            f"a region with {len(region.parts)} part indices for {len(region.layers)} pages"
        )
    page, split = region.first_page(plan.tp), region.block // region.kernel_block
    if split > 1 and region.page_bytes != page.nbytes * split:
        raise _bad_plan(
            f"a page of {region.page_bytes} bytes; its {split} kernel blocks have "
            f"{page.nbytes} bytes each"
        )
    if region.fields is not msgspec.UNSET:
        _check_fields(plan, region, region.fields)
    for index in _unlike_layers(region):
        name, spec = region.layers[index].name, region.layers[index].spec
        own = page_of(spec, region.kernel_block, plan.tp * region.splits)
        if (own.heads, own.states, own.content) != (page.heads, page.states, page.content):
            raise _bad_plan(
                f"layer {name}, whose page differs in shape from other pages of its region"
            )
        kind = kind_of(spec)
        if not _may_join(kind, group.kind):
            raise _bad_plan(f"layer {name} of kind {kind} in a group of kind {group.kind}")
        if group.kind in _PARTIAL and spec.visibility != group.visibility:
            raise _bad_plan(f"layer {name}, whose window, chunk or source differs from its group")
        if plan.dcp > 1:
            _check_tokens(plan, group, name, spec)


def _check_fields(plan: PlanData, region: Region, placed: tuple[FieldPlacement, ...]) -> None:
    """Check the placements of fields that are stored apart."""
    if region.splits > 1 or region.kernel_block != region.block:
        raise _bad_plan(
            f"a region with separate fields, {region.splits} parts per state, and blocks of "
            f"{region.block} tokens with kernel blocks of {region.kernel_block} tokens; separate "
            "fields require whole states, and kernel blocks as large as the blocks"
        )
    names = [own.name for own in placed]
    for index in _unlike_layers(region):
        page, layer = region.first_page(plan.tp, index), region.layers[index].name
        needed = [field for field in page.fields if not field.padding]
        if sorted(names) != sorted(field.name for field in needed):
            raise _bad_plan(
                f"placements of {names[:8]} for layer {layer}, whose fields are "
                f"{[field.name for field in needed]}"
            )
        for own in placed:
            field = page.field(own.name)
            lengths = {len(own.axes), len(own.sizes), len(own.strides)}
            if len(lengths) > 1 or not own.describes(field):
                raise _bad_plan(
                    f"field {own.name} of layer {layer} with axes {own.axes[:8]} of sizes "
                    f"{own.sizes[:8]}; its page has {field.sizes}"
                )
        nbytes = sum(field.nbytes for field in needed)
        if region.page_bytes != nbytes:
            raise _bad_plan(f"a page of {region.page_bytes} bytes with fields of {nbytes} bytes")
    first = placed[0]
    if (region.offset, region.page_stride, region.block_stride) != (
        first.offset,
        first.page_stride,
        first.block_stride,
    ):
        raise _bad_plan(f"a region whose offset or strides differ from those of {first.name}")
    Layout(region.layout)


def _may_join(kind: Kind, group: Kind) -> bool:
    """Return whether a layer of kind `kind` can be in a group of kind `group`.

    Sliding-window and chunked layers can be in a group of full attention.
    """
    if group in FULL_KINDS:
        return kind in (*FULL_KINDS, *LOCAL_KINDS)
    return kind == group or (kind, group) == ("sliding_window_mla", "sliding_window")


def _check_tokens(plan: PlanData, group: Group, layer: str, spec: Spec) -> None:
    """Raise an error if a layer does not support the plan's dcp (decode context parallelism).

    With dcp, ranks that have the same heads store different tokens.
    """
    if group.kind in LOCAL_KINDS:
        raise _bad_plan(
            f"dcp {plan.dcp} with layer {layer} of kind {group.kind}, which needs dcp 1"
        )
    if group.kind in FIXED_KINDS:
        return
    replicas = spec.replicas(plan.tp)
    if replicas < plan.dcp:
        got = f"dcp {plan.dcp}, but only {replicas} rank(s) hold the same heads of layer {layer}"
        raise _bad_plan(got)


def _check_views(
    plan: PlanData,
    region: Region,
    stored: dict[str, Placement],
    viewed: set[tuple[object, ...]],
) -> None:
    """Check that every field of a region, such as K or V, can be an aligned strided view.

    `viewed` records the regions checked so far, so that equivalent ones are not checked again.
    """
    specs = tuple(dict.fromkeys(layer.spec for layer in region.layers))
    size = (region.page_bytes, region.kernel_block, region.splits)
    alike = (specs, size, *map(_form, stored.values()))
    if alike in viewed:
        return
    viewed.add(alike)
    for index in _unlike_layers(region):
        page = region.first_page(plan.tp, index)
        views = stored
        if not region.apart:
            views = {f.name: page.view(stored["pages"], f.name) for f in page.fields}
        for name, seen in views.items():
            if any(step % seen.item for step in (seen.offset, *seen.strides)):
                got = f"field {name} of layer {region.layers[index].name}, placed as {seen}"
                what = "The elements of a field are not aligned to the size of an element"
                raise AtlasError(Code.MISALIGNED, what, got=got, hint=_HINT)


def _form(placed: Placement) -> tuple[object, ...]:
    """Return a key that is equal for placements whose elements are equally aligned."""
    return placed.axes, placed.sizes, placed.strides, placed.offset % _ELEMENT


def _unlike_layers(region: Region) -> Iterator[int]:
    """For each distinct spec of a region, yield the index of the first layer that has it."""
    first: dict[Spec, int] = {}
    for index, layer in enumerate(region.layers):
        first.setdefault(layer.spec, index)
    yield from first.values()


def _check_layers(plan: PlanData) -> None:
    """Check that every layer is on one stage and that each part of its state is stored once."""
    homes: dict[str, list[tuple[int, Region, Layer]]] = {}
    for region in plan.regions:
        for index, layer in enumerate(region.layers):
            homes.setdefault(layer.name, []).append((region.part(index), region, layer))
    for name, found in homes.items():
        parts = sorted(part for part, _, _ in found)
        _, first, layer = found[0]
        if parts != list(range(first.splits)):
            raise _bad_plan(
                f"layer {name} with parts {parts[:8]} instead of each of 0..{first.splits - 1} once"
            )
        same = (first.stage, first.splits, layer)
        if any((region.stage, region.splits, other) != same for _, region, other in found):
            raise _bad_plan(f"layer {name}, whose parts differ in stage, number of splits or spec")
        if not 0 <= layer.index <= _FAR:
            raise _bad_plan(f"layer {name} with index {layer.index}, which must be in 0..2**62")
    count = len({found[0][2].spec for found in homes.values()})
    if count > MOST_SPECS:
        raise _bad_plan(f"{count} different specs; the limit is {MOST_SPECS}")


def _check_groups(plan: PlanData) -> None:
    """Check that `window`, `source` and `held` of each group match the specs of its layers."""
    members: dict[int, list[Region]] = {}
    for region in plan.regions:
        members.setdefault(region.group, []).append(region)
    if set(members) != set(range(len(plan.groups))):
        empty = sorted(set(range(len(plan.groups))) - set(members))
        raise _bad_plan(f"an empty group {empty[0]}; a group must have layers")
    for index, group in enumerate(plan.groups):
        specs = {layer.spec for region in members[index] for layer in region.layers}
        seen = {spec.visibility for spec in specs}
        if group.window not in {v.window or v.chunk for v in seen}:
            raise _bad_plan(
                f"group {index} with window {group.window}, but no layer of the group has this "
                "window"
            )
        if group.source not in {v.source or 0 for v in seen}:
            raise _bad_plan(
                f"group {index} with source {group.source} (encoder tokens), but no layer of the "
                "group has this source"
            )
        saves = plan.prefix_caching and group.kind == "recurrent"
        allowed = (2, 3) if saves else (1,)
        if group.held not in allowed and (group.held, plan.policy) != (1, "foreign"):
            needed = " or ".join(map(str, allowed))
            raise _bad_plan(
                f"group {index} with held {group.held} (blocks per request); its layers need "
                f"{needed}"
            )


def _check_segments(pool: Pool, regions: list[tuple[Region, Placement]]) -> None:
    """Check that segments ascend with gaps between them, and that no layer crosses a gap.

    Each placement in `regions` covers all pages of its region, or one field of these pages.
    """
    if pool.segments is msgspec.UNSET:
        return
    if not 1 <= len(pool.segments) <= MOST_PAGES:
        raise _bad_plan(
            f"a pool with {len(pool.segments):,} segments; a pool with segments must have 1 to "
            f"{MOST_PAGES:,}"
        )
    end = -1
    for segment in pool.segments:
        if segment.offset <= end or segment.nbytes < 1:
            raise _bad_plan(
                f"a segment of {segment.nbytes} bytes at byte {segment.offset}, after byte {end}; "
                "segments must ascend with gaps between them"
            )
        end = segment.offset + segment.nbytes
    if end > pool.nbytes:
        raise _bad_plan(f"a segment that ends at byte {end} of a pool of {pool.nbytes} bytes")
    firsts = [segment.offset for segment in pool.segments]
    for region, placed in regions:
        for index, layer in enumerate(region.layers):
            own = placed.select("L", index)
            segment = pool.segments[max(0, bisect_right(firsts, own.offset) - 1)]
            if not segment.offset <= own.offset <= own.stop <= segment.offset + segment.nbytes:
                raise _bad_plan(
                    f"layer {layer.name} in bytes {own.offset} to {own.stop}, which are not in one "
                    "segment of its pool"
                )


def _refuse_mixed_blocks(regions: list[tuple[Region, Placement]], blocks: int) -> None:
    """Raise an error if blocks of different groups overlap although their ids differ.

    A block id belongs to one group at a time, so only blocks with the same id may overlap.
    """
    if len({region.group for region, _ in regions}) < 2:
        return
    cell = regions[0][0].block_stride
    for region, placed in regions:
        split = region.block // region.kernel_block
        whole = placed.fold("B", "k", into="B") if split > 1 else placed
        kept = keeps_to_its_blocks(whole, cell // split, blocks * split)
        stride = region.block_stride if not region.apart or blocks == 1 else placed.stride("B")
        if stride != cell or not kept:
            name = region.layers[0].name
            raise _bad_plan(
                f"a block of {name} that overlaps a block with a different id in another group"
            )


_HINT = "Create plans with kvatlas.plan(), not by hand"


def _bad_plan(got: str) -> AtlasError:
    return AtlasError(Code.BAD_PLAN, got=got, hint=_HINT)
