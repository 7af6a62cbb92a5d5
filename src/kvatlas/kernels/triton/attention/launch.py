"""Paged attention: decode and prefill in one batch, for pages in any layout.

The tiles of sequences with few queries are distributed evenly over the GPU; sequences with many
queries use one program per tile of queries. Both read K and V in place, through the block table,
and dequantise while they read. No step waits for the host, so a call can be captured in a CUDA
graph, and a replay uses the current content of lengths and tables.
"""

from __future__ import annotations

from typing import Any

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, hadamard, relaunch, tune
from kvatlas.kernels.triton.addresses import batch_rows
from kvatlas.kernels.triton.attention import checks as batches
from kvatlas.kernels.triton.attention import launch_arguments as calls
from kvatlas.kernels.triton.attention.batch_kind import batch_kind
from kvatlas.kernels.triton.attention.layer_launch import (
    AttentionCall,
    LayerLaunch,
    PrefillLaunch,
    Scores,
    layer_launch,
)
from kvatlas.kernels.triton.attention.merge_device import merge
from kvatlas.kernels.triton.attention.select_device import SelectedSlots, TableRows, select
from kvatlas.kernels.triton.attention.step_schedule import (
    Schedule,
    scheduled,
    sequences_at_once,
)
from kvatlas.kernels.triton.relaunch import kind_of, number_kind
from kvatlas.specs import Attention, LatentAttention

MERGED_AT_ONCE = 2048
"""Maximum programs of a merge, about as many as a GPU runs at once. More only add launch cost."""


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
    prepared: Schedule | None = None,
    **choice: Any,
) -> torch.Tensor:
    """Compute attention of `q` [tokens, query heads, D] over each sequence's cache.

    `kvatlas.kernels.attend` describes most arguments. `prepared` is a schedule that all layers of
    one kind can share in a step, and `choice` overrides the tuned settings. `max_queries=1` skips
    the launch for prefill. With 8-bit and 4-bit caches, queries are converted to float16, so they
    must not exceed 65504.
    """
    layer.spec_as(Attention)
    scores = Scores(scale, softcap, k_scale, v_scale, sink_logits is not None)
    launch = layer_launch(layer, q, scores, max_queries, choice)
    out = _out(launch, q, out)
    call = AttentionCall(layer, launch, q, out, tables, lengths, sink_logits)
    _run(call, queries, starts, max_queries, prepared)
    return out


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
    prepared: Schedule | None = None,
    indices: torch.Tensor | None = None,
    **choice: Any,
) -> torch.Tensor:
    """Compute absorbed MLA of `q` [tokens, heads, latent + rope] over each sequence's cache.

    Returns [tokens, heads, latent], before the value projection. `attend` describes the other
    arguments. `indices` [tokens, k] contains the positions that each query attends to, as for
    `kvatlas.kernels.attend_latent`; with it, `prepared` is not used.
    """
    layer.spec_as(LatentAttention)
    chosen = indices is not None
    scores = Scores(scale, None, kv_scale, kv_scale, sink_logits is not None, chosen)
    launch = layer_launch(layer, q, scores, 1 if chosen else max_queries, choice)
    out = _out(launch, q, out)
    call = AttentionCall(layer, launch, q, out, tables, lengths, sink_logits)
    if indices is None:
        _run(call, queries, starts, max_queries, prepared)
    else:
        _run_selected(call, indices, queries, starts, max_queries)
    return out


def _out(launch: LayerLaunch, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out` after a check of its shape and dtype, or a new output tensor if it is None."""
    # The launch's cache key covers all other properties of the queries.
    if not checks.last_is_tight(q):
        checks.rows_of(q, "q", (None, None, None))
    tokens, heads, _ = q.shape
    shape = tokens, heads, launch.shape.out.dim
    if out is None:
        return q.new_empty(shape)
    checks.rows_of(out, "out", shape)
    checks.apart(out, "out")
    return out


def _rotated(q: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the queries, rotated like the stored keys if the format `kind` rotates keys.

    Rotating both keeps their dot products equal.
    """
    if kind == "levels":
        return hadamard.rotate_without_signs(q)
    if kind == "int4":
        return hadamard.rotate_queries(q, 1.0 / hadamard.block_of(q))
    return q


def _run(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: Schedule | None,
) -> None:
    launch = call.launch
    kind = batch_kind(call, queries, starts, prepared)
    known = launch.compiled.get(kind)
    if known is None:
        batches.check_kinds(call, queries, starts, prepared)
    batches.check_counts(call, queries, starts, max_queries, prepared is not None)
    if not call.q.shape[0] or not call.lengths.shape[0]:
        return
    compiled: relaunch.Compiled = {} if known is None else known
    with tune.on(call.q.device):
        rotated = _rotated(call.q, launch.shape.k.kind)
        if rotated is not call.q:
            call = call._replace(q=rotated)
        if prepared is None:
            prepared = scheduled(
                launch.split, call.lengths, queries, starts, launch.early, compiled
            )
        else:
            batches.refuse_schedule(prepared, launch.split, call.lengths.shape[0])
        _decode(call, prepared, compiled)
        if launch.prefill is not None:
            _prefill(call, launch.prefill, prepared, compiled)
        if launch.shape.v.kind == "int4":
            hadamard.rotate_back(call.out, prepared.ends[0])
    if known is None and call.q.is_cuda:
        relaunch.keep(launch.compiled, kind, kind.tensors, compiled)


def _run_selected(
    call: AttentionCall,
    indices: torch.Tensor,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
) -> None:
    """Attend to selected tokens: every query is decoded like a separate sequence."""
    launch, (tokens, most) = call.launch, indices.shape
    counted = number_kind(tokens), (tokens - 1).bit_length(), most
    kind = batch_kind(call, queries, starts, None), kind_of(indices), counted
    known = launch.compiled.get(kind)
    if known is None:
        batches.check_kinds(call, queries, starts, None)
        checks.same_device(call.q.device, indices=indices)
        checks.integers(indices, "indices", axes=2)
    batches.check_counts(call, queries, starts, max_queries, prepared=False)
    if not tokens or not call.lengths.shape[0]:
        return
    compiled: relaunch.Compiled = {} if known is None else known
    with tune.on(call.q.device):
        slots = indices.new_empty((tokens, most), dtype=torch.int32)
        into = SelectedSlots(slots, slots.new_empty(tokens), slots.new_empty((2, tokens + 1)))
        counts, sequences = queries if starts is None else starts, call.lengths.shape[0]
        relaunch.launch(
            select, (tokens, 1, 1),
            (TableRows(indices, indices.stride(0)), TableRows(call.tables, call.tables.stride(0)),
             call.lengths, counts, sequences, into, most),
            {"STATES": launch.shape.selected, "TILE": launch.decode.tiling.tile,
             "STARTS": starts is not None, "SPAN": sequences_at_once(sequences),
             "EARLY": launch.early["EARLY"]},
            {"num_warps": 4, **launch.early}, compiled,
        )  # fmt: skip
        alone = call._replace(tables=slots, lengths=into.counts)
        _decode(alone, Schedule(into.ends, launch.split), compiled)
    if known is None and call.q.is_cuda:
        relaunch.keep(launch.compiled, kind, (*kind[0].tensors, kind[1]), compiled)


def _decode(call: AttentionCall, plan: Schedule, compiled: relaunch.Compiled) -> None:
    launch, scoring, sequences = call.launch, call.scoring, call.lengths.shape[0]
    use, shape, early = launch.decode, launch.shape, launch.early["EARLY"]
    partials = plan.partials(use.rows_of_partials, shape.out.width)
    batch = calls.BatchSequences(call.lengths, plan.ends, sequences)
    target = batch_rows(call.out)
    relaunch.launch(
        use.kernel, (use.workers * use.programs, 1, 1),
        (batch_rows(call.q), target, call.cache, batch, partials, scoring),
        {"SHAPE": shape, "TILING": use.tiling, "WORDS": use.words, "EARLY": early},
        use.options, compiled,
    )  # fmt: skip
    at_once = min(use.programs * use.depth, max(1, MERGED_AT_ONCE // sequences))
    together, warps = calls.merged_together(use.workers, sequences, shape.out.width)
    relaunch.launch(
        merge, (sequences, at_once, 1), (target, batch, partials, scoring, use.workers),
        {"OUT": shape.out, "TILING": use.tiling, "DEPTH": use.depth, "FEW": plan.split.few,
         "WRAP": use.words.wrap, "AT_ONCE": together, "EARLY": early},
        {"num_warps": warps, **launch.early}, compiled,
    )  # fmt: skip


def _prefill(
    call: AttentionCall, use: PrefillLaunch, plan: Schedule, compiled: relaunch.Compiled
) -> None:
    launch, sequences = call.launch, call.lengths.shape[0]
    batch = calls.BatchSequences(call.lengths, plan.ends, sequences)
    units = call.q.shape[0] * launch.shape.out.group // use.tiling.rows + sequences
    programs = units * launch.heads
    if sequences == 1:
        programs = min(programs, use.most)
    relaunch.launch(
        use.kernel, (programs, 1, 1),
        (batch_rows(call.q), batch_rows(call.out), call.cache, batch, call.scoring),
        {"SHAPE": launch.shape, "TILING": use.tiling}, use.options, compiled,
    )  # fmt: skip
