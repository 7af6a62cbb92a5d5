"""Append new tokens to the cache and gather all tokens that attention sees, in one launch.

A model step needs one launch for every layer, and preparing a launch in Python takes longer than
the launch itself. Launch parameters that depend only on the step are therefore computed for the
first layer and cached. Parameters that depend only on the layer are computed in its first step and
cached.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.kernels.table_checks import check_appendable, check_block
from kvatlas.kernels.triton import checks, relaunch, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import RowSteps
from kvatlas.kernels.triton.append_device import append_rows
from kvatlas.specs import Attention

_TILE = 4096
"""Elements per tile. A program processes one tile of K and one of V."""
_WARPS = 4
_ROOM = 512
"""Granularity of the output buffer, in elements; V starts at a multiple of it."""

_MOST_SEQUENCES = 65_535
"""Maximum number of sequences: the largest size of a CUDA grid's second axis."""

RoomView = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a tensor in an output buffer, in elements."""


class RowStrides(NamedTuple):
    """Strides of the rows of a batch [sequences, heads, tokens, D], in elements."""

    sequence: int
    head: int
    token: int


class AppendedRows(NamedTuple):
    """Strides of K and V in their pool, and strides of the new rows of K and of V."""

    k: RowSteps
    v: RowSteps
    k_new: RowStrides
    v_new: RowStrides


class AppendShape(NamedTuple):
    """Compile-time constants of the kernel, except the formats of K and V."""

    heads: int
    states: int
    """States per kernel block."""
    block: int
    """States per block of the tables."""
    tokens: int
    """Tokens per tile."""
    early: bool


class LayerAppend(NamedTuple):
    """Launch parameters of a layer that are the same in every step; cached with the layer."""

    sides: tuple[RowSteps, RowSteps]
    dims: tuple[int, int]
    """Elements per row of K and of V."""
    dtype: torch.dtype
    device: torch.device
    shape: AppendShape
    constants: dict[str, Any]
    """Compile-time constants, in the order of the kernel's parameters."""
    options: dict[str, Any]
    """Compiler options for Triton."""
    known: dict[Hashable, tuple[AppendedRows, relaunch.Compiled]]
    """Checked strides and compiled kernels, by the kind of rows and tables."""


class StepRows(NamedTuple):
    """Launch parameters of a step, for layers with the same row and block sizes."""

    programs: tuple[int, int, int]
    tables: tuple[torch.Tensor, int]
    """Kernel block ids of each sequence, and their stride."""
    tables_kind: relaunch.TensorKind
    new: tuple[int, int, int]
    """Number of sequences, heads and new tokens."""
    room: int
    """Elements of the output buffer for K and V."""
    k_view: RoomView
    v_view: RoomView


class TableAppend:
    """The function that `kernels.append_step` returns for block tables on a GPU."""

    def __init__(
        self, tables: torch.Tensor, *, block: int, start: int, count: int, first: int, visible: int
    ) -> None:
        checks.integers(tables, "tables", axes=2)
        if len(tables) > _MOST_SEQUENCES:
            problem = f"append_step supports at most {_MOST_SEQUENCES:,} sequences"
            hint = "Split the batch and call append_step for each part"
            raise checks.no_kernel(problem, f"{len(tables):,} sequences", hint)
        self.tables, self.block = tables, block
        self.numbers = first, start, start + count, visible
        self._alike: dict[tuple[AppendShape, tuple[int, int]], StepRows] = {}

    def __call__(
        self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V of a layer's new tokens and gather all visible tokens, in one launch."""
        own: LayerAppend = layer.kept.get(LayerAppend) or _for_any_step(layer)
        rows = self._alike.get((own.shape, own.dims)) or self._for_layers_like(layer, own)
        kind = (
            k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % relaunch.ALIGNED == 0,
            v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % relaunch.ALIGNED == 0,
            rows.new, rows.tables_kind,
        )  # fmt: skip
        known = own.known.get(kind)
        at, compiled = known or (_checked(own, rows, k, v), {})
        room = torch.empty(rows.room, dtype=own.dtype, device=own.device)
        keys, values = room.as_strided(*rows.k_view), room.as_strided(*rows.v_view)
        if not rows.room:
            return keys, values
        with tune.on(own.device):
            relaunch.launch(
                append_rows, rows.programs,
                ((k, v), (keys, values), at, rows.tables, *self.numbers, layer.buffer),
                own.constants, own.options, compiled,
            )  # fmt: skip
        if known is None and k.is_cuda:
            tensors = relaunch.kind_of(k), relaunch.kind_of(v), rows.tables_kind
            relaunch.keep(own.known, kind, tensors, (at, compiled))
        return keys, values

    def _for_layers_like(self, layer: LayerCache, own: LayerAppend) -> StepRows:
        """Return the step's launch parameters for layers with the row and block sizes of `own`.

        The gathered rows grow with every step. Their buffer is up to an eighth larger than needed,
        so that torch's allocator can often reuse the buffer of the previous step. Otherwise torch
        would call cudaMalloc, which takes longer than the step.
        """
        check_block(layer, self.block)
        tables = layer.kernel_ids(self.tables)
        first, start, stop, _ = self.numbers
        if checks.debugging():
            read = tables[:, : ceil_div(stop, own.shape.states)].clamp(min=0)
            checks.in_range(read, layer.kernel_blocks.size("B"))
        sequences, heads, tokens = len(tables), own.shape.heads, stop - first
        k_dim, v_dim = own.dims
        count = sequences * heads * tokens
        v_begin = ceil_div(count * k_dim, _ROOM) * _ROOM
        needed = v_begin + count * v_dim
        unit = max(_ROOM, 1 << max(0, needed.bit_length() - 4))
        made = self._alike[own.shape, own.dims] = StepRows(
            programs=(heads * ceil_div(tokens, own.shape.tokens), sequences, 1),
            tables=(tables, tables.stride(0)),
            tables_kind=relaunch.kind_of(tables),
            new=(sequences, heads, stop - start),
            room=ceil_div(needed, unit) * unit if count else 0,
            k_view=_contiguous((sequences, heads, tokens, k_dim), 0),
            v_view=_contiguous((sequences, heads, tokens, v_dim), v_begin),
        )
        return made


def _contiguous(sizes: tuple[int, int, int, int], begin: int) -> RoomView:
    _, heads, tokens, dim = sizes
    return sizes, (heads * tokens * dim, tokens * dim, dim, 1), begin


def _for_any_step(layer: LayerCache) -> LayerAppend:
    spec = layer.spec_as(Attention)
    dims = spec.head_dim, spec.v_dim or spec.head_dim
    formats.refuse_head(dims[0], "K")
    formats.refuse_head(dims[1], "V")
    check_appendable(spec)
    k, v = formats.stored_side(layer, "k"), formats.stored_side(layer, "v")
    device = layer.buffer.device
    early = tune.dependent_launch(device)
    shape = AppendShape(
        heads=layer.place("k").size("H"),
        states=layer.kernel_blocks.size("N"),
        block=layer.block_states,
        tokens=max(1, _TILE // max(k.format.width, v.format.width)),
        early=early["EARLY"],
    )
    made = layer.kept[LayerAppend] = LayerAppend(
        sides=(k.at.rows, v.at.rows),
        dims=dims,
        dtype=layer.field("k").dtype,
        device=device,
        shape=shape,
        constants={"K_FORMAT": k.format, "V_FORMAT": v.format, "SHAPE": shape},
        options={"num_warps": _WARPS, **{n: early[n] for n in early if n != "EARLY"}},
        known={},
    )
    return made


def _checked(own: LayerAppend, rows: StepRows, k: torch.Tensor, v: torch.Tensor) -> AppendedRows:
    """Return the strides of new K and V; raise an error if they do not match the layer or step."""
    checks.rows_of(k, "k", (*rows.new, own.dims[0]))
    checks.rows_of(v, "v", (*rows.new, own.dims[1]))
    checks.same_device(own.device, k=k, v=v, tables=rows.tables[0])
    if {k.dtype, v.dtype} != {own.dtype}:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"K and V must have the layer's dtype, {own.dtype}",
            got=f"{k.dtype} and {v.dtype}",
            hint="Convert K and V, or call kernels.write and kernels.read, which convert dtypes",
        )
    return AppendedRows(*own.sides, RowStrides(*k.stride()[:3]), RowStrides(*v.stride()[:3]))
