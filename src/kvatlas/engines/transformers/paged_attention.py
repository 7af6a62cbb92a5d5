"""Attention for transformers that reads pages: `attn_implementation="kvatlas"`.

Two functions are registered under that name. The mask function runs first, right after
transformers has asked the cache how long its masks are: it tells the cache which tokens
are padding and that pages will be read, holds the mask that the model wants against what
the layer's spec says, and returns an empty one. Then each layer stores its new rows and
calls the attention function, which finds the pages that were just written. Without a
cache both do what plain attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvatlas.engines.transformers.rows import LatentRows
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import attend, attend_latent
from kvatlas.specs import ChunkedAttention, SlidingAttention

if TYPE_CHECKING:
    from kvatlas.engines.transformers.layers import AttentionPages

NAME = "kvatlas"


@dataclass(frozen=True)
class Reading:
    """The pages that were written last, for the attention that follows."""

    index: int
    pages: AttentionPages
    start: int
    count: int


class Where(TypedDict):
    """Whose pages a kernel reads, and how many tokens of each ask."""

    tables: torch.Tensor
    lengths: torch.Tensor
    queries: torch.Tensor
    max_queries: int


_ASKED: ContextVar[AttentionPages | None] = ContextVar("_ASKED", default=None)
_WRITTEN: ContextVar[Reading | None] = ContextVar("_WRITTEN", default=None)


def masks_asked(pages: AttentionPages | None) -> None:
    """Transformers has asked for the sizes of a mask of these pages."""
    _ASKED.set(pages)


def pages_written(index: int, pages: AttentionPages, start: int, count: int) -> None:
    """A layer has stored `count` rows behind `start`."""
    _WRITTEN.set(Reading(index, pages, start, count))


def page_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """What transformers passes on as the mask: empty where pages are read."""
    pages = _ASKED.get()
    masks_asked(None)
    _WRITTEN.set(None)
    if pages is None or pages.seen != q_offset:
        found: torch.Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return found
    pages.batch.read_pages(attention_mask, batch_size, q_offset, q_length)
    places = range(kv_offset, kv_offset + kv_length)
    if use_vmap or not _as_planned(
        pages, mask_function, range(q_offset, q_offset + q_length), places
    ):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "Pages are read causally, within the window or the chunk of the plan",
            got="a model that masks otherwise",
            hint="Use attn_implementation sdpa or eager, or plan from the model's own config",
        )
    return torch.empty((batch_size, 1, q_length, 0), dtype=torch.bool, device=device)


def _as_planned(
    pages: AttentionPages, function: Callable[..., torch.Tensor] | None, asking: range, seen: range
) -> bool:
    """Whether the first and the last token that ask see what the spec lets them see."""
    if function is None:
        return True
    device = pages.table.device
    skip = torch.tensor(pages.batch.skipped, device=device).view(-1, 1, 1, 1)
    row = torch.arange(len(pages.batch.skipped), device=device).view(-1, 1, 1, 1)
    q = torch.tensor([asking.start, asking.stop - 1], device=device).view(1, 1, -1, 1)
    kv = torch.arange(seen.start, seen.stop, device=device).view(1, 1, 1, -1)
    sees = kv <= q
    spec = pages.rows.spec
    if isinstance(spec, SlidingAttention):
        sees = sees & (kv > q - spec.window)
    if isinstance(spec, ChunkedAttention):
        sees = sees & ((kv - skip) // spec.chunk == (q - skip) // spec.chunk)
    wanted = function(row, torch.zeros_like(row), q, kv)
    return bool(((sees == wanted) | (kv < skip) | (q < skip)).all())


def page_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [batch, heads, tokens, D] over pages; [batch, tokens, heads, Dv]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reading = _WRITTEN.get()
    _WRITTEN.set(None)
    if attention_mask is None or attention_mask.shape[-1]:
        return _plain(query, key, value, attention_mask, scale, s_aux, softcap), None
    if reading is None or reading.index != getattr(module, "layer_idx", reading.index):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "A layer that reads pages has just written to them",
            got=f"{type(module).__name__} without rows of its own",
            hint="Layers that share another's K and V need attn_implementation sdpa or eager",
        )
    pages = reading.pages
    skipped = torch.tensor(pages.batch.skipped, device=query.device)
    at = torch.arange(reading.start, reading.start + reading.count, device=query.device)
    real = at >= skipped.unsqueeze(1)
    where: Where = {
        "tables": pages.table.kernel_ids(pages.rows.layer),
        "lengths": (reading.start + reading.count - skipped).clamp(min=0),
        "queries": real.sum(1),
        "max_queries": reading.count,
    }
    q, rows = query.transpose(1, 2)[real], pages.rows
    if isinstance(rows, LatentRows):
        answer = _latent(module, rows, q, scale, where)
    else:
        answer = attend(rows.layer, q, scale=scale, sink_logits=s_aux, softcap=softcap, **where)
    found = answer.new_zeros((*real.shape, *answer.shape[1:]))
    found[real] = answer
    return found.to(query.dtype), None


def _latent(
    module: Any, rows: LatentRows, query: torch.Tensor, scale: float, where: Where
) -> torch.Tensor:
    """Absorbed MLA: queries go into the latent's space, and values come out of it."""
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, rows.spec.latent)
    plain = query.shape[-1] - rows.spec.rope
    absorbed = torch.einsum("thd,hdl->thl", query[..., :plain], weight[:, :plain])
    q = torch.cat((absorbed, query[..., plain:]), dim=-1)
    found = attend_latent(rows.layer, q, scale=scale, **where)
    return torch.einsum("thl,hdl->thd", found, weight[:, plain:])


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention over K and V as they are given, with sinks and a soft cap."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    logits = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
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
    """Make `attn_implementation="kvatlas"` known to transformers."""
    AttentionInterface.register(NAME, page_attention)
    AttentionMaskInterface.register(NAME, page_mask)
