"""Paged attention over the views of a layer, in float32: the reference for faster kernels.

One batch may contain both prefill and decode: the queries of a sequence are its last tokens, and
its block table covers all its tokens. Only visible tokens are read, so table entries outside a
window may have any value. Rows of several sequences are read together; then each sequence is
computed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.cache.tensors import whole_tensor
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.quantise import check_scales
from kvatlas.kernels.write_read_kv import read
from kvatlas.kernels.write_read_latent import read_latent
from kvatlas.specs import Attention, LatentAttention, Visibility

Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function from slots to K [tokens, kv heads, D] and V [tokens, kv heads, Dv]."""

_ROWS_AT_ONCE = 1 << 14


class _Softmax(NamedTuple):
    """Parameters of the softmax over the products of queries and keys."""

    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None


class _Sequence(NamedTuple):
    queries: slice
    """The sequence's rows in the batch of queries."""
    slots: torch.Tensor
    """Slots of the states that at least one of the sequence's queries sees."""
    mask: torch.Tensor | None
    """[queries, states]: whether a query sees a state. None if every query sees all states."""


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
    """Compute attention of `q` [tokens, query heads, D] over each sequence's cache.

    `tables` [sequences, blocks] contains block ids and `lengths` the number of cached tokens. The
    queries of a sequence are its last tokens. Pass either `queries`, the number of queries of each
    sequence, or `starts` [sequences + 1], the rows of `q` where sequences begin and end. Table
    entries past a sequence's length may have any value, and a sequence of length 0 produces zeros.
    Logits are multiplied by `scale` (default 1 / sqrt(D)) and capped by `softcap` (0 or None: no
    cap). For quantised caches, pass the same `k_scale` and `v_scale` as to `write`.

    The spec determines the window, chunk and sink tokens. `sink_logits` are learned, one per query
    head; they contribute to the softmax's denominator only. In cross attention, queries see all
    tokens of the encoder, and `lengths` counts encoder tokens.

    Rows of `out` that belong to no sequence are not written. `max_queries` is an upper bound of
    the number of queries per sequence. On a GPU, `max_queries=1` takes the fast path for decoding.
    """
    check_scales(k_scale, v_scale)
    if gpu := gpu_kernels(q):
        return gpu.attend(  # type: ignore[no-any-return]
            layer, q, tables=tables, lengths=lengths, queries=queries, starts=starts,
            scale=scale, sink_logits=sink_logits, softcap=softcap, k_scale=k_scale,
            v_scale=v_scale, out=out, max_queries=max_queries,
        )  # fmt: skip

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return read(layer, slots, k_scale=k_scale, v_scale=v_scale)

    spec = layer.spec_as(Attention)
    _check_queries(q, layer.place("k").size("H"), spec.head_dim)
    out = _out(q, spec.v_dim or spec.head_dim, out)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softmax = _Softmax(scale, softcap or None, sink_logits)
    batch = _batch(layer, q, tables, lengths, queries, starts)
    return _attend(batch, rows, q, out, softmax)


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
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute absorbed MLA of `q` [tokens, heads, latent + rope] over each sequence's cache.

    All heads share the cached rows. Returns [tokens, heads, latent], before the value projection.
    Supports every cache dtype of latents. `attend` describes the other arguments.

    For sparse attention, as in DeepSeek-V3.2, `indices` [tokens, k] contains the positions that an
    indexer has selected for each query, in any order, each at most once. Positions after the query
    and negative ones are ignored, and a query without a position produces zeros.
    """
    check_scales(kv_scale)
    spec = layer.spec_as(LatentAttention)
    if indices is not None:
        check_indices(layer, q, indices)
    if (gpu := gpu_kernels(q)) and gpu.attends_latent(spec):
        return gpu.attend_latent(  # type: ignore[no-any-return]
            layer, q, tables=tables, lengths=lengths, queries=queries, starts=starts,
            scale=scale, kv_scale=kv_scale, sink_logits=sink_logits, out=out,
            max_queries=max_queries, indices=indices,
        )  # fmt: skip

    def rows(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, rope = read_latent(layer, slots, kv_scale=kv_scale)
        return torch.cat((value, rope), dim=-1).unsqueeze(1), value.unsqueeze(1)

    _check_queries(q, 1, spec.latent + spec.rope)
    out = _out(q, spec.latent, out)
    batch = _batch(layer, q, tables, lengths, queries, starts)
    if indices is not None:
        batch = _selected(batch, whole_tensor(indices, "Indices", "Pass int32 or int64"))
    return _attend(batch, rows, q, out, _Softmax(scale, None, sink_logits))


def check_indices(layer: LayerCache, q: torch.Tensor, indices: torch.Tensor) -> None:
    """Raise an error if sparse attention is impossible with this layer or these `indices`.

    Queries must see all tokens before them, and `indices` must have a row for each query.
    """
    if layer.spec.visibility != Visibility():
        problem = "Selected tokens require a layer in which a query sees all tokens before it"
        hint = "Omit `indices`: the spec of this layer determines the visible tokens"
        raise _bad_batch(problem, f"a layer with {layer.spec.visibility}", hint)
    if indices.dim() != 2 or indices.shape[0] != q.shape[0] or not indices.shape[1]:
        problem = f"`indices` must have two axes, with a row for each of the {q.shape[0]} queries"
        hint = "Pass the positions that the indexer selected, [tokens, k]"
        raise _bad_batch(problem, f"shape {tuple(indices.shape)}", hint)


def _selected(batch: list[_Sequence], indices: torch.Tensor) -> list[_Sequence]:
    """Return one sequence per query, with the slots at the query's `indices`."""
    alone = []
    for rows, slots, _ in batch:
        for row in range(rows.start, rows.stop):
            at = indices[row].long().to(slots.device)
            at = at[(at >= 0) & (at < len(slots) - (rows.stop - 1 - row))]
            alone.append(_Sequence(slice(row, row + 1), slots[at], None))
    return alone


def _check_queries(q: torch.Tensor, heads: int, dim: int) -> None:
    if q.dim() != 3 or q.shape[2] != dim or not q.shape[1] or q.shape[1] % heads:
        problem = (
            f"`q` must be of shape [tokens, query heads, {dim}], with a multiple of {heads} heads"
        )
        hint = "Pass the query heads of this rank"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(q.shape)}", hint=hint)


def _out(q: torch.Tensor, width: int, out: torch.Tensor | None) -> torch.Tensor:
    shape = q.shape[0], q.shape[1], width
    if out is not None and out.shape != shape:
        hint = "Omit `out`, or pass a tensor with one row per query"
        problem = f"`out` must be of shape {shape}"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(out.shape)}", hint=hint)
    return q.new_empty(shape) if out is None else out


def _attend(
    batch: list[_Sequence], rows: Rows, q: torch.Tensor, out: torch.Tensor, softmax: _Softmax
) -> torch.Tensor:
    for group in _read_together(batch):
        keys, values = rows(torch.cat([sequence.slots for sequence in group]))
        sizes = [len(sequence.slots) for sequence in group]
        rows_of_each = zip(torch.split(keys, sizes), torch.split(values, sizes), strict=True)
        for (mine, _, mask), (k, v) in zip(group, rows_of_each, strict=True):
            out[mine] = _one(q[mine].float(), k, v, mask, softmax)
    return out


def _read_together(batch: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Yield lists of sequences that are read at once: several short sequences, or a long one."""
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softmax: _Softmax
) -> torch.Tensor:
    """Return the attention of one sequence: q [T, Hq, D], k [S, H, D], v [S, H, Dv].

    Each kv head serves Hq / H consecutive query heads.
    """
    tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    # [H, queries of all heads that share a kv head, D] x [H, D, S]: keys are never repeated.
    rows = torch.unflatten(q, 1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scale, softcap, sink_logits = softmax
    logits = (rows @ k.permute(1, 2, 0)).mul_(scale)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        torch.unflatten(logits, 1, (-1, tokens)).masked_fill_(~mask, float("-inf"))
    if sink_logits is not None:
        column = sink_logits.float().view(kv_heads, -1, 1).expand(-1, -1, tokens).flatten(1)
        logits = torch.cat((logits, column.unsqueeze(-1)), dim=-1)
    weights = logits.softmax(-1)[..., : v.shape[0]]
    values = torch.unflatten(weights @ v.transpose(0, 1), 1, (-1, tokens))
    return values.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _batch(
    layer: LayerCache,
    q: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> list[_Sequence]:
    """Return the query rows, visible slots and attention mask of each sequence that has queries."""
    hint = "Pass tensors of int32 or int64"
    tables, lengths = whole_tensor(tables, "Tables", hint), whole_tensor(lengths, "Lengths", hint)
    if tables.dim() != 2 or lengths.dim() != 1:
        raise _bad_batch(
            "`tables` must have two axes and `lengths` one",
            f"tables of shape {tuple(tables.shape)} and lengths of shape {tuple(lengths.shape)}",
            "Pass tables [sequences, blocks] and lengths [sequences]",
        )
    states, visibility = layer.kernel_blocks.size("N"), layer.spec.visibility
    edges = _edges(q, queries, starts)
    sizes = len(tables), len(lengths), len(edges) - 1
    if len(set(sizes)) > 1:
        raise _bad_batch(
            "Tables, lengths and queries must describe the same number of sequences",
            f"{sizes[0]} tables, {sizes[1]} lengths and queries of {sizes[2]} sequences",
            "Pass one table, length and query count per sequence",
        )
    room = tables.shape[-1] * states
    batch = []
    sequences = zip(tables.long(), lengths.tolist(), pairwise(edges), strict=True)
    for table, length, (start, stop) in sequences:
        count = stop - start
        most = length if visibility.causal else count
        if not 0 <= length <= room:
            raise _bad_batch(
                f"Lengths must be 0 to {room}, the number of tokens that a table covers",
                f"a length of {length}",
                "Pass a table with more blocks",
            )
        if count < 0:
            raise _bad_batch(
                "Query counts must not be negative",
                f"{count} queries",
                "Pass ascending `starts`, or `queries` of at least 0",
            )
        # A sequence without tokens is padding of the batch: its queries produce zeros.
        if length and count > most:
            problem = f"A sequence of {length} tokens must not have more than {most} queries"
            hint = "Include the queries in `lengths`: they are the last cached tokens"
            raise _bad_batch(problem, f"{count} queries", hint)
        if count:
            seen, mask = _seen(visibility, length, count)
            seen = seen.to(table.device)
            slots = table[seen // states] * states + seen % states
            mask = None if mask is None else mask.to(q.device)
            batch.append(_Sequence(slice(start, stop), slots, mask))
    return batch


def _edges(q: torch.Tensor, queries: torch.Tensor | None, starts: torch.Tensor | None) -> list[int]:
    """Return the first row of each sequence in `q`, then the end of the last sequence's rows."""
    counts = starts if queries is None else queries
    given = [] if counts is None else whole_tensor(counts, "Queries", "Pass int32").tolist()
    if starts is not None and queries is None and given:
        edges: list[int] = given
        fits = edges[0] >= 0 and edges[-1] <= q.shape[0]
    else:
        edges = [0, *accumulate(given if queries is not None else ())]
        fits = queries is not None and starts is None and edges[-1] == q.shape[0]
    if not fits:
        raise _bad_edges(given, q.shape[0], queries is not None, starts is not None)
    return edges


def _bad_edges(given: list[int], rows: int, queries: bool, starts: bool) -> AtlasError:
    """Return the error for `queries` or `starts` that do not match `q`.

    `given` contains the values that the caller passed, and `rows` is the length of `q`. `queries`
    and `starts` are true if the caller passed the argument of that name.
    """
    if queries == starts:
        problem, got = "Exactly one of `queries` and `starts` is required", "neither"
        return _bad_batch(problem, "both" if queries else got, "Pass `queries` or `starts`")
    if queries:
        problem = f"The sum of `queries` must be {rows}, the number of rows of `q`"
        return _bad_batch(problem, f"a sum of {sum(given)}", "Pass all rows of the batch as `q`")
    problem = f"`starts` must be row numbers of `q`, from 0 to {rows}"
    got = f"{given[0]}..{given[-1]}" if given else "no starts"
    return _bad_batch(problem, got, "Pass the cumulative query counts, beginning with 0")


def _seen(
    visibility: Visibility, length: int, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (positions, mask) of the tokens that the last `count` tokens of a sequence see.

    A sequence has `length` tokens, and the last `count` are its queries. The mask is
    [queries, positions], or None if every query sees all positions.
    """
    if not visibility.causal:
        return torch.arange(length), None
    first = visibility.first(max(0, length - count))
    tokens = torch.arange(first, length)
    if visibility.sink_tokens and first:
        tokens = torch.cat((torch.arange(min(visibility.sink_tokens, first)), tokens))
    if count == 1:
        return tokens, None
    positions = torch.arange(length - count, length).unsqueeze(1)
    return tokens, visibility.sees(positions, tokens)


def _bad_batch(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
