"""Paged attention: decode and prefill in one batch, over pages in any order.

Sequences with few queries share out all of their tiles evenly over the chip; those with
many take a program for each tile of queries. Both read K and V where they lie, through
the block table, and dequantise on the way. Nothing waits for the host: a call can be
captured in a graph, which then replays with whatever lengths and tables hold.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton import hadamard as turning
from kvatlas.kernels.triton import storage_formats as forms
from kvatlas.kernels.triton.attention import call as jobs
from kvatlas.kernels.triton.attention import checks as batches
from kvatlas.kernels.triton.attention.call import Job, Kind
from kvatlas.kernels.triton.attention.decode_device import decode, merge
from kvatlas.kernels.triton.attention.prefill_device import prefill
from kvatlas.kernels.triton.attention.schedule import Schedule, schedule
from kvatlas.kernels.triton.dependent_launch_device import early
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

    As `kvatlas.kernels.paged_attention`, and what engines have at hand besides: `starts`
    [sequences + 1] in place of counts of queries, `out` to write into, `max_queries` that
    no sequence exceeds (1 leaves out what prefill needs), and a `prepared` schedule, which
    all layers of a kind share in a step. `choice` overrides what the tuner says. With 8-bit
    and 4-bit caches queries become halves: none may be beyond 65504.
    """
    spec = layer.spec_as(Attention)
    v_dim = spec.v_dim or spec.head_dim
    forms.refuse_head(spec.head_dim, "K")
    forms.refuse_head(v_dim, "V")
    checks.rows_of(q, "q", (None, None, spec.head_dim))
    k, v = forms.stored(layer, spec, "k"), forms.stored(layer, spec, "v")
    heads = layer.place("k").size("H")
    width, v_width = jobs.width_of(spec.head_dim), jobs.width_of(v_dim)
    own = forms.dot_of(q)
    whole = spec.cache in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    job = Job(
        layer, q, _out(q, out, v_dim), tables, lengths, k, v,
        {
            "DIM": spec.head_dim, "WIDTH": width, "V_DIM": v_dim, "V_WIDTH": v_width, "ROPE": 16,
            "LATENT": False, "K_DOT": jobs.dot_for(own, k),
            "V_DOT": jobs.dot_for(own, v),
        },
        heads, _group(q, heads), jobs.bound_of(spec),
        (
            (spec.head_dim**-0.5 if scale is None else scale)
            * (k_scale if whole else 1.0),
            abs(softcap or 0.0),
            v_scale if whole else 1.0,
        ),
        sink_logits,
    )  # fmt: skip
    _run(job, queries, starts, max_queries, prepared, choice)
    return job.out


def _turned(q: torch.Tensor, kind: str) -> torch.Tensor:
    """Queries for keys that are kept rotated: a product does not change if both are."""
    if kind == "levels":
        return turning.rotated(q)
    if kind == "int4":
        size = q.shape[-1]
        return turning.spread(q, 1.0 / (size & -size))
    return q


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
    forms.refuse_head(spec.latent, "the latent")
    if not forms.attends_latent(spec):
        raise checks.no_kernel(
            "Latents stand for themselves or have one scale, in rows of a power of two",
            f"{spec.cache} of {spec.latent} + {spec.rope}",
            "Use auto or fp8",
        )
    checks.rows_of(q, "q", (None, None, spec.latent + spec.rope))
    latent, rope = forms.plain(layer, "latent"), forms.plain(layer, "rope")
    kv_scale = 1.0 if spec.cache == "auto" else kv_scale
    dot = jobs.dot_for(forms.dot_of(q), latent)
    job = Job(
        layer, q, _out(q, out, spec.latent), tables, lengths, latent, rope,
        {
            "DIM": spec.latent, "WIDTH": spec.latent, "V_DIM": spec.latent,
            "V_WIDTH": spec.latent, "ROPE": spec.rope, "LATENT": True, "K_DOT": dot, "V_DOT": dot,
        },
        1, q.shape[1], jobs.bound_of(spec), (scale * kv_scale, 0.0, kv_scale), sink_logits,
    )  # fmt: skip
    _run(job, queries, starts, max_queries, prepared, choice)
    return job.out


def _run(
    job: Job,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: Schedule | None,
    choice: dict[str, Any],
) -> None:
    batches.check(job, queries, starts, max_queries, prepared is not None)
    device = job.q.device
    if not job.q.shape[0]:
        return
    kind = jobs.kind_of(job.layer, job.q.shape[1], job.q.dtype)
    job = job._replace(q=_turned(job.q, job.k.form.kind))
    states = job.layer.kernel_blocks.size("N")
    cut = jobs.cut_for(kind, states, job.bound, max_queries, choice)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if prepared is None:
            prepared = schedule(cut, job.lengths, queries, starts)
        batches.refuse_schedule(prepared, cut, job.lengths.shape[0])
        _decode(job, kind, prepared, max_queries, choice)
        if max_queries is None or max_queries * job.group > prepared.cut.few:
            _prefill(job, kind, prepared, choice)
    if job.v.form.kind == "int4":
        turning.spread_back(job.out, prepared.ends[0])


def _decode(
    job: Job, kind: Kind, plan: Schedule, max_queries: int | None, choice: dict[str, Any]
) -> None:
    device, dims = job.q.device, job.dims
    rows = jobs.rows_for(job.group, max_queries)
    use = jobs.use_for("decode", kind, rows, choice)
    by_words = jobs.by_words(job, rows)
    rows = rows if by_words else max(16, rows)
    lead, delta = (jobs.lead_of(job), jobs.delta(job)) if by_words else (0, None)
    turn = lead * 8 // (jobs.bits_of(job.v) or 8)
    parts = triton.cdiv(job.group, rows)
    lanes = job.heads * parts
    workers = max(1, tune.processors(device) * use["per_sm"] // lanes)
    slots = 2 * workers * lanes * rows
    sums = torch.empty(slots * dims["V_WIDTH"], dtype=torch.float32, device=device)
    tops = torch.empty(slots * 2, dtype=torch.float32, device=device)
    sinks = job.lengths if job.sinks is None else job.sinks
    count = job.lengths.shape[0]
    decode[(workers * lanes,)](
        *jobs.operands(job), plan.ends[0], plan.ends[1], count, sums, tops, sinks,
        *jobs.in_base_2(job), *job.bound[1:], **jobs.constants(job, plan.cut.tile),
        PARTS=parts, LANES=lanes,
        ROWS=rows, TILE=plan.cut.tile, EVICT=use.get("evict", ""), BY_WORDS=by_words,
        DELTA=delta, LEAD=lead, TURN=turn, STAGES=use["stages"], num_warps=use["warps"],
        num_stages=use["stages"], maxnreg=use.get("registers"), EARLY=early(device)["EARLY"],
    )  # fmt: skip
    deep = rows if max_queries is None else min(rows, max_queries * job.group)
    merge[(count, lanes * deep)](
        job.out, jobs.steps(job.out), plan.ends[0], plan.ends[1], count, sums, tops, sinks,
        job.numbers[2], workers, GROUP=job.group, PARTS=parts, LANES=lanes, ROWS=rows, DEEP=deep,
        FEW=plan.cut.few, V_DIM=dims["V_DIM"], V_WIDTH=dims["V_WIDTH"],
        SINKS=job.sinks is not None, SLOTS=16,
        TURN=turn, num_warps=4, **early(device),
    )  # fmt: skip


def _prefill(job: Job, kind: Kind, plan: Schedule, choice: dict[str, Any]) -> None:
    use = jobs.use_for("prefill", kind, 0, choice)
    count = job.lengths.shape[0]
    units = job.q.shape[0] * job.group // plan.cut.rows + count
    prefill[(units * job.heads,)](
        *jobs.operands(job), plan.ends[0], plan.ends[2], count,
        job.lengths if job.sinks is None else job.sinks, *jobs.in_base_2(job), *job.bound[1:],
        **jobs.constants(job, use["tile"]), HEADS=job.heads, ROWS=plan.cut.rows,
        TILE=use["tile"], EVICT="", STAGES=use["stages"], num_warps=use["warps"],
        num_stages=use["stages"],
    )  # fmt: skip


def _out(q: torch.Tensor, out: torch.Tensor | None, dim: int) -> torch.Tensor:
    if out is None:
        return q.new_empty((*q.shape[:2], dim))
    checks.rows_of(out, "out", (q.shape[0], q.shape[1], dim))
    checks.apart(out, "out")
    return out


def _group(q: torch.Tensor, heads: int) -> int:
    if q.shape[1] % heads or not q.shape[1]:
        raise checks.no_kernel(
            "Query heads share kv heads evenly",
            f"{q.shape[1]} query heads for {heads}",
            "Pass the heads that this rank holds",
        )
    return int(q.shape[1] // heads)
