"""Stretches: which states of a request lie side by side at both ends of a copy.

A request's states fill cells (blocks, or kernel blocks where those do not touch), and
the two ends may have cells of unlike sizes, or keep only every D-th state of the
request (context parallelism). A stretch is as many states as follow each other in one
cell at either end. All of them are found at once, in numpy.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s


class Cells(NamedTuple):
    """How one end keeps states: `states` in a cell, `split` cells in a block.

    It holds those whose number leaves `residue` when divided by `every`.
    """

    states: int
    split: int = 1
    every: int = 1
    residue: int = 0

    @property
    def block(self) -> int:
        """States of the whole request that a block of this end spans."""
        return self.states * self.split * self.every


class Spots(NamedTuple):
    """Where stretches start at one end: the table entry, the kernel block and the state."""

    entry: Int64s
    kernel: Int64s
    state: Int64s


class Stretches(NamedTuple):
    """Stretches of states, at either end, and how many states each has."""

    src: Spots
    dst: Spots
    length: Int64s


def meet(src: Cells, dst: Cells) -> bool:
    """Whether the two ends hold any state in common.

    >>> meet(Cells(16, every=2, residue=0), Cells(16, every=4, residue=2))
    True
    >>> meet(Cells(16, every=2, residue=0), Cells(16, every=4, residue=3))
    False
    """
    return _first_common(src, dst) is not None


def stretches(first: int, stop: int, src: Cells, dst: Cells) -> Stretches:
    """States first .. stop - 1 of a request, as stretches.

    >>> found = stretches(8, 40, Cells(16), Cells(32))
    >>> found.length, found.src.entry, found.dst.entry, found.dst.state
    (array([ 8, 16,  8]), array([0, 1, 2]), array([0, 0, 1]), array([ 8, 16,  0]))
    """
    period = lcm(src.every, dst.every)
    common = _first_common(src, dst)
    if common is None or first >= stop:
        nothing = np.zeros(0, dtype=np.int64)
        spots = Spots(nothing, nothing, nothing)
        return Stretches(spots, spots, nothing)
    start = common + max(0, -(-(first - common) // period)) * period
    many = max(0, -(-(stop - start) // period))
    steps = (period // src.every, period // dst.every)
    places = ((start - src.residue) // src.every, (start - dst.residue) // dst.every)
    begins = _edges(places, many, src, dst) if steps == (1, 1) else np.arange(many)
    counts = np.diff(begins, append=many)
    return Stretches(
        _spots(places[0] + begins * steps[0], src),
        _spots(places[1] + begins * steps[1], dst),
        counts,
    )


def _edges(places: tuple[int, int], many: int, src: Cells, dst: Cells) -> Int64s:
    """Where a cell begins at either end, counted from the first of `many` states."""
    offsets = [-place % end.states for place, end in zip(places, (src, dst), strict=True)]
    small, large = sorted(zip((src.states, dst.states), offsets, strict=True))
    edges = np.arange(small[1], many, small[0])
    if large[0] % small[0] or (large[1] - small[1]) % small[0]:
        edges = np.union1d(edges, np.arange(large[1], many, large[0]))
    return edges if not many or (len(edges) and edges[0] == 0) else np.concatenate(([0], edges))


def _spots(local: Int64s, end: Cells) -> Spots:
    cell, state = np.divmod(local, end.states)
    if end.split == 1:
        return Spots(cell, np.zeros_like(cell), state)
    entry, kernel = np.divmod(cell, end.split)
    return Spots(entry, kernel, state)


def _first_common(src: Cells, dst: Cells) -> int | None:
    """The least state that both ends hold."""
    for end in (src, dst):
        if not 0 <= end.residue < end.every or end.states < 1 or end.split < 1:
            raise AtlasError(
                Code.BAD_SIZE,
                "Cells have states, and a residue below their divisor",
                got=end,
                hint="Take cells from a plan",
            )
    for state in range(src.residue, lcm(src.every, dst.every), src.every):
        if state % dst.every == dst.residue:
            return state
    return None
