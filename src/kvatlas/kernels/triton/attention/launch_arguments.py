"""Arguments and parameters of an attention call, computed before a kernel is launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import gap
from kvatlas.kernels.triton.attention.step_schedule import WorkSplit, fit_of
from kvatlas.kernels.triton.storage_formats import SideRows, StorageFormat, StoredSide, width_of
from kvatlas.specs import Attention, LatentAttention, Visibility

_MOST_ROWS = 64
"""Maximum query rows per decode program."""
_FEW_ROWS = 8
"""Maximum query rows for which 16-bit caches are walked as words (`decode_packed_device`).

With more rows, Triton 3.6 selects other matrix instructions, and gives their operands a wrong
layout if a transposed tile was not copied to shared memory.
"""
_WORDS_WIDTH = 128
"""The only row length, in elements, for which nvfp4 and turboquant are walked as words."""
_NEAR = 1 << 20
"""Maximum distance of K and V in bytes, so that it fits in a load instruction's offset."""
_SCALE = 4
"""Bytes of a per-row scale."""
_FEW_PARTIALS = 16
"""Maximum number of partials of a row that fit in the registers of one warp."""
_LEAST = 16
"""Number of states, or of query rows, in the smallest tile."""
_LEAST_CONVERTED = 32
"""Number of states in the smallest tile if elements are converted.

With smaller tiles, Triton 3.6 distributes narrow elements over more states than the tile has,
and produces wrong results.
"""


class OutputShape(NamedTuple):
    """Shape of the output rows; a compile-time constant."""

    group: int
    """Query heads per kv head."""
    dim: int
    """Elements per row."""
    width: int
    """Columns of the tile into which a row is loaded, at least `dim`."""
    sink_logits: bool
    """Whether every head has a sink logit."""


class AttentionShape(NamedTuple):
    """Compile-time constants of attention kernels."""

    k: StorageFormat
    """Format of K, or of the latent."""
    v: StorageFormat
    """Format of V, or of the rotary rows of a latent."""
    k_dot: Any
    """Operand type of dot products with K; `v_dot` is that of V."""
    v_dot: Any
    precision: str
    out: OutputShape
    states: int
    """States per page."""
    latent: bool
    """Absorbed MLA: the latents are the values."""
    mask: str
    softcap: bool
    selected: int = 0
    """If tables contain the slots of selected states: the states per page. `states` is then 1."""


class Tiling(NamedTuple):
    """The division of a launch into tiles; a compile-time constant."""

    rows: int
    """Query rows per program."""
    tile: int
    """States per tile."""
    fit: str
    """How tiles align with pages; see `fit_of`."""
    align: int
    """A walk over states must start at a multiple of this."""
    stages: int
    """Number of tiles to prefetch."""
    evict: str
    programs: int
    """Programs per worker: kv heads times the tiles of their query rows."""
    row_tiles: int = 1
    """Tiles of query rows per kv head."""
    together: int = 1
    """Number of tiles that are walked together; a worker's share is a multiple of it."""
    lead: int = 0
    """For Hopper's prefill: reads of V start this many bytes before the row."""


class PackedWords(NamedTuple):
    """Compile-time constants for kernels that read K and V as 16-bit words."""

    packed: bool = False
    delta: int = 0
    """Bytes from a state's row of K to its row of V."""
    lead: int = 0
    """Reads of V start this many bytes before the row, so that they are as wide as K's."""
    wrap: int = 0
    """Number of elements at the end of a row of V that come first in the sums."""
    step: int = 0
    """Stride of K rows in units, if it is a compile-time constant; else 0."""
    scales: tuple[int, int] = (0, 0)
    """Bytes from a row of K to its scale and to V's, if they are compile-time constants; else 0."""


class PagedCache(NamedTuple):
    """The pool of a layer, the strides of K and V in it, and block tables."""

    buffer: torch.Tensor
    k: SideRows
    v: SideRows
    tables: torch.Tensor
    table_stride: int


class BatchSequences(NamedTuple):
    """The sequences of a batch: lengths, and cumulative counts of queries and tiles."""

    lengths: torch.Tensor
    ends: torch.Tensor
    """[3, sequences + 1]: cumulative counts of queries, of decode tiles and of prefill tiles."""
    sequences: int


class Scoring(NamedTuple):
    """Scale, cap and mask of logits.

    Logits in kernels are multiplied by log2(e), because softmax weights are computed by exp2.
    """

    scale: float
    softcap: float
    v_scale: float
    size: int
    """Size of the window or chunk."""
    sink_tokens: int
    sink_logits: torch.Tensor | None


def mask_of(visibility: Visibility) -> tuple[str, int, int]:
    """Return (mask name, size of window or chunk, number of sink tokens) for kernels.

    >>> mask_of(Visibility()), mask_of(Visibility(window=128, sink_tokens=4))
    (('causal', 0, 0), ('sinks', 128, 4))
    """
    if not visibility.causal:
        return "full", 0, 0
    if visibility.chunk is not None:
        return "chunk", visibility.chunk, 0
    if visibility.window is None:
        return "causal", 0, 0
    sinks = visibility.sink_tokens
    return ("sinks" if sinks else "window"), visibility.window, sinks


class LaunchKey(NamedTuple):
    """The properties of a layer and its queries that determine launch parameters."""

    device: torch.device
    group: int
    """Query heads per kv head."""
    dim: int
    """Elements of the longest row."""
    cache: str
    """Name of the cache dtype in launch rules."""
    latent: bool
    query: int
    """Bytes per query."""
    stored: int
    """Bytes of K and V per state, as they are loaded."""
    converted: int
    """Bytes of K and V per state in the type of dot products; 0 if no conversion is needed."""


def launch_key(layer: LayerCache, query_heads: int, dtype: torch.dtype) -> LaunchKey:
    """Return the properties on which a layer's launch parameters depend, for queries of `dtype`."""
    spec = layer.spec
    if isinstance(spec, LatentAttention):
        rows, heads = [("latent", spec.latent + spec.rope)], 1
        dim, query = spec.latent, spec.latent + spec.rope
    else:
        spec = layer.spec_as(Attention)
        v_dim = spec.v_dim or spec.head_dim
        rows = [("k", width_of(spec.head_dim)), ("v", width_of(v_dim))]
        heads, dim, query = layer.place("k").size("H"), max(spec.head_dim, v_dim), rows[0][1]
    bits = [layer.page.field(name).dtype.bits for name, _ in rows]
    size = 4 if dtype == torch.float32 else 2
    elements = sum(width for _, width in rows)
    return LaunchKey(
        layer.buffer.device, query_heads // heads, dim,
        "fp32" if size == 4 or 32 in bits else stored_as(spec.cache),
        isinstance(spec, LatentAttention), query * size,
        sum(width * n for (_, width), n in zip(rows, bits, strict=True)) // 8,
        elements * size if any(n != 8 * size for n in bits) else 0,
    )  # fmt: skip


def parameters(kernel: str, key: LaunchKey, rows: int, choice: dict[str, Any]) -> dict[str, Any]:
    """Return launch parameters, reduced until a program fits in the GPU's shared memory.

    `rows` is the number of query rows per program. `choice` overrides the tuned parameters.
    """
    facts = {"dim": key.dim, "cache": key.cache, "latent": key.latent}
    if kernel == "decode":
        facts["rows"] = rows
    use = {**tune.choose(kernel, key.device, **facts), **choice}
    least = _LEAST
    if key.converted and key.device.type == "cuda":
        least = _LEAST_CONVERTED
        use["tile"] = max(use["tile"], least)
    limit = tune.shared_memory(key.device)
    while (wanted := _shared(use, key, rows)) > limit:
        if use["stages"] > 2 or (use["stages"] > 1 and use["tile"] <= least):
            use["stages"] -= 1
        elif use["tile"] > least:
            use["tile"] //= 2
        elif use.get("rows", 0) > _LEAST:
            use["rows"] //= 2
        else:
            raise checks.no_kernel(
                f"Queries and the smallest tile must fit in {limit:,} bytes of shared memory",
                f"{wanted:,} bytes",
                "Pass fewer query heads per call",
            )
    return use


def _shared(use: dict[str, Any], key: LaunchKey, rows: int) -> int:
    """Return an upper bound of the shared memory that a program needs, in bytes."""
    states = use["tile"] * (use["stages"] * key.stored + key.converted)
    return int(use.get("rows", rows) * key.query + states)


def split_of(
    layer: LayerCache,
    query_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_queries: int | None = None,
    **choice: Any,
) -> WorkSplit:
    """Return how a layer's work is split into tiles. Pass the result to `schedule` in each step.

    The schedule can be used for every layer of the same kind, with the same query `dtype` and the
    same `max_queries`.
    """
    key = launch_key(layer, query_heads, dtype)
    states = layer.kernel_blocks.size("N")
    return work_split(key, states, mask_of(layer.spec.visibility), max_queries, choice)


def work_split(
    key: LaunchKey,
    states: int,
    mask: tuple[str, int, int],
    max_queries: int | None,
    choice: dict[str, Any],
) -> WorkSplit:
    """Return how work is split into tiles, for layers with `states` tokens per page."""
    few = rows_for(key.group, max_queries)
    tile = parameters("decode", key, few, choice)["tile"]
    rows = parameters("prefill", key, 0, choice)["rows"]
    return WorkSplit(
        key.group, triton.cdiv(key.group, few) * few, tile, rows, fit_of(states, tile)[1], *mask
    )


def rows_for(group: int, max_queries: int | None) -> int:
    """Return the number of query rows of a decode program; a row is a (query, head) pair.

    A program has the rows of `max_queries` queries if all of them fit, otherwise the rows of one
    query. A query has `group` heads. The number is rounded up to a power of two of at most 64; it
    is at least 8, or 16 without `max_queries`.

    >>> rows_for(4, 1), rows_for(4, None), rows_for(8, 4), rows_for(128, 1)
    (8, 16, 32, 64)
    """
    wanted = group * max(1, max_queries or 1)
    if wanted > _MOST_ROWS:
        wanted = group
    # Without `max_queries`, leave rows for sequences with a few queries to be decoded too.
    least = 16 if max_queries is None else 8
    return max(least, min(_MOST_ROWS, int(triton.next_power_of_2(wanted))))


def merged_together(workers: int, sequences: int, width: int) -> tuple[int, int]:
    """Return (number of partial results to load at once, number of warps) for a merge program.

    In a batch of many sequences, each sequence has few partials, because workers divide the tiles
    evenly. Programs that reserve registers for more partials would run at lower occupancy. Of
    `sequences`, only the bit length of `sequences` - 1 is used, because kernels are compiled and
    cached for each bit length.

    >>> merged_together(66, 64, 128), merged_together(66, 1, 128), merged_together(132, 64, 512)
    ((16, 1), (64, 4), (8, 4))
    """
    fewest = 1 << max(0, (sequences - 1).bit_length() - 1)
    if workers // fewest + 2 <= _FEW_PARTIALS:
        return (_FEW_PARTIALS, 1) if width <= 128 else (_FEW_PARTIALS // 2, 4)
    return (64 if width <= 128 else 16), 4


def stored_as(cache: str) -> str:
    """Return the name that launch rules use for a cache dtype.

    All fp8 dtypes with one scale per tensor are called `fp8`.

    >>> stored_as("fp8_e5m2"), stored_as("turboquant_4bit_nc"), stored_as("auto")
    ('fp8', 'turboquant', 'auto')
    """
    if cache.startswith("turboquant"):
        return "turboquant"
    return "fp8" if cache in ("fp8_e4m3", "fp8_e5m2") else cache


def dot_for(own: Any, side: StoredSide, *, values: bool) -> Any:
    """Return the operand type of dot products with K, or with V if `values` is true.

    Elements of 8 and 4 bits are exact in float16, and converting to it is fast. V with a scale per
    row uses bfloat16, whose range covers the product of a weight and any scale. If `own`, the
    operand type of the queries, is float32, the result is always float32.
    """
    if values and own != tl.float32 and side.format.kind in ("scaled", "int4"):
        return tl.bfloat16
    narrow = side.format.element in (tl.float8e4nv, tl.float8e5, tl.int8)
    if side.format.kind == "records":  # elements times scales need the range of the queries' type
        return own
    exact = narrow or side.format.kind in ("int4", "nvfp4", "levels")
    return tl.float16 if exact and own != tl.float32 else own


def words_of(
    layer: LayerCache, shape: AttentionShape, sides: tuple[SideRows, SideRows], rows: int
) -> PackedWords:
    """Return how K and V are read for `rows` query rows: as 16-bit words, or element by element."""
    k, v = shape.k, shape.v
    bits = k.bits
    suits = (
        not shape.latent
        and bits in (4, 8, 16)
        and bits == v.bits
        and rows <= min(_most_rows(k), _most_rows(v))
        and all(
            form.unit * form.element.primitive_bitwidth >= 16 and at.rows.element == 1
            and not form.tile and form.dim == form.width >= 16 * (16 // bits)
            and (form.kind != "nvfp4" or (form.scale_unit % 4 == 0 and at.scales.element == 1))
            for form, at in zip((k, v), sides, strict=True)
        )
    )  # fmt: skip
    delta = gap(layer, "k", "v") if suits else None
    if delta is None or abs(delta) >= _NEAR:
        return PackedWords()
    if k.kind == v.kind == "int4":
        scales = gap(layer, "k", "k_scale"), gap(layer, "k", "v_scale")
        if scales[0] is not None and scales[1] is not None:
            return PackedWords(True, delta, 0, 0, sides[0].rows.state, (scales[0], scales[1]))
    lead = lead_of(layer, shape)
    return PackedWords(True, delta, lead, lead * 8 // bits)


def _most_rows(form: StorageFormat) -> int:
    """Return the maximum number of query rows for which a format is read as 16-bit words.

    For nvfp4 and turboquant, only the configurations that were verified on a GPU are enabled: rows
    of 128 elements, and no more query rows than fit in one warp.
    """
    if form.kind in ("nvfp4", "levels", "range"):
        return 2 * _FEW_ROWS if form.width == _WORDS_WIDTH else 0
    return _FEW_ROWS if form.bits == 16 else _MOST_ROWS


def lead_of(layer: LayerCache, shape: AttentionShape) -> int:
    """Return how many bytes before a row of V a read must start, to be as wide as reads of K.

    For example, a head and token with scales per row may take 264 bytes: K, K's scale, V, V's
    scale, without a gap. V is then aligned only to 4 bytes, but the scale before it is aligned to
    8.
    """
    k, v = shape.k, shape.v
    if not all(form.kind == "scaled" for form in (k, v)):
        return 0
    k_length, v_length = (form.dim * form.bits // 8 for form in (k, v))
    gapless = (
        gap(layer, "k", "k_scale") == k_length
        and gap(layer, "k_scale", "v") == _SCALE
        and gap(layer, "v", "v_scale") == v_length
    )
    whole = (layer.buffer.data_ptr(), k_length, v_length)
    aligned = k.scale_unit >= 2 and all(n % (2 * _SCALE) == 0 for n in whole)
    return _SCALE if gapless and aligned else 0
