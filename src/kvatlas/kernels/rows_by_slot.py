"""Write and read rows by slot, in torch.

A slot is `block_id * N + i` for state i of a block of N states, as in vLLM's slot mapping. The
slots of a prefill form long runs, and each run is one strided copy. The slots of a decode step are
scattered and become one indexed copy. Both work on the views of a field, in any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvatlas.cache import LayerCache
from kvatlas.cache.tensors import checked_ids, whole_tensor
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.kernels.strided_copy import WORDS, as_runs, stretch_starts

_ROW_AXES = ("B", "N", "H", "C", "c")
_LONG = 4
"""Minimum states per run for which one copy per run is cheaper than indexing every row."""
_MANY = 256
"""Minimum rows for which a search for runs pays off."""
_LARGE = 128 << 10
"""Minimum bytes for which torch's strided copy pays for the overhead of its call."""


class SlotRun(NamedTuple):
    """Rows with consecutive slots: part of one block, or several whole blocks."""

    blocks: Int64s
    state: int
    row: int
    length: int


@dataclass(frozen=True)
class Slots:
    """Validated slots: block ids, indices in the blocks, and runs of consecutive slots."""

    numbers: torch.Tensor
    in_block: int
    """States per block."""
    runs: list[SlotRun] | None
    """Runs of consecutive slots; None if the slots are scattered or on a GPU."""

    @cached_property
    def blocks(self) -> torch.Tensor:
        """The block id of each slot."""
        return torch.div(self.numbers, self.in_block, rounding_mode="floor")

    @cached_property
    def states(self) -> torch.Tensor:
        """The index of each slot in its block."""
        return torch.remainder(self.numbers, self.in_block)


def find_slots(layer: LayerCache, slots: torch.Tensor) -> Slots:
    """Validate the slots of a layer, and find runs of consecutive slots.

    Raises an error if a slot is out of range.
    """
    states = layer.kernel_blocks.size("N")
    count = layer.kernel_blocks.size("B") * states
    hint = f"Pass block_id * {states} + i for state i of a block, as in vLLM's slot mapping"
    slots = checked_ids(slots, count, "Slots", hint)
    looked_for = slots.device.type == "cpu" and slots.numel() >= _MANY
    return Slots(slots, states, _slot_runs(slots.numpy(), states) if looked_for else None)


def kept_slots(slots: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (slots, *rows) without the entries whose slot is negative.

    Raises an error if there is not exactly one slot per row.
    """
    slots = whole_tensor(slots, "Slots", "Pass a slot for each row, or -1 to skip a row")
    if slots.dim() != 1 or any(row.shape[:1] != slots.shape for row in rows):
        shapes = " and ".join(str(tuple(row.shape)) for row in rows)
        got = f"slots of shape {tuple(slots.shape)} for rows of shape {shapes}"
        problem = "`slots` must have one axis, with one slot per row"
        hint = "Pass a slot for each row, or -1 to skip a row"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        return (slots[kept], *(row[kept] for row in rows))
    return (slots, *rows)


def write_fields(layer: LayerCache, slots: Slots, fields: Mapping[str, torch.Tensor]) -> None:
    """Write rows [T, ...] of each field; row i is written to the i-th of `slots`."""
    for name, values in fields.items():
        pages = _by_row(layer, name)
        pages, rows = _in_words(pages, _tiled_like(pages, values.to(pages.dtype)))
        if slots.runs is None:
            pages.index_put_((slots.blocks, slots.states), rows)
        else:
            _copy_runs(pages, rows, slots.runs, into_pages=True)


def read_fields(layer: LayerCache, slots: Slots) -> dict[str, torch.Tensor]:
    """Return rows [T, ...] of every field, by field name; row i is read from the i-th slot."""
    names = [field.name for field in layer.page.fields if not field.padding]
    return {name: read_field(layer, name, slots) for name in names}


def read_field(
    layer: LayerCache, name: str, slots: Slots, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows [T, ...] of a field, one per slot, in a new tensor or in `out`.

    If pages store a row as several tiles, the tiles are joined.
    """
    pages = _by_row(layer, name)
    tiled = "c" in layer.place(name).axes
    if slots.runs is None:
        words, in_turn = _row_words(layer, name, pages)
        if in_turn and out is not None:
            rows = _tiled_like(pages, out)
            if _widest_word(rows) >= words.element_size():
                torch.index_select(words, 0, slots.numbers, out=rows.view(words.dtype))
                return out
        if in_turn:
            rows = words.index_select(0, slots.numbers).view(pages.dtype)
        else:
            rows = words[slots.blocks, slots.states].view(pages.dtype)
        rows = rows.flatten(-2) if tiled else rows
        return rows if out is None else out.copy_(rows)
    if out is None:
        rows = pages.new_empty((slots.numbers.numel(), *pages.shape[2:]))
        out = rows.flatten(-2) if tiled else rows
    words, rows = _in_words(pages, _tiled_like(pages, out))
    _copy_runs(words, rows, slots.runs, into_pages=False)
    return out


def _by_row(layer: LayerCache, name: str) -> torch.Tensor:
    """Return a view of a field as [blocks, tokens, heads, row].

    A field without heads lacks that axis. A tiled row has two axes: tiles, and elements of a tile.
    """
    kept: torch.Tensor | None = layer.kept.get(("by row", name))
    if kept is None:
        axes = layer.place(name).axes
        order = [axes.index(axis) for axis in _ROW_AXES if axis in axes]
        kept = layer.kept["by row", name] = layer.field(name).permute(order)
    return kept


def _row_words(layer: LayerCache, name: str, pages: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return (view, flat): a view of a field's rows as the widest integers that fit its alignment.

    If all tokens are evenly spaced, `flat` is true and the view is [blocks * tokens, ...].
    Otherwise `flat` is false and the view is [blocks, tokens, ...].
    """
    kept: tuple[torch.Tensor, bool] | None = layer.kept.get(("row words", name))
    if kept is None:
        (words,) = _in_words(pages)
        in_turn = words.stride(0) == words.shape[1] * words.stride(1)
        kept = layer.kept["row words", name] = (words.flatten(0, 1) if in_turn else words, in_turn)
    return kept


def _tiled_like(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a view of rows [T, ...], split into tiles if `pages` [B, N, ...] stores tiled rows."""
    tiled = pages.dim() == rows.dim() + 2
    return torch.unflatten(rows, -1, pages.shape[-2:]) if tiled else rows


def _slot_runs(slots: Int64s, states: int) -> list[SlotRun] | None:
    """Return runs of consecutive slots; None if runs are so short that an indexed copy is faster.

    Each run is inside one block, or consists of whole blocks. A block has `states` slots.
    """
    starts = stretch_starts(slots)
    if len(slots) < _LONG * len(starts):
        return None
    # Cut runs at block boundaries; consecutive whole blocks then form one run again.
    cuts = np.union1d(starts, np.flatnonzero(slots % states == 0))
    lengths = np.diff(cuts, append=len(slots))
    blocks, first = np.divmod(slots[cuts], states)
    whole = (first == 0) & (lengths == states)
    goes_on = np.zeros(len(cuts), dtype=bool)
    goes_on[1:] = whole[1:] & whole[:-1]
    heads = np.flatnonzero(~goes_on).tolist()
    return [
        SlotRun(blocks[i:j], int(first[i]), int(cuts[i]), int(lengths[i:j].sum()))
        for i, j in zip(heads, [*heads[1:], len(cuts)], strict=True)
    ]


def _copy_runs(
    pages: torch.Tensor, rows: torch.Tensor, runs: list[SlotRun], *, into_pages: bool
) -> None:
    states = pages.shape[1]
    arrays = pages.numpy(), rows.numpy()
    for blocks, state, row, length in runs:
        if length < states:
            ends = arrays[0][blocks[0], state : state + length], arrays[1][row : row + length]
            target, source = ends if into_pages else ends[::-1]
            target[...] = source
            continue
        lines = torch.unflatten(rows[row : row + length], 0, (len(blocks), states))
        _copy_whole_blocks(pages, blocks, lines, into_pages=into_pages)


def _copy_whole_blocks(
    pages: torch.Tensor, blocks: Int64s, lines: torch.Tensor, *, into_pages: bool
) -> None:
    """Copy `pages[blocks]` to `lines` [blocks, tokens, ...], or back if `into_pages` is true.

    If ranges of adjacent blocks are large, each range is one copy. Otherwise a single indexed copy
    moves all blocks.
    """
    starts = stretch_starts(blocks)
    if len(starts) > 1 and lines.nbytes < _LARGE * len(starts):
        if not into_pages:
            torch.index_select(pages, 0, torch.from_numpy(blocks), out=lines)
        elif pages.stride(-1) == lines.stride(-1) == 1:
            as_runs(pages.numpy())[blocks] = as_runs(lines.numpy())
        else:
            pages.index_put_((torch.from_numpy(blocks),), lines)
        return
    for i, n in zip(starts.tolist(), np.diff(starts, append=len(blocks)).tolist(), strict=True):
        ends = pages[blocks[i] : blocks[i] + n], lines[i : i + n]
        target, source = ends if into_pages else ends[::-1]
        target.copy_(source)


def _in_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors viewed as integers, as wide as the alignment of every tensor permits."""
    word = min(_widest_word(tensor) for tensor in tensors)
    return [tensor.view(WORDS[word]) for tensor in tensors]


def _widest_word(tensor: torch.Tensor) -> int:
    item = tensor.element_size()
    if tensor.stride(-1) != 1 or not tensor.numel():
        return item
    steps = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return next(word for word in WORDS if word <= item or not any(s * item % word for s in steps))
