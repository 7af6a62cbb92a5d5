"""Policy `atlas`, the default: small blocks for hybrids, and every order that bytes allow.

Where vLLM's plan is already tight, it is the same plan. It differs where vLLM
inflates or refuses:

- **Hybrids.** vLLM makes a page of one attention layer hold a whole recurrent state,
  so a block is thousands of tokens. Here `pack` attention layers share a page, and a
  block shrinks to 1/pack. Packs are searched; the best is taken if its block is at
  most 1/8 of vLLM's and it pads no more than vLLM does. Otherwise recurrent states
  get a pool of their own, sized by the number of requests: no padding and the
  smallest block that kernels take, at the price that memory is divided beforehand.
- **Orders.** Groups with unlike pages overlay each other in any block-outermost order,
  because a block id belongs to one group at a time. Where an order would interleave
  the blocks of unlike pages, each group gets a pool of its own.
- **Kernel blocks.** Where a backend reads smaller blocks, block-outermost orders lay
  out kernel blocks of all layers one after the other, so that both the block and its
  kernel blocks have one stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.plan.backends import smallest_common_block
from kvatlas.plan.grouping import Draft, alike, group_layers
from kvatlas.plan.orders import resolve_order, supported_orders
from kvatlas.plan.plan import Plan
from kvatlas.plan.pools import Cluster, pooled
from kvatlas.plan.report import padding
from kvatlas.plan.request import Request
from kvatlas.plan.sizing import DEFAULT_BLOCK, BlockSize, block_size, kernel_multiple
from kvatlas.plan.vllm import plan_vllm, sized_wants
from kvatlas.plan.wants import Want

_ROUNDING = 1e-12

SHRINK = 8
"""A hybrid's block is to be at most this fraction of vLLM's."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`pack` attention layers in each page; a page holds a recurrent state too."""

    pack: int
    block: int
    """Tokens in a block."""
    slots: int
    """Pages in a block."""
    page: int
    """Bytes of such a page."""
    padding: float
    """Share of what a request claims that is padding."""


def plan_atlas(asked: Request) -> Plan:
    """The plan of policy atlas."""
    size = kernel_size(asked)
    wants = sized_wants(asked, size)
    # DeepSeek-V4's backends declare orders so that pages pack, not because kernels need them.
    binding = {b.name: b for b in asked.backends.values() if b and b.family != "other"}
    orders = supported_orders(list(binding.values()))
    layout = resolve_order(orders, asked.layout)
    states = [want for want in wants if want.kind == "mamba"]
    attention = [want for want in wants if want.kind != "mamba"]
    if states and attention:
        return _hybrid(asked, attention, states, layout, orders, size)
    if asked.pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Packing serves hybrids, whose attention layers share pages with recurrent states",
            got=f"pack {asked.pack} for {asked.model.name}",
            hint="Leave pack out",
        )
    return pooled(asked, _clusters(wants, layout), size, orders)


def kernel_size(asked: Request) -> BlockSize:
    """The block that kernels take, before any state inflates it."""
    used = list({b.name: b for b in asked.backends.values() if b}.values())
    if asked.block_size is not None or not used:
        size = block_size(asked.model, asked.backends, tp=asked.tp, asked=asked.block_size)
        return BlockSize(asked.block_size or size.tokens, None, size.reasons[:1])
    block = smallest_common_block(used, DEFAULT_BLOCK)
    names = ", ".join(backend.name for backend in used)
    reason = f"{block} tokens is the smallest block from {DEFAULT_BLOCK} on that {names} take."
    return BlockSize(block, None, (reason,))


def _clusters(wants: list[Want], layout: Layout) -> list[Cluster]:
    """Groups that can overlay each other in one pool, or each in a pool of its own."""
    try:
        drafts = group_layers(wants, layout)
    except AtlasError as refusal:
        if refusal.code is not Code.PAGES_NOT_UNIFIED:
            raise
        drafts = group_layers(wants, Layout("BLHNC"))
    pages = {want.nbytes for draft in drafts for want in draft.wants}
    shapes = {
        (want.page.heads, want.page.states, want.nbytes) for draft in drafts for want in draft.wants
    }
    # A page in one stretch overlays any other of its size; stripes of heads only their like.
    clash = len(pages) > 1 if layout.page_contiguous else len(shapes) > 1
    if len(drafts) == 1 or not clash or layout.block_outermost:
        return [Cluster(tuple(drafts), layout)]
    return [Cluster((draft,), layout) for draft in drafts]


def _hybrid(
    asked: Request,
    attention: list[Want],
    states: list[Want],
    layout: Layout,
    orders: tuple[str, ...],
    size: BlockSize,
) -> Plan:
    striped = not layout.page_contiguous and not layout.block_outermost
    can_pack = alike(attention) and not (striped and attention[0].page.heads > 1)
    if asked.pack != "auto":
        if not can_pack or not 1 <= asked.pack <= len(attention):
            raise AtlasError(
                Code.BAD_PACK,
                "A pack is of one to all attention layers, all alike, in an order that keeps "
                "the bytes of a block together",
                got=f"pack {asked.pack} of {len(attention)} attention layers in {layout}",
                hint="Use pack auto",
            )
        chosen = _packing(asked, attention, states, asked.pack)
        return _packed(asked, attention, states, layout, orders, chosen, ())
    reference = plan_vllm(msgspec.structs.replace(asked, layout=None))
    bar, block = padding(reference).share, reference.block_size
    packs = [
        _packing(asked, attention, states, pack)
        for pack in range(1, len(attention) + 1 if can_pack else 1)
    ]
    small = [p for p in packs if p.block * SHRINK <= block or p.block <= size.tokens]
    tight = [p for p in small if p.padding <= bar + _ROUNDING]
    told: tuple[str, ...] = (
        f"vLLM's block is {block} tokens, and {bar:.2%} of what a request of {asked.max_len:,} "
        "tokens claims there is padding.",
    )
    if tight:
        chosen = min(tight, key=lambda p: (p.block, p.padding))
        return _packed(asked, attention, states, layout, orders, chosen, told)
    if small:
        near = min(small, key=lambda p: p.padding)
        told += (
            f"Packing {near.pack} attention layers into a page would give blocks of {near.block} "
            f"tokens, but {near.padding:.2%} padding: a page holds a whole number of kernel "
            "blocks of every layer, and a state does not fill it.",
        )
    elif packs:
        told += (
            f"Even all {len(attention)} attention layers in one page give blocks of "
            f"{packs[-1].block} tokens, more than 1/{SHRINK} of vLLM's.",
        )
    else:
        told += (f"In {layout} attention pages and states of unlike shape cannot share a pool.",)
    return _states_apart(asked, attention, states, layout, orders, size, told)


def _packing(asked: Request, attention: list[Want], states: list[Want], pack: int) -> Packing:
    """What packing `pack` layers into a page comes to."""
    token = attention[0].page.unpadded // attention[0].block
    sizes = [want.nbytes for want in states]
    used = [want.backend for want in attention if want.backend]
    step = kernel_multiple(asked.model, used, asked.block_size or DEFAULT_BLOCK)
    block = step * ceil_div(max(sizes), step * token * pack)
    slots, page = ceil_div(len(attention), pack), pack * block * token
    blocks = ceil_div(ceil_div(asked.max_len, asked.dcp), block)
    sets = states[0].blocks(asked.max_len, asked.in_flight, asked.dcp)
    claimed = (blocks + sets * ceil_div(len(states), slots)) * slots * page
    useful = blocks * len(attention) * block * token + sets * sum(sizes)
    return Packing(pack, block, slots, page, 1 - useful / claimed)


def _packed(
    asked: Request,
    attention: list[Want],
    states: list[Want],
    layout: Layout,
    orders: tuple[str, ...],
    packing: Packing,
    told: tuple[str, ...],
) -> Plan:
    layers = tuple(want.with_block(packing.block) for want in attention)
    groups = ceil_div(len(states), packing.slots)
    kept = [want.with_block(packing.block) for want in states]
    drafts = [Draft(tuple(kept[i::groups]), mixed=False) for i in range(groups)]
    reasons = (
        *told,
        f"{packing.pack} of {len(attention)} attention layers share a page of {packing.page:,} "
        f"bytes, which also holds a recurrent state of {states[0].nbytes:,}: blocks of "
        f"{packing.block} tokens. The {len(states)} recurrent layers form {groups} groups of up "
        f"to {packing.slots}, so a request takes {groups} blocks for each set of states.",
    )
    cluster = Cluster(
        (Draft(layers, mixed=False), *drafts), layout, pack=packing.pack, page=packing.page
    )
    return pooled(asked, [cluster], BlockSize(packing.block, None, reasons), orders)


def _states_apart(
    asked: Request,
    attention: list[Want],
    states: list[Want],
    layout: Layout,
    orders: tuple[str, ...],
    size: BlockSize,
    told: tuple[str, ...],
) -> Plan:
    every = sum(want.nbytes for want in states)
    held = states[0].blocks(asked.max_len, asked.in_flight, asked.dcp)
    reasons = (
        *size.reasons,
        *told,
        f"So recurrent states get a pool of their own: {every:,} bytes for all {len(states)} "
        f"layers in one block, {held} blocks for each request, no padding. The price: that pool "
        "is sized by the number of requests, and neither pool can borrow from the other.",
    )
    rows = Cluster((Draft(tuple(states), mixed=True),), Layout("BLHNC"), states=True)
    clusters = [*_clusters(attention, layout), rows]
    return pooled(asked, clusters, BlockSize(size.tokens, None, reasons), orders)
