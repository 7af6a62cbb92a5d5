"""Policy `atlas`, the default: never worse than vLLM's plan, with the smallest blocks.

Its promise: at every length, while prefilling and while decoding, it fits at least 99% of
the requests that vLLM's plan fits, which is always among the candidates. Plans differ where
vLLM inflates or refuses:

- **Hybrids.** vLLM makes a page of one attention layer hold a whole recurrent state, so a
  block is thousands of tokens. Here a block holds many attention layers of few tokens, or
  several states, or parts of states split by heads. Of the blocks that keep the promise the
  smallest is taken, then the one with the least padding. Attention and states share one
  pool: a pool of states by itself is a bet on the number of requests, made only where the
  caller asks for it (`states="apart"`, `requests=`), or where no block can hold both.
  `pack=N` packs just N attention layers into each page instead.
- **Orders.** Groups with unlike pages overlay each other in any block-outermost order,
  because a block id belongs to one group at a time. Where an order that was asked for would
  interleave the blocks of unlike pages, each group gets a pool of its own.
- **Kernel blocks.** Where a backend reads smaller blocks, block-outermost orders lay
  out kernel blocks of all layers one after the other, so that both the block and its
  kernel blocks have one stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.backends import ANY_ORDER, EVERY_ORDER, smallest_common_block
from kvatlas.planning.block_size import (
    DEFAULT_BLOCK,
    BlockSize,
    kernel_multiple,
    kernel_size,
    used_backends,
)
from kvatlas.planning.capacity import LENGTHS, PROMISE, Capacity, Share, capacity_of, least_share
from kvatlas.planning.grouping import GroupDraft, alike, by_tokens, dealt, group_layers
from kvatlas.planning.layout_resolution import resolve_order, supported_orders, viewable_orders
from kvatlas.planning.placing import (
    PlanDraft,
    PoolDraft,
    blocks_held,
    kernels_read,
    least_memory,
    make_plan,
    not_enough,
)
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_vllm import draft_vllm
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.shared_blocks import MOST_TABLES, SharedBlock, SharedBlockSearch
from kvatlas.planning.sized_layers import SizedLayer, size_layers
from kvatlas.planning.topology import check_vllm_topology

_MOST_TRIES = 16
"""Shared blocks of which a plan is made before vLLM's own is taken."""


def plan_atlas(request: PlanRequest) -> Plan:
    """The plan of policy atlas."""
    size = kernel_size(request)
    layers = size_layers(request, block=size.tokens)
    orders = viewable_orders(supported_orders(used_backends(request), EVERY_ORDER), layers)
    states = [layer for layer in layers if layer.kind == "recurrent"]
    attention = [layer for layer in layers if layer.kind != "recurrent"]
    hybrid = bool(states and attention)
    layout = _layout(request, orders, layers, hybrid=hybrid)
    orders = tuple(order for order in orders if order in (*ANY_ORDER, layout.order))
    if hybrid:
        return _plan_hybrid(Hybrid(request, attention, states, layout, orders, size))
    if request.pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Only hybrids can be packed: attention layers share pages with recurrent states",
            got=f"pack {request.pack} for {request.model.name}",
            hint="Leave pack out",
        )
    draft = PlanDraft(tuple(_pools(layers, layout)), size, orders)
    if request.layout is None:
        theirs = Yardstick(request, layers)  # no state inflates vLLM's block: it is this one
        if theirs.draft and not theirs.share(draft).keeps_promise:
            draft = theirs.draft
    return make_plan(request, draft, policy="atlas")


def _layout(
    request: PlanRequest, orders: tuple[str, ...], layers: list[SizedLayer], *, hybrid: bool
) -> Layout:
    """The order that was asked for, or the first in which all groups share a pool."""
    preferred = request.layout
    if preferred is None and hybrid and request.pack == "auto":
        # Block by block, states and attention fit together whatever their shapes.
        preferred = next((order for order in orders if Layout(order).block_outermost), None)
    elif preferred is None:
        one = (order for order in orders if len(_pools(layers, Layout(order))) == 1)
        preferred = next(one, None)
    return resolve_order(orders, preferred)


def _pools(layers: list[SizedLayer], layout: Layout) -> list[PoolDraft]:
    """Groups that can overlay each other in one pool, or each in a pool of its own."""
    for order in (layout, Layout("BLHNC")):
        try:
            groups = group_layers(layers, order)
            break
        except AtlasError as refusal:
            if refusal.code is not Code.PAGES_NOT_UNIFIED:
                raise
    else:
        groups = by_tokens(layers)
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


class Yardstick:
    """The plan of vLLM, which no other may fall behind."""

    def __init__(self, request: PlanRequest, layers: list[SizedLayer] | None = None) -> None:
        self.request = request
        self.refusal: AtlasError | None = None
        self.draft: PlanDraft | None = None
        try:
            self.draft = draft_vllm(msgspec.structs.replace(request, layout=None), layers=layers)
        except AtlasError as refusal:
            self.refusal = refusal

    @cached_property
    def capacity(self) -> Capacity | None:
        """What it fits; nothing where there is no such plan, or memory too small for it."""
        try:
            return capacity_of(self.request, self.draft) if self.draft else None
        except AtlasError as refusal:
            if refusal.code is not Code.NOT_ENOUGH_MEMORY:
                raise
            return None

    def share(self, draft: PlanDraft) -> Share:
        """The least share of its requests that a draft fits."""
        mine = capacity_of(self.request, draft)
        if self.capacity is None:
            return Share(1.0, self.request.max_len, DECODING)
        return least_share(mine, self.capacity, self.request)

    @property
    def block(self) -> int:
        """Tokens of its block; 0 without a plan."""
        return self.draft.size.tokens if self.draft else 0

    @property
    def sentence(self) -> str:
        """What it is, for people."""
        if self.draft is None:
            code = self.refusal.code if self.refusal else ""
            return f"vLLM has no plan to compare with ({code})."
        try:
            check_vllm_topology(self.request.model, self.request.tp, self.request.dcp)
        except AtlasError as refusal:
            return (
                f"vLLM refuses this topology: {refusal.got}. By its other rules a block would "
                f"have {self.block:,} tokens."
            )
        return f"vLLM's block is {self.block:,} tokens."


@dataclass(frozen=True)
class Hybrid:
    """A model with both attention and recurrent layers, and what is decided of its plan."""

    request: PlanRequest
    attention: list[SizedLayer]
    states: list[SizedLayer]
    layout: Layout
    orders: tuple[str, ...]
    size: BlockSize
    """The block that kernels take, before states are looked at."""

    @cached_property
    def theirs(self) -> Yardstick:
        """What vLLM plans."""
        return Yardstick(self.request)

    @cached_property
    def search(self) -> SharedBlockSearch:
        """The search for blocks that attention and states share."""
        request = self.request
        step = request.block_size or smallest_common_block(used_backends(request), DEFAULT_BLOCK)
        layers, theirs = [*self.attention, *self.states], self.theirs.draft
        return SharedBlockSearch(request, layers, step=step, theirs=theirs)

    @property
    def can_pack(self) -> bool:
        """Whether packs of attention layers can share pages with states."""
        striped = not self.layout.page_contiguous and not self.layout.block_outermost
        uniform = alike(self.attention) and alike(self.states)
        return uniform and not (striped and self.attention[0].page.heads > 1)

    @property
    def token(self) -> int:
        """Bytes that an attention layer keeps for a token."""
        return self.attention[0].page.unpadded // self.attention[0].block

    def draft(self, pools: list[PoolDraft], tokens: int, *reasons: str) -> PlanDraft:
        """Pools with blocks of so many tokens."""
        return PlanDraft(tuple(pools), BlockSize(tokens, reasons=reasons), self.orders)


def _plan_hybrid(hybrid: Hybrid) -> Plan:
    request, attention = hybrid.request, hybrid.attention
    if request.pack != "auto":
        if not hybrid.can_pack or not 1 <= request.pack <= len(attention):
            raise AtlasError(
                Code.BAD_PACK,
                "Only one to all attention layers can be packed, all alike, in an order that "
                "keeps the bytes of a block together",
                got=f"pack {request.pack} of {len(attention)} attention layers in {hybrid.layout}",
                hint="Use pack auto",
            )
        return make_plan(request, _packed(hybrid, request.pack), policy="atlas")
    if request.states == "apart" or request.requests is not None:
        return make_plan(request, _states_apart(hybrid, "As asked"), policy="atlas")
    tried = []
    for draft in islice(_shared_drafts(hybrid), _MOST_TRIES):
        made = _sound(hybrid, draft)
        if made is not None:
            return made
        tried.append(draft)
    own = _vllms_own(hybrid)
    least = min((least_memory(request, x) for x in (*tried, own) if x), default=0)
    if least > request.memory:
        raise not_enough(request, least)
    if own is not None:
        return make_plan(request, own, policy="atlas")
    if request.states == "shared":
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "No block can hold both attention and recurrent states",
            got=f"{request.model.name} in {hybrid.layout}",
            hint="Use a block-outermost order such as BLNHC, or states apart",
        )
    why = f"In {hybrid.layout} no block can hold both attention and states"
    return make_plan(request, _states_apart(hybrid, why), policy="atlas")


def _sound(hybrid: Hybrid, draft: PlanDraft) -> Plan | None:
    """The plan of a draft, if it can be made, kernels can read it, and it keeps the promise."""
    request = hybrid.request
    try:
        share = hybrid.theirs.share(draft)
        if not share.keeps_promise:
            return None
        kept = hybrid.theirs.capacity is not None
        reasons = (*draft.size.reasons, *([_promise(request, share)] if kept else []))
        size = BlockSize(draft.size.tokens, reasons=reasons)
        made = make_plan(request, replace(draft, size=size), policy="atlas")
    except AtlasError:
        return None
    return made if kernels_read(request.backends, made) else None


def _promise(request: PlanRequest, share: Share) -> str:
    longest = max(request.max_len, LENGTHS)
    text = (
        f"At every length up to {longest:,} tokens, prefilling or decoding, it fits at least "
        f"{share.share:.1%} of the requests that vLLM's plan fits"
    )
    return f"{text} (least at {share.length:,} tokens)." if share.share < 1 else f"{text}."


def _shared_drafts(hybrid: Hybrid) -> Iterator[PlanDraft]:
    """Drafts in which attention and states share blocks, the preferred first."""
    if not hybrid.layout.block_outermost:
        yield from _packs(hybrid)
        return
    own = _vllms_own(hybrid)
    largest = hybrid.theirs.block or _largest(hybrid)
    for block in hybrid.search.blocks(largest):
        if own and hybrid.search.preference(own) <= block.preference:
            return
        yield _shared(hybrid, block)


def _largest(hybrid: Hybrid) -> int:
    """Tokens that one attention layer needs to hold a state: no larger block is of use."""
    state = max(layer.nbytes for layer in hybrid.states)
    return hybrid.search.step * ceil_div(state, hybrid.search.step * hybrid.token)


def _vllms_own(hybrid: Hybrid) -> PlanDraft | None:
    """The plan of vLLM, in the order that was asked for; nothing where it refuses."""
    request, theirs = hybrid.request, hybrid.theirs
    draft = theirs.draft
    if request.layout is not None:
        try:
            draft = draft_vllm(request)
        except AtlasError:
            return None
    if draft is None:
        return None
    own = f"This is vLLM's own plan. {_what_stopped(hybrid, theirs.block)}"
    reasons = (*draft.size.reasons, own)
    return replace(draft, size=BlockSize(draft.size.tokens, draft.size.state_padding, reasons))


def _shared(hybrid: Hybrid, block: SharedBlock) -> PlanDraft:
    """A pool whose blocks hold attention or states."""
    tokens, splits, theirs = block.tokens, block.splits, hybrid.theirs
    groups = hybrid.search.groups_of(block)
    pack = max(len(g.layers) for g in groups if g.layers[0].kind != "recurrent")
    fit = max(len(g.layers) for g in groups if g.layers[0].kind == "recurrent")
    tables = sum(g.layers[0].kind != "recurrent" for g in groups)
    what = "states" if splits == 1 else f"parts of states, each state split by heads into {splits}"
    price = "" if splits == 1 else ", and kernels that are called once for each part"
    reasons = (
        theirs.sentence,
        f"Here a block holds {pack} of {len(hybrid.attention)} attention layers for {tokens:,} "
        f"tokens, or {fit} {what}: {tables} block table(s) for attention and "
        f"{len(groups) - tables} for the {len(hybrid.states)} recurrent layers. "
        f"The price is the number of tables{price}.",
        _what_stopped(hybrid, tokens),
    )
    pool = PoolDraft(groups, hybrid.layout, pack=pack)
    return hybrid.draft([pool], tokens, *reasons)


def _what_stopped(hybrid: Hybrid, tokens: int) -> str:
    """Why blocks are not smaller than so many tokens."""
    if tokens <= hybrid.search.step:
        return f"Kernels take no smaller block than {hybrid.search.step} tokens."
    if min(hybrid.search.tried, default=tokens) >= tokens:
        return (
            "No smaller block holds a state, or an even part of one, with "
            f"{MOST_TABLES} block tables or fewer."
        )
    return f"Every smaller block fits fewer than {PROMISE:.0%} of its requests at some length."


def _packs(hybrid: Hybrid) -> Iterator[PlanDraft]:
    """Drafts whose pages hold one attention layer or more, the smallest blocks first."""
    if not hybrid.can_pack:
        return
    drafts: dict[int, PlanDraft] = {}
    for pack in range(1, len(hybrid.attention) + 1):
        draft = _packed(hybrid, pack)
        drafts.setdefault(draft.size.tokens, draft)  # of equal blocks the smallest pack
    yield from (drafts[tokens] for tokens in sorted(drafts))


def _packed(hybrid: Hybrid, pack: int) -> PlanDraft:
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
        *dealt([layer.cut(block) for layer in attention], 1),
        *dealt([layer.cut(block) for layer in states], groups),
    )
    pool = PoolDraft(drafts, hybrid.layout, pack=pack, page=page)
    return hybrid.draft([pool], block, reason)


def _states_apart(hybrid: Hybrid, why: str) -> PlanDraft:
    states, size = hybrid.states, hybrid.size
    nbytes, blocks = sum(layer.nbytes for layer in states), blocks_held(states[0], hybrid.request)
    price = (
        f"{why}, recurrent states have a pool of their own: {nbytes:,} bytes for all {len(states)} "
        f"layers in one block, {blocks} blocks for each request, no "
        "padding. The price: that pool is sized by the number of requests, and neither pool can "
        "borrow from the other: more requests cannot run at once when they are short, and saved "
        "prefixes take from the same pool. `requests` sizes it."
    )
    rows = PoolDraft((GroupDraft(tuple(states), mixed=True),), Layout("BLHNC"), states=True)
    pools = [*_pools(hybrid.attention, hybrid.layout), rows]
    return hybrid.draft(pools, size.tokens, *size.reasons, hybrid.theirs.sentence, price)
