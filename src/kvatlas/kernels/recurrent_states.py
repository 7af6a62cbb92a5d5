"""Write a sequence's recurrent state to a block, and read it back.

A plan may split a state by heads into parts, each on a separate page or in a separate group. Pass
all parts together (`Cache.parts`). Callers still pass and receive one tensor per state; each part
stores a range of the tensor's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ShardRange
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.kernels.block_copy import block_ids

ConvOrder = Literal["SD", "DS"]
"""Axis order of a convolution state: `SD` is [taps, rows], `DS` is [rows, taps]."""


class _PartRange(NamedTuple):
    """A range of rows of a recurrent state, stored in one part.

    A part is the share of the state that is on one page. The first row of the range has index
    `start` in the state and index `local` in the part.
    """

    view: torch.Tensor
    ids: torch.Tensor
    axis: int
    local: int
    start: int
    length: int

    @property
    def held(self) -> torch.Tensor:
        return self.view.narrow(self.axis, self.local, self.length)

    def of(self, state: torch.Tensor) -> torch.Tensor:
        return state.narrow(self.axis, self.start, self.length)


def write_states(
    parts: LayerCache | Sequence[LayerCache],
    states: Mapping[str, torch.Tensor],
    ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    conv: ConvOrder | None = None,
) -> None:
    """Write states [sequences, ...], given by field name; sequence i goes to block `ids[i]`.

    Parts in separate groups have separate block tables: pass one tensor of ids per part. Pass
    `conv` if the axis order of the given convolution state differs from the spec's. Fields that
    are not passed keep their content.
    """
    parts = [parts] if isinstance(parts, LayerCache) else list(parts)
    blocks = _ids_by_part(parts, ids)
    for name, state in states.items():
        expected = (len(blocks[0]), *_shape(parts, name, conv))
        if tuple(state.shape) != expected:
            problem = f"The state of field {name!r} must be of shape {expected}"
            hint = (
                "Pass all parts of the layer, and states [sequences, ...] in the field's axis order"
            )
            raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(state.shape)}", hint=hint)
        for rows in _part_ranges(parts, blocks, name, conv):
            rows.held[rows.ids] = rows.of(state).to(rows.view.dtype)


def read_states(
    parts: LayerCache | Sequence[LayerCache],
    ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    conv: ConvOrder | None = None,
) -> dict[str, torch.Tensor]:
    """Return the states in blocks `ids`, by field name: [sequences, ...] in the stored dtype."""
    parts = [parts] if isinstance(parts, LayerCache) else list(parts)
    blocks = _ids_by_part(parts, ids)
    states = {}
    for name in (field.name for field in parts[0].page.fields if not field.padding):
        view, _ = _oriented(parts[0], name, conv)
        if len(parts) == 1:
            states[name] = view[blocks[0]]
            continue
        states[name] = view.new_empty((len(blocks[0]), *_shape(parts, name, conv)))
        for rows in _part_ranges(parts, blocks, name, conv):
            rows.of(states[name]).copy_(rows.held[rows.ids])
    return states


def _ids_by_part(
    parts: Sequence[LayerCache], ids: torch.Tensor | Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the block ids of each part; raise an error if two parts would share bytes."""
    shared = ids if isinstance(ids, torch.Tensor) else None
    by_part = list(ids) if shared is None else [shared] * len(parts)
    if len(by_part) != len(parts) or len({len(blocks) for blocks in by_part}) > 1:
        problem = f"`ids` must contain {len(parts)} tensors of equal length, one for each part"
        got = f"{len(by_part)} tensors of lengths {[len(blocks) for blocks in by_part]}"
        hint = "Pass one block id per sequence for each part"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if shared is not None and len({(p.buffer.data_ptr(), p.placement) for p in parts}) < len(parts):
        problem = "Parts in separate groups cannot share block ids"
        got = f"one tensor of ids for {len(parts)} parts of layer {parts[0].name!r}"
        hint = "Pass a list with one tensor of ids for each part"
        raise AtlasError(Code.OVERLAP, problem, got=got, hint=hint)
    return [block_ids(part, blocks) for part, blocks in zip(parts, by_part, strict=True)]


def _part_ranges(
    parts: Sequence[LayerCache], ids: list[torch.Tensor], name: str, conv: ConvOrder | None
) -> Iterator[_PartRange]:
    """Yield, for each part of a split state, the rows of field `name` that the part stores."""
    for part, blocks in zip(parts, ids, strict=True):
        view, axes = _oriented(part, name, conv)
        field = part.page.field(name)
        if not field.ranges:  # Replicated: every part holds the whole field.
            yield _PartRange(view, blocks, 1, 0, 0, view.shape[1])
            continue
        axis = axes.index(str(field.sharding.axis))
        for rows in field.ranges:
            start = int(np.searchsorted(_rows_held(parts, name), rows.start))
            yield _PartRange(view, blocks, axis, rows.local, start, rows.length)


def _rows_held(parts: Sequence[LayerCache], name: str) -> Int64s:
    """Return the rows of field `name` that the parts store, numbered as in the unsharded model."""
    return _union(tuple(rows for part in parts for rows in part.page.field(name).ranges))


@lru_cache(maxsize=256)
def _union(ranges: tuple[ShardRange, ...]) -> Int64s:
    rows = [np.arange(held.start, held.start + held.length) for held in ranges]
    return np.unique(np.concatenate(rows))


def _shape(parts: Sequence[LayerCache], name: str, conv: ConvOrder | None) -> tuple[int, ...]:
    view, axes = _oriented(parts[0], name, conv)
    shape = list(view.shape)
    field = parts[0].page.field(name)
    if field.ranges:
        shape[axes.index(str(field.sharding.axis))] = len(_rows_held(parts, name))
    return tuple(shape[1:])


def _oriented(
    part: LayerCache, name: str, conv: ConvOrder | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return (view, axis names) of a field. A convolution state is permuted to the order `conv`."""
    view, axes = part.field(name), part.place(name).axes
    if name != "conv" or conv is None:
        return view, axes
    wanted = ("B", "T", "R") if conv == "SD" else ("B", "R", "T")
    return view.permute([axes.index(axis) for axis in wanted]), wanted
