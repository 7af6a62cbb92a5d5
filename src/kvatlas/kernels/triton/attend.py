"""Paged attention: decode and prefill in one batch, over pages in any order.

Sequences with few queries share out all of their tiles evenly over the chip; those with
many take a program for each tile of queries. Both read K and V where they lie, through
the block table, and dequantise on the way. Nothing waits for the host: a call can be
captured in a graph, which then replays with whatever lengths and tables hold.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.triton import checks, forms, tune, turning
from kvatlas.kernels.triton.attending import LOG2E
from kvatlas.kernels.triton.decoding import decode, merge
from kvatlas.kernels.triton.early import early
from kvatlas.kernels.triton.forms import Stored
from kvatlas.kernels.triton.prefilling import prefill
from kvatlas.kernels.triton.schedule import Cut, Schedule, fit_of, schedule
from kvatlas.specs import (
    ChunkedAttention,
    CrossAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
)
from kvatlas.specs.attention import Attention

_MOST_ROWS = 64
"""Rows of queries that one decoding program holds, at most."""
_FEW_ROWS = 8
"""Rows up to which 16-bit caches are walked with states as the rows of the dots.

With more, Triton 3.6 takes other matrix instructions, whose operands it lays out wrongly
where a tile is turned and was not copied to shared memory by the pipeline.
"""
_NEAR = 1 << 20
"""Bytes that an instruction can add to an address, less than it can."""
_SCALE = 4
"""Bytes of a row's own scale."""


class _Job(NamedTuple):
    """One call, all of it decided: what the kernels of decode and prefill share."""

    layer: LayerCache
    q: torch.Tensor
    out: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    k: Stored
    v: Stored
    dims: dict[str, Any]
    heads: int
    group: int
    bound: tuple[str, int, int]
    """What queries see, the size of a window or chunk, and the states that stay besides."""
    numbers: tuple[float, float, float]
    """Scale, softcap and V's scale."""
    sinks: torch.Tensor | None
    levels: torch.Tensor


def attend(
    layer: LayerCache,
    spec: Attention,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
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
    v_dim = spec.v_dim or spec.head_dim
    forms.refuse_head(spec.head_dim, "K")
    forms.refuse_head(v_dim, "V")
    checks.rows_of(q, "q", (None, None, spec.head_dim))
    k, v = forms.stored(layer, spec, "k"), forms.stored(layer, spec, "v")
    heads = layer.place("k").size("H")
    width, v_width = _width(spec.head_dim), _width(v_dim)
    own = forms.dot_of(q)
    whole = spec.cache in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    job = _Job(
        layer, q, _out(q, out, v_dim), tables, lengths, k, v,
        {
            "DIM": spec.head_dim, "WIDTH": width, "V_DIM": v_dim, "V_WIDTH": v_width, "ROPE": 16,
            "LATENT": False, "K_DOT": _dot(own, k),
            "V_DOT": _dot(own, v),
        },
        heads, _group(q, heads), _bound(spec),
        (
            (spec.head_dim**-0.5 if scale is None else scale)
            * (k_scale if whole else 1.0),
            abs(softcap or 0.0),
            v_scale if whole else 1.0,
        ),
        sinks,
        forms.levels(k.form.bits, q.device) if k.form.kind == "levels" else lengths,
    )  # fmt: skip
    _run(job, spec.cache, queries, starts, max_queries, prepared, choice)
    if v.form.kind == "int4":
        turning.spread_back(job.out)
    return job.out


def _bound(spec: Attention | LatentAttention) -> tuple[str, int, int]:
    """Which states queries see, as kernels take it."""
    if isinstance(spec, CrossAttention):
        return "all", 0, 0
    if isinstance(spec, SlidingAttention | SlidingLatentAttention):
        return "window", spec.window, 0
    if isinstance(spec, ChunkedAttention):
        return "chunk", spec.chunk, 0
    if isinstance(spec, SinkAttention) and spec.window is not None:
        return "kept", spec.window, spec.sinks
    return "none", 0, 0


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
    spec: LatentAttention,
    q: torch.Tensor,
    *,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    max_queries: int | None = None,
    prepared: Schedule | None = None,
    **choice: Any,
) -> torch.Tensor:
    """Absorbed MLA: `q` [tokens, heads, latent + rope] over rows that all heads share.

    What comes back is [tokens, heads, latent], before the value projection.
    """
    sizes = spec.latent, spec.rope
    if spec.cache not in ("auto", "fp8", "fp8_e4m3") or any(n & (n - 1) or n < 16 for n in sizes):
        raise checks.no_kernel(
            "Latents stand for themselves or have one scale, in rows of a power of two",
            f"{spec.cache} of {spec.latent} + {spec.rope}",
            "Use auto or fp8",
        )
    forms.refuse_head(spec.latent, "the latent")
    checks.rows_of(q, "q", (None, None, spec.latent + spec.rope))
    latent, rope = forms.plain(layer, "latent"), forms.plain(layer, "rope")
    dot = _dot(forms.dot_of(q), latent)
    job = _Job(
        layer, q, _out(q, out, spec.latent), tables, lengths, latent, rope,
        {
            "DIM": spec.latent, "WIDTH": spec.latent, "V_DIM": spec.latent,
            "V_WIDTH": spec.latent, "ROPE": spec.rope, "LATENT": True, "K_DOT": dot, "V_DOT": dot,
        },
        1, q.shape[1], _bound(spec), (scale * kv_scale, 0.0, kv_scale), sinks, lengths,
    )  # fmt: skip
    _run(job, spec.cache, queries, starts, max_queries, prepared, choice)
    return job.out


def cut_of(
    layer: LayerCache,
    spec: Attention | LatentAttention,
    query_heads: int,
    *,
    max_queries: int | None = None,
    **choice: Any,
) -> Cut:
    """How batches of such layers are cut, for `schedule` to be called once in a step.

    The schedule serves every layer of the same kind, with the same `max_queries`.
    """
    if isinstance(spec, LatentAttention):
        heads, dim = 1, spec.latent
    else:
        heads, dim = layer.place("k").size("H"), spec.head_dim
    return _cut(
        layer.buffer.device, query_heads // heads, dim, layer.kernel_blocks.size("N"), spec.cache,
        _bound(spec), max_queries, choice,
    )  # fmt: skip


def _cut(
    device: torch.device,
    group: int,
    dim: int,
    states: int,
    cache: str,
    bound: tuple[str, int, int],
    max_queries: int | None,
    choice: dict[str, Any],
) -> Cut:
    few = _rows(group, max_queries)
    use = tune.choose("decode", device, dim=dim, cache=_stored_as(cache), rows=few)
    many = tune.choose("prefill", device, dim=dim, cache=_stored_as(cache))
    tile: int = choice.get("tile") or use["tile"]
    rows: int = choice.get("rows") or many["rows"]
    return Cut(
        group, triton.cdiv(group, few) * few, tile, rows,
        fit_of(states, tile)[1], *bound,
    )  # fmt: skip


def _run(
    job: _Job,
    cache: str,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: Schedule | None,
    choice: dict[str, Any],
) -> None:
    _check(job, queries, starts, max_queries)
    device, dim = job.q.device, job.dims["DIM"]
    if not job.q.shape[0]:
        return
    job = job._replace(q=_turned(job.q, job.k.form.kind))
    cut = _cut(
        device, job.group, dim, job.layer.kernel_blocks.size("N"), cache, job.bound, max_queries,
        choice,
    )  # fmt: skip
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if prepared is None:
            prepared = schedule(cut, job.lengths, queries, starts)
        _refuse_schedule(prepared, cut, job.lengths.shape[0])
        _decode(job, cache, prepared, max_queries, choice)
        if max_queries is None or max_queries * job.group > prepared.cut.few:
            _prefill(job, cache, prepared, choice)


def _refuse_schedule(given: Schedule, cut: Cut, count: int) -> None:
    """Refuse a schedule of other batches or layers: rows would be left unwritten."""
    if given.cut != cut or given.ends.shape != (3, count + 1):
        raise AtlasError(
            Code.BAD_TENSOR,
            "A schedule serves one batch, and layers that are cut alike",
            got=f"{given.cut} of {given.ends.shape[1] - 1} sequences for {cut} of {count}",
            hint="Make it by cut_of() of such a layer, with the same max_queries",
        )


def _decode(
    job: _Job, cache: str, plan: Schedule, max_queries: int | None, choice: dict[str, Any]
) -> None:
    device, dims = job.q.device, job.dims
    rows = _rows(job.group, max_queries)
    facts = {"dim": dims["DIM"], "cache": _stored_as(cache), "rows": rows}
    use = {**tune.choose("decode", device, **facts), **choice}
    narrow = _narrow(job, rows)
    rows = rows if narrow else max(16, rows)
    lead = _lead(job) if narrow else 0
    turn = lead * 8 // (_bits(job.v) or 8)
    parts = triton.cdiv(job.group, rows)
    lanes = job.heads * parts
    workers = max(1, tune.processors(device) * use["per_sm"] // lanes)
    sums = torch.empty(2 * workers * lanes * rows * dims["V_WIDTH"], device=device)
    tops = torch.empty(2 * workers * lanes * rows * 2, device=device)
    sinks = job.lengths if job.sinks is None else job.sinks
    count = job.lengths.shape[0]
    decode[(workers * lanes,)](
        *_operands(job), plan.ends[0], plan.ends[1], count, sums, tops, sinks, *_numbers(job),
        *job.bound[1:], **_constants(job, plan.cut.tile), PARTS=parts, LANES=lanes,
        ROWS=rows, TILE=plan.cut.tile, EVICT=use.get("evict", ""), NARROW=narrow,
        DELTA=_delta(job), LEAD=lead, TURN=turn, STAGES=use["stages"], num_warps=use["warps"],
        num_stages=use["stages"], maxnreg=use.get("registers"), EARLY=early(device)["EARLY"],
    )  # fmt: skip
    deep = rows if max_queries is None else min(rows, max_queries * job.group)
    merge[(count, lanes * deep)](
        job.out, _steps(job.out), plan.ends[0], plan.ends[1], count, sums, tops, sinks,
        job.numbers[2], workers, GROUP=job.group, PARTS=parts, LANES=lanes, ROWS=rows, DEEP=deep,
        V_DIM=dims["V_DIM"], V_WIDTH=dims["V_WIDTH"], SINKS=job.sinks is not None, SLOTS=16,
        TURN=turn, num_warps=4, **early(device),
    )  # fmt: skip


def _prefill(job: _Job, cache: str, plan: Schedule, choice: dict[str, Any]) -> None:
    use = {
        **tune.choose("prefill", job.q.device, dim=job.dims["DIM"], cache=_stored_as(cache)),
        **choice,
    }
    count = job.lengths.shape[0]
    units = job.q.shape[0] * job.group // plan.cut.rows + count
    prefill[(units * job.heads,)](
        *_operands(job), plan.ends[0], plan.ends[2], count,
        job.lengths if job.sinks is None else job.sinks, *_numbers(job), *job.bound[1:],
        **_constants(job, use["tile"]), HEADS=job.heads, ROWS=plan.cut.rows,
        TILE=use["tile"], EVICT="", STAGES=use["stages"], num_warps=use["warps"],
        num_stages=use["stages"],
    )  # fmt: skip


def _operands(job: _Job) -> tuple[Any, ...]:
    return (
        job.q, _steps(job.q), job.out, _steps(job.out), job.layer.buffer, job.k.at,
        job.k.scale_at, job.v.at, job.v.scale_at, job.v.zero_at, job.levels, job.tables,
        job.tables.stride(0), job.lengths,
    )  # fmt: skip


def _constants(job: _Job, tile: int) -> dict[str, Any]:
    fit, align = fit_of(job.layer.kernel_blocks.size("N"), tile)
    return {
        **job.dims,
        "K_FORM": tuple(job.k.form),
        "V_FORM": tuple(job.v.form),
        "STATES": job.layer.kernel_blocks.size("N"),
        "GROUP": job.group,
        "FIT": fit,
        "ALIGN": align,
        "SOFTCAP": job.numbers[1] > 0,
        "SINKS": job.sinks is not None,
        "BOUND": job.bound[0],
        "PRECISION": "ieee" if job.dims["K_DOT"] == tl.float32 else "tf32",
    }


def _numbers(job: _Job) -> tuple[float, float, float]:
    """Logits are in base 2, and turned there by the softcap where there is one."""
    scale, softcap, v_scale = job.numbers
    return (scale if softcap else scale * LOG2E.value), softcap, v_scale


def _steps(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.stride(0), tensor.stride(1)


def _rows(group: int, max_queries: int | None) -> int:
    """Rows of a decoding program: the heads of one query, or of several where few are."""
    wanted = group * max(1, max_queries or 1)
    if wanted > _MOST_ROWS:
        wanted = group
    # Where a batch may have anything, sequences of a few queries are still decoded.
    least = 16 if max_queries is None else 8
    return max(least, min(_MOST_ROWS, int(triton.next_power_of_2(wanted))))


def _stored_as(cache: str) -> str:
    """What rules call a cache dtype: 8-bit floats of one scale are alike."""
    return "fp8" if cache in ("fp8_e4m3", "fp8_e5m2") else cache


def _width(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _dot(own: Any, side: Stored) -> Any:
    """The type of a dot: elements of 8 and 4 bits are exact as halves, and get there fast."""
    exact = side.form.element in (tl.float8e4nv, tl.float8e5, tl.int8) or side.form.kind == "int4"
    return tl.float16 if exact and own != tl.float32 else own


def _narrow(job: _Job, rows: int) -> bool:
    """Whether K and V can be walked as words of 16 bits."""
    dims, bits = job.dims, _bits(job.k)
    return (
        not dims["LATENT"]
        and bits in (4, 8, 16)
        and bits == _bits(job.v)
        and (bits < 16 or rows <= _FEW_ROWS)
        and _delta(job) is not None
        and all(
            side.form.unit * _bytes(side) >= 2 and side.at[4] == 1 and not side.form.tile
            and dim == width >= 16 * (16 // bits)
            for side, dim, width in (
                (job.k, dims["DIM"], dims["WIDTH"]), (job.v, dims["V_DIM"], dims["V_WIDTH"])
            )
        )
    )  # fmt: skip


def _bits(side: Stored) -> int:
    """Bits of an element; 0 where elements are not numbers by themselves."""
    return side.form.bits if side.form.kind in ("plain", "scaled", "int4") else 0


def _bytes(side: Stored) -> int:
    return int(side.form.element.primitive_bitwidth) // 8


def _delta(job: _Job) -> int | None:
    """Bytes from a row of K to that of V, where that is one number for all rows."""
    k, v = ([step * side.form.unit * _bytes(side) for step in side.at[:4]]
            for side in (job.k, job.v))  # fmt: skip
    return v[0] - k[0] if k[1:] == v[1:] and abs(v[0] - k[0]) < _NEAR else None


def _lead(job: _Job) -> int:
    """Bytes before V from which on it can be read in pieces as wide as those of K.

    A row with its own scale is 264 bytes, say: K, its scale, V, its scale. V starts at a
    multiple of 4 alone, its neighbours' scales at one of 8.
    """
    if not all(side.form.kind in ("scaled", "int4") for side in (job.k, job.v)):
        return 0
    k, k_scale, v, v_scale = (
        [step * unit * size for step in at[:4]]
        for side in (job.k, job.v)
        for at, unit, size in (
            (side.at, side.form.unit, 1), (side.scale_at, side.form.scale_unit, 4)
        )
    )  # fmt: skip
    length = job.dims["V_DIM"] * _bits(job.v) // 8
    between = (v[0] - k_scale[0], v_scale[0] - v[0]) == (_SCALE, length)
    alike = k[1:] == k_scale[1:] == v[1:] == v_scale[1:]
    starts = (job.layer.buffer.data_ptr(), k_scale[0], *k[1:], length)
    aligned = all(step % (2 * _SCALE) == 0 for step in starts)
    return _SCALE if between and alike and aligned else 0


def _out(q: torch.Tensor, out: torch.Tensor | None, dim: int) -> torch.Tensor:
    if out is None:
        return q.new_empty((*q.shape[:2], dim))
    checks.rows_of(out, "out", (q.shape[0], q.shape[1], dim))
    return out


def _group(q: torch.Tensor, heads: int) -> int:
    if q.shape[1] % heads:
        raise checks.no_kernel(
            "Query heads share kv heads evenly",
            f"{q.shape[1]} query heads for {heads}",
            "Pass the heads that this rank holds",
        )
    return int(q.shape[1] // heads)


def _check(
    job: _Job,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
) -> None:
    checks.same_device(
        job.layer.buffer.device, q=job.q, out=job.out, tables=job.tables, lengths=job.lengths,
        queries=queries, starts=starts, sinks=job.sinks,
    )  # fmt: skip
    checks.integers(job.tables, "tables", axes=2)
    for name, given in (("lengths", job.lengths), ("queries", queries), ("starts", starts)):
        if given is not None:
            checks.integers(given, name, axes=1)
    if job.sinks is not None:
        checks.rows_of(job.sinks, "sinks", (job.q.shape[1],))
    _refuse_batch(job, queries, starts, max_queries)


def _refuse_batch(
    job: _Job,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
) -> None:
    count = job.lengths.shape[0]
    sizes = [job.tables.shape[0], *([] if queries is None else [queries.shape[0]])]
    sizes += [] if starts is None else [starts.shape[0] - 1]
    wrong = any(size != count for size in sizes) or (queries is None) == (starts is None)
    room = job.tables.shape[1] * job.layer.kernel_blocks.size("N")
    got = f"{count} lengths, {sizes} tables and queries, {job.q.shape[0]} rows, room for {room}"
    if not wrong and checks.debugging() and count:
        asked = queries if queries is not None else starts.diff()  # type: ignore[union-attr]
        wrong = int(asked.sum()) != job.q.shape[0]
        wrong |= job.bound[0] != "all" and bool((asked > job.lengths).any())
        wrong |= bool(((asked > 0) & (job.lengths < 1)).any()) or int(job.lengths.max()) > room
        wrong |= max_queries is not None and int(asked.max()) > max_queries
        _debug_tables(job, asked)
    if wrong:
        raise checks.bad_batch(got)


def _debug_tables(job: _Job, asked: torch.Tensor) -> None:
    """Only blocks within reach count: what a window has left behind may hold anything."""
    states = job.layer.kernel_blocks.size("N")
    first = job.lengths - asked
    kind, size, kept = job.bound
    low = first * 0
    if kind in ("window", "kept"):
        low = (first - size + 1).clamp(min=0)
    if kind == "chunk":
        low = first // size * size
    at = torch.arange(job.tables.shape[1], device=job.tables.device)
    reached = (at >= (low // states)[:, None]) | (at * states < kept)
    reached &= at * states < job.lengths[:, None]
    reached &= (asked > 0)[:, None]
    checks.in_range(job.tables[reached], job.layer.kernel_blocks.size("B"))
