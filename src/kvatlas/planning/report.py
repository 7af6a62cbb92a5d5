"""What a plan says of itself: figures for machines, sentences for people."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.planning.plan_parts import Group, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.sized_layers import FULL_KINDS, page_of


class Padding(msgspec.Struct, frozen=True):
    """Bytes that a request of some length claims, and what of them means nothing."""

    claimed: int
    pages: int
    """Behind pages that are smaller than what they share a page with."""
    empty: int
    """Slots of a block that the group does not fill, and rounding of the block."""

    @property
    def share(self) -> float:
        """Padding as a share of what is claimed."""
        return (self.pages + self.empty) / self.claimed if self.claimed else 0.0


def padding(plan: Plan, length: int | None = None) -> Padding:
    """Padding in the blocks of a request of `length` tokens, over all stages."""
    tokens = plan.max_len if length is None else length
    blocks = [g.blocks(tokens, in_flight=plan.in_flight, dcp=plan.dcp) for g in plan.groups]
    # A block id is taken on every stage, also where its group has no layer there.
    claimed = sum(
        count * pool.block_bytes
        for pool in plan.pools
        for count, group in zip(blocks, plan.groups, strict=True)
        if group.pool == pool.index
    )
    pages = used = 0
    for region in plan.regions:
        count, nbytes = blocks[region.group], region.page_bytes * len(region.layers)
        useful = unpadded(plan, region) * len(region.layers) // region.splits
        pages += count * (nbytes - useful)
        used += count * nbytes
    return Padding(claimed, pages, claimed - used)


def unpadded(plan: Plan, region: Region) -> int:
    """Bytes of a whole layer's page in a region, without padding or repeated rows."""
    return page_of(region.layers[0].spec, region.block, plan.tp).unpadded


def bytes_per_request(plan: Plan, group: int) -> tuple[int, float]:
    """(fixed bytes, bytes for each further token) that a request takes of a group, per rank."""
    found = plan.groups[group]
    width = max(pool.block_bytes for pool in plan.pools if pool.index == found.pool)
    if found.kind in FULL_KINDS:
        return 0, width / (found.block * plan.dcp)
    return found.blocks(plan.max_len, in_flight=plan.in_flight) * width, 0.0


def summary(plan: Plan) -> dict[str, Any]:
    """One JSON object with what an operator asks first."""
    waste = padding(plan)
    return {
        "model": plan.model,
        "policy": plan.policy,
        "layout": plan.layout,
        "accepted_layouts": list(plan.accepted_layouts),
        "backends": list(plan.backends),
        "tp": plan.tp,
        "pp": plan.pp,
        "dcp": plan.dcp,
        "pack": plan.pack,
        "memory": plan.memory,
        "max_len": plan.max_len,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "bytes_per_block": plan.bytes_per_block,
        "tokens": plan.tokens,
        "requests_at_max_len": round(plan.requests(), 4) if plan.groups else None,
        "padding_share": round(waste.share, 6),
        "pools": [
            {
                "stage": pool.stage,
                "index": pool.index,
                "blocks": pool.blocks,
                "block_bytes": pool.block_bytes,
                "bytes": pool.nbytes,
            }
            for pool in plan.pools
        ],
        "groups": [_group(plan, index) for index in range(len(plan.groups))],
        "warnings": list(plan.warnings),
    }


def _group(plan: Plan, index: int) -> dict[str, Any]:
    group = plan.groups[index]
    regions = [region for region in plan.regions if region.group == index]
    members = [_member(plan, group, region) for region in regions]
    layers = [layer for region in regions for layer in region.layers]
    layers.sort(key=lambda layer: layer.index)  # stable: caches of a layer stay in order
    count = len({layer.name for layer in layers})
    fixed, each = bytes_per_request(plan, index)
    more = {
        "pool": group.pool,
        "window": group.window,
        "fixed_bytes_per_request": fixed,
        "bytes_per_token": each,
    }
    if not group.mixed and len({member["page_bytes"] for member in members}) == 1:
        first = members[0]
        return {
            **first,
            "num_layers": count,
            "first_layer": layers[0].name,
            "last_layer": layers[-1].name,
            **more,
        }
    return {
        "kind": group.kind,
        "num_layers": count,
        "first_layer": layers[0].name,
        "last_layer": layers[-1].name,
        "block_size": group.block,
        "page_bytes": sum(member["page_bytes"] * member["pages"] for member in members),
        "unpadded_page_bytes": sum(
            member["unpadded_page_bytes"] * member["pages"] for member in members
        ),
        "heads": None,
        "states": None,
        "content_bytes": None,
        "members": members,
        **more,
    }


def _member(plan: Plan, group: Group, region: Region) -> dict[str, Any]:
    page = page_of(region.layers[0].spec, region.block, plan.tp * region.splits)
    return {
        "kind": group.kind,
        "num_layers": len({layer.name for layer in region.layers}),
        "pages": len(region.layers),
        "splits": region.splits,
        "first_layer": region.layers[0].name,
        "last_layer": region.layers[-1].name,
        "block_size": region.block,
        "kernel_block": region.kernel_block,
        "page_bytes": region.page_bytes,
        "unpadded_page_bytes": page.unpadded,
        "heads": page.heads,
        "states": page.states,
        "content_bytes": page.content,
        "offset": region.offset,
        "page_stride": region.page_stride,
        "block_stride": region.block_stride,
    }


def explain(plan: Plan) -> str:
    """The reason for the block size and for each byte of waste, in sentences."""
    lines = [
        f"{plan.model} at tp {plan.tp}"
        + (f", pp {plan.pp}" if plan.pp > 1 else "")
        + f", policy {plan.policy}, order {plan.layout}: blocks of {plan.block_size} tokens.",
        *plan.reasons,
    ]
    lines += _group_lines(plan)
    waste = padding(plan)
    where = "over all pipeline stages" if plan.pp > 1 else "on each tensor-parallel rank"
    lines.append(
        f"A request of {plan.max_len:,} tokens claims {waste.claimed:,} bytes {where}, of which "
        f"{waste.share:.2%} is padding:"
    )
    if waste.pages:
        lines.append(f"  {waste.pages:,} bytes behind pages smaller than their share of a block,")
    if waste.empty:
        lines.append(f"  {waste.empty:,} bytes of pages that a group leaves empty,")
    if not waste.pages and not waste.empty:
        lines.append("  none at all.")
    for stage in range(plan.pp):
        idle = plan.memory - sum(pool.nbytes for pool in plan.pools if pool.stage == stage)
        name = f"Stage {stage} leaves" if plan.pp > 1 else "It leaves"
        lines.append(f"{name} {idle:,} of {plan.memory:,} bytes of memory unused.")
    lines += [f"Note: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _group_lines(plan: Plan) -> list[str]:
    """A sentence for each group, neighbours that say the same thing told together."""
    said: list[tuple[str, list[int]]] = []
    for index, group in enumerate(plan.groups):
        fixed, each = bytes_per_request(plan, index)
        pages = sum(len(r.layers) for r in plan.regions if r.group == index)
        cut = any(r.splits > 1 for r in plan.regions if r.group == index)
        what = f"{pages} {'parts of ' if cut else ''}layers of {group.kind}"
        reach = f" within {group.window:,} tokens" if group.window else ""
        takes = f"{each:,.0f} bytes for each token" if each else f"{fixed:,} bytes at most"
        if group.window:
            takes += f", with {plan.in_flight:,} tokens in flight"
        text = f"{what}{reach}, blocks of {group.block} tokens; a request takes {takes}."
        if said and said[-1][0] == text:
            said[-1][1].append(index)
        else:
            said.append((text, [index]))
    return [
        f"Group {found[0]}: {text}"
        if len(found) == 1
        else f"Groups {found[0]} to {found[-1]}, each: {text}"
        for text, found in said
    ]
