"""Paged attention for transformers: `attn_implementation="kvatlas"`.

Two functions are registered under that name. The mask function runs first, right after
transformers has read the mask sizes from the cache. The mask function records in the cache which
tokens are padding, and that attention will read the pages. It also checks the model's mask against
the visibility of the layer's spec, and returns an empty mask. Then each layer stores its new tokens
and calls the attention function, which reads the pages of the layer that was just written.
Without a cache, both functions fall back to plain attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import attend, attend_latent
from kvatlas.specs import LatentAttention

if TYPE_CHECKING:
    from kvatlas.engines.transformers.cache_layers import PagedAttentionLayer

NAME = "kvatlas"
"""The name to pass as `attn_implementation`."""


MASKED: ContextVar[PagedAttentionLayer | None] = ContextVar("MASKED", default=None)
"""The layer whose mask transformers builds next, set when it asks for the mask sizes."""
WRITTEN: ContextVar[tuple[int, PagedAttentionLayer] | None] = ContextVar("WRITTEN", default=None)
"""The index and the layer that has just stored its new tokens and attends next."""


def page_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Return the mask that transformers passes to attention.

    If the mask is empty, attention reads the pages.

    Raises an error if the model's mask differs from the visibility of the layer's spec.
    """
    layer = MASKED.get()
    MASKED.set(None)
    WRITTEN.set(None)
    if layer is None or layer.seen != q_offset:
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
    empty = torch.empty((batch_size, 1, q_length, 0), dtype=torch.bool, device=device)
    if layer.batch.fixed is not None:  # DecodeGraph has checked the mask
        return layer.mask_of_slots(layer.batch.fixed.tensors.lengths) if layer.indexed else empty
    layer.batch.expect_paged_attention(attention_mask, batch_size, q_offset, q_length)
    queries = range(q_offset, q_offset + q_length)
    keys = range(kv_offset, kv_offset + kv_length)
    if use_vmap or not _as_planned(layer, mask_function, queries, keys):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "Paged attention supports only the mask for which the layer was planned: causal, "
            "sliding or chunked",
            got=f"another mask for tokens {q_offset} to {q_offset + q_length - 1}",
            hint='Use attn_implementation="sdpa" or "eager", or plan from the model\'s own config',
        )
    if layer.indexed:  # The indexer needs the mask to select tokens.
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, device=device,
        )  # fmt: skip
    return empty


def _as_planned(
    layer: PagedAttentionLayer, function: Callable[..., Tensor] | None, queries: range, keys: range
) -> bool:
    """Return whether the model's mask equals the spec's visibility for the first and last query."""
    if function is None:
        return True
    device = layer.table.device
    padding = torch.tensor(layer.batch.padding, device=device).view(-1, 1, 1, 1)
    sequence = torch.arange(len(padding), device=device).view(-1, 1, 1, 1)
    q = torch.tensor([queries.start, queries.stop - 1], device=device).view(1, 1, -1, 1)
    kv = torch.arange(keys.start, keys.stop, device=device).view(1, 1, 1, -1)
    planned = layer.pages.spec.visibility.sees(q - padding, kv - padding)
    wanted = function(sequence, torch.zeros_like(sequence), q, kv)
    return bool(((planned == wanted) | (kv < padding) | (q < padding)).all())


def page_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with `query` [batch, heads, tokens, D] over the pages of the most recent layer.

    This is the layer that stored its new tokens last.

    Returns the output [batch, tokens, heads, Dv], and None instead of attention weights. An empty
    `attention_mask`, which `page_mask` returns, selects the pages. With any other mask, or without
    a mask, the function attends over `key` and `value`. In models with an indexer, `indices`
    [batch, tokens, k] contains the tokens that each query selects.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    written = WRITTEN.get()
    WRITTEN.set(None)
    paged = attention_mask is not None and not attention_mask.shape[-1]
    if indices is not None and written is not None:
        paged = written[1].reads_pages(query.shape[-2])
    if not paged:
        attention_mask = _of_selected(attention_mask, indices, key)
        return _plain(query, key, value, attention_mask, scale, s_aux, softcap), None
    if written is None or written[0] != getattr(module, "layer_idx", written[0]):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "Paged attention does not support layers that share the K and V of another layer",
            got=f"{type(module).__name__}, which stored no K and V before attending",
            hint='Use attn_implementation="sdpa" or "eager" for this model',
        )
    layer, count = written[1], query.shape[-2]
    pages, step = layer.pages, layer.batch.step_tensors(layer.seen - count, count)
    where: dict[str, Any] = {
        "tables": layer.table.kernel_ids(pages),
        "lengths": step.lengths,
        "queries": step.queries,
        "max_queries": count,
        "scale": scale,
    }
    q = query.transpose(1, 2)
    q = q.flatten(0, 1) if step.stored is None else q[step.stored]
    if isinstance(pages.spec, LatentAttention):
        if indices is not None:
            chosen = layer.positions(indices)
            chosen = chosen.flatten(0, 1) if step.stored is None else chosen[step.stored]
            where["indices"] = chosen
        answers = _absorbed(module, pages, q, where)
    else:
        answers = attend(pages, q, sink_logits=s_aux, softcap=softcap, **where)
    if step.stored is None:
        return torch.unflatten(answers, 0, (-1, count)).to(query.dtype), None
    padded = answers.new_zeros((*step.stored.shape, *answers.shape[1:]))
    padded[step.stored] = answers
    return padded.to(query.dtype), None


def _of_selected(mask: Tensor | None, indices: Tensor | None, keys: Tensor) -> Tensor | None:
    """Return `mask` restricted to the tokens in `indices`; unchanged if `indices` is None."""
    if indices is None:
        return mask
    chosen = torch.zeros(
        (*indices.shape[:2], keys.shape[2]), dtype=torch.bool, device=indices.device
    ).scatter_(-1, indices.long(), value=True)
    return chosen.unsqueeze(1) if mask is None else mask & chosen.unsqueeze(1)


def _absorbed(module: Any, pages: LayerCache, query: Tensor, where: dict[str, Any]) -> Tensor:
    """Attend with absorbed MLA: project queries to the latent space, and the output back."""
    spec = pages.spec_as(LatentAttention)
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, spec.latent)
    plain = query.shape[-1] - spec.rope
    latent = torch.einsum("thd,hdl->thl", query[..., :plain], weight[:, :plain])
    q = torch.cat((latent, query[..., plain:]), dim=-1)
    answers = attend_latent(pages, q, **where)
    return torch.einsum("thl,hdl->thd", answers, weight[:, plain:])


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attend over the given K and V, with optional learned sinks and soft cap."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    logits = (q @ k.transpose(-1, -2)).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    elif mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(-1)[..., : v.shape[-2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)


def register() -> None:
    """Register `attn_implementation="kvatlas"` with transformers."""
    AttentionInterface.register(NAME, page_attention)
    AttentionMaskInterface.register(NAME, page_mask)
