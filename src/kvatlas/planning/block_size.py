"""How large a block is, and how many of them the memory holds.

The block is the smallest that all backends take. A hybrid's block is inflated until
one attention page holds a recurrent state, since both share pages: with a state of
`m` bytes and `a` bytes of attention for each token and layer, and kernels that want
multiples of `k` tokens, that is k * ceil(m / (k * a)).
"""

from __future__ import annotations

from math import lcm

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, ceil_div, positive, round_up
from kvatlas.models import Model
from kvatlas.planning.backends import Backend, smallest_common_block
from kvatlas.planning.grouping import Draft
from kvatlas.planning.sized_layers import kind_of, page_of
from kvatlas.specs import LatentAttention

DEFAULT_BLOCK = 16
_LATENT_MULTIPLE = 128


class BlockSize(msgspec.Struct, frozen=True):
    """A block size, what state pages are padded to, and why."""

    tokens: int
    state_padding: int | None
    reasons: tuple[str, ...]


def kernel_size(backends: dict[str, Backend | None], asked: int | None) -> BlockSize:
    """The block that kernels take, before any state inflates it."""
    used = list({b.name: b for b in backends.values() if b}.values())
    if asked is None:
        if not used:
            return BlockSize(DEFAULT_BLOCK, None, ())
        block = smallest_common_block(used, DEFAULT_BLOCK)
        names = ", ".join(backend.name for backend in used)
        reason = f"{block} tokens is the smallest block from {DEFAULT_BLOCK} on that {names} take."
        return BlockSize(block, None, (reason,))
    block = positive(asked, "the block size")
    for backend in used:
        # Backends that come with a model are not chosen by their block size.
        if backend.family != "other" and not backend.takes(block):
            raise AtlasError(
                Code.BACKEND_REFUSES,
                f"{backend.name} takes blocks of a multiple of "
                f"{' or '.join(map(str, backend.sizes))} tokens",
                got=f"a block of {block}",
                hint="Choose a multiple, or another backend",
            )
    return BlockSize(block, None, (f"A block of {block} tokens was asked for.",))


def block_size(
    model: Model, backends: dict[str, Backend | None], *, tp: int, asked: int | None
) -> BlockSize:
    """The block of a model, as vLLM sizes it."""
    used = list({b.name: b for b in backends.values() if b}.values())
    plain = kernel_size(backends, asked)
    block, reasons = plain.tokens, list(plain.reasons)
    state = state_bytes(model, tp)
    token = token_bytes(model, tp)
    if not state or not token:
        return plain
    step = kernel_multiple(model, used, block)
    inflated = round_up(step * ceil_div(state, step * token), lcm(*(min(b.sizes) for b in used)))
    if inflated > block:
        reasons.append(
            f"A recurrent layer's state takes {state:,} bytes and shares pages with attention, "
            f"which takes {token:,} bytes for each token and layer: {inflated} tokens, the next "
            f"multiple of {step}, make a page that holds a state."
        )
        block = inflated
    page = block * token
    return BlockSize(block, None if page == state else page, tuple(reasons))


def kernel_multiple(model: Model, used: list[Backend], block: int) -> int:
    """Tokens that a hybrid's block is a multiple of."""
    step = max(min(used[0].sizes), block) if used else block
    latent = any(isinstance(layer.spec, LatentAttention) for layer in model.layers)
    return max(step, _LATENT_MULTIPLE) if latent else step


def state_bytes(model: Model, tp: int) -> int:
    """Bytes of the largest recurrent state of one layer on one rank; 0 without."""
    specs = {layer.spec for layer in model.layers if kind_of(layer.spec) == "recurrent"}
    return max((page_of(spec, 1, tp).unpadded for spec in specs), default=0)


def token_bytes(model: Model, tp: int) -> int:
    """Bytes that attention keeps for one token in one layer on one rank; 0 without."""
    for layer in model.layers:
        if kind_of(layer.spec) != "recurrent":
            return page_of(layer.spec, layer.spec.tokens_per_state or 1, tp).unpadded
    return 0


def bytes_per_block(drafts: list[Draft], layout: Layout) -> int:
    """Bytes of a block: of the widest group, since groups overlay each other."""
    filled = [draft for draft in drafts if draft.wants]
    if not layout.block_outermost:
        return max(sum(want.spread for want in draft.wants) for draft in filled)
    widest = max(sum(want.nbytes for want in draft.wants) for draft in filled)
    return round_up(widest, lcm(*(want.alignment for draft in filled for want in draft.wants)))


def stages_of(model: Model, pp: int) -> dict[str, int]:
    """The pipeline stage of each layer: equal shares, the rest before the last stage.

    A remainder goes to the stages from the last but one backwards, since the last
    also computes the logits.
    """
    shares = [model.depth // pp] * pp
    for extra in range(model.depth % pp):
        shares[-2 - extra] += 1
    ends = [sum(shares[: stage + 1]) for stage in range(pp)]
    return {
        layer.name: next((stage for stage, end in enumerate(ends) if layer.index < end), pp - 1)
        for layer in model.layers
    }
