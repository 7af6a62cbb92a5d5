"""Determine the block size of a plan.

The block size is the smallest that all backends support. For a hybrid, vLLM increases it
until an attention page can hold a recurrent state, because both share pages. With a state of
`m` bytes, `a` bytes of attention per token and layer, and kernels that need multiples of `k`
tokens, the block size is k * ceil(m / (k * a)).
"""

from __future__ import annotations

from math import lcm

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div, positive, round_up
from kvatlas.models import Model
from kvatlas.planning.backends import Backend, smallest_common_block
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import FIXED_KINDS, kind_of, page_of
from kvatlas.specs import Indexer, LatentAttention

DEFAULT_BLOCK = 16
_LATENT_MULTIPLE = 128


class BlockSize(msgspec.Struct, frozen=True):
    """A block size in tokens, and the reasons for it."""

    tokens: int
    state_padding: int | None = None
    """The size in bytes to which pages of recurrent states are padded; None without padding."""
    reasons: tuple[str, ...] = ()


def used_backends(request: PlanRequest) -> list[Backend]:
    """Return the attention backends of the request's layers, without duplicates."""
    return list({b.name: b for b in request.backends.values() if b}.values())


def kernel_size(request: PlanRequest) -> BlockSize:
    """Return the requested block size, or by default one that all attention backends support.

    `block_size()` may increase this size so that a page can hold a recurrent state.
    """
    used = used_backends(request)
    if request.block_size is None:
        if not used:
            return BlockSize(DEFAULT_BLOCK)
        block = smallest_common_block(used, DEFAULT_BLOCK)
        names = [backend.name for backend in used]
        why = f"the smallest that {names[0]} supports"
        if len(used) > 1 or block != min(used[0].sizes):
            why = f"the smallest of at least {DEFAULT_BLOCK} that {', '.join(names)} support"
        return BlockSize(block, reasons=(f"Block size: {block} tokens, {why}.",))
    block = positive(request.block_size, "the block size")
    for backend in used:
        # vLLM does not check the block size of model-specific backends.
        if backend.family != "other" and not backend.takes(block):
            raise AtlasError(
                Code.BACKEND_REFUSES,
                f"{backend.name} needs a block size that is a multiple of "
                f"{' or '.join(map(str, backend.sizes))} tokens",
                got=f"a block size of {block}",
                hint="Pass such a multiple as block_size=, or another backend=",
            )
    return BlockSize(block, reasons=(f"Block size: {block} tokens, as requested.",))


def block_size(request: PlanRequest) -> BlockSize:
    """Return the block size that vLLM uses for a model."""
    plain = kernel_size(request)
    block, reasons = plain.tokens, plain.reasons
    state = state_bytes(request.model, request.tp)
    token = token_bytes(request.model, request.tp) if state else 0
    if not token:
        return plain
    step = lcm(kernel_multiple(request, block), checkpoint_multiple(request))
    least = 1
    if request.rules.multiple_of_all_backends:
        least = lcm(*(min(backend.sizes) for backend in used_backends(request)))
    inflated = round_up(step * ceil_div(state, step * token), least)
    if inflated > block:
        reasons += (
            f"Increased to {inflated} tokens, a multiple of {step}: attention and recurrent "
            f"states share pages, so an attention page ({token:,} bytes per token and layer) "
            f"must be large enough for a recurrent state of {state:,} bytes.",
        )
        block = inflated
    page = block * token
    return BlockSize(block, None if page == state else page, reasons)


def kernel_multiple(request: PlanRequest, block: int) -> int:
    """Return the alignment of a hybrid's block size, in tokens.

    `block` is the smallest block size that the kernels support.
    """
    sizes = [min(backend.sizes) for backend in used_backends(request)[:1]]
    if any(isinstance(layer.spec, LatentAttention) for layer in request.model.layers):
        sizes.append(_LATENT_MULTIPLE)
    return max([block, *sizes])


def checkpoint_multiple(request: PlanRequest) -> int:
    """Return the interval, in tokens, at which prefill kernels save recurrent states."""
    return lcm(*(rule.alignment for rule in request.checkpoints.values()))


def state_bytes(model: Model, tp: int) -> int:
    """Return the size of the model's largest recurrent state on one rank, in bytes.

    The result is 0 if the model has no recurrent layers.
    """
    specs = {layer.spec for layer in model.layers if kind_of(layer.spec) == "recurrent"}
    return max((page_of(spec, 1, tp).unpadded for spec in specs), default=0)


def token_bytes(model: Model, tp: int) -> int:
    """Return how many bytes per token the first attention layer stores on one rank.

    Indexers do not count, because their pages are stored next to the pages of attention.

    The result is 0 if the model has no attention layers.
    """
    for layer in model.layers:
        if kind_of(layer.spec) not in FIXED_KINDS and not isinstance(layer.spec, Indexer):
            return page_of(layer.spec, layer.spec.tokens_per_state or 1, tp).unpadded
    return 0
