"""Drafts of plans in which a page holds several attention layers of a hybrid (`pack=N`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.capacity import capacity_of
from kvatlas.planning.grouping import dealt
from kvatlas.planning.hybrid_models import Hybrid
from kvatlas.planning.placing import PlanDraft, PoolDraft, least_memory
from kvatlas.planning.plan_data import DECODING


def plural(number: int, word: str) -> str:
    """Return the word, in the plural unless the number is 1."""
    return word if number == 1 else f"{word}s"


def packs(hybrid: Hybrid) -> Iterator[PlanDraft]:
    """Yield drafts that differ in the number of attention layers per page, small blocks first."""
    if not hybrid.can_pack:
        return
    drafts: dict[int, PlanDraft] = {}
    for pack in range(1, len(hybrid.attention) + 1):
        draft = packed(hybrid, pack)
        drafts.setdefault(draft.size.tokens, draft)  # of equal block sizes, keep the smallest pack
    yield from (drafts[tokens] for tokens in sorted(drafts))


def packed(hybrid: Hybrid, pack: int) -> PlanDraft:
    """Return a draft whose pages hold either `pack` attention layers or one recurrent state."""
    attention, states, step = hybrid.attention, hybrid.states, hybrid.packed_step
    block = step * ceil_div(hybrid.largest_state, step * hybrid.token * pack)
    pages, page = ceil_div(len(attention), pack), pack * block * hybrid.token
    groups = ceil_div(len(states), pages)
    held = f"{pack} of {len(attention)} attention layers"
    if pack > len(attention):
        spare = pack - len(attention)
        held = f"all {len(attention)} attention layers, with padding for {spare} more,"
    reason = (
        f"A page of {page:,} bytes holds either {held} or one recurrent "
        f"state of {states[0].nbytes:,} bytes; this gives blocks of {block} tokens. "
        f"The {len(states)} recurrent layers form {groups} {plural(groups, 'group')} of up to "
        f"{pages}, so one state of every layer takes {groups} {plural(groups, 'block')}."
    )
    drafts = (
        *dealt([layer.cut(block) for layer in attention], 1),
        *dealt([layer.cut(block) for layer in states], groups),
    )
    pool = PoolDraft(drafts, hybrid.layout, pack=pack, page=page)
    return hybrid.draft([pool], block, reason)


def packed_to_run(hybrid: Hybrid, pack: int) -> PlanDraft:
    """Return a draft that vLLM can run. A page holds `pack` attention layers or one state.

    Two block sizes are tried. With the larger one, `pack` attention layers take at least as many
    bytes as a recurrent state; with the smaller one, they take fewer. The result is the draft that
    fits more requests of `max_len` tokens.
    """
    per_token, step = pack * hybrid.token, hybrid.packed_step
    fewest = hybrid.largest_state // (step * per_token) * step
    sizes = {step * ceil_div(hybrid.largest_state, step * per_token), max(step, fewest)}
    drafts = [
        _whole_states(hybrid, pack, block)
        for block in sorted(sizes)
        if all(one.reads(block) for one in hybrid.backends)
    ]
    if not drafts:
        raise AtlasError(
            Code.BAD_PACK,
            "This pack needs a block size that the kernels of the model's backends do not support",
            got=f"pack={pack}, which gives blocks of {' or '.join(map(str, sorted(sizes)))} tokens",
            hint="Pass another pack=, or another backend=",
        )
    return max(drafts, key=lambda draft: _requests(hybrid, draft))


def _whole_states(hybrid: Hybrid, pack: int, block: int) -> PlanDraft:
    """Return a draft with blocks of `block` tokens, in which states are not split.

    All attention layers form one group. The number of recurrent states in a block is the number of
    attention layers divided by `pack`, rounded up.
    """
    attention, states = hybrid.attention, hybrid.states
    each = ceil_div(len(attention), pack)
    groups = ceil_div(len(states), each)
    drafts = (
        *dealt([layer.cut(block) for layer in attention], 1),
        *dealt([layer.cut(block) for layer in states], groups),
    )
    reason = (
        f"A block holds either all {len(attention)} attention layers for {block} tokens, or "
        f"{each} recurrent {plural(each, 'state')}: one for {pack} attention layers. The "
        f"{len(states)} recurrent layers form {groups} {plural(groups, 'group')}."
    )
    pool = PoolDraft(drafts, hybrid.layout, pack=pack)
    return hybrid.draft([pool], block, hybrid.theirs.sentence, reason)


def _requests(hybrid: Hybrid, draft: PlanDraft) -> float:
    """Return how many decoding requests of `max_len` tokens fit in a draft.

    If no request fits, the result is negative: the bytes per rank at which one request would fit,
    with a minus sign.
    """
    longest = np.array([hybrid.request.max_len])
    try:
        return float(capacity_of(hybrid.request, draft).requests(longest, DECODING)[0])
    except AtlasError:  # not enough memory for one
        return -float(least_memory(hybrid.request, draft))
