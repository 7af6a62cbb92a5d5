"""Launches of a layer, prepared at the first call and cached with the layer.

An engine calls a layer's attention at every step with queries of one shape and dtype. A
`LayerLaunch` contains everything that depends only on this shape and dtype and on the placement of
the layer's pages. Later calls only check their tensors and launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.attention import launch_arguments as calls
from kvatlas.kernels.triton.attention.decode_device import decode
from kvatlas.kernels.triton.attention.prefill_device import prefill
from kvatlas.kernels.triton.attention.step_schedule import WorkSplit, fit_of
from kvatlas.kernels.triton.attention.walk_device import LOG2E
from kvatlas.kernels.triton.relaunch import Compiled
from kvatlas.kernels.triton.storage_formats import SideRows, StoredSide
from kvatlas.specs import Attention, LatentAttention

_PER_TENSOR = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
"""Cache dtypes with per-tensor scales for K and V."""


_GLUON = (3, 6), (3, 9)
"""The first and the last Triton release for which Gluon kernels are enabled."""


_FEW_LATENT_ROWS = 16
"""Maximum query rows for which `latent_few_device` is used, with transposed products."""


_ANY_NUMBER = 1 << 31
"""No limit on the number of programs."""


MOST_KEPT = 64
"""Maximum launches cached per layer. A call with other scales or `max_queries` adds a launch."""


class Scores(NamedTuple):
    """Scoring arguments of a call that are not in the spec; hashable."""

    scale: float | None
    softcap: float | None
    k_scale: float
    v_scale: float
    sink_logits: bool
    """Whether sink logits are given."""
    selected: bool = False
    """Whether each query attends to selected tokens only."""


class DecodeLaunch(NamedTuple):
    """Launch parameters for sequences with few queries."""

    kernel: Any
    tiling: calls.Tiling
    words: calls.PackedWords
    workers: int
    programs: int
    """Programs per worker."""
    depth: int
    """Maximum number of rows of a tile that contain queries."""
    rows_of_partials: int
    options: dict[str, Any]
    """Compiler options for Triton."""


class PrefillLaunch(NamedTuple):
    """Launch parameters for sequences with many queries."""

    kernel: Any
    tiling: calls.Tiling
    options: dict[str, Any]
    most: int
    """Maximum programs for a batch of one sequence, whose tiles are divided among them."""


class LayerLaunch(NamedTuple):
    """The launches of a layer for queries of one shape and dtype."""

    heads: int
    """Number of kv heads."""
    k: SideRows
    v: SideRows
    shape: calls.AttentionShape
    scoring: calls.Scoring
    """Scoring parameters without sink logits, which are tensors."""
    split: WorkSplit
    decode: DecodeLaunch
    prefill: PrefillLaunch | None
    """None if `max_queries` excludes sequences with many queries."""
    early: dict[str, Any]
    """Launch options of a kernel that waits on the device for the previous one."""
    compiled: dict[Hashable, Compiled]
    """Compiled kernels, by kind of batch. A batch of a kind in here has passed the checks."""


class AttentionCall(NamedTuple):
    """One attention call: the prepared launches of a layer, and the tensors of a batch."""

    layer: LayerCache
    launch: LayerLaunch
    q: torch.Tensor
    out: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    sink_logits: torch.Tensor | None

    @property
    def cache(self) -> calls.PagedCache:
        """The layer and the block tables, in the form that kernels expect."""
        launch = self.launch
        return calls.PagedCache(
            self.layer.buffer, launch.k, launch.v, self.tables, self.tables.stride(0)
        )

    @property
    def scoring(self) -> calls.Scoring:
        """Scoring parameters for kernels. Without sink logits, `q` is passed as a placeholder."""
        sinks = self.q if self.sink_logits is None else self.sink_logits
        return calls.Scoring(*self.launch.scoring[:-1], sinks)


def layer_launch(
    layer: LayerCache,
    q: torch.Tensor,
    scores: Scores,
    max_queries: int | None,
    choice: dict[str, Any],
) -> LayerLaunch:
    """Return the launches of a layer for the shape and dtype of `q`. The result is cached."""
    key = (q.shape[1:], q.dtype, q.is_cuda, scores, max_queries, tuple(choice.items()))
    kept: LayerLaunch | None = layer.kept.get(key)
    if kept is None:
        kept = _worked_out(layer, q, scores, max_queries, choice)
        made = [one for one, launch in layer.kept.items() if isinstance(launch, LayerLaunch)]
        for old in made[: 1 - MOST_KEPT]:
            layer.kept.pop(old, None)
        layer.kept[key] = kept
    return kept


def _worked_out(
    layer: LayerCache,
    q: torch.Tensor,
    scores: Scores,
    max_queries: int | None,
    choice: dict[str, Any],
) -> LayerLaunch:
    if isinstance(layer.spec, LatentAttention):
        heads, (k, v) = 1, _latent_sides(layer, q)
    else:
        heads, (k, v) = layer.place("k").size("H"), _attention_sides(layer, q)
    shape = _shape(layer, q, k, v, heads, scores)
    key = calls.launch_key(layer, q.shape[1], q.dtype)
    mask = calls.mask_of(layer.spec.visibility)
    split = calls.work_split(key, shape.states, mask, max_queries, choice)
    wanted = max_queries is None or max_queries * key.group > split.few
    scoring = _scoring(layer, scores)
    few = _decode(layer, key, split, shape, (k.at, v.at), heads, max_queries, choice)
    many = _prefill(key, split, shape, heads, choice) if wanted else None
    if scoring.scale > 0 and layer.buffer.data_ptr() % 16 == 0:
        few = on_hopper(few, key, shape)
        if many is not None and not choice:
            many = prefill_on_hopper(many, key, shape, (k.at, v.at), calls.lead_of(layer, shape))
    return LayerLaunch(
        heads, k.at, v.at, shape, scoring, split, few, many,
        tune.dependent_launch(layer.buffer.device), {},
    )  # fmt: skip


def _attention_sides(layer: LayerCache, q: torch.Tensor) -> tuple[StoredSide, StoredSide]:
    """Return the formats and strides of an attention layer's K and V.

    Raises an error if no kernel supports the layer or the queries.
    """
    spec = layer.spec_as(Attention)
    formats.refuse_head(spec.head_dim, "K")
    formats.refuse_head(spec.v_dim or spec.head_dim, "V")
    checks.rows_of(q, "q", (None, None, spec.head_dim))
    heads = layer.place("k").size("H")
    if q.shape[1] % heads or not q.shape[1]:
        raise checks.no_kernel(
            f"The number of query heads must be a multiple of {heads}, the number of kv heads",
            f"{q.shape[1]} query heads",
            "Pass the query heads of this rank",
        )
    return formats.stored_side(layer, "k"), formats.stored_side(layer, "v")


def _latent_sides(layer: LayerCache, q: torch.Tensor) -> tuple[StoredSide, StoredSide]:
    """Return the formats and strides of an MLA layer's latents and rotary parts.

    Raises an error if no kernel supports the layer.
    """
    spec = layer.spec_as(LatentAttention)
    formats.refuse_head(spec.latent, "the latent")
    if not formats.attends_latent(spec):
        raise checks.no_kernel(
            "The GPU kernel requires the cache dtype auto, fp8 or fp8_ds_mla (v3), and rows whose "
            "numbers of elements are powers of two",
            f"cache dtype {spec.cache}, latents of {spec.latent} elements and rotary parts of "
            f"{spec.rope} elements",
            "Use one of these cache dtypes and sizes, or attend on a CPU",
        )
    checks.rows_of(q, "q", (None, None, spec.latent + spec.rope))
    return formats.stored_latent(layer, "latent"), formats.stored_latent(layer, "rope")


def _shape(
    layer: LayerCache,
    q: torch.Tensor,
    k: StoredSide,
    v: StoredSide,
    heads: int,
    scores: Scores,
) -> calls.AttentionShape:
    latent, states = isinstance(layer.spec, LatentAttention), layer.kernel_blocks.size("N")
    values = k.format if latent else v.format
    own = formats.dot_of(q)
    k_dot = calls.dot_for(own, k, values=False)
    return calls.AttentionShape(
        k.format, v.format, k_dot, k_dot if latent else calls.dot_for(own, v, values=True),
        "ieee" if k_dot == tl.float32 else "tf32",
        calls.OutputShape(q.shape[1] // heads, values.dim, values.width, scores.sink_logits),
        1 if scores.selected else states, latent, calls.mask_of(layer.spec.visibility)[0],
        bool(scores.softcap), states if scores.selected else 0,
    )  # fmt: skip


def _scoring(layer: LayerCache, scores: Scores) -> calls.Scoring:
    """Return the scoring parameters. The scale includes log2(e), unless there is a softcap."""
    spec = layer.spec
    scale, k_scale, v_scale = scores.scale, scores.k_scale, scores.v_scale
    if isinstance(spec, LatentAttention):
        kept_as_is = spec.cache not in _PER_TENSOR
    else:
        spec = layer.spec_as(Attention)
        kept_as_is = spec.cache not in _PER_TENSOR
        scale = spec.head_dim**-0.5 if scale is None else scale
    if kept_as_is:
        k_scale = v_scale = 1.0
    scale = (scale or 0.0) * k_scale
    scale = scale if scores.softcap else scale * LOG2E.value
    _, size, sink_tokens = calls.mask_of(spec.visibility)
    return calls.Scoring(scale, abs(scores.softcap or 0.0), v_scale, size, sink_tokens, None)


def _decode(
    layer: LayerCache,
    key: calls.LaunchKey,
    split: WorkSplit,
    shape: calls.AttentionShape,
    sides: tuple[SideRows, SideRows],
    heads: int,
    max_queries: int | None,
    choice: dict[str, Any],
) -> DecodeLaunch:
    rows = calls.rows_for(key.group, max_queries)
    use = calls.parameters("decode", key, rows, choice)
    words = calls.words_of(layer, shape, sides, rows)
    rows = rows if words.packed else max(16, rows)
    row_tiles = triton.cdiv(key.group, rows)
    programs = heads * row_tiles
    workers = max(1, tune.processors(key.device) * use["per_sm"] // programs)
    tiling = calls.Tiling(
        rows, split.tile, *fit_of(shape.states, split.tile), use["stages"], use.get("evict", ""),
        programs, row_tiles,
    )  # fmt: skip
    depth = rows if max_queries is None else min(rows, max_queries * key.group)
    options = {
        "num_warps": use["warps"],
        "num_stages": use["stages"],
        "maxnreg": use.get("registers"),
    }
    return DecodeLaunch(
        decode, tiling, words, workers, programs, depth, 2 * workers * programs * rows, options
    )


def _has_hopper_kernels(key: calls.LaunchKey, shape: calls.AttentionShape) -> bool:
    """Return whether the Hopper kernels support this GPU, Triton release, mask and scoring."""
    return (
        tune.architecture(key.device) == "hopper"
        and _GLUON[0] <= _release(triton.__version__) <= _GLUON[1]
        and shape.k_dot in (tl.bfloat16, tl.float16)
        and shape.mask == "causal"
        and not shape.softcap
        and not shape.out.sink_logits
    )


def on_hopper(
    launch: DecodeLaunch, key: calls.LaunchKey, shape: calls.AttentionShape
) -> DecodeLaunch:
    """Return `launch`, with a Hopper kernel for MLA if one supports this layer and GPU."""
    records = shape.k.kind == "records"
    suits = (
        _has_hopper_kernels(key, shape)
        and shape.latent
        and (shape.k.dim, shape.v.dim) == (512, 64)
        and shape.v.element == (shape.k_dot if records else shape.k.element)
        and shape.k.element in (shape.k_dot, tl.float8e4nv)
        and (not records or shape.k_dot == tl.bfloat16)
        and all(f.unit * f.element.primitive_bitwidth >= 128 for f in (shape.k, shape.v))
        and launch.tiling.tile == 64
    )
    if not suits:
        return launch
    few = launch.tiling.rows <= _FEW_LATENT_ROWS
    file = "few" if few else "decode"
    module = import_module(f"kvatlas.kernels.triton.attention.latent_{file}_device")
    return launch._replace(
        kernel=module.decode_latent_few if few else module.decode_latent,
        tiling=launch.tiling._replace(together=2),
        options={"num_warps": 4, "launch_pdl": True},
    )


def _prefill(
    key: calls.LaunchKey,
    split: WorkSplit,
    shape: calls.AttentionShape,
    heads: int,
    choice: dict[str, Any],
) -> PrefillLaunch:
    use = calls.parameters("prefill", key, 0, choice)
    fit = fit_of(shape.states, use["tile"])
    tiling = calls.Tiling(split.rows, use["tile"], *fit, use["stages"], "", heads)
    options = {"num_warps": use["warps"], "num_stages": use["stages"]}
    return PrefillLaunch(prefill, tiling, options, _ANY_NUMBER)


def prefill_on_hopper(
    launch: PrefillLaunch,
    key: calls.LaunchKey,
    shape: calls.AttentionShape,
    sides: tuple[SideRows, SideRows],
    lead: int,
) -> PrefillLaunch:
    """Return `launch`, with the Hopper kernel if it supports this layer and GPU.

    For 8-bit rows, reads of V start `lead` bytes before the row.
    """
    suits = (
        _has_hopper_kernels(key, shape)
        and not shape.latent
        and shape.k.dim == shape.v.dim == 128
        and shape.k.kind == shape.v.kind
        and _hopper_loads(shape.k, sides[0], shape.k_dot)
        and _hopper_loads(shape.v, sides[1], shape.v_dot)
        and launch.tiling.rows == 128
    )
    if not suits:
        return launch
    module = import_module("kvatlas.kernels.triton.attention.hopper_prefill_device")
    return PrefillLaunch(
        module.prefill_hopper,
        launch.tiling._replace(tile=128, stages=2, lead=lead if shape.k.bits == 8 else 0),
        {"num_warps": 4},
        tune.processors(key.device),
    )  # fmt: skip


def _hopper_loads(form: formats.StorageFormat, at: SideRows, dot: Any) -> bool:
    """Return whether Hopper's prefill kernel can load rows of format `form` with strides `at`."""
    if form.tile or at.rows.element != 1:
        return False
    if form.element == dot:
        return form.kind == "plain" and form.unit * form.bits == 128
    if form.kind == "nvfp4":
        return form.unit % 4 == 0 and form.scale_unit % 2 == 0 and at.scales.element == 1
    bytes_apart = form.kind in ("plain", "scaled") and form.element in (tl.int8, tl.float8e4nv)
    return (bytes_apart or form.kind == "int4") and form.unit % 4 == 0


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> _release("3.6.0+git1")
    (3, 6)
    """
    return tuple(int(number) for number in version.split(".")[:2])
