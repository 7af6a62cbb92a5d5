"""Paged attention over the views of a layer, in float32: the reference that others are held to.

Prefill and decode are one batch: each sequence brings its last few tokens as queries
and a block table for all of them. Only states within reach are read, so table entries
that a window has left behind may hold anything. Rows of several sequences are read at
once, then each is attended to by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.kv_rows import read
from kvatlas.kernels.latent_rows import read_latent
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CrossAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
)

Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From slots to K [tokens, kv heads, D] and V [tokens, kv heads, Dv]."""

_ROWS_AT_ONCE = 1 << 14


class _Sight(NamedTuple):
    """Which tokens a query sees."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    first: int = 0
    """Tokens at the beginning that stay in sight of a window."""

    @classmethod
    def of(cls, spec: Spec) -> _Sight:
        if isinstance(spec, CrossAttention):
            return cls(causal=False)
        if isinstance(spec, SlidingAttention | SlidingLatentAttention):
            return cls(window=spec.window)
        if isinstance(spec, ChunkedAttention):
            return cls(chunk=spec.chunk)
        if isinstance(spec, SinkAttention) and spec.window is not None:
            return cls(window=spec.window, first=spec.sink_tokens)
        return cls()

    def seen(self, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions that the last `count` of `length` tokens see, and who sees which."""
        if not self.causal:
            return torch.arange(length), None
        reach = 0
        if self.window is not None:
            reach = max(0, length - count - self.window + 1)
        if self.chunk is not None:
            reach = (length - count) // self.chunk * self.chunk
        seen = torch.arange(reach, length)
        if self.first and reach:
            seen = torch.cat((torch.arange(min(self.first, reach)), seen))
        if count == 1:
            return seen, None  # the last token sees all that is in reach
        at = torch.arange(length - count, length).unsqueeze(1)
        mask = seen <= at
        if self.window is not None:
            mask &= (seen > at - self.window) | (seen < self.first)
        if self.chunk is not None:
            mask &= seen // self.chunk == at // self.chunk
        return seen, mask


class _Sequence(NamedTuple):
    start: int
    """Its first row in the batch of queries."""
    tokens: int
    slots: torch.Tensor
    mask: torch.Tensor | None


def attend(
    layer: LayerCache,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    scale: float | None = None,
    sink_logits: torch.Tensor | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    max_queries: int | None = None,
) -> torch.Tensor:
    """Attention of `q` [tokens, query heads, D] over each sequence's cache.

    `tables` [sequences, blocks] holds block ids, `lengths` the tokens in the cache,
    and `queries` how many of them, the last ones, are in `q`; `starts` [sequences + 1] says
    the same by where they begin and end. Window, chunk and tokens that stay are the spec's;
    `sink_logits` are learned logits, one for each query head, that take part in the softmax alone.
    Cross attention sees all of the encoder's tokens, which `lengths` then counts.

    `out` is written into, rows of the batch alone. A caller who knows that no sequence has
    more than `max_queries` says so: on a GPU a step of 1 is decoded the fastest way.
    """
    if gpu := gpu_kernels(q):
        return gpu.attend(  # type: ignore[no-any-return]
            layer, q, tables=tables, lengths=lengths, queries=queries, starts=starts,
            scale=scale, sink_logits=sink_logits, softcap=softcap, k_scale=k_scale,
            v_scale=v_scale, out=out, max_queries=max_queries,
        )  # fmt: skip

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read(layer, slots, k_scale=k_scale, v_scale=v_scale)

    spec = layer.spec_as(Attention)
    width = spec.v_dim or spec.head_dim
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch = _batch(layer, _Sight.of(spec), q, tables, lengths, queries, starts)
    return _attend(batch, rows, q, _out(q, width, out), scale, sink_logits, softcap)


def attend_latent(
    layer: LayerCache,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    sink_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_queries: int | None = None,
) -> torch.Tensor:
    """Absorbed MLA: `q` [tokens, heads, latent + rope] over rows that all heads share.

    What comes back is [tokens, heads, latent], before the value projection. Every cache
    dtype of latents is read as its kernels would. The rest is as for `attend`.
    """
    spec = layer.spec_as(LatentAttention)
    if (gpu := gpu_kernels(q)) and gpu.attends_latent(spec):
        return gpu.attend_latent(  # type: ignore[no-any-return]
            layer, q, tables=tables, lengths=lengths, queries=queries, starts=starts,
            scale=scale, kv_scale=kv_scale, sink_logits=sink_logits, out=out,
            max_queries=max_queries,
        )  # fmt: skip

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, rope = read_latent(layer, slots, kv_scale=kv_scale)
        return torch.cat((value, rope), dim=-1).unsqueeze(1), value.unsqueeze(1)

    batch = _batch(layer, _Sight.of(spec), q, tables, lengths, queries, starts)
    return _attend(batch, rows, q, _out(q, spec.latent, out), scale, sink_logits, None)


def _out(q: torch.Tensor, width: int, given: torch.Tensor | None) -> torch.Tensor:
    shape = q.shape[0], q.shape[1], width
    if given is not None and given.shape != shape:
        raise AtlasError(
            Code.BAD_TENSOR,
            "A result has a row for every query",
            got=f"out of shape {tuple(given.shape)} for {shape}",
            hint="Leave `out` away, or pass one of that shape",
        )
    return q.new_empty(shape) if given is None else given


def _attend(
    batch: list[_Sequence],
    rows: Rows,
    q: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sink_logits: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    for group in _grouped(batch):
        keys, values = rows(torch.cat([sequence.slots for sequence in group]))
        sizes = [len(sequence.slots) for sequence in group]
        for sequence, k, v in zip(
            group, torch.split(keys, sizes), torch.split(values, sizes), strict=True
        ):
            mine = slice(sequence.start, sequence.start + sequence.tokens)
            found = _one(q[mine].float(), k, v, sequence.mask, scale, sink_logits, softcap)
            out[mine] = found.to(out.dtype)
    return out


def _grouped(batch: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Sequences that are read at once: many short ones, or a long one by itself."""
    group: list[_Sequence] = []
    taken = 0
    for sequence in batch:
        if group and taken + len(sequence.slots) > _ROWS_AT_ONCE:
            yield group
            group, taken = [], 0
        group.append(sequence)
        taken += len(sequence.slots)
    if group:
        yield group


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sink_logits: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence: q [T, Hq, D], k [S, H, D], v [S, H, Dv]; query heads share kv heads evenly."""
    tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    # [H, queries of all heads that share it, D] x [H, D, S]: keys are never repeated.
    rows = torch.unflatten(q, 1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    logits = (rows @ k.permute(1, 2, 0)).mul_(scale)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        torch.unflatten(logits, 1, (-1, tokens)).masked_fill_(~mask, float("-inf"))
    if sink_logits is not None:
        column = sink_logits.float().view(kv_heads, -1, 1).expand(-1, -1, tokens).flatten(1)
        logits = torch.cat((logits, column.unsqueeze(-1)), dim=-1)
    weights = logits.softmax(-1)[..., : v.shape[0]]
    found = weights @ v.transpose(0, 1)
    return torch.unflatten(found, 1, (-1, tokens)).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _batch(
    layer: LayerCache,
    sight: _Sight,
    q: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> list[_Sequence]:
    """What each sequence sees, as slots."""
    states = layer.kernel_blocks.size("N")
    counts, start = _asked(q, queries, starts)
    tokens = lengths.tolist()
    _refuse_batch(q, tables, tokens, counts, states, causal=sight.causal)
    batch = []
    for table, length, count in zip(tables.long(), tokens, counts, strict=True):
        if count:
            seen, mask = sight.seen(length, count)
            seen = seen.to(table.device)
            slots = table[seen // states] * states + seen % states
            batch.append(
                _Sequence(start, count, slots, None if mask is None else mask.to(q.device))
            )
        start += count
    return batch


def _asked(
    q: torch.Tensor, queries: torch.Tensor | None, starts: torch.Tensor | None
) -> tuple[list[int], int]:
    """How many queries each sequence has, and the row of the first; refused if `q` has others."""
    first = 0
    if starts is not None and queries is None and len(starts):
        edges = starts.tolist()
        counts, first = starts.diff().tolist(), edges[0]
        wrong = first < 0 or edges[-1] > q.shape[0]
    elif queries is not None and starts is None:
        counts = queries.tolist()
        wrong = sum(counts) != q.shape[0]
    else:
        counts, wrong = [], True
    if wrong:
        raise _bad_batch(f"queries {queries}, starts {starts} for {q.shape[0]} rows")
    return counts, first


def _refuse_batch(
    q: torch.Tensor,
    tables: torch.Tensor,
    lengths: list[int],
    queries: list[int],
    states: int,
    *,
    causal: bool,
) -> None:
    room = tables.shape[-1] * states
    found = (len(tables), len(lengths), len(queries))
    wrong = len(set(found)) > 1 or min(queries, default=0) < 0
    if not wrong:
        over = causal and any(n > m for n, m in zip(queries, lengths, strict=True))
        wrong = over or max(lengths, default=0) > room or min(lengths, default=1) < 1
    if wrong:
        raise _bad_batch(f"{found} tables, lengths and queries; {q.shape[0]} rows; room for {room}")


def _bad_batch(got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_TENSOR,
        "Each sequence has a table for its length and no more queries than tokens",
        got=got,
        hint="Pass queries or starts, one of them; queries are the last tokens of sequences",
    )
