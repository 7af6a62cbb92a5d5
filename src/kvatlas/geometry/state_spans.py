"""Spans of consecutive states of a request that a copy can move together.

A state is what a layer caches for one token, or for several tokens if it compresses them. The
states of a request fill kernel blocks, and a block of the block table consists of one or more
kernel blocks. Within a kernel block, states have a constant stride. The two ends of a copy are
its source and its destination. They may have kernel blocks of different sizes, or hold only every
n-th state (context parallelism). Four types describe the states in terms of blocks, without
addresses:

- `StateBlocks`: how the source or the destination divides a request's states over its blocks;
- `CommonStates`: the states that both ends hold, computed arithmetically without arrays;
- `SpanStarts`: where spans of states start in the source or the destination, as arrays;
- `StateSpans`: the longest spans of states that are consecutive within one kernel block,
  both in the source and in the destination; computed with numpy.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, refuse_too_many
from kvatlas.geometry.integers import ceil_div


class StateBlocks(NamedTuple):
    """The division of a request's states over the blocks of the source or the destination.

    A kernel block has `states` states, and a block has `split` kernel blocks. The source or the
    destination holds the states `residue`, `residue + every`, `residue + 2 * every` and so on of
    the request. If `ring` is true, all states share the first block, and later states overwrite
    earlier ones.

    >>> StateBlocks(16, every=2).overlaps(StateBlocks(16, every=4, residue=2))
    True
    >>> StateBlocks(16, every=2).overlaps(StateBlocks(16, every=4, residue=3))
    False
    """

    states: int
    split: int = 1
    every: int = 1
    residue: int = 0
    ring: bool = False

    def overlaps(self, other: StateBlocks) -> bool:
        """Return whether `self` and `other` store any common state of the request."""
        return self.first_common(other) is not None

    def first_common(self, other: StateBlocks) -> int | None:
        """Return the first state that `self` and `other` both store; None if there is none."""
        for end in (self, other):
            if not 0 <= end.residue < end.every or end.states < 1 or end.split < 1:
                problem = (
                    "StateBlocks needs `states` and `split` >= 1, and `residue` in 0..`every` - 1"
                )
                hint = "Take the StateBlocks from a plan"
                raise AtlasError(Code.BAD_SIZE, problem, got=end, hint=hint)
        held = range(self.residue, lcm(self.every, other.every), self.every)
        return next((state for state in held if state % other.every == other.residue), None)

    def locate(self, local: Int64s) -> SpanStarts:
        """Return the position of each state: table entry, kernel block, index in the kernel block.

        `local[i]` is the index of a state among the states that are stored in these blocks.

        >>> StateBlocks(12, ring=True).locate(np.array([8, 12, 29]))
        SpanStarts(entry=array([0, 0, 0]), kernel=array([0, 0, 0]), state=array([8, 0, 5]))
        """
        if self.ring:
            local = local % (self.states * self.split)
        block, state = np.divmod(local, self.states)
        if self.split == 1:
            return SpanStarts(block, np.zeros_like(block), state)
        entry, kernel = np.divmod(block, self.split)
        return SpanStarts(entry, kernel, state)


class SpanStarts(NamedTuple):
    """Positions of the first states of spans, in the source or the destination of a copy.

    A position is a block table entry, a kernel block of that block, and a state of that kernel
    block.

    >>> StateBlocks(16, split=2).locate(np.array([0, 40]))
    SpanStarts(entry=array([0, 1]), kernel=array([0, 0]), state=array([0, 8]))
    """

    entry: Int64s
    kernel: Int64s
    state: Int64s


class StateSpans(NamedTuple):
    """Spans of states: starts at the source and the destination, and lengths in states.

    >>> spans = StateSpans.between(8, 40, StateBlocks(16), StateBlocks(32))
    >>> spans.length, spans.source.entry, spans.destination.entry, spans.destination.state
    (array([ 8, 16,  8]), array([0, 1, 2]), array([0, 0, 1]), array([ 8, 16,  0]))
    """

    source: SpanStarts
    destination: SpanStarts
    length: Int64s

    @classmethod
    def between(
        cls, first: int, stop: int, source: StateBlocks, destination: StateBlocks
    ) -> StateSpans:
        """Return spans of the states that both ends hold, among states first .. stop - 1."""
        return CommonStates.between(first, stop, source, destination).spans()


class CommonStates(NamedTuple):
    """The states of a request that both the source and the destination of a copy hold.

    The source (end 0) numbers its states from 0, and so does the destination (end 1). Common state
    n is state `local[0] + n * steps[0]` of the source and `local[1] + n * steps[1]` of the
    destination.

    >>> common = CommonStates.between(8, 40, StateBlocks(16), StateBlocks(32))
    >>> common.total, common.last_entry(0), common.entries(1)
    (32, 2, array([0, 1]))
    """

    ends: tuple[StateBlocks, StateBlocks]
    total: int
    local: tuple[int, int]
    steps: tuple[int, int]

    @classmethod
    def between(
        cls, first: int, stop: int, source: StateBlocks, destination: StateBlocks
    ) -> CommonStates:
        """Return the states that both ends hold, among states first .. stop - 1 of a request."""
        period = lcm(source.every, destination.every)
        steps = (period // source.every, period // destination.every)
        common = source.first_common(destination)
        if common is None or first >= stop:
            return cls((source, destination), 0, (0, 0), steps)
        start = common + max(0, ceil_div(first - common, period)) * period
        count = max(0, ceil_div(stop - start, period))
        local = (
            (start - source.residue) // source.every,
            (start - destination.residue) // destination.every,
        )
        return cls((source, destination), count, local, steps)

    @property
    def side_by_side(self) -> bool:
        """Whether each common state directly follows the previous one, at both ends."""
        return self.steps == (1, 1)

    def last_entry(self, end: int) -> int:
        """Return the index of the last needed entry of a block table.

        `end` selects the table: it is 0 for the source and 1 for the destination. `total` must not
        be 0.
        """
        if self.ends[end].ring:
            return 0
        return self._last(end) // self._entry_states(end)

    def entries(self, end: int) -> Int64s:
        """Return the indices of all needed entries of a block table, ascending.

        `end` selects the table: it is 0 for the source and 1 for the destination.
        """
        if self.ends[end].ring:
            return np.zeros(1, np.int64)
        each = self._entry_states(end)
        if self.steps[end] <= each:
            return np.arange(self.local[end] // each, self._last(end) // each + 1)
        return (self.local[end] + np.arange(self.total) * self.steps[end]) // each

    def entry_slice(self, end: int) -> slice | Int64s:
        """Return the indices of `entries` as a slice if they are consecutive, else as an array."""
        each = self._entry_states(end)
        if self.ends[end].ring:
            return slice(0, 1)
        if self.steps[end] <= each:
            return slice(self.local[end] // each, self._last(end) // each + 1)
        return self.entries(end)

    def numbers_in(self, end: int, entry: int) -> range:
        """Return the indices of the common states in entry `entry` of a block table.

        `end` selects the table: it is 0 for the source and 1 for the destination.

        >>> common = CommonStates.between(8, 40, StateBlocks(16), StateBlocks(32))
        >>> [common.numbers_in(0, entry) for entry in (0, 1, 2, 3)]
        [range(0, 8), range(8, 24), range(24, 32), range(32, 32)]
        """
        if self.ends[end].ring:
            return range(self.total if entry == 0 else 0)
        each = self._entry_states(end)
        edges = (each * entry - self.local[end], each * (entry + 1) - self.local[end])
        first, stop = (min(self.total, ceil_div(max(0, at), self.steps[end])) for at in edges)
        return range(first, stop)

    def spans(self, first: int = 0, stop: int | None = None) -> StateSpans:
        """Return the spans of common states first .. stop - 1; by default, of all common states."""
        count = max(0, (self.total if stop is None else stop) - first)
        source, destination = (self.local[end] + first * self.steps[end] for end in (0, 1))
        size = min(one.states for one in self.ends) if self.side_by_side else 1
        refuse_too_many(count // size, "spans of states")
        if self.side_by_side:
            begins = _block_starts(
                [(self.ends[0].states, source), (self.ends[1].states, destination)], count
            )
        else:
            begins = np.arange(count)
        return StateSpans(
            self.ends[0].locate(source + begins * self.steps[0]),
            self.ends[1].locate(destination + begins * self.steps[1]),
            np.diff(begins, append=count),
        )

    def _last(self, end: int) -> int:
        return self.local[end] + (self.total - 1) * self.steps[end]

    def _entry_states(self, end: int) -> int:
        return self.ends[end].states * self.ends[end].split


def _block_starts(ends: list[tuple[int, int]], count: int) -> Int64s:
    """Return where to cut states 0 .. count - 1 so that no span crosses a kernel block boundary.

    The result lists the first state of each span, ascending. `ends` contains a tuple for the
    source and one for the destination: (states per kernel block, number of state 0 at this end).
    """
    (small, first), (large, second) = sorted((size, -at % size) for size, at in ends)
    starts = np.arange(first, count, small)
    if large % small or (second - first) % small:
        starts = np.union1d(starts, np.arange(second, count, large))
    if count and (not len(starts) or starts[0]):
        starts = np.concatenate(([0], starts))
    return starts
