"""Paged attention: decode and prefill in one batch, over pages in any order.

Sequences with few queries share out all of their tiles evenly over the chip; those with
many take a program for each tile of queries. Both read K and V where they lie, through
the block table, and dequantise on the way. Nothing waits for the host: a call can be
captured in a graph, which then replays with whatever lengths and tables hold.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, hadamard, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import batch_rows
from kvatlas.kernels.triton.attention import arguments as calls
from kvatlas.kernels.triton.attention import checks as batches
from kvatlas.kernels.triton.attention.decode_device import decode
from kvatlas.kernels.triton.attention.merge_device import merge
from kvatlas.kernels.triton.attention.prefill_device import prefill
from kvatlas.kernels.triton.attention.schedule import Schedule, fit_of, schedule
from kvatlas.kernels.triton.attention.walk_device import LOG2E
from kvatlas.kernels.triton.storage_formats import StoredSide
from kvatlas.specs import Attention, LatentAttention


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
    spec = layer.spec_as(Attention)
    v_dim = spec.v_dim or spec.head_dim
    formats.refuse_head(spec.head_dim, "K")
    formats.refuse_head(v_dim, "V")
    checks.rows_of(q, "q", (None, None, spec.head_dim))
    heads = layer.place("k").size("H")
    if q.shape[1] % heads or not q.shape[1]:
        raise checks.no_kernel(
            "Query heads do not share kv heads evenly",
            f"{q.shape[1]} query heads for {heads}",
            "Pass the heads that this rank holds",
        )
    stored = formats.stored_side(layer, "k"), formats.stored_side(layer, "v")
    per_tensor = spec.cache in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    scale = spec.head_dim**-0.5 if scale is None else scale
    scales = (scale * k_scale, v_scale) if per_tensor else (scale, 1.0)
    scoring = _scoring(spec, scales, softcap, sink_logits)
    call = _call(layer, (q, out), (tables, lengths), stored, heads, scoring)
    _run(call, queries, starts, max_queries, prepared, choice)
    return call.out


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
    spec = layer.spec_as(LatentAttention)
    formats.refuse_head(spec.latent, "the latent")
    if not formats.attends_latent(spec):
        raise checks.no_kernel(
            "Latents have scales by blocks, or rows that are no power of two",
            f"{spec.cache} of {spec.latent} + {spec.rope}",
            "Use auto or fp8",
        )
    checks.rows_of(q, "q", (None, None, spec.latent + spec.rope))
    stored = tuple(formats.stored_latent(layer, name) for name in ("latent", "rope"))
    kv_scale = 1.0 if spec.cache == "auto" else kv_scale
    scoring = _scoring(spec, (scale * kv_scale, kv_scale), None, sink_logits)
    call = _call(layer, (q, out), (tables, lengths), stored, 1, scoring)
    _run(call, queries, starts, max_queries, prepared, choice)
    return call.out


def _scoring(
    spec: Attention | LatentAttention,
    scales: tuple[float, float],
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> calls.Scoring:
    """Logits in base 2: their scale has the factor, unless a softcap turns them there itself."""
    scale, v_scale = scales
    _, size, sink_tokens = calls.mask_of(spec.visibility)
    scale = scale if softcap else scale * LOG2E.value
    return calls.Scoring(scale, abs(softcap or 0.0), v_scale, size, sink_tokens, sink_logits)


def _call(
    layer: LayerCache,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    where: tuple[torch.Tensor, torch.Tensor],
    stored: tuple[StoredSide, ...],
    heads: int,
    scoring: calls.Scoring,
) -> calls.AttentionCall:
    (q, out), (tables, lengths), (k, v) = rows, where, stored
    latent = isinstance(layer.spec, LatentAttention)
    values = k.format if latent else v.format
    own = formats.dot_of(q)
    k_dot = calls.dot_for(own, k)
    if out is None:
        out = q.new_empty((*q.shape[:2], values.dim))
    else:
        checks.rows_of(out, "out", (q.shape[0], q.shape[1], values.dim))
        checks.apart(out, "out")
    shape = calls.AttentionShape(
        k.format, v.format, k_dot, k_dot if latent else calls.dot_for(own, v),
        "ieee" if k_dot == tl.float32 else "tf32",
        calls.OutputShape(
            q.shape[1] // heads, values.dim, values.width, scoring.sink_logits is not None
        ),
        layer.kernel_blocks.size("N"), latent, calls.mask_of(layer.spec.visibility)[0],
        scoring.softcap > 0,
    )  # fmt: skip
    return calls.AttentionCall(layer, q, out, tables, lengths, heads, k.at, v.at, shape, scoring)


def _rotated(q: torch.Tensor, kind: str) -> torch.Tensor:
    """Queries for keys that are kept rotated: a product does not change if both are."""
    if kind == "levels":
        return hadamard.rotate_without_signs(q)
    if kind == "int4":
        return hadamard.rotate_queries(q, 1.0 / hadamard.block_of(q))
    return q


def _run(
    call: calls.AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: Schedule | None,
    choice: dict[str, Any],
) -> None:
    visibility = call.layer.spec.visibility
    batches.check(call, visibility, queries, starts, max_queries, prepared is not None)
    if not call.q.shape[0]:
        return
    key = calls.launch_key(call.layer, call.q.shape[1], call.q.dtype)
    if call.scoring.sink_logits is None:  # any tensor will do: it is not read
        call = call._replace(scoring=call.scoring._replace(sink_logits=call.q))
    call = call._replace(q=_rotated(call.q, call.shape.k.kind))
    mask = calls.mask_of(visibility)
    split = calls.work_split(key, call.shape.states, mask, max_queries, choice)
    with tune.on(call.q.device):
        if prepared is None:
            prepared = schedule(split, call.lengths, queries, starts)
        batches.refuse_schedule(prepared, split, call.lengths.shape[0])
        _decode(call, key, prepared, max_queries, choice)
        if max_queries is None or max_queries * key.group > split.few:
            _prefill(call, key, prepared, choice)
    if call.shape.v.kind == "int4":
        hadamard.rotate_back(call.out, prepared.ends[0])


def _decode(
    call: calls.AttentionCall,
    key: calls.LaunchKey,
    plan: Schedule,
    max_queries: int | None,
    choice: dict[str, Any],
) -> None:
    device, out = call.q.device, call.shape.out
    rows = calls.rows_for(key.group, max_queries)
    use = calls.parameters("decode", key, rows, choice)
    words = calls.words_of(call, rows)
    rows = rows if words.packed else max(16, rows)
    row_tiles = triton.cdiv(key.group, rows)
    programs = call.heads * row_tiles
    workers = max(1, tune.processors(device) * use["per_sm"] // programs)
    count = 2 * workers * programs * rows
    partials = calls.Partials(
        torch.empty(count * out.width, dtype=torch.float32, device=device),
        torch.empty(count * 2, dtype=torch.float32, device=device),
    )
    tile = plan.split.tile
    tiling = calls.Tiling(
        rows, tile, *fit_of(call.shape.states, tile), use["stages"], use.get("evict", ""),
        programs, row_tiles,
    )  # fmt: skip
    batch = calls.BatchSequences(call.lengths, plan.ends[0], plan.ends[1], call.lengths.shape[0])
    target, early = batch_rows(call.out), tune.dependent_launch(device)
    decode[(workers * programs,)](
        batch_rows(call.q), target, call.cache, batch, partials, call.scoring, SHAPE=call.shape,
        TILING=tiling, WORDS=words, EARLY=early["EARLY"], num_warps=use["warps"],
        num_stages=use["stages"], maxnreg=use.get("registers"),
    )  # fmt: skip
    depth = rows if max_queries is None else min(rows, max_queries * key.group)
    merge[(batch.sequences, programs * depth)](
        target, batch, partials, call.scoring, workers, OUT=out, TILING=tiling, DEPTH=depth,
        FEW=plan.split.few, WRAP=words.wrap, num_warps=4, **early,
    )  # fmt: skip


def _prefill(
    call: calls.AttentionCall, key: calls.LaunchKey, plan: Schedule, choice: dict[str, Any]
) -> None:
    use = calls.parameters("prefill", key, 0, choice)
    batch = calls.BatchSequences(call.lengths, plan.ends[0], plan.ends[2], call.lengths.shape[0])
    rows, tile = plan.split.rows, use["tile"]
    tiling = calls.Tiling(
        rows, tile, *fit_of(call.shape.states, tile), use["stages"], "", call.heads
    )
    units = call.q.shape[0] * key.group // rows + batch.sequences
    prefill[(units * call.heads,)](
        batch_rows(call.q), batch_rows(call.out), call.cache, batch, call.scoring,
        SHAPE=call.shape, TILING=tiling, num_warps=use["warps"], num_stages=use["stages"],
    )  # fmt: skip
