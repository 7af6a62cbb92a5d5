"""Rows in and out of pages by slots: what all writes and reads are made of.

A slot is block * N + state, as engines number them. Slots of a prefill come in long
stretches, and a stretch moves as one strided copy; slots of a decode come one by one and
move as one indexed copy. Both work on the views of a field, in whatever order it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.strided_copy import LANES, as_runs, stretch_starts

_ROW_AXES = ("B", "N", "H", "C", "c")
_LONG = 4
"""States in a stretch from which a copy for each costs less than indexing every row."""
_MANY = 256
"""Rows from which it is worth looking for stretches at all."""
_LARGE = 128 << 10
"""Bytes from which torch's strided copy is worth the price of its call."""


class Piece(NamedTuple):
    """Rows that lie together: part of one block, or whole blocks in turn."""

    blocks: NDArray[np.int64]
    state: int
    row: int
    length: int


class Slots(NamedTuple):
    """Slots that were checked: blocks and states, and the stretches that they come in."""

    blocks: torch.Tensor
    states: torch.Tensor
    pieces: list[Piece] | None
    """None where slots are scattered."""


def find_slots(layer: LayerCache, slots: torch.Tensor) -> Slots:
    """Slots of a layer, refused where there are no such states."""
    states = layer.kernel_blocks.size("N")
    count = layer.kernel_blocks.size("B") * states
    slots = checked(slots, count, "Slots", "Check the block table, and slots = block * N + state")
    pieces = None
    if slots.device.type == "cpu" and slots.numel() >= _MANY:
        pieces = _pieces(slots.numpy(), states)
    return Slots(
        torch.div(slots, states, rounding_mode="floor"), torch.remainder(slots, states), pieces
    )


def checked(ids: torch.Tensor, count: int, what: str, hint: str) -> torch.Tensor:
    """Ids as int64, all of them in 0..count-1."""
    if ids.numel():
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= count:
            rule = f"{what} are 0..{count - 1}"
            raise AtlasError(Code.OUT_OF_RANGE, rule, got=f"{low}..{high}", hint=hint)
    return ids.long()


def by_row(layer: LayerCache, name: str) -> torch.Tensor:
    """A field as [B, N, H, row], or less where it has no heads; a tiled row has two axes."""
    axes = layer.place(name).axes
    if not set(axes) <= set(_ROW_AXES):
        raise AtlasError(
            Code.BAD_AXES,
            "Rows are those of fields with states",
            got=f"{name} with axes {axes}",
            hint="Write and read recurrent states whole",
        )
    return layer.field(name).permute([axes.index(axis) for axis in _ROW_AXES if axis in axes])


def put_rows(target: torch.Tensor, slots: Slots, rows: torch.Tensor) -> None:
    """Rows [T, ...] into a field [B, N, ...]."""
    if target.dim() == rows.dim() + 2:
        rows = torch.unflatten(rows, -1, target.shape[-2:])
    target, rows = _in_lanes(target, rows)
    if slots.pieces is None:
        target.index_put_((slots.blocks, slots.states), rows)
    else:
        _walk(target, rows, slots.pieces, into_pages=True)


def take_rows(source: torch.Tensor, slots: Slots, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [T, ...] of a field [B, N, ...], in a new tensor or in `out`."""
    if slots.pieces is None and out is None:
        (pages,) = _in_lanes(source)
        return pages[slots.blocks, slots.states].view(source.dtype)
    shape = (slots.blocks.numel(), *source.shape[2:])
    found = source.new_empty(shape) if out is None else out
    pages, rows = _in_lanes(source, found)
    if slots.pieces is None:
        rows.copy_(pages[slots.blocks, slots.states])
    else:
        _walk(pages, rows, slots.pieces, into_pages=False)
    return found


def write_fields(layer: LayerCache, slots: Slots, fields: Mapping[str, torch.Tensor]) -> None:
    """Rows of several fields into the same states."""
    for name, rows in fields.items():
        target = by_row(layer, name)
        put_rows(target, slots, rows.to(target.dtype))


def read_fields(layer: LayerCache, slots: Slots) -> dict[str, torch.Tensor]:
    """Rows of all fields of the same states, tiles put together again."""
    found = {}
    for field in layer.page.fields:
        if not field.padding:
            rows = take_rows(by_row(layer, field.name), slots)
            tiled = any(axis.name == "c" for axis in field.axes)
            found[field.name] = rows.flatten(-2) if tiled else rows
    return found


def kept_slots(slots: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Slots and rows without those that are not stored, refused where their numbers differ."""
    if slots.dim() != 1 or any(row.shape[:1] != slots.shape for row in rows):
        raise AtlasError(
            Code.BAD_TENSOR,
            "Every row has a slot",
            got=f"rows {[tuple(row.shape) for row in rows]} for slots {tuple(slots.shape)}",
            hint="Pass one slot for each row, negative where it is not stored",
        )
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        return (slots[kept], *(row[kept] for row in rows))
    return (slots, *rows)


def _pieces(slots: NDArray[np.int64], states: int) -> list[Piece] | None:
    """Stretches, each inside one block or over whole blocks; None where they are short."""
    starts = stretch_starts(slots)
    if len(slots) < _LONG * len(starts):
        return None
    # A stretch is cut at the borders of blocks; whole blocks in turn are then one piece.
    cuts = np.union1d(starts, np.flatnonzero(slots % states == 0))
    lengths = np.diff(cuts, append=len(slots))
    blocks, first = np.divmod(slots[cuts], states)
    whole = (first == 0) & (lengths == states)
    goes_on = np.zeros(len(cuts), dtype=bool)
    goes_on[1:] = whole[1:] & whole[:-1]
    heads = np.flatnonzero(~goes_on)
    found = []
    for head, end in zip(heads.tolist(), [*heads[1:].tolist(), len(cuts)], strict=True):
        row, length = int(cuts[head]), int(lengths[head:end].sum())
        found.append(Piece(blocks[head:end], int(first[head]), row, length))
    return found


def _walk(
    pages: torch.Tensor, rows: torch.Tensor, pieces: list[Piece], *, into_pages: bool
) -> None:
    states = pages.shape[1]
    quick = pages.numpy(), rows.numpy()
    for blocks, state, row, length in pieces:
        if length < states:
            page, line = quick[0][blocks[0], state : state + length], quick[1][row : row + length]
            target, source = (page, line) if into_pages else (line, page)
            target[...] = source
            continue
        lines = torch.unflatten(rows[row : row + length], 0, (len(blocks), states))
        _walk_blocks(pages, blocks, lines, into_pages=into_pages)


def _walk_blocks(
    pages: torch.Tensor, blocks: NDArray[np.int64], lines: torch.Tensor, *, into_pages: bool
) -> None:
    """Whole blocks: neighbours as one copy where that is large, else all of them by index."""
    starts = stretch_starts(blocks)
    nbytes = lines.numel() * lines.element_size()
    if nbytes < _LARGE * len(starts) and len(starts) > 1:
        if not into_pages:
            torch.index_select(pages, 0, torch.from_numpy(blocks), out=lines)
        elif pages.stride(-1) == lines.stride(-1) == 1:
            as_runs(pages.numpy())[blocks] = as_runs(lines.numpy())
        else:
            pages.index_put_((torch.from_numpy(blocks),), lines)
        return
    for i, n in zip(starts.tolist(), np.diff(starts, append=len(blocks)).tolist(), strict=True):
        page, line = pages[blocks[i] : blocks[i] + n], lines[i : i + n]
        target, source = (page, line) if into_pages else (line, page)
        target.copy_(source)


def _in_lanes(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes as elements that are as wide as all of them allow."""
    lane = min(_lane(tensor) for tensor in tensors)
    return [tensor.view(LANES[lane]) for tensor in tensors]


def _lane(tensor: torch.Tensor) -> int:
    item = tensor.element_size()
    if tensor.stride(-1) != 1 or not tensor.numel():
        return item
    steps = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return next(lane for lane in LANES if lane <= item or not any(s * item % lane for s in steps))
