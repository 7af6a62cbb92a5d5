"""Batches for coalesced reads: which source bytes to read together, and how to scatter them.

Where the layouts of the source and the destination differ, runs are short, but most of them are
adjacent at the source. Runs that are close together at the source, and have regular strides at the
source and at the destination, form a tile. Reads, sorting and scatters work on tiles, because there
are far fewer tiles than runs. Adjacent tiles are read together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.nested_copy import copy_nested_unchecked
from kvatlas.copying.run_bounds import Bytes
from kvatlas.geometry import NestedSteps
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import INT64_MAX, ceil_div
from kvatlas.geometry.nested_steps import Steps
from kvatlas.routing import Copy
from kvatlas.routing.binding import Starts

_SHARE = 4
"""A tile or a run may fill at most 1 / `_SHARE` of a buffer."""
_SPARSE = 8
"""The span of a tile is at most this multiple of its bytes: other tiles may fill its gaps."""
_MOST_TILES = 1 << 17
"""The approximate number of tiles that are sorted together, in about 10 MB of memory."""
_LOOKED_AT = 16
"""The number of spans from which `expected_reads` estimates the reads of all spans."""
_KEPT = 1 << 10
"""The strides of a batch are cached for similar batches if it has at most this many tiles."""


class Placing(NamedTuple):
    """Runs of equal length: their offsets in a batch and in the destination pool."""

    pool: int
    places: NestedSteps
    length: int

    def carry_out(self, batch: Bytes, pools: Mapping[int, Bytes]) -> None:
        """Copy the runs from `batch`, the bytes that were read, to their destination pool."""
        copy_nested_unchecked(batch, pools[self.pool], self.places, self.length)


class CoalescedBatch(NamedTuple):
    """Ranges of a source pool that are read together into contiguous memory.

    `placing` lists where the bytes are copied afterwards.
    """

    pool: int
    source: Int64s
    length: Int64s
    placing: list[Placing]

    @property
    def nbytes(self) -> int:
        """The number of bytes that are scattered, without the gaps that are read with them."""
        return sum(
            one.length * len(one.places.source) * prod(step.times for step in one.places.steps)
            for one in self.placing
        )

    def read(self, at: int) -> Copy:
        """Return a `Copy` from the source pool to offset `at` of staging memory."""
        places = np.cumsum(self.length) - self.length + at
        return Copy(self.pool, STAGING, self.source, places, self.length)


class _Tiles(NamedTuple):
    """The tiles of one copy. A tile is a set of runs that are close together at the source.

    `source` and `destination` are the offsets of the tiles relative to a span (contiguous byte
    range) of `grid`, and are the same for each span. `steps` are the strides between the runs of a
    tile.
    """

    grid: Copy
    source: Int64s
    destination: Int64s
    steps: tuple[Steps, ...]
    reach: int
    """Bytes from the start of a tile's first run to the start of its last run, at the source."""
    extent: int
    """The value that `reach` would have without the limit on the size of a tile."""

    @classmethod
    def of(cls, grid: Copy, most: int) -> _Tiles:
        """Group the runs of a copy into tiles that span at most `most` bytes at the source."""
        return cls(grid, *_tiled(grid.starts, int(grid.length.max()), most))

    @property
    def source_stop(self) -> int:
        """An offset in the source pool at or after the end of every tile."""
        return (
            int((self.grid.source + self.grid.length).max()) + int(self.source.max()) + self.reach
        )


def coalesced_batches(grids: Sequence[Copy], room: int) -> Generator[CoalescedBatch]:
    """Yield batches of at most `room` bytes that together contain all runs of `grids`."""
    alike: defaultdict[tuple[int, int], list[Copy]] = defaultdict(list)
    for grid in grids:
        if len(grid):
            cut = _cut(grid, max(1, room // _SHARE))
            alike[grid.source_pool, len(cut.length)].append(cut)
    for (_, count), several in alike.items():
        tiles = [_Tiles.of(grid, max(1, room // _SHARE)) for grid in several]
        step = max(1, _MOST_TILES // sum(len(one.source) for one in tiles))
        for first in range(0, count, step):
            yield from _SortedTiles.of(tiles, slice(first, first + step)).batches(room)


def expected_reads(grids: Sequence[Copy], room: int) -> tuple[int, int]:
    """Return an estimate of (number of ranges to read, bytes to read) for copying `grids`.

    The estimate is based on the first spans (contiguous byte ranges) of each grid.
    """
    some = [_first_spans(grid) for grid in grids if len(grid)]
    reads = [batch.length for batch in coalesced_batches(some, room)]
    total, part = (max(1, sum(grid.nbytes for grid in several)) for several in (grids, some))
    ranges, nbytes = sum(map(len, reads)), sum(int(length.sum()) for length in reads)
    return ceil_div(ranges * total, part), ceil_div(nbytes * total, part)


def _first_spans(grid: Copy) -> Copy:
    source, destination, length = (
        column[:_LOOKED_AT] for column in (grid.source, grid.destination, grid.length)
    )
    return Copy(
        grid.source_pool, grid.destination_pool, source, destination, length, starts=grid.starts
    )


def _cut(grid: Copy, most: int) -> Copy:
    """Return a `Copy` that moves the same bytes as `grid`, in runs of at most `most` bytes."""
    if int(grid.length.max()) <= most:
        return grid
    parts = -(-grid.length // most)
    skip = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    source, destination, length = (
        np.repeat(one, parts) for one in (grid.source, grid.destination, grid.length)
    )
    pools = (grid.source_pool, grid.destination_pool)
    return Copy(
        *pools,
        source + skip,
        destination + skip,
        np.minimum(length - skip, most),
        starts=grid.starts,
    )


class _SortedTiles(NamedTuple):
    """Tiles of several copies, in the order in which they are read. Arrays are indexed by tile."""

    tiles: Sequence[_Tiles]
    owner: Int64s
    """The index in `tiles` of the grid that each tile belongs to."""
    start: Int64s
    """The source offset of each tile, plus `far` times the number of its block."""
    reached: Int64s
    """The largest end of each tile and all tiles before it, in the same units as `start`."""
    destination: Int64s
    length: Int64s
    place: Int64s
    """The position of each tile in the concatenation of everything that is read."""
    far: int
    """A distance larger than any source offset, so that tiles of different blocks never touch."""

    @classmethod
    def of(cls, tiles: Sequence[_Tiles], spans: slice) -> _SortedTiles:
        """Return the tiles of several copies, in the order in which they are read.

        The slice `spans` selects the spans (contiguous byte ranges) of each copy to include.
        """
        grid, extent = tiles[0].grid, max(one.extent for one in tiles)
        far = 1 + max(one.source_stop for one in tiles)
        apart = _span_groups(grid.source[spans], grid.destination[spans], extent) * far
        starts, stops, targets, lengths = [], [], [], []
        for one in tiles:
            at, length = one.grid.source[spans] + apart, one.grid.length[spans]
            starts.append((at[:, None] + one.source).reshape(-1))
            stops.append(((at + length + one.reach)[:, None] + one.source).reshape(-1))
            targets.append((one.grid.destination[spans, None] + one.destination).reshape(-1))
            lengths.append(np.repeat(length, len(one.source)))
        owner = np.repeat(np.arange(len(tiles)), [len(one) for one in starts])
        start = np.concatenate(starts)
        order = np.argsort(start, kind="stable")
        columns = (owner, start, *map(np.concatenate, (stops, targets, lengths)))
        owner, start, stop, destination, length = (column[order] for column in columns)
        reached = np.maximum.accumulate(stop)
        skipped = np.maximum(0, start[1:] - reached[:-1]).cumsum()
        place = start - start[0]
        place[1:] -= skipped
        return cls(tiles, owner, start, reached, destination, length, place, far)

    def batches(self, room: int) -> Iterator[CoalescedBatch]:
        """Yield the tiles in batches of at most `room` bytes."""
        cuts = self._cuts(room)
        gaps = np.flatnonzero(self.start[1:] > self.reached[:-1]) + 1
        runs = np.union1d(gaps, cuts[:-1])
        length = self.reached[np.append(runs[1:], len(self.start)) - 1] - self.start[runs]
        source, firsts = self.start[runs] % self.far, np.searchsorted(runs, cuts).tolist()
        alike = [part for number in range(len(self.tiles)) for part in self._alike(number, cuts)]
        pool = self.tiles[0].grid.source_pool
        for number, at in enumerate(self.place[cuts[:-1]].tolist()):
            some = slice(firsts[number], firsts[number + 1])
            placing = [part.placing(number, at) for part in alike]
            yield CoalescedBatch(pool, source[some], length[some], [one for one in placing if one])

    def _cuts(self, room: int) -> list[int]:
        """Divide the tiles into batches of at most `room` bytes.

        Return the index of each batch's first tile, followed by the number of tiles.
        """
        edges = np.flatnonzero(self.start[1:] >= self.reached[:-1]) + 1
        edges = np.append(edges, len(self.start))
        end = self.place[-1] + self.reached[-1] - self.start[-1]
        places, cuts = np.append(self.place, end), [0]
        before = places[edges]
        while cuts[-1] < len(self.start):
            limit = places[cuts[-1]] + room
            cut = edges[np.searchsorted(before, limit, side="right") - 1]
            if cut <= cuts[-1] or before[0] > limit:
                # The tiles here overlap, so the cut reads some bytes twice.
                cut = np.searchsorted(self.place, limit - room // _SHARE, side="right")
            cuts.append(int(cut))
        return cuts

    def _alike(self, number: int, cuts: list[int]) -> Iterator[_AlikeTiles]:
        """Yield the tiles of grid `number`, grouped by the length of their runs."""
        own = np.flatnonzero(self.owner == number)
        lengths = self.length[own]
        for length in np.unique(lengths).tolist():
            some = own[lengths == length]
            cut = np.searchsorted(some, cuts).tolist()
            yield _AlikeTiles(
                self.tiles[number], length, self.place[some], self.destination[some], cut
            )


class _AlikeTiles(NamedTuple):
    """Tiles of one `Copy`. All their runs have equal length. Tile `cuts[i]` begins batch i."""

    tiles: _Tiles
    length: int
    place: Int64s
    destination: Int64s
    cuts: list[int]

    def placing(self, batch: int, at: int) -> Placing | None:
        """Return the runs of these tiles that are in batch number `batch`; None if there are none.

        `at` is the offset of the batch in the concatenation of all reads.
        """
        some = slice(self.cuts[batch], self.cuts[batch + 1])
        if some.start == some.stop:
            return None
        outer = _nested(self.place[some] - at, self.destination[some])
        nested = NestedSteps(outer.source, outer.destination, outer.steps + self.tiles.steps)
        return Placing(self.tiles.grid.destination_pool, nested, self.length)


def _nested(source: Int64s, destination: Int64s) -> NestedSteps:
    """Return offsets as nested strides. Strides that several batches share are cached."""
    if len(source) > _KEPT:
        return NestedSteps.of(source, destination)
    found = _steps_of((source - source[0]).tobytes(), (destination - destination[0]).tobytes())
    return NestedSteps(found.source + source[0], found.destination + destination[0], found.steps)


@lru_cache(maxsize=32)
def _tiled(
    starts: Starts, length: int, most: int
) -> tuple[Int64s, Int64s, tuple[Steps, ...], int, int]:
    """Return all fields of `_Tiles` except `grid`, in order.

    The result is cached, because all requests of a route share it.
    """
    nested = NestedSteps.of(starts.source, starts.destination)
    nbytes, reach, extent, dense = length, 0, 0, list[Steps]()
    for one in sorted(nested.steps, key=lambda one: abs(one.source)):
        extent, nbytes = extent + (one.times - 1) * one.source, nbytes * one.times
        if one.source < 0 or extent + length > _SPARSE * nbytes:
            extent -= (one.times - 1) * one.source
            break
        if extent + length <= most:
            dense.append(one)
            reach = extent
    others = tuple(one for one in nested.steps if one not in dense)
    return *nested.written_out(others), tuple(reversed(dense)), reach, extent


@lru_cache(maxsize=256)
def _steps_of(source: bytes, destination: bytes) -> NestedSteps:
    return NestedSteps.of(np.frombuffer(source, np.int64), np.frombuffer(destination, np.int64))


def _span_groups(source: Int64s, destination: Int64s, extent: int) -> Int64s:
    """Return a group number for each span. Spans that interleave at the source share a number.

    A span stands for several runs, which begin within `extent` bytes at the source. Groups are
    numbered in the order of their destinations, so that groups that are adjacent at the destination
    are in one batch if the batch has room.
    """
    order = np.argsort(source, kind="stable")
    block = np.empty_like(source)
    block[order] = np.cumsum(np.append(0, np.diff(source[order]) > extent))
    first = np.full(int(block.max()) + 1, INT64_MAX)
    np.minimum.at(first, block, destination)
    rank = np.empty_like(first)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    numbers: Int64s = rank[block]
    return numbers
