"""Recurrent states in pages: a block for each row of a batch, in the axes that models use.

Models update states in place, in one tensor for the batch. Rows of a batch lie in
scattered blocks, and a plan may cut a state by heads into several, so a model is lent a
tensor and what it made of it is written to the pages when the cache is next asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvatlas.cache import LayerCache, torch_dtype
from kvatlas.geometry import DType
from kvatlas.specs import Recurrent, State

_MODEL_AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "conv": (("R", "T"),),
    "ssm": (("H", "K", "V"), ("H", "P", "S"), ("R", "S")),
}
"""Axes of a state behind the batch, as modeling code has them."""

Piece = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where a stretch lies in a part, and where in the whole."""


@dataclass(frozen=True)
class StateField:
    """One state of one layer (`conv` or `ssm`), over all the parts that it is cut into."""

    parts: Sequence[LayerCache]
    state: State

    @property
    def name(self) -> str:
        """What the field is called in the page."""
        return self.state.name

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Its axes as the model has them."""
        own = {axis for axis, _ in self.state.axes}
        return next(axes for axes in _MODEL_AXES[self.name] if set(axes) == own)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Its shape for one row."""
        sizes = dict(self.state.axes)
        return tuple(sizes[axis] for axis in self.axes)

    def read(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole state of each row; `blocks` are the rows' blocks for each part."""
        dtype = torch_dtype(DType.of(self.state.dtype))
        found = torch.empty((len(blocks[0]), *self.shape), dtype=dtype, device=blocks[0].device)
        for (view, pieces), ids in zip(self._places, blocks, strict=True):
            rows = view[ids]
            for mine, whole in pieces:
                found[whole] = rows[mine]
        return found

    def write(self, blocks: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Put the whole state of each row, every part where it lies."""
        for (view, pieces), ids in zip(self._places, blocks, strict=True):
            for mine, whole in pieces:
                at: tuple[torch.Tensor | slice, ...] = (ids, *mine[1:])
                view[at] = values[whole].to(view.dtype)

    @cached_property
    def _places(self) -> list[tuple[torch.Tensor, list[Piece]]]:
        """Each part's view, and which pieces of the whole it holds."""
        return [(self._view(layer), self._pieces(layer)) for layer in self.parts]

    def _view(self, layer: LayerCache) -> torch.Tensor:
        placed = layer.place(self.name)
        return layer.field(self.name).permute([placed.axes.index(a) for a in ("B", *self.axes)])

    def _pieces(self, layer: LayerCache) -> list[Piece]:
        everything = (slice(None),) * (1 + len(self.shape))
        field = layer.page.field(self.name)
        if self.state.sharding.axis is None or not field.ranges:
            return [(everything, everything)]
        axis = 1 + self.axes.index(self.state.sharding.axis)

        def stretch(start: int, length: int) -> tuple[slice, ...]:
            at = list(everything)
            at[axis] = slice(start, start + length)
            return tuple(at)

        return [(stretch(p.local, p.length), stretch(p.start, p.length)) for p in field.ranges]


def state_fields(parts: Sequence[LayerCache], spec: Recurrent) -> dict[str, StateField] | None:
    """The states of a layer by name; None where models keep them otherwise."""
    found = {state.name: StateField(parts, state) for state in spec.layer_states()}
    for name, field in found.items():
        own = {axis for axis, _ in field.state.axes}
        if all(set(axes) != own for axes in _MODEL_AXES.get(name, ())):
            return None
    return found
