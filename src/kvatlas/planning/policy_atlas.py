"""Policy `atlas`, the default: small blocks for hybrids, and every order that bytes allow.

Where vLLM's plan is already tight, it is the same plan. It differs where vLLM
inflates or refuses:

- **Hybrids.** vLLM makes a page of one attention layer hold a whole recurrent state,
  so a block is thousands of tokens. Here a block holds many attention layers of few
  tokens, or several states, or parts of states split by heads. Block sizes, layers in a
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
from kvatlas.geometry import Layout, ceil_div, round_up
from kvatlas.planning.backends import ANY_ORDER, EVERY_ORDER, smallest_common_block
from kvatlas.planning.block_size import (
    DEFAULT_BLOCK,
    BlockSize,
    block_size,
    kernel_multiple,
    kernel_size,
    used_backends,
)
from kvatlas.planning.grouping import GroupDraft, alike, by_tokens, dealt, group_layers
from kvatlas.planning.layout_resolution import resolve_order, supported_orders, viewable_orders
from kvatlas.planning.placing import PoolDraft, blocks_held, make_plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_vllm import plan_vllm
from kvatlas.planning.report import padding
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import SizedLayer, page_of, size_layers
from kvatlas.planning.topology import check_vllm_topology

_ROUNDING = 1e-12
_SPLITS = (1, 2, 4, 8)
"""Parts that a state may be split into: each is one more call of its kernel."""
_MOST_TRIES = 16
_MOST_SIZES = 1024
"""Block sizes that are tried, from the smallest on; real states leave at most a few hundred."""
_MOST_TABLES = 64
"""Block tables that an engine may be asked to keep for a request."""

SHRINK = 8
"""A hybrid's block is to be at most this fraction of vLLM's."""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block that holds either some attention layers or some states, or parts of them."""

    tokens: int
    """Tokens in a block."""
    width: int
    """Attention layers in a block."""
    splits: int
    """Parts that a state is split into, by heads."""
    fit: int
    """Such parts in a block."""
    tables: int
    """Block tables, of attention and of states."""
    padding: float
    """Share of what a request claims that is padding."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model with both attention and recurrent layers, and what is decided of its plan."""

    request: PlanRequest
    attention: list[SizedLayer]
    states: list[SizedLayer]
    layout: Layout
    orders: tuple[str, ...]
    size: BlockSize
    """The block that kernels take, before states are looked at."""

    @property
    def token(self) -> int:
        """Bytes that an attention layer keeps for a token."""
        return self.attention[0].page.unpadded // self.attention[0].block

    def plan(self, pools: list[PoolDraft], tokens: int, *reasons: str) -> Plan:
        """The plan of these pools with blocks of so many tokens."""
        size = BlockSize(tokens, reasons=reasons)
        return make_plan(self.request, pools, size, policy="atlas", orders=self.orders)


def plan_atlas(request: PlanRequest) -> Plan:
    """The plan of policy atlas."""
    size = kernel_size(request)
    layers = size_layers(request, block=size.tokens)
    # DeepSeek-V4's backends declare orders so that pages pack, not because kernels need them.
    backends = [b for b in used_backends(request) if b.family != "other"]
    orders = viewable_orders(supported_orders(backends, EVERY_ORDER), layers)
    states = [layer for layer in layers if layer.kind == "recurrent"]
    attention = [layer for layer in layers if layer.kind != "recurrent"]
    preferred = request.layout
    if preferred is None and states and attention and request.pack == "auto":
        # Block by block, states and attention fit together whatever their shapes.
        preferred = next((order for order in orders if Layout(order).block_outermost), None)
    layout = resolve_order(orders, preferred)
    orders = tuple(order for order in orders if order in (*ANY_ORDER, layout.order))
    if states and attention:
        return _plan_hybrid(Hybrid(request, attention, states, layout, orders, size))
    if request.pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Only hybrids can be packed: attention layers share pages with recurrent states",
            got=f"pack {request.pack} for {request.model.name}",
            hint="Leave pack out",
        )
    return make_plan(request, _pools(layers, layout), size, policy="atlas", orders=orders)


def _pools(layers: list[SizedLayer], layout: Layout) -> list[PoolDraft]:
    """Groups that can overlay each other in one pool, or each in a pool of its own."""
    groups = by_tokens(layers)
    for order in (layout, Layout("BLHNC")):
        try:
            groups = group_layers(layers, order)
            break
        except AtlasError as refusal:
            if refusal.code is not Code.PAGES_NOT_UNIFIED:
                raise
    # A page in one stretch overlays any other of its size; stripes of heads only their like.
    shapes = {
        layer.nbytes
        if layout.page_contiguous
        else (layer.page.heads, layer.page.states, layer.nbytes)
        for group in groups
        for layer in group.layers
    }
    # Outside all blocks, stripes of heads or states are as long as their group is wide.
    apart = not layout.block_outermost and not layout.layer_compact
    if len(groups) == 1 or layout.block_outermost or (len(shapes) == 1 and not apart):
        return [PoolDraft(tuple(groups), layout)]
    return [PoolDraft((group,), layout) for group in groups]


def _plan_hybrid(hybrid: Hybrid) -> Plan:
    request, attention, states = hybrid.request, hybrid.attention, hybrid.states
    layout, size = hybrid.layout, hybrid.size
    uniform = alike(attention) and alike(states)
    striped = not layout.page_contiguous and not layout.block_outermost
    can_pack = uniform and not (striped and attention[0].page.heads > 1)
    if request.pack != "auto":
        if not can_pack or not 1 <= request.pack <= len(attention):
            raise AtlasError(
                Code.BAD_PACK,
                "Only one to all attention layers can be packed, all alike, in an order that "
                "keeps the bytes of a block together",
                got=f"pack {request.pack} of {len(attention)} attention layers in {layout}",
                hint="Use pack auto",
            )
        return _packed(hybrid, request.pack)
    bar, block, compared = _vllm_yardstick(request)
    tried: list[SharedBlock] = []
    if layout.block_outermost and uniform:
        tried = _shared_blocks(hybrid, max(block // SHRINK, size.tokens))
    tried.sort(key=lambda shared: (shared.splits, shared.tables, shared.tokens))
    tight = [shared for shared in tried if shared.padding <= bar + _ROUNDING]
    near = min(tried, key=lambda shared: shared.padding, default=None)
    if request.states == "shared" and near and not tight:
        return _shared(hybrid, near, compared)
    for chosen in tight[:_MOST_TRIES] if request.states != "apart" else ():
        made = _shared(hybrid, chosen, compared)
        # Stages hold unlike shares of each group, which only the whole plan shows.
        if request.pp == 1 or padding(made).share <= bar + _ROUNDING:
            return made
    if near:
        why = (
            f"In one pool, the tightest block of at most 1/{SHRINK} of that has {near.tokens} "
            f"tokens and {near.padding:.2%} padding: blocks are whole kernel blocks of every "
            "layer, and whole heads of states do not fill them."
        )
    elif not uniform:
        why = "Its attention layers, or its recurrent ones, are of several kinds."
    elif layout.block_outermost:
        why = (
            f"No block of at most 1/{SHRINK} of that holds a state or an even part of one with "
            f"{_MOST_TABLES} block tables or fewer."
        )
    else:
        why = f"In {layout}, attention and states of unlike shape share blocks only as packs."
    try:
        return _states_apart(hybrid, compared, why)
    except AtlasError as refusal:
        # Pools of their own need more for the first request than a shared one.
        explicit = request.states == "apart" or request.requests is not None
        if refusal.code is not Code.NOT_ENOUGH_MEMORY or explicit or not can_pack:
            raise
        return _packed(hybrid, 1)


def _vllm_yardstick(request: PlanRequest) -> tuple[float, int, str]:
    """(padding, block, sentence) of vLLM's own plan; any padding will do where it refuses."""
    try:
        reference = plan_vllm(msgspec.structs.replace(request, layout=None))
    except AtlasError as refusal:
        compared = f"vLLM has no plan to compare with ({refusal.code})."
        return 1.0, block_size(request).tokens, compared
    bar, block = padding(reference).share, reference.block_size
    try:
        check_vllm_topology(request.model, request.tp, request.dcp)
    except AtlasError as refusal:
        compared = (
            f"vLLM refuses this topology: {refusal.got}. By its other rules a block would have "
            f"{block} tokens, and {bar:.2%} of what a request of {request.max_len:,} tokens "
            "claims would be padding."
        )
        return bar, block, compared
    compared = (
        f"vLLM's block is {block} tokens, and {bar:.2%} of what a request of "
        f"{request.max_len:,} tokens claims there is padding."
    )
    return bar, block, compared


def _shared_blocks(hybrid: Hybrid, largest: int) -> list[SharedBlock]:
    """Every way in which blocks of at most `largest` tokens hold attention or states."""
    request, attention, states = hybrid.request, hybrid.attention, hybrid.states
    step = request.block_size or smallest_common_block(used_backends(request), DEFAULT_BLOCK)
    sets = blocks_held(states[0], request)
    useful = sets * sum(layer.nbytes for layer in states)
    ways = []
    for splits in _SPLITS:
        try:
            part = page_of(states[0].spec, states[0].block, request.tp * splits).nbytes
        except AtlasError:
            continue  # heads that do not divide so far
        for width in (n for n in range(1, len(attention) + 1) if len(attention) % n == 0):
            tables = len(attention) // width
            least = round_up(ceil_div(part, width * hybrid.token), step)
            for tokens in range(least, largest + 1, step)[:_MOST_SIZES]:
                nbytes = width * tokens * hybrid.token
                fit = nbytes // part
                groups = ceil_div(len(states) * splits, fit)
                blocks = blocks_held(attention[0], request, tokens) * tables
                claimed = (blocks + sets * groups) * nbytes
                waste = 1 - (blocks * nbytes + useful) / claimed
                if tables + groups <= _MOST_TABLES:
                    ways.append(SharedBlock(tokens, width, splits, fit, tables + groups, waste))
    return ways


def _shared(hybrid: Hybrid, chosen: SharedBlock, compared: str) -> Plan:
    states, tokens, splits = hybrid.states, chosen.tokens, chosen.splits
    layers = [replace(layer, block=tokens) for layer in hybrid.attention]
    parts = [
        replace(layer, block=tokens, splits=splits, part=part)
        for layer in states
        for part in range(splits)
    ]
    tables = len(layers) // chosen.width
    groups = ceil_div(len(parts), chosen.fit)
    what = "whole states" if splits == 1 else f"parts of states, each split by heads into {splits}"
    reasons = [
        compared,
        f"Here a block holds {chosen.width} of {len(layers)} attention layers for {tokens} "
        f"tokens, or {chosen.fit} {what}: {tables} block table(s) for attention and {groups} for "
        f"the {len(states)} recurrent layers, and {chosen.padding:.2%} padding. The price is the "
        "number of tables"
        + ("." if splits == 1 else ", and kernels that are called once for each part."),
    ]
    if tokens == hybrid.attention[0].block:
        reasons.append(f"Kernels take no smaller block than {tokens} tokens.")
    drafts = (*dealt(layers, tables), *dealt(parts, groups))
    return hybrid.plan([PoolDraft(drafts, hybrid.layout, pack=chosen.width)], tokens, *reasons)


def _packed(hybrid: Hybrid, pack: int) -> Plan:
    """`pack` attention layers in each page; a page holds a recurrent state too."""
    request, attention, states = hybrid.request, hybrid.attention, hybrid.states
    step = kernel_multiple(request, request.block_size or DEFAULT_BLOCK)
    state = max(layer.nbytes for layer in states)
    block = step * ceil_div(state, step * hybrid.token * pack)
    pages, page = ceil_div(len(attention), pack), pack * block * hybrid.token
    groups = ceil_div(len(states), pages)
    reason = (
        f"{pack} of {len(attention)} attention layers share a page of {page:,} bytes, which also "
        f"holds a recurrent state of {states[0].nbytes:,}: blocks of {block} tokens. The "
        f"{len(states)} recurrent layers form {groups} groups of up to {pages}, so a request "
        f"takes {groups} blocks for each set of states."
    )
    drafts = (
        *dealt([replace(layer, block=block) for layer in attention], 1),
        *dealt([replace(layer, block=block) for layer in states], groups),
    )
    pool = PoolDraft(drafts, hybrid.layout, pack=pack, page=page)
    return hybrid.plan([pool], block, reason)


def _states_apart(hybrid: Hybrid, compared: str, why: str) -> Plan:
    states, size = hybrid.states, hybrid.size
    nbytes, blocks = sum(layer.nbytes for layer in states), blocks_held(states[0], hybrid.request)
    price = (
        f"So recurrent states get a pool of their own: {nbytes:,} bytes for all {len(states)} "
        f"layers in one block, {blocks} blocks for each request, no "
        "padding. The price: that pool is sized by the number of requests, and neither pool can "
        "borrow from the other: more requests cannot run at once when they are short, and saved "
        "prefixes take from the same pool. `requests` sizes it; `states` shared avoids it where "
        "small blocks can hold a state."
    )
    rows = PoolDraft((GroupDraft(tuple(states), mixed=True),), Layout("BLHNC"), states=True)
    pools = [*_pools(hybrid.attention, hybrid.layout), rows]
    return hybrid.plan(pools, size.tokens, *size.reasons, compared, why, price)
