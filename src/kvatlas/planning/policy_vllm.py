"""Policies `vllm` and `uniform`: vLLM 0.32's own answer, to the byte.

`uniform` is what vLLM does with its hybrid manager off: windows and chunks are kept
at full length, so that one block table serves all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, PageSet, PoolPosition, side_by_side
from kvatlas.planning.assemble import assemble
from kvatlas.planning.block_size import BlockSize, block_size, bytes_per_block
from kvatlas.planning.grouping import Draft, group_layers, promote
from kvatlas.planning.layout_resolution import candidate_orders, resolve_order
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import Request
from kvatlas.planning.sized_layers import Want, wants_of
from kvatlas.specs import CrossAttention


def plan_vllm(asked: Request) -> Plan:
    """The plan that vLLM 0.32 makes."""
    return _plan(asked, "vllm")


def plan_uniform(asked: Request) -> Plan:
    """The plan that vLLM 0.32 makes without its hybrid manager."""
    return _plan(asked, "uniform")


def _plan(asked: Request, policy: str) -> Plan:
    size = block_size(asked.model, asked.backends, tp=asked.tp, asked=asked.block_size)
    wants = sized_wants(asked, size)
    orders = candidate_orders(wants)
    layout = resolve_order(orders, asked.layout)
    if policy == "uniform":
        wants = promote(wants)
    drafts = group_layers(wants, layout)
    refuse_unlike_pages(drafts, layout)
    return overlay(asked, drafts, layout, size, policy=policy, orders=orders)


def sized_wants(asked: Request, size: BlockSize) -> list[Want]:
    """What the layers want at a block size."""
    return wants_of(
        asked.model,
        asked.backends,
        block=size.tokens,
        tp=asked.tp,
        state_padding=size.state_padding,
        prefix_caching=asked.prefix_caching,
        max_len=asked.max_len,
    )


def refuse_unlike_pages(drafts: list[Draft], layout: Layout) -> None:
    """Pages of unlike size lie side by side in blocks, or one group owns the pool."""
    pages = {want.nbytes for draft in drafts for want in draft.wants}
    if len(pages) > 1 and (
        not layout.page_contiguous or (len(drafts) > 1 and layout.layer_compact)
    ):
        raise AtlasError(
            Code.LAYOUT_REFUSED,
            "Groups with unlike pages overlay each other only block by block",
            got=f"{layout} with pages of {sorted(pages)} bytes",
            hint="Use BLHNC or BLNHC, or policy atlas",
        )


def overlay(
    asked: Request,
    drafts: list[Draft],
    layout: Layout,
    size: BlockSize,
    *,
    policy: str,
    orders: tuple[str, ...],
) -> Plan:
    """Groups that overlay each other in one pool on each stage."""
    staged = [
        [
            Draft(tuple(w for w in d.wants if asked.stages[w.layer.name] == s), d.mixed)
            for d in drafts
        ]
        for s in range(asked.pp)
    ]
    blocks, widths = count_blocks(asked, drafts, staged, layout)
    regions: list[Region] = []
    warnings: list[str] = []
    for stage, stage_drafts in enumerate(staged):
        for index, draft in enumerate(stage_drafts):
            regions += place_group(draft, layout, blocks, widths[stage], stage, index, warnings)
    pools = [
        Pool(stage=stage, blocks=blocks, block_bytes=width)
        for stage, width in enumerate(widths)
        if width
    ]
    return assemble(
        asked,
        policy=policy,
        layout=layout.order,
        orders=orders,
        size=size,
        groups=[group_of(draft, pool=0) for draft in drafts],
        pools=pools,
        regions=regions,
        warnings=warnings,
    )


def count_blocks(
    asked: Request, drafts: list[Draft], staged: list[list[Draft]], layout: Layout
) -> tuple[int, list[int]]:
    """Blocks that every stage can hold, and the bytes of one on each stage."""
    widths = [
        bytes_per_block(stage, layout) if any(draft.wants for draft in stage) else 0
        for stage in staged
    ]
    needed = sum(
        max(w.blocks(asked.max_len, asked.in_flight, asked.dcp) for w in draft.wants)
        for draft in drafts
    )
    for width in filter(None, widths):
        # One block is the null block, which engines never hand out.
        if (needed + 1) * width > asked.memory:
            raise AtlasError(
                Code.NOT_ENOUGH_MEMORY,
                f"One request of {asked.max_len:,} tokens fits in memory",
                got=f"{asked.memory:,} bytes for {needed + 1:,} blocks of {width:,}",
                hint=f"Give at least {(needed + 1) * width:,} bytes, or a shorter max_len",
            )
    return min((asked.memory // width for width in widths if width), default=1), widths


def place_group(
    draft: Draft,
    layout: Layout,
    blocks: int,
    width: int,
    stage: int,
    index: int,
    warnings: list[str],
) -> list[Region]:
    """The regions of a group on one stage, one behind the other."""
    rows = [PageSet(wants[0].page, len(wants), wants[0].spread) for wants in draft.regions]
    spots = side_by_side(rows, layout, blocks=blocks, width=width)
    regions = []
    for wants, position in zip(draft.regions, spots, strict=True):
        dense = not layout.block_outermost or position.block_stride <= position.page_stride
        kernel = kernel_block(wants, warnings, dense=dense)
        regions.append(region_of(wants, layout, position, stage, index, kernel=kernel))
    return regions


def region_of(
    wants: Sequence[Want],
    layout: Layout,
    position: PoolPosition,
    stage: int,
    index: int,
    *,
    kernel: int,
    page_bytes: int | None = None,
) -> Region:
    """Alike layers of a group, where they lie."""
    want = wants[0]
    return Region(
        stage=stage,
        group=index,
        layers=tuple(want.layer for want in wants),
        block=want.block,
        kernel_block=kernel,
        page_bytes=page_bytes or want.nbytes,
        layout=layout.order,
        offset=position.offset,
        page_stride=position.page_stride,
        block_stride=position.block_stride,
        splits=want.splits,
        parts=tuple(want.part for want in wants) if want.splits > 1 else (),
    )


def kernel_block(wants: Sequence[Want], warnings: list[str], *, dense: bool) -> int:
    """Tokens that the layers' kernel reads at once; the whole block where it cannot be split."""
    want = wants[0]
    if want.backend is None or want.backend.reads(want.block):
        return want.block
    found = want.backend.kernel_block(want.block)
    if found is None or not dense or want.padded:
        warnings.append(
            f"{want.backend.name} reads blocks of {' or '.join(map(str, want.backend.sizes))} "
            f"tokens, and blocks of {want.block} cannot be split where pages are not dense: "
            "engines refuse to bind this plan."
        )
        return want.block
    return found


def group_of(draft: Draft, pool: int) -> Group:
    """A group as plans keep it."""
    want = draft.wants[0]
    spec = want.layer.spec
    return Group(
        kind=want.kind,
        block=want.block,
        pool=pool,
        window=want.window,
        held=1 + max(want.checkpoints for want in draft.wants),
        source=spec.source if isinstance(spec, CrossAttention) else 0,
        mixed=draft.mixed,
    )
