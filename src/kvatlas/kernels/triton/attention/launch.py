"""Paged attention: decode and prefill in one batch, over pages in any order.

Sequences with few queries share out all of their tiles evenly over the chip; those with
many take a program for each tile of queries. Both read K and V where they lie, through
the block table, and dequantise on the way. Nothing waits for the host: a call can be
captured in a graph, which then replays with whatever lengths and tables hold.
"""

from __future__ import annotations

from typing import Any

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, hadamard, relaunch, tune
from kvatlas.kernels.triton.addresses import batch_rows
from kvatlas.kernels.triton.attention import arguments as calls
from kvatlas.kernels.triton.attention import checks as batches
from kvatlas.kernels.triton.attention.batch_kind import batch_kind
from kvatlas.kernels.triton.attention.layer_launch import (
    AttentionCall,
    LayerLaunch,
    PrefillLaunch,
    Scores,
    layer_launch,
)
from kvatlas.kernels.triton.attention.merge_device import merge
from kvatlas.kernels.triton.attention.schedule import Schedule, scheduled
from kvatlas.specs import Attention, LatentAttention

MERGED_AT_ONCE = 2048
"""Programs of a merge: what a chip holds at once. More cost time where nothing is to be merged."""


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
    """Attention of `q` [tokens, query heads, D] over each sequence's cache.

    As `kvatlas.kernels.attend`, and what engines have at hand besides: `starts`
    [sequences + 1] in place of counts of queries, `out` to write into, `max_queries` that
    no sequence exceeds (1 leaves out what prefill needs), and a `prepared` schedule, which
    all layers of a kind share in a step. `choice` overrides what the tuner says. With 8-bit
    and 4-bit caches queries become halves: none may be beyond 65504.
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
    **choice: Any,
) -> torch.Tensor:
    """Absorbed MLA: `q` [tokens, heads, latent + rope] over rows that all heads share.

    What comes back is [tokens, heads, latent], before the value projection.
    """
    layer.spec_as(LatentAttention)
    scores = Scores(scale, None, kv_scale, kv_scale, sink_logits is not None)
    launch = layer_launch(layer, q, scores, max_queries, choice)
    out = _out(launch, q, out)
    call = AttentionCall(layer, launch, q, out, tables, lengths, sink_logits)
    _run(call, queries, starts, max_queries, prepared)
    return out


def _out(launch: LayerLaunch, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Where rows of the output go: memory of its own, unless it is given."""
    # What else there is to say of queries, their launches depend on.
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
    """Queries for keys that are kept rotated: a product does not change if both are."""
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
