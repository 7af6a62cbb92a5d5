"""The block tables of one request, as vLLM has them while a prompt is computed step by step.

A table only grows. What a window or a state leaves behind is let go before each step. Places are
spans along the request; those that are named can be found by later requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.simulation.layer_classes import LayerClass


class SimulatedTable:
    """The blocks of one class: a window, or states at every block."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        self._one, self._step = one, step
        self._places = places
        """Those that are named or will be, in their order."""
        self.named = self._until(hit)
        """How many of these have their content."""
        self.left = 0
        """How many of these were left behind."""
        self._cut = one.first_place(hit * step, step)
        """The first place that is in use."""
        self._taken = hit * one.blocks
        """Blocks of the table, those that were left behind included."""

    @property
    def in_use(self) -> int:
        """Blocks that the request owns."""
        return self._taken - self._cut * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Blocks in use that nobody can find."""
        return self.in_use - (self.named - self.left) * self._one.blocks

    def _until(self, place: int) -> int:
        """How many places that are named, or will be, lie before this one."""
        return bisect_left(self._places, place)

    def leave(self, tokens: int) -> slice:
        """Let go of what is not needed behind so many tokens; which named places are left."""
        before = self.left
        cut = self._one.first_place(tokens, self._step)
        if cut > self._cut:
            self._cut = cut
            self._taken = max(self._taken, cut * self._one.blocks)
            self.left = self._until(cut)
        return slice(before, self.left)

    def take(self, stop: int) -> int:
        """Blocks for all tokens up to `stop`; how many more."""
        before = self._taken
        self._taken = max(before, self._blocks(stop))
        return self._taken - before

    def _blocks(self, stop: int) -> int:
        if self._one.needs == "state":
            return ceil_div(stop, self._step) * self._one.blocks
        return ceil_div(stop * self._one.blocks, self._step)

    def behind(self, stop: int, spans: int | None = None) -> int:
        """Blocks of the first `stop` tokens behind so many spans, or behind all whole ones."""
        whole = stop // self._step if spans is None else spans
        return self._blocks(stop) - whole * self._one.blocks

    def name(self, stop: int) -> slice:
        """Tokens up to `stop` are computed; which places have their content since then."""
        before = self.named
        self.named = max(before, self._until(stop // self._step))
        return slice(before, self.named)


class AttentionTable(SimulatedTable):
    """The blocks of attention: all places are named, and none is left."""

    def _until(self, place: int) -> int:
        return min(place, len(self._places))


class StateTable(SimulatedTable):
    """States of which few are kept: one at the end of each step, and none between."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        super().__init__(one, step, places, hit)
        self._loose: list[int] = []
        """Places in use that are not named."""

    @property
    def in_use(self) -> int:
        """Blocks that the request owns."""
        return self.unnamed + (self.named - self.left) * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Blocks in use that nobody can find."""
        return len(self._loose) * self._one.blocks

    def leave(self, tokens: int) -> slice:
        """Let go of all states but the one behind so many tokens; which named ones are left."""
        left = super().leave(tokens)
        self._loose = [place for place in self._loose if place >= self._cut]
        return left

    def take(self, stop: int) -> int:
        """A state behind `stop` tokens, unless its block is there."""
        if self._blocks(stop) <= self._taken:
            return 0
        self._taken = self._blocks(stop)
        self._loose.append(self._taken // self._one.blocks - 1)
        return self._one.blocks

    def name(self, stop: int) -> slice:
        """The state behind `stop` tokens can be found, if it is kept."""
        new = super().name(stop)
        for place in self._places[new]:
            self._loose.remove(place)
        return new
