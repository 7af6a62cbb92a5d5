"""What a call of attention is, all of it decided before a kernel is launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import gap
from kvatlas.kernels.triton.attention.schedule import Cut, fit_of
from kvatlas.kernels.triton.attention.walk_device import LOG2E
from kvatlas.kernels.triton.storage_formats import Stored
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CrossAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
)

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
_LEAST = 16
"""States, or rows of queries, in the smallest tile."""
_LEAST_CONVERTED = 32
"""States in the smallest tile of elements that are converted.

Triton 3.6 spreads narrow elements over more states than a smaller one has, and errs.
"""


class Job(NamedTuple):
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


def bound_of(spec: Attention | LatentAttention) -> tuple[str, int, int]:
    """Which states queries see, as kernels take it."""
    if isinstance(spec, CrossAttention):
        return "all", 0, 0
    if isinstance(spec, SlidingAttention | SlidingLatentAttention):
        return "window", spec.window, 0
    if isinstance(spec, ChunkedAttention):
        return "chunk", spec.chunk, 0
    if isinstance(spec, SinkAttention) and spec.window is not None:
        return "kept", spec.window, spec.sink_tokens
    return "none", 0, 0


class Kind(NamedTuple):
    """What the parameters of launches depend on."""

    device: torch.device
    group: int
    """Query heads that share a kv head."""
    dim: int
    """Elements of the longest row."""
    cache: str
    """What rules call a cache dtype."""
    latent: bool
    query: int
    """Bytes of a query."""
    stored: int
    """Bytes of a state's K and V, as they are loaded."""
    converted: int
    """Bytes of them as dots take them, where that is something else."""


def _spec(layer: LayerCache) -> Attention | LatentAttention:
    return layer.spec if isinstance(layer.spec, LatentAttention) else layer.spec_as(Attention)


def kind_of(layer: LayerCache, query_heads: int, dtype: torch.dtype) -> Kind:
    """The kind of a layer's launches, for queries of a dtype."""
    spec = _spec(layer)
    if isinstance(spec, LatentAttention):
        rows, heads = [("latent", spec.latent + spec.rope)], 1
        dim, query = spec.latent, spec.latent + spec.rope
    else:
        v_dim = spec.v_dim or spec.head_dim
        rows = [("k", width_of(spec.head_dim)), ("v", width_of(v_dim))]
        heads, dim, query = layer.place("k").size("H"), max(spec.head_dim, v_dim), rows[0][1]
    bits = [layer.page.field(name).dtype.bits for name, _ in rows]
    size = 4 if dtype == torch.float32 else 2
    elements = sum(width for _, width in rows)
    return Kind(
        layer.buffer.device, query_heads // heads, dim,
        "fp32" if size == 4 or 32 in bits else stored_as(spec.cache),
        isinstance(spec, LatentAttention), query * size,
        sum(width * n for (_, width), n in zip(rows, bits, strict=True)) // 8,
        elements * size if any(n != 8 * size for n in bits) else 0,
    )  # fmt: skip


def use_for(kernel: str, kind: Kind, rows: int, choice: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a launch: stages and tiles that were chosen, or fewer, so that they fit."""
    facts = {"dim": kind.dim, "cache": kind.cache, "latent": kind.latent}
    if kernel == "decode":
        facts["rows"] = rows
    use = {**tune.choose(kernel, kind.device, **facts), **choice}
    least = _LEAST
    if kind.converted and kind.device.type == "cuda":
        least = _LEAST_CONVERTED
        use["tile"] = max(use["tile"], least)
    limit = tune.shared_memory(kind.device)
    while (wanted := _shared(use, kind, rows)) > limit:
        if use["stages"] > 2 or (use["stages"] > 1 and use["tile"] <= least):
            use["stages"] -= 1
        elif use["tile"] > least:
            use["tile"] //= 2
        elif use.get("rows", 0) > _LEAST:
            use["rows"] //= 2
        else:
            raise checks.no_kernel(
                "A program's queries and its smallest tile fit the shared memory of its chip",
                f"{wanted} bytes of {limit}",
                "Pass fewer query heads in one call",
            )
    return use


def _shared(use: dict[str, Any], kind: Kind, rows: int) -> int:
    """Bytes of shared memory that a program holds, at most."""
    states = use["tile"] * (use["stages"] * kind.stored + kind.converted)
    return int(use.get("rows", rows) * kind.query + states)


def cut_of(
    layer: LayerCache,
    query_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_queries: int | None = None,
    **choice: Any,
) -> Cut:
    """How batches of such layers are cut, for `schedule` to be called once in a step.

    The schedule serves every layer of the same kind, with queries of the same `dtype` and
    with the same `max_queries`.
    """
    kind = kind_of(layer, query_heads, dtype)
    states = layer.kernel_blocks.size("N")
    return cut_for(kind, states, bound_of(_spec(layer)), max_queries, choice)


def cut_for(
    kind: Kind,
    states: int,
    bound: tuple[str, int, int],
    max_queries: int | None,
    choice: dict[str, Any],
) -> Cut:
    """The cut of layers of a kind, with so many states in a page."""
    few = rows_for(kind.group, max_queries)
    tile = use_for("decode", kind, few, choice)["tile"]
    rows = use_for("prefill", kind, 0, choice)["rows"]
    return Cut(
        kind.group, triton.cdiv(kind.group, few) * few, tile, rows,
        fit_of(states, tile)[1], *bound,
    )  # fmt: skip


def operands(job: Job) -> tuple[Any, ...]:
    """Tensors and where rows lie in them, in the order in which kernels take them."""
    return (
        job.q, steps(job.q), job.out, steps(job.out), job.layer.buffer, job.k.at,
        job.k.scale_at, job.v.at, job.v.scale_at, job.v.zero_at, job.tables,
        job.tables.stride(0), job.lengths,
    )  # fmt: skip


def constants(job: Job, tile: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
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


def in_base_2(job: Job) -> tuple[float, float, float]:
    """Scale, softcap and V's scale, for logits in base 2; a softcap turns them there itself."""
    scale, softcap, v_scale = job.numbers
    return (scale if softcap else scale * LOG2E.value), softcap, v_scale


def steps(tensor: torch.Tensor) -> tuple[int, int]:
    """Elements from token to token, and from head to head.

    >>> steps(torch.empty(7, 4, 16))
    (64, 16)
    """
    return tensor.stride(0), tensor.stride(1)


def rows_for(group: int, max_queries: int | None) -> int:
    """Rows of a decoding program: the heads of one query, or of several where few are.

    >>> rows_for(4, 1), rows_for(4, None), rows_for(8, 4), rows_for(128, 1)
    (8, 16, 32, 64)
    """
    wanted = group * max(1, max_queries or 1)
    if wanted > _MOST_ROWS:
        wanted = group
    # Where a batch may have anything, sequences of a few queries are still decoded.
    least = 16 if max_queries is None else 8
    return max(least, min(_MOST_ROWS, int(triton.next_power_of_2(wanted))))


def stored_as(cache: str) -> str:
    """What rules call a cache dtype: 8-bit floats of one scale are alike.

    >>> stored_as("fp8_e5m2"), stored_as("turboquant_4bit_nc"), stored_as("auto")
    ('fp8', 'turboquant', 'auto')
    """
    if cache.startswith("turboquant"):
        return "turboquant"
    return "fp8" if cache in ("fp8_e4m3", "fp8_e5m2") else cache


def width_of(dim: int) -> int:
    """Columns of the tile that holds rows of so many elements.

    >>> width_of(8), width_of(96), width_of(128)
    (16, 128, 128)
    """
    return max(16, int(triton.next_power_of_2(dim)))


def dot_for(own: Any, side: Stored) -> Any:
    """The type of a dot: elements of 8 and 4 bits are exact as halves, and get there fast."""
    exact = side.form.element in (tl.float8e4nv, tl.float8e5, tl.int8) or side.form.kind == "int4"
    return tl.float16 if exact and own != tl.float32 else own


def by_words(job: Job, rows: int) -> bool:
    """Whether K and V can be walked as words of 16 bits."""
    dims, bits = job.dims, bits_of(job.k)
    return (
        not dims["LATENT"]
        and bits in (4, 8, 16)
        and bits == bits_of(job.v)
        and (bits < 16 or rows <= _FEW_ROWS)
        and delta(job) is not None
        and all(
            side.form.unit * bytes_of(side) >= 2 and side.at[4] == 1 and not side.form.tile
            and dim == width >= 16 * (16 // bits)
            for side, dim, width in (
                (job.k, dims["DIM"], dims["WIDTH"]), (job.v, dims["V_DIM"], dims["V_WIDTH"])
            )
        )
    )  # fmt: skip


def bits_of(side: Stored) -> int:
    """Bits of an element; 0 where elements are not numbers by themselves."""
    return side.form.bits if side.form.kind in ("plain", "scaled", "int4") else 0


def bytes_of(side: Stored) -> int:
    """Bytes of what a kernel loads as one element: an element, or two codes of 4 bits."""
    return int(side.form.element.primitive_bitwidth) // 8


def delta(job: Job) -> int | None:
    """Bytes from a row of K to that of V, where that is one small number for all rows."""
    found = gap(job.layer, "k", "v")
    return None if found is None or abs(found) >= _NEAR else found


def lead_of(job: Job) -> int:
    """Bytes before V from which on it can be read in pieces as wide as those of K.

    A row with its own scale is 264 bytes, say: K, its scale, V, its scale. V starts at a
    multiple of 4 alone, its neighbours' scales at one of 8.
    """
    if not all(side.form.kind in ("scaled", "int4") for side in (job.k, job.v)):
        return 0
    length = job.dims["V_DIM"] * bits_of(job.v) // 8
    between = gap(job.layer, "k_scale", "v") == _SCALE and gap(job.layer, "v", "v_scale") == length
    whole = (job.layer.buffer.data_ptr(), length)
    aligned = job.k.form.scale_unit >= 2 and all(n % (2 * _SCALE) == 0 for n in whole)
    return _SCALE if between and aligned and delta(job) is not None else 0
