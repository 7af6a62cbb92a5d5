"""Recurrent states: a sequence's whole state into a block, and back.

A plan may cut a state by heads, each part in a slot or a group of its own; then all parts
are passed together (`Cache.parts`), and the state is one tensor all the same: each part says
which of the rows it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field
from kvatlas.kernels.block_copy import block_ids

ConvOrder = Literal["SD", "DS"]
"""Taps outside rows ([taps, rows]), or rows outside taps."""


class _Share(NamedTuple):
    """A stretch of a state's cut axis that a part holds: `local` there, `start` in the state."""

    view: torch.Tensor
    ids: torch.Tensor
    axis: int
    local: int
    start: int
    length: int

    @property
    def held(self) -> torch.Tensor:
        return self.view.narrow(self.axis, self.local, self.length)


def write_states(
    parts: LayerCache | Sequence[LayerCache],
    states: Mapping[str, torch.Tensor],
    ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    conv: ConvOrder | None = None,
) -> None:
    """States [sequences, ...] by field, each sequence's into its block of `ids`.

    Parts in groups of their own have block tables of their own: `ids` is then one tensor
    for each part. `conv` says how the convolution's state is given, where it differs from
    the spec's own order. Fields that are left out keep what they hold.
    """
    parts = [parts] if isinstance(parts, LayerCache) else list(parts)
    places = _ids_of(parts, ids)
    for name, rows in states.items():
        expected = (len(places[0]), *_shape(parts, name, conv))
        if tuple(rows.shape) != expected:
            raise AtlasError(
                Code.BAD_TENSOR,
                "A state is as large as all parts of its field",
                got=f"{name} of {tuple(rows.shape)}, not {expected}",
                hint="Pass [sequences, ...] in the field's own axes, and all parts of the layer",
            )
        for share in _shares(parts, places, name, conv):
            given = rows.narrow(share.axis, share.start, share.length)
            share.held[share.ids] = given.to(share.view.dtype)


def read_states(
    parts: LayerCache | Sequence[LayerCache],
    ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    conv: ConvOrder | None = None,
) -> dict[str, torch.Tensor]:
    """The states of the blocks `ids` by field, as [sequences, ...] in their own dtype."""
    parts = [parts] if isinstance(parts, LayerCache) else list(parts)
    places = _ids_of(parts, ids)
    found = {}
    for field in parts[0].page.fields:
        if field.padding:
            continue
        shares = list(_shares(parts, places, field.name, conv))
        if len(parts) == 1:
            found[field.name] = shares[0].view[places[0]]
            continue
        shape = (len(places[0]), *_shape(parts, field.name, conv))
        out = shares[0].view.new_empty(shape)
        for share in shares:
            out.narrow(share.axis, share.start, share.length).copy_(share.held[share.ids])
        found[field.name] = out
    return found


def _ids_of(
    parts: Sequence[LayerCache], ids: torch.Tensor | Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Blocks of each part, refused where two parts would write the same bytes."""
    alike = isinstance(ids, torch.Tensor)
    found = [ids] * len(parts) if isinstance(ids, torch.Tensor) else list(ids)
    if len(found) != len(parts) or len({len(one) for one in found}) > 1:
        raise AtlasError(
            Code.BAD_TENSOR,
            "Every part of a state has as many blocks as there are sequences",
            got=f"{[len(one) for one in found]} blocks for {len(parts)} parts",
            hint="Pass one tensor of ids, or one for each part",
        )
    if alike and len({(p.buffer.data_ptr(), p.placement) for p in parts}) < len(parts):
        raise AtlasError(
            Code.OVERLAP,
            "Parts in groups of their own take blocks of their own",
            got=f"one list of ids for {len(parts)} parts of {parts[0].name}",
            hint="Pass one tensor of ids for each part",
        )
    return [block_ids(part, one) for part, one in zip(parts, found, strict=True)]


def _shares(
    parts: Sequence[LayerCache], ids: list[torch.Tensor], name: str, conv: ConvOrder | None
) -> Iterator[_Share]:
    """What each part holds of a field, with rows counted in the state that is whole here."""
    starts, _ = _rows_held(parts, name)
    for part, places in zip(parts, ids, strict=True):
        view, axes = _oriented(part, name, conv)
        field = part.page.field(name)
        if not field.ranges:  # every part holds all of it
            yield _Share(view, places, 1, 0, 0, view.shape[1])
            continue
        axis = axes.index(str(field.sharding.axis)) + 1
        for piece in field.ranges:
            first = max(start for start in starts if start <= piece.start)
            start = starts[first] + piece.start - first
            yield _Share(view, places, axis, piece.local, start, piece.length)


def _rows_held(parts: Sequence[LayerCache], name: str) -> tuple[dict[int, int], int]:
    """Where stretches of the whole model's rows start in this state, by their first row.

    Sections follow each other in a state as they do in the model; parts may repeat some.
    Beside it the number of rows.
    """
    pieces = sorted(
        (piece.start, piece.start + piece.length)
        for part in parts
        for piece in part.page.field(name).ranges
    )
    found: dict[int, int] = {}
    rows = end = 0
    for start, stop in pieces:
        if start > end or not found:
            found[start] = rows
            end = start
        rows += max(0, stop - end)
        end = max(end, stop)
    return found, rows


def _shape(parts: Sequence[LayerCache], name: str, conv: ConvOrder | None) -> tuple[int, ...]:
    view, axes = _oriented(parts[0], name, conv)
    shape = list(view.shape[1:])
    field: Field = parts[0].page.field(name)
    if field.ranges:
        shape[axes.index(str(field.sharding.axis))] = _rows_held(parts, name)[1]
    return tuple(shape)


def _oriented(
    part: LayerCache, name: str, conv: ConvOrder | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """A field's view with its axes behind B, the convolution's in the order asked for."""
    view, axes = part.field(name), part.place(name).axes
    if name == "conv" and conv is not None:
        wanted = ("B", "T", "R") if conv == "SD" else ("B", "R", "T")
        view, axes = view.permute([axes.index(axis) for axis in wanted]), wanted
    return view, axes[1:]
