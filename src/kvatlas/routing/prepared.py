"""`Prepared`: descriptors of all blocks, made once; a transfer is then two index arrays.

Transports register long descriptor lists once and take indices afterwards. A chunk is
as many states as both ends can address whole: a block where both have the same one,
otherwise the greatest common divisor of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import (
    Ends,
    Int64s,
    SpanStarts,
    StateBlocks,
    StridedRuns,
    fill_descriptors,
    fold_states,
    natural,
)
from kvatlas.planning import Plan
from kvatlas.routing.binding import Family, families
from kvatlas.routing.block_tables import Blocks, End
from kvatlas.routing.compiler import Lane
from kvatlas.routing.request import Request

Base = int | Mapping[int, int]
"""An address for every pool by its index, or one address for all of them."""


class Place(NamedTuple):
    """One end of a prepared transfer: whose pools, and where they are in memory."""

    plan: Plan
    rank: int
    base: Base
    device: int

    def blocks(self, group: int) -> int:
        """Blocks of a group's pool."""
        place = (self.rank // self.plan.tp, self.plan.groups[group].pool)
        return next(p.blocks for p in self.plan.pools if (p.stage, p.index) == place)

    def address(self, group: int) -> int:
        """Where a group's pool begins."""
        if not isinstance(self.base, Mapping):
            return natural(self.base, "the base address")
        pool = self.plan.groups[group].pool
        if pool not in self.base:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "Every pool that takes part has a base address",
                got=f"none for pool {pool}",
                hint="Pass a mapping from pool index to address, or one address",
            )
        return natural(self.base[pool], "the base address")


class Part(NamedTuple):
    """Descriptors of one family: rows x kernel blocks x chunks x blocks, blocks fastest."""

    lane: Lane
    family: Family
    state: Ends
    """Bytes between states, at either end."""
    chunk: int
    """States in a chunk."""
    first: Ends
    """Its first descriptor in the list of either end."""

    def cells(self, end: int) -> StateBlocks:
        """How one end keeps its states."""
        return self.lane.dst if end else self.lane.src

    def group(self, end: int) -> int:
        """The group at one end."""
        return self.lane.dst_group if end else self.lane.src_group

    def chunks(self, end: int) -> int:
        """Chunks in a cell."""
        return self.cells(end).states // self.chunk

    def steps(self, end: int) -> list[Int64s]:
        """Offsets of rows, kernel blocks and chunks, all of them sums of one of each."""
        kernel = self.family.strip.kernel_offsets(end, self.cells(end).split)
        chunk = np.arange(self.chunks(end)) * (self.chunk * self.state[end])
        return [self.family.rows[end], kernel, chunk]

    def indices(self, end: int, spots: SpanStarts, ids: Int64s, blocks: int) -> Int64s:
        """Where the descriptors of these chunks are in the list, for every row in turn."""
        each = self.cells(end).split * self.chunks(end) * blocks
        rows = np.arange(len(self.family.rows[end])) * each
        return (rows[:, None] + (spots.kernel * blocks + ids + self.first[end])).reshape(-1)


class Prepared:
    """All blocks of two ranks as descriptors, and how a transfer indexes them.

    Made by `Route.prepare`. Lists are written when they are first asked for.
    """

    def __init__(self, lanes: Mapping[Lane, Sequence[StridedRuns]], src: Place, dst: Place) -> None:
        self.ends = (src, dst)
        self.parts: list[Part] = []
        first = [0, 0]
        for lane, strips in lanes.items():
            chunk = chunk_of(lane)
            for state, family in _closed(lane, strips, chunk):
                part = Part(lane, family, state, chunk, (first[0], first[1]))
                self.parts.append(part)
                for end in (0, 1):
                    many = [len(steps) for steps in part.steps(end)]
                    blocks = self.ends[end].blocks(part.group(end))
                    first[end] += int(np.prod(many)) * blocks
        self.counts = (first[0], first[1])

    @cached_property
    def src(self) -> NDArray[np.uint64]:
        """Rows (address, length, device) for every chunk of every block at the source."""
        return self._rows(0)

    @cached_property
    def dst(self) -> NDArray[np.uint64]:
        """Rows (address, length, device) for every chunk of every block at the destination."""
        return self._rows(1)

    def strided(self, end: int) -> NDArray[np.uint64]:
        """The same list as rows (address, length, device, stride, count), blocks folded.

        Each row stands for `count` descriptors `stride` bytes apart, in the same order:
        what a transport that knows strides takes instead of millions of rows. End 0 is
        the source and 1 the destination.
        """
        found = [np.zeros((0, 5), dtype=np.uint64)]
        for part in self.parts:
            side, strip = self.ends[end], part.family.strip
            starts = fill_descriptors(part.steps(end), *self._unit(part, end))
            rows = np.empty((len(starts), 5), dtype=np.uint64)
            rows[:, :3] = starts
            rows[:, 3] = strip.block_strides[end]
            rows[:, 4] = side.blocks(part.group(end))
            found.append(rows)
        return np.concatenate(found)

    def select(
        self, *, src_blocks: Blocks, dst_blocks: Blocks, tokens: Any
    ) -> tuple[Int64s, Int64s]:
        """Indices into both lists that carry a request's tokens, aligned.

        Whole chunks move: the last one may reach past the tokens, and the first of a
        window before it, in blocks that are the request's own. A range that itself starts
        inside a chunk is refused.
        """
        src, dst = self.ends
        request = Request(
            End(src.plan, src.rank, src_blocks, "source"),
            End(dst.plan, dst.rank, dst_blocks, "destination"),
            tokens,
        )
        placed = [(part, request.place(part.lane, part.chunk)) for part in self.parts]
        request.refuse_twice()
        nothing = np.zeros(0, dtype=np.int64)
        chosen: tuple[list[Int64s], list[Int64s]] = ([nothing], [nothing])
        for part, place in placed:
            spots, ids = (place.found.src, place.found.dst), (place.src, place.dst)
            for end in (0, 1):
                blocks = self.ends[end].blocks(part.group(end))
                chosen[end].append(part.indices(end, spots[end], ids[end], blocks))
        return np.concatenate(chosen[0]), np.concatenate(chosen[1])

    def _rows(self, end: int) -> NDArray[np.uint64]:
        found = []
        for part in self.parts:
            many = self.ends[end].blocks(part.group(end))
            steps = [*part.steps(end), part.family.strip.block_offsets(end, many)]
            found.append(fill_descriptors(steps, *self._unit(part, end)))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros((0, 3), dtype=np.uint64)

    def _unit(self, part: Part, end: int) -> tuple[Int64s, Int64s, int, int]:
        """A descriptor at the start of its pool: start, length, base and device."""
        one = np.zeros(1, dtype=np.int64)
        side = self.ends[end]
        return one, one + part.family.strip.item, side.address(part.group(end)), side.device


def chunk_of(lane: Lane) -> int:
    """States that both ends can address whole."""
    if lane.per_state is None or lane.src.every != lane.dst.every:
        return 1
    return gcd(lane.src.states, lane.dst.states)


def _closed(lane: Lane, strips: Sequence[StridedRuns], chunk: int) -> Iterator[tuple[Ends, Family]]:
    """Families with the states of a chunk folded in, and how far apart their states are."""
    if lane.per_state is None:
        yield from (((0, 0), family) for family in families(strips))
        return
    by_state: dict[Ends, list[StridedRuns]] = defaultdict(list)
    whole = lane.src.states == lane.dst.states == chunk
    for strip in strips:
        by_state[(0, 0) if whole else strip.state_strides].append(strip)
    for state, alike in by_state.items():
        yield from ((state, family) for family in families(fold_states(alike, chunk)))
