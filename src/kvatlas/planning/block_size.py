"""How large a block is.

The block is the smallest that all backends take. A hybrid's block is inflated until
one attention page holds a recurrent state, since both share pages: with a state of
`m` bytes and `a` bytes of attention for each token and layer, and kernels that want
multiples of `k` tokens, that is k * ceil(m / (k * a)).
"""

from __future__ import annotations

from math import lcm

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div, positive, round_up
from kvatlas.models import Model
from kvatlas.planning.backends import Backend, smallest_common_block
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import kind_of, page_of
from kvatlas.specs import LatentAttention

DEFAULT_BLOCK = 16
_LATENT_MULTIPLE = 128


class BlockSize(msgspec.Struct, frozen=True):
    """A block size, what state pages are padded to, and why."""

    tokens: int
    state_padding: int | None = None
    reasons: tuple[str, ...] = ()


def used_backends(request: PlanRequest) -> list[Backend]:
    """The attention backends of a model's layers, each once."""
    return list({b.name: b for b in request.backends.values() if b}.values())


def kernel_size(request: PlanRequest) -> BlockSize:
    """The block that kernels take, before any state inflates it."""
    used = used_backends(request)
    if request.block_size is None:
        if not used:
            return BlockSize(DEFAULT_BLOCK)
        block = smallest_common_block(used, DEFAULT_BLOCK)
        names = [backend.name for backend in used]
        why = f"{names[0]}'s smallest"
        if len(used) > 1 or block != min(used[0].sizes):
            why = f"the smallest from {DEFAULT_BLOCK} on for {' and '.join(names)}"
        return BlockSize(block, reasons=(f"Block: {block} tokens, {why}.",))
    block = positive(request.block_size, "the block size")
    for backend in used:
        # Backends that come with a model are not chosen by their block size.
        if backend.family != "other" and not backend.takes(block):
            raise AtlasError(
                Code.BACKEND_REFUSES,
                f"{backend.name} takes only blocks of a multiple of "
                f"{' or '.join(map(str, backend.sizes))} tokens",
                got=f"a block of {block}",
                hint="Choose a multiple, or another backend",
            )
    return BlockSize(block, reasons=(f"Block: {block} tokens, as requested.",))


def block_size(request: PlanRequest) -> BlockSize:
    """The block of a model, as vLLM sizes it."""
    plain = kernel_size(request)
    block, reasons = plain.tokens, plain.reasons
    state = state_bytes(request.model, request.tp)
    token = token_bytes(request.model, request.tp) if state else 0
    if not token:
        return plain
    step = kernel_multiple(request, block)
    least = lcm(*(min(backend.sizes) for backend in used_backends(request)))
    inflated = round_up(step * ceil_div(state, step * token), least)
    if inflated > block:
        reasons += (
            f"Grown to {inflated} tokens, a multiple of {step}: an attention page ({token:,} "
            f"bytes per token and layer) must hold a recurrent state of {state:,} bytes, "
            "since both share pages.",
        )
        block = inflated
    page = block * token
    return BlockSize(block, None if page == state else page, reasons)


def kernel_multiple(request: PlanRequest, block: int) -> int:
    """Tokens that a hybrid's block is a multiple of, where kernels take `block`."""
    sizes = [min(backend.sizes) for backend in used_backends(request)[:1]]
    if any(isinstance(layer.spec, LatentAttention) for layer in request.model.layers):
        sizes.append(_LATENT_MULTIPLE)
    return max([block, *sizes])


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
