"""The block tables of one request in vLLM, while a prompt is computed step by step.

A place is the index of a span in the request. A place is named if its blocks have a hash, so that
later requests can find them. A table only grows, but the blocks of places that a window or a
recurrent layer no longer needs are freed before each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.simulation.layer_classes import LayerClass


class SimulatedTable:
    """The block table of one layer class: a window, or recurrent states at every block."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        self._one, self._step = one, step
        self._places = places
        """Places that are named once they are computed, ascending."""
        self.named = self._until(hit)
        """Number of leading `_places` that are computed and named."""
        self.left = 0
        """Number of leading `_places` that are no longer needed and were freed."""
        self._cut = one.first_place(hit * step, step)
        """The first place in use."""
        self._taken = hit * one.blocks
        """Number of blocks of the table, including freed ones."""

    @property
    def in_use(self) -> int:
        """Number of blocks that the request owns."""
        return self._taken - self._cut * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Number of blocks in use that are not named."""
        return self.in_use - (self.named - self.left) * self._one.blocks

    def _until(self, place: int) -> int:
        """Return how many of `_places` come before `place`."""
        return bisect_left(self._places, place)

    def leave(self, tokens: int) -> slice:
        """Free blocks that are not needed after `tokens` tokens.

        Returns the indices in `_places` of the freed places.
        """
        before = self.left
        cut = self._one.first_place(tokens, self._step)
        if cut > self._cut:
            self._cut = cut
            self._taken = max(self._taken, cut * self._one.blocks)
            self.left = self._until(cut)
        return slice(before, self.left)

    def take(self, stop: int) -> int:
        """Take blocks for all tokens up to `stop` and return how many were added."""
        before = self._taken
        self._taken = max(before, self._blocks(stop))
        return self._taken - before

    def _blocks(self, stop: int) -> int:
        if self._one.needs == "state":
            return ceil_div(stop, self._step) * self._one.blocks
        return ceil_div(stop * self._one.blocks, self._step)

    def behind(self, stop: int, spans: int | None = None) -> int:
        """Return how many blocks the first `stop` tokens need beyond those of `spans` spans.

        By default, `spans` is the number of complete spans in `stop` tokens.
        """
        whole = stop // self._step if spans is None else spans
        return self._blocks(stop) - whole * self._one.blocks

    def name(self, stop: int) -> slice:
        """Record that tokens up to `stop` are computed.

        Returns the indices in `_places` of the places that are named now.
        """
        before = self.named
        self.named = max(before, self._until(stop // self._step))
        return slice(before, self.named)


class AttentionTable(SimulatedTable):
    """The blocks of full attention: all places are named, and none is freed."""

    def _until(self, place: int) -> int:
        return min(place, len(self._places))


class StateTable(SimulatedTable):
    """Recurrent states that are written only at the end of each step."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        super().__init__(one, step, places, hit)
        self._loose: list[int] = []
        """Places in use that are not named."""

    @property
    def in_use(self) -> int:
        """Number of blocks that the request owns."""
        return self.unnamed + (self.named - self.left) * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Number of blocks in use that are not named."""
        return len(self._loose) * self._one.blocks

    def leave(self, tokens: int) -> slice:
        """Free all states except the one after `tokens` tokens.

        Returns the indices in `_places` of the freed places.
        """
        left = super().leave(tokens)
        self._loose = [place for place in self._loose if place >= self._cut]
        return left

    def take(self, stop: int) -> int:
        """Take a block for the state after `stop` tokens, unless it exists.

        Returns the number of blocks that were added.
        """
        if self._blocks(stop) <= self._taken:
            return 0
        self._taken = self._blocks(stop)
        self._loose.append(self._taken // self._one.blocks - 1)
        return self._one.blocks

    def name(self, stop: int) -> slice:
        """Name the state after `stop` tokens, if it is kept.

        Returns the indices in `_places` of the places that are named now.
        """
        new = super().name(stop)
        for place in self._places[new]:
            self._loose.remove(place)
        return new
