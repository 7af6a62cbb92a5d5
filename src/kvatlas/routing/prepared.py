"""`PreparedRoute`: descriptors of all blocks, computed once and then selected by index.

Some transports register a long list of descriptors once and take indices for each transfer. Each
descriptor covers a chunk: the largest number of states that both ends can address as a unit. That
is a kernel block if kernel blocks have the same size at both ends, otherwise the greatest common
divisor of the two sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import StridedRuns, merge_runs
from kvatlas.geometry.address_arrays import Int64s, fill_descriptors
from kvatlas.geometry.integers import natural
from kvatlas.geometry.state_spans import SpanStarts
from kvatlas.geometry.strided_runs import Ends, fold_states
from kvatlas.planning import Plan
from kvatlas.routing.binding import RepeatedRuns, repeated
from kvatlas.routing.block_tables import Blocks, RequestTables
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.request import RequestEnds

Base = int | Mapping[int, int]
"""Base addresses: a mapping from pool index to address, or one address for all pools."""


class RankMemory(NamedTuple):
    """The base addresses and the device of one rank's pools."""

    plan: Plan
    rank: int
    base: Base
    device: int

    def address(self, group: int) -> int:
        """Return the address where a group's pool begins."""
        if not isinstance(self.base, Mapping):
            return natural(self.base, "the base address")
        pool = self.plan.groups[group].pool
        if pool not in self.base:
            problem = f"Pool {pool} needs a base address"
            got = f"base addresses for pools {sorted(self.base)}"
            hint = "Pass an address for every pool index, or one address for all pools"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint=hint)
        return natural(self.base[pool], "the base address")


class DescriptorGrid(NamedTuple):
    """Descriptors of all blocks, in a grid with four axes: starts, kernel blocks, chunks, blocks.

    A start is the byte offset of a run in block 0. A chunk is a number of states that both ends
    can address as a unit. The block index varies fastest.
    """

    pair: GroupPair
    runs: RepeatedRuns
    state: Ends
    """Bytes between consecutive states, at the source and at the destination."""
    chunk: int
    """Number of states in a chunk."""
    first: Ends
    """Index of the grid's first descriptor in `PreparedRoute.source` and in `.destination`."""

    def chunks(self, end: int) -> int:
        """Return the number of chunks in a kernel block; `end` is 0: source, or 1: destination."""
        return self.pair.cells[end].states // self.chunk

    def steps(self, end: int) -> list[Int64s]:
        """Return the byte offsets of the starts, of the kernel blocks and of the chunks of a block.

        `end` is 0 for the source and 1 for the destination. A descriptor's address in block 0 is
        the pool's address plus one offset from each of the three lists.
        """
        kernel = np.arange(self.pair.cells[end].split) * self.runs.strip.kernel_strides[end]
        chunk = np.arange(self.chunks(end)) * (self.chunk * self.state[end])
        return [self.runs.starts.at(end), kernel, chunk]

    def indices(self, end: int, spots: SpanStarts, ids: Int64s, blocks: int) -> Int64s:
        """Return the indices of some chunks' descriptors: all at start 0, then all at start 1, ...

        The indices refer to `PreparedRoute.source` if `end` is 0, else to `.destination`. The
        chunks are given by two arrays: `ids` contains the block id of each chunk, and
        `spots.kernel` its index within the block. The pool has `blocks` blocks.
        """
        each = self.pair.cells[end].split * self.chunks(end) * blocks
        starts = np.arange(len(self.runs.starts.source)) * each
        return (starts[:, None] + (spots.kernel * blocks + ids + self.first[end])).reshape(-1)


class PreparedRoute:
    """Descriptors of all blocks of two ranks; a transfer selects them by index.

    Created by `Route.prepare`. The lists are built on first access.
    """

    def __init__(
        self,
        strips: Mapping[GroupPair, Sequence[StridedRuns]],
        unused: Mapping[GroupPair, Sequence[StridedRuns]],
        source: RankMemory,
        destination: RankMemory,
    ) -> None:
        self.ends = (source, destination)
        self.grids: list[DescriptorGrid] = []
        first = [0, 0]
        for pair, own in strips.items():
            chunk = chunk_of(pair)
            for state, runs in _by_chunk(pair, own, unused.get(pair, ()), chunk):
                grid = DescriptorGrid(pair, runs, state, chunk, (first[0], first[1]))
                self.grids.append(grid)
                for end in (0, 1):
                    first[end] += prod(map(len, grid.steps(end))) * self._blocks(grid, end)
        self.counts = (first[0], first[1])

    @cached_property
    def source(self) -> NDArray[np.uint64]:
        """Descriptors of every chunk of every source block: rows (address, length, device)."""
        return self._rows(0)

    @cached_property
    def destination(self) -> NDArray[np.uint64]:
        """Descriptors of every chunk of every destination block: rows (address, length, device)."""
        return self._rows(1)

    def strided(self, end: int) -> NDArray[np.uint64]:
        """Return the descriptors of one end: rows (address, length, device, stride, count).

        Each row represents `count` descriptors that are `stride` bytes apart, one per block, in
        the order of `source` or `destination`. Transports that support strides take these rows
        instead of millions of descriptors. End 0 is the source and 1 the destination.
        """
        lists = [np.zeros((0, 5), dtype=np.uint64)]
        for grid in self.grids:
            starts = fill_descriptors(grid.steps(end), *self._unit(grid, end))
            rows = np.empty((len(starts), 5), dtype=np.uint64)
            rows[:, :3] = starts
            rows[:, 3] = grid.runs.strip.block_strides[end]
            rows[:, 4] = self._blocks(grid, end)
            lists.append(rows)
        return np.concatenate(lists)

    def select(
        self, *, source_blocks: Blocks, destination_blocks: Blocks, tokens: Any
    ) -> tuple[Int64s, Int64s]:
        """Return the descriptors of a request's tokens: indices into `source` and `destination`.

        Whole chunks are copied. The last chunk may extend past the tokens, and the first chunk
        of a window may begin before the window; both chunks stay in blocks of the request. A range
        of tokens that starts inside a chunk raises an error.
        """
        source, destination = self.ends
        request = RequestEnds(
            RequestTables(source.plan, source.rank, source_blocks, "source"),
            RequestTables(destination.plan, destination.rank, destination_blocks, "destination"),
            tokens,
        )
        states = [request.states(grid.pair, grid.chunk) for grid in self.grids]
        request.check_distinct()
        bound = [
            (grid, request.bind(grid.pair, own.spans()))
            for grid, own in zip(self.grids, states, strict=True)
            if own.total
        ]

        def indices(end: int) -> Int64s:
            lists = [np.zeros(0, dtype=np.int64)]
            for grid, (states, ids) in bound:
                spots = states.destination if end else states.source
                lists.append(grid.indices(end, spots, ids[end], self._blocks(grid, end)))
            return np.concatenate(lists)

        return indices(0), indices(1)

    def _rows(self, end: int) -> NDArray[np.uint64]:
        lists = []
        for grid in self.grids:
            blocks = np.arange(self._blocks(grid, end)) * grid.runs.strip.block_strides[end]
            lists.append(fill_descriptors([*grid.steps(end), blocks], *self._unit(grid, end)))
        if len(lists) == 1:
            return lists[0]
        return np.concatenate(lists) if lists else np.zeros((0, 3), dtype=np.uint64)

    def _blocks(self, grid: DescriptorGrid, end: int) -> int:
        memory = self.ends[end]
        return memory.plan.pool(memory.rank, grid.pair.groups[end]).blocks

    def _unit(self, grid: DescriptorGrid, end: int) -> tuple[Int64s, Int64s, int, int]:
        """Return the arguments of `fill_descriptors` for a grid: (starts, lengths, base, device).

        There is one start, 0, and one length, because all descriptors of a grid are equally long.
        """
        one, memory = np.zeros(1, dtype=np.int64), self.ends[end]
        base = memory.address(grid.pair.groups[end])
        return one, one + grid.runs.strip.item, base, memory.device


def chunk_of(pair: GroupPair) -> int:
    """Return the largest number of states that both ends can address as a unit."""
    source, destination = pair.cells
    if pair.per_state is None or source.every != destination.every:
        return 1
    # The rows of one group of tokens must not reach around a ring.
    group = pair.visibility.chunk if source.ring else None
    return gcd(source.states, destination.states, group or 0)


def _by_chunk(
    pair: GroupPair, strips: Sequence[StridedRuns], unused: Sequence[StridedRuns], chunk: int
) -> Iterator[tuple[Ends, RepeatedRuns]]:
    """Extend runs that copy one state, so that they copy the `chunk` states of a whole chunk.

    Yield (distances, runs). The distances are the bytes between consecutive states in the source
    and in the destination. They are 0 if a kernel block has only one chunk. `unused` are runs of
    unused bytes to copy with a kernel block.
    """
    if pair.per_state is None:
        yield from (((0, 0), runs) for runs in repeated(merge_runs([*strips, *unused])))
        return
    by_state: dict[Ends, list[StridedRuns]] = defaultdict(list)
    whole = pair.cells[0].states == pair.cells[1].states == chunk
    for strip in strips:
        by_state[(0, 0) if whole else strip.state_strides].append(strip)
    for state, alike in by_state.items():
        others = unused if whole else ()
        yield from ((state, runs) for runs in repeated(fold_states(alike, chunk, others)))
