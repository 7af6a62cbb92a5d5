"""What a call of attention is, all of it decided before a kernel is launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import gap
from kvatlas.kernels.triton.attention.schedule import WorkSplit, fit_of
from kvatlas.kernels.triton.storage_formats import SideRows, StorageFormat, StoredSide, width_of
from kvatlas.specs import Attention, LatentAttention, Visibility

_MOST_ROWS = 64
"""Rows of queries that one decoding program holds, at most."""
_FEW_ROWS = 8
"""Rows up to which 16-bit caches are walked with states as the rows of the dots.

With more, Triton 3.6 takes other matrix instructions, whose operands it lays out wrongly
where a tile is transposed and was not copied to shared memory by the pipeline.
"""
_WORDS_WIDTH = 128
"""Elements of rows of nvfp4 and turboquant that are walked as words."""
_NEAR = 1 << 20
"""Bytes that an instruction can add to an address, less than it can."""
_SCALE = 4
"""Bytes of a row's own scale."""
_FEW_PARTIALS = 16
"""Partials of a row that one warp has registers for."""
_LEAST = 16
"""States, or rows of queries, in the smallest tile."""
_LEAST_CONVERTED = 32
"""States in the smallest tile of elements that are converted.

Triton 3.6 spreads narrow elements over more states than a smaller one has, and errs.
"""


class OutputShape(NamedTuple):
    """Rows of the output: a constant."""

    group: int
    """Query heads that share a kv head."""
    dim: int
    """Elements of a row."""
    width: int
    """Columns of the tile that holds a row."""
    sink_logits: bool
    """Whether every head has a sink's logit."""


class AttentionShape(NamedTuple):
    """What kernels of attention are compiled for."""

    k: StorageFormat
    """K, or the latent."""
    v: StorageFormat
    """V, or the rotary rows of a latent."""
    k_dot: Any
    """The type of the operands of dots with K; below, of those with V."""
    v_dot: Any
    precision: str
    out: OutputShape
    states: int
    """States in a page."""
    latent: bool
    """Absorbed MLA: values are the latents."""
    mask: str
    softcap: bool


class Tiling(NamedTuple):
    """How a launch is cut into tiles: a constant."""

    rows: int
    """Query rows of a program."""
    tile: int
    """States in a tile."""
    fit: str
    """How tiles meet pages, of `fit_of`."""
    align: int
    """What states a walk starts at multiples of."""
    stages: int
    """Tiles that are loaded ahead."""
    evict: str
    programs: int
    """Programs of a worker: kv heads, times the tiles of their query rows."""
    row_tiles: int = 1
    """Tiles of rows that the query heads of a kv head are split into."""
    together: int = 1
    """Tiles that are walked together: a worker's share is a multiple of them."""
    lead: int = 0
    """Bytes before V from which on Hopper's prefill reads it; decode's are in its words."""


class PackedWords(NamedTuple):
    """How K and V are walked as words of 16 bits, where they are: a constant."""

    packed: bool = False
    delta: int = 0
    """Bytes from a row of K to that of V."""
    lead: int = 0
    """Bytes before V from which on it is read."""
    wrap: int = 0
    """Elements of a row of V that are last, and come first in sums."""
    step: int = 0
    """Units between the rows of K of neighbouring states, where a kernel is compiled for them."""
    scales: tuple[int, int] = (0, 0)
    """Bytes from a row of K to its scale and to that of V, where a kernel is compiled for them."""


class PagedCache(NamedTuple):
    """The pool of a layer, where K and V lie in it, and block tables."""

    buffer: torch.Tensor
    k: SideRows
    v: SideRows
    tables: torch.Tensor
    table_stride: int


class BatchSequences(NamedTuple):
    """The sequences of a batch."""

    lengths: torch.Tensor
    ends: torch.Tensor
    """Where their queries end, their tiles of decode, and those of prefill: rows, one after the
    other, of one number more than there are sequences."""
    sequences: int


class Scoring(NamedTuple):
    """What logits are scaled, capped and masked by; logits are in base 2."""

    scale: float
    softcap: float
    v_scale: float
    size: int
    """Window or chunk."""
    sink_tokens: int
    sink_logits: torch.Tensor | None


def mask_of(visibility: Visibility) -> tuple[str, int, int]:
    """What queries see, as kernels take it: a mask, the size of its window or chunk, sink tokens.

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


def launch_key(layer: LayerCache, query_heads: int, dtype: torch.dtype) -> LaunchKey:
    """The key of a layer's launches, for queries of a dtype."""
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
    """Parameters of a launch: stages and tiles that were chosen, or fewer, so that they fit."""
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
                "Queries and the smallest tile exceed the shared memory of the chip",
                f"{wanted} bytes of {limit}",
                "Pass fewer query heads in one call",
            )
    return use


def _shared(use: dict[str, Any], key: LaunchKey, rows: int) -> int:
    """Bytes of shared memory that a program holds, at most."""
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
    """How the work of such layers is split, for `schedule` to be called once in a step.

    The schedule serves every layer of the same kind, with queries of the same `dtype` and
    with the same `max_queries`.
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
    """The split of layers with such a key, with so many states in a page."""
    few = rows_for(key.group, max_queries)
    tile = parameters("decode", key, few, choice)["tile"]
    rows = parameters("prefill", key, 0, choice)["rows"]
    return WorkSplit(
        key.group, triton.cdiv(key.group, few) * few, tile, rows, fit_of(states, tile)[1], *mask
    )


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


def merged_together(workers: int, sequences: int, width: int) -> tuple[int, int]:
    """Partials of a row that a merge loads together, and the warps that do.

    Workers share out sequences of like lengths so that each is left in few partials, if there
    are many of them: programs that have room for more are fewer at once. Batches whose
    numbers of sequences have as many bits are alike, as they are to `batch_kind`.

    >>> merged_together(66, 64, 128), merged_together(66, 1, 128), merged_together(132, 64, 512)
    ((16, 1), (64, 4), (8, 4))
    """
    fewest = 1 << max(0, (sequences - 1).bit_length() - 1)
    if workers // fewest + 2 <= _FEW_PARTIALS:
        return (_FEW_PARTIALS, 1) if width <= 128 else (_FEW_PARTIALS // 2, 4)
    return (64 if width <= 128 else 16), 4


def stored_as(cache: str) -> str:
    """What rules call a cache dtype: 8-bit floats of one scale are alike.

    >>> stored_as("fp8_e5m2"), stored_as("turboquant_4bit_nc"), stored_as("auto")
    ('fp8', 'turboquant', 'auto')
    """
    if cache.startswith("turboquant"):
        return "turboquant"
    return "fp8" if cache in ("fp8_e4m3", "fp8_e5m2") else cache


def dot_for(own: Any, side: StoredSide, *, values: bool) -> Any:
    """The type of a dot: elements of 8 and 4 bits are exact as halves, and get there fast.

    Values with a scale for each row are exact as bfloat16 too, as which weights times any scale
    are in range.
    """
    if values and own != tl.float32 and side.format.kind in ("scaled", "int4"):
        return tl.bfloat16
    narrow = side.format.element in (tl.float8e4nv, tl.float8e5, tl.int8)
    exact = narrow or side.format.kind in ("int4", "nvfp4", "levels")
    return tl.float16 if exact and own != tl.float32 else own


def words_of(
    layer: LayerCache, shape: AttentionShape, sides: tuple[SideRows, SideRows], rows: int
) -> PackedWords:
    """How K and V are walked as words of 16 bits, where rows of queries are so many."""
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
    """Rows of queries up to which elements are walked as words.

    nvfp4 and turboquant only where a chip was seen to be right: in rows of 128 elements, and
    with no more rows of queries than one warp has room for.
    """
    if form.kind in ("nvfp4", "levels", "range"):
        return 2 * _FEW_ROWS if form.width == _WORDS_WIDTH else 0
    return _FEW_ROWS if form.bits == 16 else _MOST_ROWS


def lead_of(layer: LayerCache, shape: AttentionShape) -> int:
    """Bytes before V from which on it can be read in pieces as wide as those of K.

    A row with its own scale is 264 bytes, say: K, its scale, V, its scale, without a gap. V
    starts at a multiple of 4 alone, its neighbours' scales at one of 8.
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
