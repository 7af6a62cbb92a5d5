"""Quantise K and V of a batch and write them to their slots, in one launch."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels.hadamard import signs
from kvatlas.kernels.triton import checks, relaunch, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import BatchRows, batch_rows
from kvatlas.kernels.triton.storage_formats import SideRows, StorageFormat, StoredSide
from kvatlas.kernels.triton.write_device import write_rows
from kvatlas.specs import Attention, LatentAttention

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes."""
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Cache dtypes with only a per-tensor scale."""
_PER_TENSOR = (*_FP8, "nvfp4")
"""Cache dtypes with a per-tensor scale, including those that also have other scales."""


def write(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **choice: Any,
) -> None:
    """Write K and V [tokens, heads, D] to `slots`, quantised to the layer's cache dtype.

    A slot is `block_id * N + i` for state i of a block of N states, as in vLLM's slot mapping.
    Negative slots are skipped. K and V may be slices of a fused projection: only their last axis
    must be contiguous. `choice` overrides the tuned settings.
    """
    spec = layer.spec_as(Attention)
    scales = (float(k_scale), float(v_scale)) if spec.cache in _PER_TENSOR else (1.0, 1.0)
    _write(layer, (k, v), slots, scales, choice)


def write_latent(
    layer: LayerCache,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scale: float = 1.0,
    **choice: Any,
) -> None:
    """Write latents [n, latent] and rotary parts [n, rope] to `slots`, one row to each slot."""
    layer.spec_as(LatentAttention)
    checks.rows_of(latent, "latent", (None, None))
    checks.rows_of(rope, "rope", (None, None))
    rows = latent.unsqueeze(1), rope.unsqueeze(1)
    _write(layer, rows, slots, (float(kv_scale), float(kv_scale)), choice)


class WrittenSide(NamedTuple):
    """New rows of K or V, and the strides of their destination."""

    rows: BatchRows
    at: SideRows
    scale: float
    """The per-tensor scale."""
    table: torch.Tensor
    """Sign bits of the int4 rotation."""


class WriteLaunch(NamedTuple):
    """Launch parameters of a layer for batches with one row shape; cached with the layer."""

    sides: tuple[StoredSide, StoredSide]
    tables: tuple[torch.Tensor | None, torch.Tensor | None]
    """Sign bits of the rotation, if the format has one."""
    rows_at_once: int
    constants: dict[str, Any]
    """Compile-time constants, in the order of the kernel's parameters."""
    options: dict[str, Any]
    """Compiler options for Triton."""
    compiled: dict[Hashable, relaunch.Compiled]
    """Compiled kernels, by kind of rows and slots. Inputs of these kinds have passed the checks."""


class WriteKind(NamedTuple):
    """The properties of rows and slots on which compiled kernels and the argument checks depend."""

    tensors: tuple[relaunch.TensorKind, ...]
    one_row: bool
    aligned_count: bool


def write_kind(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> WriteKind:
    """Return the properties of rows and slots, except sizes, on which compiled kernels depend."""
    kinds = relaunch.kind_of(k), relaunch.kind_of(v), relaunch.kind_of(slots)
    return WriteKind(kinds, *relaunch.number_kind(slots.numel()))


def _write(
    layer: LayerCache,
    rows: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scales: tuple[float, float],
    choice: dict[str, Any],
) -> None:
    k, v = rows
    key = WriteLaunch, k.shape[1:], v.shape[1:], k.dtype, v.dtype, tuple(choice.items())
    launch: WriteLaunch | None = layer.kept.get(key)
    if launch is None:
        launch = layer.kept[key] = _worked_out(layer, rows, choice)
    count = slots.numel()
    kind = write_kind(k, v, slots)
    known = launch.compiled.get(kind)
    if known is None:
        checks.integers(slots, "slots", axes=1)
        checks.same_device(layer.buffer.device, k=k, v=v, slots=slots)
    # The launch's cache key covers all other properties of the rows.
    if k.shape[0] != count or not checks.last_is_tight(k):
        checks.rows_of(k, "k", (count, None, None))
    if v.shape[0] != count or not checks.last_is_tight(v):
        checks.rows_of(v, "v", (count, None, None))
    if checks.debugging():
        places = layer.kernel_blocks.size("B") * layer.kernel_blocks.size("N")
        checks.in_range(slots.clamp(min=0), places, "Slots")
    if not count:
        return
    compiled: relaunch.Compiled = {} if known is None else known
    (k_side, v_side), (k_table, v_table) = launch.sides, launch.tables
    with tune.on(k.device):
        relaunch.launch(
            write_rows, (-(-count * k.shape[1] // launch.rows_at_once), 1, 1),
            (
                WrittenSide(
                    batch_rows(k), k_side.at, scales[0], slots if k_table is None else k_table
                ),
                WrittenSide(
                    batch_rows(v), v_side.at, scales[1], slots if v_table is None else v_table
                ),
                slots, count, layer.buffer,
            ),
            launch.constants, launch.options, compiled,
        )  # fmt: skip
    if known is None and k.is_cuda:
        relaunch.keep(launch.compiled, kind, kind.tensors, compiled)


def _worked_out(
    layer: LayerCache, rows: tuple[torch.Tensor, torch.Tensor], choice: dict[str, Any]
) -> WriteLaunch:
    if isinstance(layer.spec, LatentAttention):
        sides, per_tensor = _latent_sides(layer, rows), layer.spec.cache != "auto"
    else:
        sides = _attention_sides(layer, rows)
        per_tensor = layer.spec_as(Attention).cache in _FP8
    k, v = (side.format for side in sides)
    device = layer.buffer.device
    use = {**tune.choose("write", device, kind=k.kind), **choice}
    count = max(1, use["tile"] // max(k.width, v.width))
    early = tune.dependent_launch(device)
    constants = {
        "K_FORMAT": k,
        "V_FORMAT": v,
        "HEADS": rows[0].shape[1],
        "STATES": layer.kernel_blocks.size("N"),
        "COUNT": count,
        "PER_TENSOR": per_tensor,
        "EARLY": early["EARLY"],
    }
    options = {
        "num_warps": use["warps"],
        # Fused multiply-adds round differently, so codes would differ from those of torch.
        "enable_fp_fusion": k.kind not in ("scaled", "int4"),
        **early,
    }
    tables = _turned_signs(k, rows[0].dtype, device), _turned_signs(v, rows[1].dtype, device)
    return WriteLaunch(sides, tables, count, constants, options, {})


def _attention_sides(
    layer: LayerCache, rows: tuple[torch.Tensor, torch.Tensor]
) -> tuple[StoredSide, StoredSide]:
    """Return the formats and strides of an attention layer's K and V; check the new rows."""
    spec = layer.spec_as(Attention)
    heads, v_dim = layer.place("k").size("H"), spec.v_dim or spec.head_dim
    formats.refuse_head(spec.head_dim, "K")
    formats.refuse_head(v_dim, "V")
    odd = any(n & (n - 1) or n < 16 for n in (spec.head_dim, v_dim))
    if spec.cache.startswith("turboquant") and odd:
        raise checks.no_kernel(
            f"The cache dtype {spec.cache} requires head sizes of powers of two, at least 16",
            f"head sizes of {spec.head_dim} for K and {v_dim} for V",
            "Use another cache dtype",
        )
    for name, new, dim in zip("kv", rows, (spec.head_dim, v_dim), strict=True):
        checks.rows_of(new, name, (None, heads, dim))
    return formats.stored_side(layer, "k"), formats.stored_side(layer, "v")


def _latent_sides(
    layer: LayerCache, rows: tuple[torch.Tensor, torch.Tensor]
) -> tuple[StoredSide, StoredSide]:
    """Return the formats and strides of an MLA layer's two fields; check the new rows."""
    spec = layer.spec_as(LatentAttention)
    formats.refuse_head(spec.latent, "the latent")
    if not formats.writes_latent(spec):
        raise checks.no_kernel(
            "The GPU kernel requires the cache dtype auto or fp8 for latents",
            f"cache dtype {spec.cache}",
            "Use kvatlas.kernels.write_latent, which supports all cache dtypes",
        )
    checks.rows_of(rows[0], "latent", (None, 1, spec.latent))
    checks.rows_of(rows[1], "rope", (None, 1, spec.rope))
    return formats.stored_latent(layer, "latent"), formats.stored_latent(layer, "rope")


@lru_cache(maxsize=16)
def _turned_signs(
    form: StorageFormat, rows: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return one mask for each column of int4 rows; return None for other formats.

    A mask is the sign bit if the rotation of int4 flips the sign of the column, otherwise 0.
    """
    if form.kind != "int4":
        return None
    minus = signs(1 << form.rotation, device).repeat(form.width >> form.rotation) < 0
    bits = _BITS[rows.itemsize]
    return torch.where(minus, torch.iinfo(bits).min, 0).to(bits)
