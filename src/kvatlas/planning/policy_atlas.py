"""Policy `atlas`, the default: never worse than vLLM's plan, with the smallest blocks.

The promise: for every request length, while prefilling and while decoding, the plan fits at
least 99% of the requests that vLLM's plan fits. vLLM's plan is always a candidate. The two
plans differ in three cases:

- **Hybrids.** vLLM makes a page of one attention layer large enough for a whole recurrent
  state, so a block has thousands of tokens. Here a block holds either many attention layers
  for few tokens, or several states, or parts of states that are split by heads. The smallest
  block size that keeps the promise is used; among blocks of this size, the one with the least
  padding. Attention and states share one pool. A separate pool of states would fix the number of
  requests, so it is used only if the caller asks for it (`states="apart"`, `requests=`) or no
  block can hold both. `pack=N` packs N attention layers into each page instead.
  `runs_on=` demands a plan that vLLM can run, with one pool, whole states and blocks that kernels
  read. The promise of such a plan ends at `max_len`, because the engine accepts no longer request.
- **Layouts.** Groups with different pages can overlay each other in any block-outermost
  layout, because a block id belongs to one group at a time. If the caller requests a layout
  that would interleave the blocks of different pages, each group gets a separate pool.
- **Kernel blocks.** If a backend reads smaller blocks, a block-outermost layout stores the
  first kernel block of all layers, then the second, and so on. Blocks and kernel blocks then
  each have a single stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.backends import ANY_ORDER, EVERY_ORDER
from kvatlas.planning.block_size import BlockSize, kernel_size, used_backends
from kvatlas.planning.capacity import PROMISE, Share, longest_promised
from kvatlas.planning.grouping import GroupDraft, by_tokens, group_layers
from kvatlas.planning.hybrid_models import Hybrid, Yardstick
from kvatlas.planning.hybrid_packs import packed, packed_to_run, packs, plural
from kvatlas.planning.layout_resolution import (
    layers_in_layout,
    resolve_order,
    supported_orders,
    viewable_orders,
)
from kvatlas.planning.placing import (
    PlanDraft,
    PoolDraft,
    blocks_held,
    kernels_read,
    least_memory,
    longest_request,
    make_plan,
    not_enough,
)
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_vllm import draft_vllm
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.shared_blocks import MOST_TABLES, SharedBlock
from kvatlas.planning.sized_layers import FIXED_KINDS, SizedLayer, size_layers

_MOST_TRIES = 16
"""Number of drafts with shared blocks to try before the planner falls back to vLLM's plan."""


def plan_atlas(request: PlanRequest) -> Plan:
    """Return the plan of policy atlas."""
    size = kernel_size(request)
    layers = size_layers(request, block=size.tokens)
    orders = viewable_orders(supported_orders(used_backends(request), EVERY_ORDER), layers)
    hybrid = {layer.kind == "recurrent" for layer in layers} == {True, False}
    layout = _layout(request, orders, layers, hybrid=hybrid)
    unplaced, layers = layers, layers_in_layout(layers, layout)
    orders = tuple(order for order in orders if order in (*ANY_ORDER, layout.order))
    if hybrid:
        states = [layer for layer in layers if layer.kind == "recurrent"]
        rings = [layer for layer in layers if layer.kind == "ring"]
        attention = [layer for layer in layers if layer.kind not in FIXED_KINDS]
        return _plan_hybrid(Hybrid(request, attention, states, rings, layout, orders, size))
    if request.pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Only hybrids, which have attention and recurrent layers, support the option `pack`",
            got=f"pack={request.pack} for {request.model.name}",
            hint="Omit pack=",
        )
    if request.runs_on:
        return make_plan(request, draft_vllm(request), policy="atlas")
    draft = PlanDraft(tuple(_pools(layers, layout)), size, orders)
    if request.layout is None:
        theirs = Yardstick(request, unplaced)  # without states, vLLM has the same block size
        if theirs.draft and not theirs.share(draft).keeps_promise:
            draft = theirs.draft
    return make_plan(request, draft, policy="atlas")


def _layout(
    request: PlanRequest, orders: tuple[str, ...], layers: list[SizedLayer], *, hybrid: bool
) -> Layout:
    """Return the requested layout, or by default the first suitable layout in `orders`.

    A layout is suitable if all groups can share a pool; for hybrids, if it is block-outermost. If
    no layout is suitable, the first of `orders` is returned. `hybrid` is true if the model is a
    hybrid.
    """
    preferred = request.layout
    if preferred is None and hybrid and (request.pack == "auto" or request.runs_on):
        # In a block-outermost layout, pages of any shape can share blocks.
        preferred = next((order for order in orders if _shares_blocks(order, request)), None)
    elif preferred is None:
        one = (order for order in orders if len(_pools(layers, Layout(order))) == 1)
        preferred = next(one, None)
    return resolve_order(orders, preferred)


def _shares_blocks(order: str, request: PlanRequest) -> bool:
    """Return whether a block can hold either attention or recurrent states, in layout `order`.

    If the plan is for an engine, each page must also be contiguous.
    """
    layout = Layout(order)
    return layout.block_outermost and (layout.page_contiguous or not request.runs_on)


def _pools(layers: list[SizedLayer], layout: Layout) -> list[PoolDraft]:
    """Return one pool if all groups can overlay each other, otherwise one pool per group."""
    for order in (layout, Layout("BLHNC")):
        try:
            groups = group_layers(layers, order)
            break
        except AtlasError as refusal:
            if refusal.code is not Code.PAGES_NOT_UNIFIED:
                raise
    else:
        groups = by_tokens(layers)
    # A contiguous page can overlay any page of the same size; others need the same shape.
    contiguous = layout.page_contiguous
    shapes = {
        layer.nbytes if contiguous else (layer.page.heads, layer.page.states, layer.nbytes)
        for group in groups
        for layer in group.layers
    }
    # If heads or states are outside of blocks and layers, strides depend on the group's width.
    apart = not layout.block_outermost and not layout.layer_compact
    if len(groups) == 1 or layout.block_outermost or (len(shapes) == 1 and not apart):
        return [PoolDraft(tuple(groups), layout)]
    return [PoolDraft((group,), layout) for group in groups]


def _plan_hybrid(hybrid: Hybrid) -> Plan:
    request = hybrid.request
    if request.pack != "auto":
        fits = hybrid.can_pack and 1 <= request.pack <= hybrid.most_packed
        if not fits or (request.runs_on and not _shares_blocks(hybrid.layout.order, request)):
            raise AtlasError(
                Code.BAD_PACK,
                "The model or the layout does not support this pack",
                got=f"pack={request.pack} for {len(hybrid.attention)} attention layers in "
                f"{hybrid.layout}",
                hint=f"Omit pack=, or pass 1..{hybrid.most_packed}. Packs require one kind of "
                "attention, one kind of state, and a layout with contiguous pages or blocks",
            )
        draft = (packed_to_run if request.runs_on else packed)(hybrid, request.pack)
        return make_plan(request, draft, policy="atlas")
    if request.states == "apart" or request.requests is not None:
        return make_plan(request, _states_apart(hybrid, "As requested"), policy="atlas")
    tried = []
    for draft in islice(_shared_drafts(hybrid), _MOST_TRIES):
        made = _sound(hybrid, draft)
        if made is not None:
            return made
        tried.append(draft)
    own = _vllms_own(hybrid)
    drafts = [draft for draft in (*tried, own) if draft]
    least = min((least_memory(request, draft) for draft in drafts), default=0)
    if least > request.memory:
        longest = max(longest_request(request, draft) for draft in drafts)
        raise not_enough(request, least, longest)
    if own is not None:
        return make_plan(request, own, policy="atlas")
    if request.states == "shared" or request.runs_on:
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "Attention and recurrent states cannot share blocks in this layout",
            got=f"{request.model.name} in layout {hybrid.layout}",
            hint="Pass a layout= that starts with B, such as 'BLNHC', or states='apart' without "
            "runs_on=",
        )
    why = f"Because no block can hold both attention and states in layout {hybrid.layout}"
    return make_plan(request, _states_apart(hybrid, why), policy="atlas")


def _sound(hybrid: Hybrid, draft: PlanDraft) -> Plan | None:
    """Return the plan that a draft describes; None if it is not sound.

    A plan is sound if it is valid, fits 99% of the requests of vLLM's plan, and has blocks
    that kernels can read.
    """
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
    longest = longest_promised(request)
    text = (
        f"For every request length up to {longest:,} tokens, prefilling or decoding, this plan "
        f"fits at least {share.share:.1%} of the requests that vLLM's plan fits"
    )
    where = f" (the minimum is at {share.length:,} tokens)" if share.share < 1 else ""
    return f"{text}{where}."


def _shared_drafts(hybrid: Hybrid) -> Iterator[PlanDraft]:
    """Yield drafts in which attention and recurrent states share blocks, the best first."""
    if hybrid.request.runs_on and not _shares_blocks(hybrid.layout.order, hybrid.request):
        return
    if not hybrid.layout.block_outermost:
        yield from packs(hybrid)
        return
    own = _vllms_own(hybrid)
    largest = hybrid.theirs.block or _largest(hybrid)
    for block in hybrid.search.blocks(largest):
        if own and hybrid.search.preference(own) <= block.preference:
            return
        yield _shared(hybrid, block)


def _largest(hybrid: Hybrid) -> int:
    """Return the largest block size to try, in tokens.

    With this block size, an attention page is large enough for a recurrent state.
    """
    step = hybrid.search.step
    return step * ceil_div(hybrid.largest_state, step * hybrid.token)


def _vllms_own(hybrid: Hybrid) -> PlanDraft | None:
    """Return vLLM's plan in the requested layout, as a draft; None if vLLM has no such plan."""
    request, theirs = hybrid.request, hybrid.theirs
    draft = theirs.draft
    if request.layout is not None:
        try:
            draft = draft_vllm(request)
        except AtlasError:
            return None
    if draft is None:
        return None
    own = f"This is vLLM's plan. {_what_stopped(hybrid, theirs.block)}"
    reasons = (*draft.size.reasons, own)
    return replace(draft, size=BlockSize(draft.size.tokens, draft.size.state_padding, reasons))


def _shared(hybrid: Hybrid, block: SharedBlock) -> PlanDraft:
    """Return a draft with one pool, whose blocks hold either attention or recurrent states."""
    tokens, splits, theirs = block.tokens, block.splits, hybrid.theirs
    groups = hybrid.search.groups_of(block)
    kinds = [group.layers[0].kind for group in groups]
    pack = max(len(g.layers) for g in groups if g.layers[0].kind not in FIXED_KINDS)
    fit = max(len(g.layers) for g in groups if g.layers[0].kind == "recurrent")
    tables = sum(kind not in FIXED_KINDS for kind in kinds)
    what, price = f"{fit} recurrent {plural(fit, 'state')}", ""
    if splits > 1:
        what = (
            f"{fit} {plural(fit, 'part')} of recurrent states, each state split by heads into "
            f"{splits} parts"
        )
        price = ", and a separate kernel call for each part of a state"
    reasons = (
        theirs.sentence,
        f"In this plan a block holds either {pack} of {len(hybrid.attention)} attention layers "
        f"for {tokens:,} tokens, or {what}. Attention uses {tables} block "
        f"{plural(tables, 'table')}, and the {len(hybrid.states)} recurrent layers use "
        f"{kinds.count('recurrent')}. {_ring_tables(hybrid, kinds.count('ring'))}The cost is the "
        f"number of block tables{price}.",
        _what_stopped(hybrid, tokens),
    )
    pool = PoolDraft(groups, hybrid.layout, pack=pack)
    return hybrid.draft([pool], tokens, *reasons)


def _ring_tables(hybrid: Hybrid, tables: int) -> str:
    """Return a sentence about the block tables of rings; empty without rings."""
    if not tables:
        return ""
    return (
        f"The rings of {len(hybrid.rings)} layers use {tables} block {plural(tables, 'table')}, "
        "each with one block per request. "
    )


def _what_stopped(hybrid: Hybrid, tokens: int) -> str:
    """Return a sentence that explains why the block size is not smaller than `tokens`."""
    if tokens <= hybrid.search.step:
        return f"The kernels support no block smaller than {hybrid.search.step} tokens."
    if min(hybrid.search.tried, default=tokens) >= tokens:
        return (
            "No smaller block can hold a state, or an equal part of one, with at most "
            f"{MOST_TABLES} block tables."
        )
    if hybrid.theirs.draft is None:
        return "Every smaller block has more padding."
    return (
        f"Every smaller block fits fewer than {PROMISE:.0%} of the requests of vLLM's plan at "
        "some request length."
    )


def _states_apart(hybrid: Hybrid, why: str) -> PlanDraft:
    states, size = hybrid.states, hybrid.size
    nbytes, blocks = sum(layer.nbytes for layer in states), blocks_held(states[0], hybrid.request)
    price = (
        f"{why}, recurrent states are in a separate pool, without padding. One block of "
        f"{nbytes:,} bytes holds the states of all {len(states)} layers, and a request takes "
        f"{blocks} {plural(blocks, 'block')}. The cost: the pool's size, which `requests` sets, "
        "limits the number of requests, and neither pool can borrow from the other. Even if "
        "requests are short, no more of them can run at once, and saved prefixes compete with "
        "running requests for the same pool."
    )
    rows = PoolDraft((GroupDraft(tuple(states), mixed=True),), Layout("BLHNC"), states=True)
    pools = [*_pools([*hybrid.attention, *hybrid.rings], hybrid.layout), rows]
    return hybrid.draft(pools, size.tokens, *size.reasons, hybrid.theirs.sentence, price)
