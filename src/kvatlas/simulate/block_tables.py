"""The block tables of one request in vLLM, while a prompt is computed step by step.

A span is a fixed number of tokens (`step`) that fills whole blocks in every group. A place is the
index of a span in the request. To name a span is to give its blocks a hash, so that later requests
can find them. A table only grows, but blocks that a window or a recurrent layer no longer needs
are freed before each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvatlas.geometry.integers import ceil_div
from kvatlas.simulate.layer_classes import LayerClass


class SimulatedTable:
    """The block table of window layers, or of recurrent layers with a state in every block."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        self._one, self._step = one, step
        self._places = places
        """The named spans: indices of the spans whose blocks get a hash when they are computed."""
        self.named = self._until(hit)
        """Number of leading `_places` that are computed and have hashes."""
        self.left = 0
        """Number of leading `_places` that are no longer needed and were freed."""
        self._cut = one.first_place(hit * step, step)
        """The index of the first span whose blocks are in use."""
        self._taken = hit * one.blocks
        """Number of blocks of the table, including freed ones."""

    @property
    def in_use(self) -> int:
        """Number of blocks that the request owns."""
        return self._taken - self._cut * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Number of owned blocks that have no hash, so that later requests cannot find them."""
        return self.in_use - (self.named - self.left) * self._one.blocks

    def _until(self, place: int) -> int:
        """Return how many of the indices in `_places` are less than `place`."""
        return bisect_left(self._places, place)

    def leave(self, tokens: int) -> slice:
        """Free the blocks that are not needed to compute tokens after the first `tokens`.

        Returns the freed part of `_places`, the list of spans whose blocks have a hash, as a slice.
        """
        before = self.left
        cut = self._one.first_place(tokens, self._step)
        if cut > self._cut:
            self._cut = cut
            self._taken = max(self._taken, cut * self._one.blocks)
            self.left = self._until(cut)
        return slice(before, self.left)

    def take(self, stop: int) -> int:
        """Extend the table to the first `stop` tokens, and return the number of added blocks."""
        before = self._taken
        self._taken = max(before, self._blocks(stop))
        return self._taken - before

    def _blocks(self, stop: int) -> int:
        if self._one.needs == "state":
            return ceil_div(stop, self._step) * self._one.blocks
        return ceil_div(stop * self._one.blocks, self._step)

    def behind(self, stop: int, spans: int | None = None) -> int:
        """Return the number of blocks for `stop` tokens that are not in the first `spans` spans.

        By default, `spans` is the number of complete spans in `stop` tokens. The result is then the
        number of blocks of the incomplete last span.
        """
        whole = stop // self._step if spans is None else spans
        return self._blocks(stop) - whole * self._one.blocks

    def name(self, stop: int) -> slice:
        """Record that the first `stop` tokens are computed, so that their blocks get hashes.

        Returns the spans whose blocks get a hash in this call, as a slice of `_places`.
        """
        before = self.named
        self.named = max(before, self._until(stop // self._step))
        return slice(before, self.named)


class AttentionTable(SimulatedTable):
    """The block table of full attention: all complete spans get hashes, and none is freed."""

    def _until(self, place: int) -> int:
        return min(place, len(self._places))


class StateTable(SimulatedTable):
    """The block table of recurrent layers that write a state only at the end of each step."""

    def __init__(self, one: LayerClass, step: int, places: Sequence[int], hit: int) -> None:
        super().__init__(one, step, places, hit)
        self._loose: list[int] = []
        """Indices of the spans in use whose states have no hash."""

    @property
    def in_use(self) -> int:
        """Number of blocks that the request owns."""
        return self.unnamed + (self.named - self.left) * self._one.blocks

    @property
    def unnamed(self) -> int:
        """Number of owned blocks that have no hash, so that later requests cannot find them."""
        return len(self._loose) * self._one.blocks

    def leave(self, tokens: int) -> slice:
        """Free all states except the latest, which is the state after `tokens` tokens.

        Returns the freed part of `_places`, the list of spans whose states have a hash, as a slice.
        """
        left = super().leave(tokens)
        self._loose = [place for place in self._loose if place >= self._cut]
        return left

    def take(self, stop: int) -> int:
        """Add the blocks for the state after `stop` tokens, unless the table has them.

        Returns the number of added blocks.
        """
        if self._blocks(stop) <= self._taken:
            return 0
        self._taken = self._blocks(stop)
        self._loose.append(self._taken // self._one.blocks - 1)
        return self._one.blocks

    def name(self, stop: int) -> slice:
        """Record that the first `stop` tokens are computed, so that their kept states get hashes.

        Returns the spans whose states get a hash in this call, as a slice of `_places`, which lists
        the spans with kept states.
        """
        new = super().name(stop)
        for place in self._places[new]:
            self._loose.remove(place)
        return new
