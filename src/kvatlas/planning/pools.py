"""From groups to pools: how memory is divided where groups do not all overlay one pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, PageSet, ceil_div, packs, shared_pages, side_by_side
from kvatlas.planning.assemble import assemble
from kvatlas.planning.block_size import BlockSize, bytes_per_block
from kvatlas.planning.grouping import Draft
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_vllm import group_of, kernel_block, place_group, region_of
from kvatlas.planning.request import Request
from kvatlas.planning.sized_layers import Want, page_of


@dataclass(frozen=True)
class Cluster:
    """Groups that overlay each other in one pool."""

    drafts: tuple[Draft, ...]
    layout: Layout
    pack: int = 1
    """Attention layers in a page."""
    page: int = 0
    """Bytes of such a page, where attention layers and states share them."""
    states: bool = False
    """A pool of recurrent states, sized by the number of requests."""

    def on(self, stages: dict[str, int], stage: int) -> Cluster:
        """What of it lies on a pipeline stage."""
        drafts = tuple(
            Draft(tuple(w for w in draft.wants if stages[w.layer.name] == stage), draft.mixed)
            for draft in self.drafts
        )
        return Cluster(drafts, self.layout, self.pack, self.page, self.states)

    @cached_property
    def width(self) -> int:
        """Bytes of a block; 0 where nothing is kept."""
        filled = [draft for draft in self.drafts if draft.wants]
        if not filled:
            return 0
        if not self.page:
            return bytes_per_block(filled, self.layout)
        return self.page * max(
            len(d.wants) if d.wants[0].kind == "recurrent" else ceil_div(len(d.wants), self.pack)
            for d in filled
        )

    def needed(self, asked: Request) -> int:
        """Blocks that a request of the greatest length holds."""
        return sum(
            max(w.blocks(asked.max_len, asked.in_flight, asked.dcp) for w in draft.wants)
            for draft in self.drafts
            if draft.wants
        )


def pooled(
    asked: Request, clusters: list[Cluster], size: BlockSize, orders: tuple[str, ...]
) -> Plan:
    """The plan of policy atlas for groups that lie in these clusters."""
    stages = [[c.on(asked.stages, stage) for c in clusters] for stage in range(asked.pp)]
    counts = divide_memory(asked, clusters, stages)
    regions: list[Region] = []
    groups: list[Group] = []
    warnings: list[str] = []
    if asked.requests and not any(cluster.states for cluster in clusters):
        warnings.append("requests= sizes a pool of recurrent states, and this plan has none.")
    for index, cluster in enumerate(clusters):
        for place, draft in enumerate(cluster.drafts):
            groups.append(group_of(draft, pool=index))
            for stage in range(asked.pp):
                part = stages[stage][index]
                regions += _place(
                    part, part.drafts[place], counts[index], stage, len(groups) - 1, warnings
                )
    pools = [
        Pool(stage=stage, index=index, blocks=counts[index], block_bytes=part.width)
        for stage in range(asked.pp)
        for index, part in enumerate(stages[stage])
        if part.width
    ]
    return assemble(
        asked,
        policy="atlas",
        layout=clusters[0].layout.order,
        orders=orders,
        size=size,
        groups=groups,
        pools=pools,
        regions=regions,
        warnings=warnings,
        pack=max(cluster.pack for cluster in clusters),
    )


def divide_memory(
    asked: Request, clusters: list[Cluster], stages: list[list[Cluster]]
) -> list[int]:
    """Blocks of each pool: what requests of the greatest length would use of each.

    The null block, which engines never hand out, is counted to every pool.
    """
    needs = [cluster.needed(asked) for cluster in clusters]
    # Every pool first gets one request and its null block, or the requests asked for.
    least = [
        need * (asked.requests if cluster.states and asked.requests else 1) + 1
        for cluster, need in zip(clusters, needs, strict=True)
    ]
    found: list[list[int]] = []
    for parts in stages:
        widths = [part.width for part in parts]
        taken = sum(blocks * width for blocks, width in zip(least, widths, strict=True))
        if taken > asked.memory:
            raise AtlasError(
                Code.NOT_ENOUGH_MEMORY,
                f"One request of {asked.max_len:,} tokens fits in memory"
                + (f", and states of {asked.requests:,}" if asked.requests else ""),
                got=f"{asked.memory:,} bytes",
                hint=f"Give at least {taken:,} bytes, or a shorter max_len",
            )
        shares = [
            0 if part.states and asked.requests else need * width
            for part, need, width in zip(parts, needs, widths, strict=True)
        ]
        free, total = asked.memory - taken, sum(shares)
        found.append(
            [
                first + (free * share // total // width if share else 0)
                for first, share, width in zip(least, shares, widths, strict=True)
            ]
        )
    return [
        min(stage[i] for stage, parts in zip(found, stages, strict=True) if parts[i].width)
        for i in range(len(clusters))
    ]


def _place(
    cluster: Cluster, draft: Draft, blocks: int, stage: int, index: int, warnings: list[str]
) -> list[Region]:
    """The regions of a group on one stage."""
    if not draft.wants:
        return []
    layout, width = cluster.layout, cluster.width
    if cluster.page:
        return _place_packed(cluster, draft, blocks, stage, index, warnings)
    splits = {_split(want) for want in draft.wants}
    if layout.block_outermost and splits != {1} and len(splits) == 1:
        split = splits.pop()
        if width % split == 0:
            return _place_kernel_blocks(draft, layout, blocks, width, split, stage, index)
    return place_group(draft, layout, blocks, width, stage, index, warnings)


def _split(want: Want) -> int:
    """Kernel blocks in a block of a layer."""
    if want.backend is None or want.padded:
        return 1
    return want.block // (want.backend.kernel_block(want.block) or want.block)


def _place_kernel_blocks(
    draft: Draft, layout: Layout, blocks: int, width: int, split: int, stage: int, index: int
) -> list[Region]:
    """Kernel blocks of all layers, one after the other, so that they have one stride."""
    rows = []
    for wants in draft.regions:
        want = wants[0]
        page = page_of(want.layer.spec, want.block // split, want.tp)
        rows.append(PageSet(page, len(wants), page.nbytes))
    spots = side_by_side(rows, layout, blocks=blocks, width=width, split=split)
    return [
        region_of(wants, layout, spot, stage, index, kernel=wants[0].block // split)
        for wants, spot in zip(draft.regions, spots, strict=True)
    ]


def _place_packed(
    cluster: Cluster, draft: Draft, blocks: int, stage: int, index: int, warnings: list[str]
) -> list[Region]:
    """Packs of attention layers, or one state, in each page of a block."""
    layout, width = cluster.layout, cluster.width
    wants, want = draft.wants, draft.wants[0]
    shared = shared_pages(layout, cluster.page, blocks=blocks, width=width)
    if want.kind == "recurrent":
        kept = {"kernel": want.block, "page_bytes": cluster.page}
        return [region_of(wants, layout, shared, stage, index, **kept)]
    kernel = kernel_block(wants, warnings, dense=False)
    found = packs(
        want.page, len(wants), cluster.pack, layout, shared=shared, blocks=blocks, width=width
    )
    regions = []
    rest = list(wants)
    for count, spot in found:
        mine, rest = rest[:count], rest[count:]
        regions.append(region_of(mine, layout, spot, stage, index, kernel=kernel))
    return regions
