"""The cached blocks that a group needs to continue a request after a number of tokens."""

from __future__ import annotations

from math import gcd, lcm

from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Group, Plan
from kvatlas.specs import Attention, CrossAttention, Indexer, LatentAttention, Spec, Visibility


def first_needed(group: Group, tokens: int) -> int:
    """Return the position of the first token to which the token at position `tokens` attends.

    >>> first_needed(Group(kind="sliding_window", block=16, pool=0, window=128), 1000)
    873
    """
    return min(int(group.visibility.first(tokens)), tokens)


def first_seen(plan: Plan, index: int, tokens: int) -> int:
    """Return the position of the first token to which all layers of a group attend.

    The attending token is at position `tokens`. The result may be greater than the result of
    `first_needed`, because a group that keeps all tokens may contain layers with a window.

    >>> from kvatlas.planning import plan
    >>> made = plan("gpt-oss-20b", memory="20GiB", policy="uniform")
    >>> first_needed(made.groups[0], 1000), first_seen(made, 0, 1000)
    (0, 873)
    """
    layers = [layer for one in plan.regions if one.group == index for layer in one.layers]
    seen = [int(layer.spec.visibility.first(tokens)) for layer in layers]
    return min(max(first_needed(plan.groups[index], tokens), *seen), tokens)


def needed_blocks(group: Group, tokens: int) -> range:
    """Return the block table entries that a group needs to continue after `tokens` tokens.

    Full attention needs all entries, and a window needs the last ones. A recurrent layer needs only
    the state after `tokens` tokens, which is in the last entry.

    >>> needed_blocks(Group(kind="recurrent", block=16, pool=0), 64)
    range(3, 4)
    >>> needed_blocks(Group(kind="sliding_window", block=16, pool=0, window=17), 64)
    range(3, 4)
    >>> needed_blocks(Group(kind="chunked_local_attention", block=16, pool=0, window=24), 72)
    range(4, 4)
    """
    stop = ceil_div(tokens, group.block)
    if not tokens:
        return range(0)
    if group.kind == "recurrent":
        return range(stop - 1, stop)
    if group.kind == "ring":  # the only entry, unless a group of tokens begins here
        return range(int(first_needed(group, tokens) < tokens))
    first = first_needed(group, tokens)
    if first == tokens:  # a chunk begins here
        return range(tokens // group.block, tokens // group.block)
    return range(first // group.block, stop)


def last_without_need(group: Group, tokens: int) -> int:
    """Return the last position, at most `tokens`, at which a token attends to no earlier token.

    For chunked attention, that position is the start of a chunk. For a ring buffer, it is the start
    of a group of tokens. For other layers, it is 0.

    >>> last_without_need(Group(kind="chunked_local_attention", block=16, pool=0, window=24), 80)
    72
    """
    if group.kind == "recurrent":
        return 0
    first = first_needed(group, tokens)
    chunked = group.kind in ("chunked_local_attention", "ring")
    return first if chunked or first == tokens else 0


def keeps_all(group: Group) -> bool:
    """Return whether every earlier token is needed to continue."""
    return group.kind != "recurrent" and group.visibility == Visibility()


def release_order(plan: Plan) -> dict[int, list[int]]:
    """Return the groups of each pool in the order in which they release blocks of one position.

    A state or a window cannot be used without the blocks of full attention before it. States and
    windows are therefore released first. Groups of equal kind, window and block size are adjacent.
    """
    alike: dict[tuple[int, tuple[object, ...]], list[int]] = {}
    for index, group in enumerate(plan.groups):
        rank = 0 if group.kind == "recurrent" else 1 + keeps_all(group)
        kind = (group.kind, group.visibility, group.block, group.pool)
        alike.setdefault((rank, kind), []).append(index)
    order: dict[int, list[int]] = {}
    for _, groups in sorted(alike.items(), key=lambda item: (item[0][0], item[1][0])):
        order.setdefault(plan.groups[groups[0]].pool, []).extend(groups)
    return order


def hit_step(plan: Plan) -> int:
    """Return the least common multiple of the block sizes of all groups, in tokens.

    A hit that consists of whole blocks in every group ends at a multiple of this number.
    """
    return lcm(*(group.block for group in plan.groups))


def hash_grain(plan: Plan) -> int:
    """Return the number of tokens between prefix hashes: the gcd of the block sizes.

    Groups with ring buffers are left out, because their blocks are never reused.
    """
    blocks = [group.block for group in plan.groups if group.kind != "ring"]
    return gcd(*(blocks or [group.block for group in plan.groups]))


def can_be_cut(plan: Plan) -> bool:
    """Return whether prefix cache hits may end at any token, not only at the ends of blocks.

    They may if every layer stores a separate row for each prompt token, and chunks of chunked
    attention begin only at block boundaries. Recurrent layers (one state per block), compressed
    layers (one row for several tokens) and cross attention have no such rows.
    """
    layers = [layer for region in plan.regions for layer in region.layers]
    chunked = [group for group in plan.groups if group.kind == "chunked_local_attention"]
    whole = all(group.window and group.window % group.block == 0 for group in chunked)
    return whole and all(_keeps_tokens(layer.spec) for layer in layers)


def _keeps_tokens(spec: Spec) -> bool:
    if isinstance(spec, LatentAttention | Indexer):
        return spec.compress == 1
    return isinstance(spec, Attention) and not isinstance(spec, CrossAttention)


def reuses_prefixes(plan: Plan) -> bool:
    """Return whether prefix caching is enabled and the model has no cross attention."""
    kinds = {group.kind for group in plan.groups}
    return "cross_attention" not in kinds and plan.prefix_caching
