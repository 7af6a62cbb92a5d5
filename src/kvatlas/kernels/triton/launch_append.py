"""New tokens of sequences into their pages, and all that attention sees out of them, at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.triton import checks, relaunch, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import RowSteps
from kvatlas.kernels.triton.append_device import append_rows
from kvatlas.specs import Attention

_TILE = 8192
"""Elements of a tile: a program has one of K and one of V."""
_WARPS = 4
_ROOM = 512
"""Elements that the room for rows is a multiple of, and where V begins in it."""


class SequenceRows(NamedTuple):
    """Rows [sequences, heads, tokens, elements] of a batch: a tensor, and its strides."""

    tensor: torch.Tensor
    sequence: int
    head: int
    token: int


class AppendedSide(NamedTuple):
    """New rows of K or of V, where they go, and where all rows in sight are put."""

    rows: SequenceRows
    at: RowSteps
    out: torch.Tensor


class SequenceTables(NamedTuple):
    """Block tables [sequences, blocks]: a tensor, and its stride."""

    tensor: torch.Tensor
    sequence: int


class AppendShape(NamedTuple):
    """What the kernel is compiled for besides formats."""

    heads: int
    states: int
    """Of a block."""
    tokens: int
    """Of a tile."""
    early: bool


class AppendLaunch(NamedTuple):
    """What a layer's launches are: kept with the layer."""

    at: tuple[RowSteps, RowSteps]
    """Where K and V lie."""
    dims: tuple[int, int]
    """Elements of rows of K and of V."""
    dtype: torch.dtype
    shape: AppendShape
    constants: dict[str, Any]
    """What the kernel is compiled for, in its order."""
    options: dict[str, Any]
    """What Triton compiles with."""
    compiled: dict[Hashable, relaunch.Compiled]
    """What was compiled for rows and tables of a kind, which were looked at then."""


def append_and_gather(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    *,
    start: int,
    first: int = 0,
    visible: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function of `kernels` in one launch; rows that it returns are contiguous."""
    launch: AppendLaunch | None = layer.kept.get(AppendLaunch)
    if launch is None:
        launch = layer.kept[AppendLaunch] = _worked_out(layer)
    kinds = relaunch.kind_of(k), relaunch.kind_of(v), relaunch.kind_of(tables)
    kind = kinds, k.shape, v.shape, tables.shape
    known = launch.compiled.get(kind)
    if known is None:
        _check(layer, launch, k, v, tables)
    sequences, heads, count, _ = k.shape
    stop, shape = start + count, launch.shape
    if not 0 <= first <= start or stop > tables.shape[1] * shape.states:
        raise _outside(first, start, stop, tables.shape[1] * shape.states)
    if checks.debugging():
        checks.in_range(tables.clamp(min=0), layer.kernel_blocks.size("B"))
    tokens = stop - first
    keys, values = _room(k, (sequences, heads, tokens), launch.dims)
    if not keys.numel():
        return keys, values
    compiled: relaunch.Compiled = {} if known is None else known
    k_at, v_at = launch.at
    with tune.on(k.device):
        relaunch.launch(
            append_rows, (heads * -(-tokens // shape.tokens), sequences, 1),
            (
                AppendedSide(SequenceRows(k, *k.stride()[:3]), k_at, keys),
                AppendedSide(SequenceRows(v, *v.stride()[:3]), v_at, values),
                SequenceTables(tables, tables.stride(0)),
                first, start, stop, visible, tokens, layer.buffer,
            ),
            launch.constants, launch.options, compiled,
        )  # fmt: skip
    if known is None and k.is_cuda:
        relaunch.keep(launch.compiled, kind, kinds, compiled)
    return keys, values


def _worked_out(layer: LayerCache) -> AppendLaunch:
    spec = layer.spec_as(Attention)
    dims = spec.head_dim, spec.v_dim or spec.head_dim
    formats.refuse_head(dims[0], "K")
    formats.refuse_head(dims[1], "V")
    if spec.cache != "auto":
        problem, hint = "Rows are quantised", "Use write, and read"
        raise checks.no_kernel(problem, spec.cache, hint)
    k, v = formats.stored_side(layer, "k"), formats.stored_side(layer, "v")
    early = tune.dependent_launch(layer.buffer.device)
    shape = AppendShape(
        heads=layer.place("k").size("H"),
        states=layer.kernel_blocks.size("N"),
        tokens=max(1, _TILE // max(k.format.width, v.format.width)),
        early=early["EARLY"],
    )
    constants = {"K_FORMAT": k.format, "V_FORMAT": v.format, "SHAPE": shape}
    options = {"num_warps": _WARPS, **{n: value for n, value in early.items() if n != "EARLY"}}
    dtype = layer.field("k").dtype
    return AppendLaunch((k.at.rows, v.at.rows), dims, dtype, shape, constants, options, {})


def _check(
    layer: LayerCache, launch: AppendLaunch, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor
) -> None:
    """Refuse rows that are not the layer's, and tables that are not theirs."""
    checks.rows_of(k, "k", (None, launch.shape.heads, None, launch.dims[0]))
    checks.rows_of(v, "v", (*k.shape[:3], launch.dims[1]))
    checks.integers(tables, "Tables", axes=2)
    checks.same_device(layer.buffer.device, k=k, v=v, tables=tables)
    if {k.dtype, v.dtype} != {launch.dtype} or tables.shape[0] != k.shape[0]:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"K and V must be {launch.dtype}, as the layer keeps them, and sequences have tables",
            got=f"{k.dtype} and {v.dtype} of {k.shape[0]} sequences, {tables.shape[0]} tables",
            hint="Use write, and read, which convert",
        )


def _room(
    like: torch.Tensor, rows: tuple[int, int, int], dims: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors for K and V of `rows` sequences, heads and tokens, in up to an eighth more memory.

    Rows grow with every step: memory of the same size is at hand from the step before,
    where torch would ask the device for more of it, which takes longer than the step.
    """
    sequences, heads, tokens = rows
    count = sequences * heads * tokens
    behind_k = -(-count * dims[0] // _ROOM) * _ROOM
    needed = behind_k + count * dims[1]
    unit = max(_ROOM, 1 << max(0, needed.bit_length() - 4))
    room = torch.empty(-(-needed // unit) * unit, dtype=like.dtype, device=like.device)
    keys, values = (
        room.as_strided((*rows, dim), (heads * tokens * dim, tokens * dim, dim, 1), begin)
        for dim, begin in zip(dims, (0, behind_k), strict=True)
    )
    return keys, values


def _outside(first: int, start: int, stop: int, most: int) -> AtlasError:
    return AtlasError(
        Code.OUT_OF_RANGE,
        "Tokens to read begin behind the new ones, or these end behind the tables",
        got=f"tokens from {first} on, new ones {start}..{stop - 1}, tables for {most}",
        hint="Reserve blocks for new tokens first",
    )
