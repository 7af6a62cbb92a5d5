"""Paged attention over the views of a layer, in float32: the reference that others are held to.

Prefill and decode are one batch: each sequence brings its last few tokens as queries
and a block table for all of them. Only blocks within reach are read, so table entries
that a window has left behind may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.attention import read
from kvatlas.specs import ChunkedAttention, LatentAttention, SlidingAttention
from kvatlas.specs.attention import Attention

Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From slots to K [tokens, kv heads, D] and V [tokens, kv heads, Dv]."""


def attend(
    layer: LayerCache,
    spec: Attention,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of `q` [tokens, query heads, D] over each sequence's cache.

    `tables` [sequences, blocks] holds block ids, `lengths` the tokens in the cache,
    and `queries` how many of them, the last ones, are in `q`. Window and chunk are the
    spec's; `sinks` are learned logits, one for each query head, that take part in the
    softmax alone.
    """

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read(layer, spec, slots, k_scale=k_scale, v_scale=v_scale)

    return _attend(
        layer,
        rows,
        q,
        tables,
        lengths,
        queries,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=spec.window if isinstance(spec, SlidingAttention) else None,
        chunk=spec.chunk if isinstance(spec, ChunkedAttention) else None,
        sinks=sinks,
        softcap=softcap,
    )


def attend_latent(
    layer: LayerCache,
    spec: LatentAttention,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor,
    scale: float,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Absorbed MLA: `q` [tokens, heads, latent + rope] over rows that all heads share.

    What comes back is [tokens, heads, latent], before the value projection.
    """
    if spec.cache not in ("auto", "fp8", "fp8_e4m3"):
        raise AtlasError(
            Code.BAD_SPEC,
            "The reference reads latents that stand for themselves or have one scale",
            got=f"cache dtype {spec.cache}",
            hint="Use auto or fp8",
        )
    latent, rope = layer.field("latent"), layer.field("rope")
    states = latent.shape[1]

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, places = slots // states, slots % states
        value = latent[blocks, places].float() * kv_scale
        key = torch.cat((value, rope[blocks, places].float() * kv_scale), dim=-1)
        return key.unsqueeze(1), value.unsqueeze(1)

    return _attend(layer, rows, q, tables, lengths, queries, scale=scale)


def _attend(
    layer: LayerCache,
    rows: Rows,
    q: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    _refuse_batch(layer, q, tables, lengths, queries)
    states = layer.kernel_blocks.size("N")
    found = []
    start = 0
    for table, length, count in zip(tables, lengths.tolist(), queries.tolist(), strict=True):
        if not count:
            continue
        at = torch.arange(length - count, length)
        reach = 0
        if window is not None:
            reach = max(0, length - count - window + 1)
        if chunk is not None:
            reach = (length - count) // chunk * chunk
        seen = torch.arange(reach, length)
        k, v = rows(table[seen // states].long() * states + seen % states)
        mask = seen <= at.unsqueeze(1)
        if window is not None:
            mask &= seen > at.unsqueeze(1) - window
        if chunk is not None:
            mask &= seen // chunk == at.unsqueeze(1) // chunk
        mine = q[start : start + count].float()
        found.append(_one(mine, k, v, mask, scale, sinks, softcap))
        start += count
    return torch.cat(found).to(q.dtype)


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence: q [T, Hq, D], k [S, H, D], v [S, H, Dv]; query heads share kv heads evenly."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    logits = torch.einsum("thd,shd->hts", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(-1)[..., : v.shape[0]]
    return torch.einsum("hts,shd->thd", weights, v)


def _refuse_batch(
    layer: LayerCache,
    q: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    states = layer.kernel_blocks.size("N")
    counts = (len(tables), len(lengths), len(queries))
    room = tables.shape[-1] * states
    wrong = len(set(counts)) > 1 or int(queries.sum()) != q.shape[0]
    if wrong or bool((queries > lengths).any()) or int(lengths.max()) > room:
        raise AtlasError(
            Code.BAD_TENSOR,
            "Each sequence has a table for its length and no more queries than tokens",
            got=f"{counts} tables, lengths and queries; {q.shape[0]} rows; room for {room}",
            hint="Queries are the last tokens of their sequences",
        )
