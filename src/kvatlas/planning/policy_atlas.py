"""Policy `atlas`, the default: small blocks for hybrids, and every order that bytes allow.

Where vLLM's plan is already tight, it is the same plan. It differs where vLLM
inflates or refuses:

- **Hybrids.** vLLM makes a page of one attention layer hold a whole recurrent state,
  so a block is thousands of tokens. Here a block holds many attention layers of few
  tokens, or several states, or parts of states splits by heads. Block sizes, layers in a
  block and parts of a state are searched; the plan with the fewest block tables is
  taken whose block is at most 1/8 of vLLM's and that pads no more than vLLM's. Where
  there is none, states get a pool of their own, sized by the number of requests: no
  padding and the smallest block that kernels take, but memory is divided beforehand.
  `pack=N` packs just N attention layers into each page instead.
- **Orders.** Groups with unlike pages overlay each other in any block-outermost order,
  because a block id belongs to one group at a time. Where an order would interleave
  the blocks of unlike pages, each group gets a pool of its own.
- **Kernel blocks.** Where a backend reads smaller blocks, block-outermost orders lay
  out kernel blocks of all layers one after the other, so that both the block and its
  kernel blocks have one stride.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, ceil_div
from kvatlas.planning.backends import smallest_common_block
from kvatlas.planning.block_size import (
    DEFAULT_BLOCK,
    BlockSize,
    block_size,
    kernel_multiple,
    kernel_size,
)
from kvatlas.planning.grouping import Draft, alike, by_tokens, group_layers
from kvatlas.planning.layout_resolution import resolve_order, supported_orders
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_vllm import plan_vllm, sized_wants
from kvatlas.planning.pools import Cluster, pooled
from kvatlas.planning.report import padding
from kvatlas.planning.request import Request
from kvatlas.planning.sized_layers import Want, page_of

_ROUNDING = 1e-12
_CUTS = (1, 2, 4, 8)
"""Parts that a state may be splits into: each is one more call of its kernel."""
_MOST_TRIES = 16
_MOST_TABLES = 64
"""Block tables that an engine may be asked to keep for a request."""

SHRINK = 8
"""A hybrid's block is to be at most this fraction of vLLM's."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`pack` attention layers in each page; a page holds a recurrent state too."""

    pack: int
    block: int
    """Tokens in a block."""
    pages: int
    """Pages in a block."""
    page: int
    """Bytes of such a page."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Blocks that hold either some attention layers or some states, or parts of them."""

    block: int
    """Tokens in a block."""
    width: int
    """Attention layers in a block."""
    splits: int
    """Parts that a state is splits into, by heads."""
    fit: int
    """Such parts in a block."""
    tables: int
    """Block tables, of attention and of states."""
    padding: float
    """Share of what a request claims that is padding."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model with both attention and recurrent layers, and what is decided of its plan."""

    asked: Request
    attention: list[Want]
    states: list[Want]
    layout: Layout
    orders: tuple[str, ...]
    size: BlockSize
    """The block that kernels take, before states are looked at."""


def plan_atlas(asked: Request) -> Plan:
    """The plan of policy atlas."""
    size = kernel_size(asked.backends, asked.block_size)
    wants = sized_wants(asked, size)
    # DeepSeek-V4's backends declare orders so that pages pack, not because kernels need them.
    binding = {b.name: b for b in asked.backends.values() if b and b.family != "other"}
    orders = supported_orders(list(binding.values()))
    states = [want for want in wants if want.kind == "recurrent"]
    attention = [want for want in wants if want.kind != "recurrent"]
    preferred = asked.layout
    if preferred is None and states and attention and asked.pack == "auto":
        # Block by block, states and attention fit together whatever their shapes.
        preferred = next((order for order in orders if Layout(order).block_outermost), None)
    layout = resolve_order(orders, preferred)
    if states and attention:
        return _hybrid(Hybrid(asked, attention, states, layout, orders, size))
    if asked.pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Packing serves hybrids, whose attention layers share pages with recurrent states",
            got=f"pack {asked.pack} for {asked.model.name}",
            hint="Leave pack out",
        )
    return pooled(asked, _clusters(wants, layout), size, orders)


def _clusters(wants: list[Want], layout: Layout) -> list[Cluster]:
    """Groups that can overlay each other in one pool, or each in a pool of its own."""
    drafts = by_tokens(wants)
    for order in (layout, Layout("BLHNC")):
        try:
            drafts = group_layers(wants, order)
            break
        except AtlasError as refusal:
            if refusal.code is not Code.PAGES_NOT_UNIFIED:
                raise
    pages = {want.nbytes for draft in drafts for want in draft.wants}
    shapes = {
        (want.page.heads, want.page.states, want.nbytes) for draft in drafts for want in draft.wants
    }
    # A page in one stretch overlays any other of its size; stripes of heads only their like.
    clash = len(pages) > 1 if layout.page_contiguous else len(shapes) > 1
    if len(drafts) == 1 or not clash or layout.block_outermost:
        return [Cluster(tuple(drafts), layout)]
    return [Cluster((draft,), layout) for draft in drafts]


def _hybrid(hybrid: Hybrid) -> Plan:
    asked, attention, states = hybrid.asked, hybrid.attention, hybrid.states
    layout, size = hybrid.layout, hybrid.size
    striped = not layout.page_contiguous and not layout.block_outermost
    can_pack = alike(attention) and alike(states) and not (striped and attention[0].page.heads > 1)
    if asked.pack != "auto":
        if not can_pack or not 1 <= asked.pack <= len(attention):
            raise AtlasError(
                Code.BAD_PACK,
                "A pack is of one to all attention layers, all alike, in an order that keeps "
                "the bytes of a block together",
                got=f"pack {asked.pack} of {len(attention)} attention layers in {layout}",
                hint="Use pack auto",
            )
        packing = _packing(hybrid, asked.pack)
        return _packed(hybrid, packing)
    bar, block, told = _yardstick(asked)
    tried: list[Sharing] = []
    if layout.block_outermost and alike(attention) and alike(states):
        tried = _sharings(hybrid, max(block // SHRINK, size.tokens))
    tried.sort(key=lambda sharing: (sharing.splits, sharing.tables, sharing.block))
    tight = [sharing for sharing in tried if sharing.padding <= bar + _ROUNDING]
    near = min(tried, key=lambda sharing: sharing.padding, default=None)
    if asked.states == "shared" and near and not tight:
        return _shared(hybrid, near, told)
    for chosen in tight[:_MOST_TRIES] if asked.states != "apart" else ():
        made = _shared(hybrid, chosen, told)
        # Stages hold unlike shares of each group, which only the whole plan shows.
        if asked.pp == 1 or padding(made).share <= bar + _ROUNDING:
            return made
    if near:
        why = (
            f"In one pool the tightest blocks of at most 1/{SHRINK} of that have {near.block} "
            f"tokens and {near.padding:.2%} padding (states shared): blocks are whole kernel "
            "blocks of every layer, and whole heads of states do not fill them."
        )
    elif not alike(attention) or not alike(states):
        why = "Its attention layers, or its recurrent ones, are of several kinds."
    elif layout.block_outermost:
        why = (
            f"No block of at most 1/{SHRINK} of that holds a state or an even part of one with "
            f"{_MOST_TABLES} block tables or fewer."
        )
    else:
        why = f"In {layout} attention and states of unlike shape share blocks only as packs."
    try:
        return _states_apart(hybrid, (*told, why))
    except AtlasError as refusal:
        # Pools of their own need more for the first request than a shared one.
        told_to = asked.states == "apart" or asked.requests is not None
        if refusal.code is not Code.NOT_ENOUGH_MEMORY or told_to or not can_pack:
            raise
        return _packed(hybrid, _packing(hybrid, 1))


def _yardstick(asked: Request) -> tuple[float, int, tuple[str, ...]]:
    """(padding, block, sentence) of vLLM's own plan; any padding will do where it refuses."""
    try:
        reference = plan_vllm(msgspec.structs.replace(asked, layout=None))
    except AtlasError as refusal:
        size = block_size(asked.model, asked.backends, tp=asked.tp, asked=asked.block_size)
        return 1.0, size.tokens, (f"vLLM has no plan to compare with ({refusal.code}).",)
    bar, block = padding(reference).share, reference.block_size
    said = (
        f"vLLM's block is {block} tokens, and {bar:.2%} of what a request of {asked.max_len:,} "
        "tokens claims there is padding."
    )
    return bar, block, (said,)


def _sharings(hybrid: Hybrid, largest: int) -> list[Sharing]:
    """Every way in which blocks of at most `largest` tokens hold attention or states."""
    asked, attention, states = hybrid.asked, hybrid.attention, hybrid.states
    first, request = attention[0], (asked.max_len, asked.in_flight, asked.dcp)
    token = first.page.unpadded // first.block
    used = [want.backend for want in attention if want.backend]
    step = asked.block_size or smallest_common_block(used, DEFAULT_BLOCK)
    sets = states[0].blocks(*request)
    useful = sets * sum(want.nbytes for want in states)
    found = []
    for splits in _CUTS:
        try:
            part = page_of(states[0].layer.spec, states[0].block, asked.tp * splits).nbytes
        except AtlasError:
            continue  # heads that do not divide so far
        for width in (n for n in range(1, len(attention) + 1) if len(attention) % n == 0):
            tables = len(attention) // width
            for block in range(step, largest + 1, step):
                nbytes = width * block * token
                fit = nbytes // part
                if not fit:
                    continue
                groups = ceil_div(len(states) * splits, fit)
                blocks = first.blocks(*request, block=block) * tables
                claimed = (blocks + sets * groups) * nbytes
                waste = 1 - (blocks * nbytes + useful) / claimed
                if tables + groups <= _MOST_TABLES:
                    found.append(Sharing(block, width, splits, fit, tables + groups, waste))
    return found


def _shared(hybrid: Hybrid, chosen: Sharing, told: tuple[str, ...]) -> Plan:
    asked, attention, states = hybrid.asked, hybrid.attention, hybrid.states
    layers = [want.with_block(chosen.block) for want in attention]
    tables = len(layers) // chosen.width
    parts = [
        replace(want, block=chosen.block, splits=chosen.splits, part=part)
        for want in states
        for part in range(chosen.splits)
    ]
    groups = ceil_div(len(parts), chosen.fit)
    drafts = [Draft(tuple(layers[i::tables]), mixed=False) for i in range(tables)]
    drafts += [Draft(tuple(parts[i::groups]), mixed=False) for i in range(groups)]
    splits = chosen.splits
    whole = (
        "whole states" if splits == 1 else f"parts of states, each splits by heads into {splits}"
    )
    reasons = (
        *told,
        f"Here a block holds {chosen.width} of {len(layers)} attention layers for {chosen.block} "
        f"tokens, or {chosen.fit} {whole}: {tables} block table(s) for attention and {groups} for "
        f"the {len(states)} recurrent layers, and {chosen.padding:.2%} padding. The price is the "
        "number of tables"
        + ("." if splits == 1 else ", and kernels that are called once for each part."),
    )
    if chosen.block == attention[0].block:
        reasons += (f"Kernels take no smaller block than {chosen.block} tokens.",)
    size = BlockSize(chosen.block, None, reasons)
    cluster = Cluster(tuple(drafts), hybrid.layout, pack=chosen.width)
    return pooled(asked, [cluster], size, hybrid.orders)


def _packing(hybrid: Hybrid, pack: int) -> Packing:
    """What packing `pack` layers into a page comes to."""
    asked, attention, states = hybrid.asked, hybrid.attention, hybrid.states
    token = attention[0].page.unpadded // attention[0].block
    used = [want.backend for want in attention if want.backend]
    step = kernel_multiple(asked.model, used, asked.block_size or DEFAULT_BLOCK)
    block = step * ceil_div(max(want.nbytes for want in states), step * token * pack)
    return Packing(pack, block, ceil_div(len(attention), pack), pack * block * token)


def _packed(hybrid: Hybrid, packing: Packing) -> Plan:
    asked, attention, states = hybrid.asked, hybrid.attention, hybrid.states
    layers = tuple(want.with_block(packing.block) for want in attention)
    kept = [want.with_block(packing.block) for want in states]
    groups = ceil_div(len(kept), packing.pages)
    drafts = [Draft(tuple(kept[i::groups]), mixed=False) for i in range(groups)]
    reason = (
        f"{packing.pack} of {len(attention)} attention layers share a page of {packing.page:,} "
        f"bytes, which also holds a recurrent state of {states[0].nbytes:,}: blocks of "
        f"{packing.block} tokens. The {len(states)} recurrent layers form {groups} groups of up "
        f"to {packing.pages}, so a request takes {groups} blocks for each set of states."
    )
    cluster = Cluster(
        (Draft(layers, mixed=False), *drafts),
        hybrid.layout,
        pack=packing.pack,
        page=packing.page,
    )
    return pooled(asked, [cluster], BlockSize(packing.block, None, (reason,)), hybrid.orders)


def _states_apart(hybrid: Hybrid, told: tuple[str, ...]) -> Plan:
    asked, states, size = hybrid.asked, hybrid.states, hybrid.size
    every = sum(want.nbytes for want in states)
    held = states[0].blocks(asked.max_len, asked.in_flight, asked.dcp)
    reasons = (
        *size.reasons,
        *told,
        f"So recurrent states get a pool of their own: {every:,} bytes for all {len(states)} "
        f"layers in one block, {held} blocks for each request, no padding. The price: that pool "
        "is sized by the number of requests, and neither pool can borrow from the other: more "
        "requests cannot run at once when they are short, and saved prefixes take from the same "
        "pool. `requests` sizes it, `states` shared avoids it.",
    )
    rows = Cluster((Draft(tuple(states), mixed=True),), Layout("BLHNC"), states=True)
    clusters = [*_clusters(hybrid.attention, hybrid.layout), rows]
    return pooled(asked, clusters, BlockSize(size.tokens, None, reasons), hybrid.orders)
