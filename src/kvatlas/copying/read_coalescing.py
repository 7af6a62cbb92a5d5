"""Batches for coalesced reads: which source bytes to read together, and how to scatter them.

Runs are short where the two layouts differ, but at the source most of them are adjacent. Runs that
are close together at the source, and at regular strides at both ends, form a tile. Reading, sorting
and scattering work on tiles, of which there are few regardless of the number of runs. Adjacent
tiles are read as one.
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
"""The fraction of a buffer that a tile or a run may fill: a quarter."""
_SPARSE = 8
"""The span of a tile is at most this multiple of its bytes: other tiles may fill its gaps."""
_MOST_TILES = 1 << 17
"""The approximate number of tiles that are sorted together. This many take 10 MB."""
_LOOKED_AT = 16
"""The number of spans from which the others are estimated."""
_KEPT = 1 << 10
"""The maximum number of tiles in a batch whose strides are cached for similar batches."""


class Placing(NamedTuple):
    """Runs of one length at nested strides in a batch, and their destinations in a pool."""

    pool: int
    places: NestedSteps
    length: int

    def carry_out(self, batch: Bytes, pools: Mapping[int, Bytes]) -> None:
        """Copy the runs of a batch into their pool."""
        copy_nested_unchecked(batch, pools[self.pool], self.places, self.length)


class LandingBatch(NamedTuple):
    """Ranges of a source pool that are read consecutively into a buffer, and their destinations."""

    pool: int
    src: Int64s
    length: Int64s
    placing: list[Placing]

    @property
    def nbytes(self) -> int:
        """The number of bytes that are scattered."""
        return sum(
            one.length * len(one.places.src) * prod(step.times for step in one.places.steps)
            for one in self.placing
        )

    def read(self, at: int) -> Copy:
        """Return the copy that reads the batch into the staging memory at an offset."""
        places = np.cumsum(self.length) - self.length + at
        return Copy(self.pool, STAGING, self.src, places, self.length)


class _Tiles(NamedTuple):
    """The starts of a grid's tiles relative to its spans, and the strides inside each tile."""

    grid: Copy
    src: Int64s
    dst: Int64s
    steps: tuple[Steps, ...]
    reach: int
    """Bytes between the first run of a tile and the start of its last, at the source."""
    extent: int
    """The reach if the tile's size were not limited."""

    @classmethod
    def of(cls, grid: Copy, most: int) -> _Tiles:
        """Put as many strides into a tile as keep it dense and within `most` bytes."""
        return cls(grid, *_tiled(grid.starts, int(grid.length.max()), most))

    @property
    def source_stop(self) -> int:
        """The end of the last tile at the source."""
        return int((self.grid.src + self.grid.length).max()) + int(self.src.max()) + self.reach


def landing_batches(grids: Sequence[Copy], room: int) -> Generator[LandingBatch]:
    """Yield all runs of the grids, in batches of at most `room` bytes."""
    alike: defaultdict[tuple[int, int], list[Copy]] = defaultdict(list)
    for grid in grids:
        if len(grid):
            cut = _cut(grid, max(1, room // _SHARE))
            alike[grid.src_pool, len(cut.length)].append(cut)
    for (_, count), several in alike.items():
        tiles = [_Tiles.of(grid, max(1, room // _SHARE)) for grid in several]
        step = max(1, _MOST_TILES // sum(len(one.src) for one in tiles))
        for first in range(0, count, step):
            yield from _SortedTiles.of(tiles, slice(first, first + step)).batches(room)


def expected_reads(grids: Sequence[Copy], room: int) -> tuple[int, int]:
    """Estimate the number of ranges read for some grids, and their bytes, from the first spans."""
    some = [_first_spans(grid) for grid in grids if len(grid)]
    reads = [batch.length for batch in landing_batches(some, room)]
    total, part = (max(1, sum(grid.nbytes for grid in several)) for several in (grids, some))
    ranges, nbytes = sum(map(len, reads)), sum(int(length.sum()) for length in reads)
    return ceil_div(ranges * total, part), ceil_div(nbytes * total, part)


def _first_spans(grid: Copy) -> Copy:
    src, dst, length = (column[:_LOOKED_AT] for column in (grid.src, grid.dst, grid.length))
    return Copy(grid.src_pool, grid.dst_pool, src, dst, length, starts=grid.starts)


def _cut(grid: Copy, most: int) -> Copy:
    """The same runs, none longer than `most` bytes."""
    if int(grid.length.max()) <= most:
        return grid
    parts = -(-grid.length // most)
    skip = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    src, dst, length = (np.repeat(one, parts) for one in (grid.src, grid.dst, grid.length))
    pools = (grid.src_pool, grid.dst_pool)
    return Copy(*pools, src + skip, dst + skip, np.minimum(length - skip, most), starts=grid.starts)


class _SortedTiles(NamedTuple):
    """Tiles of all spans in the order in which they are read."""

    tiles: Sequence[_Tiles]
    owner: Int64s
    """Of which of them each is."""
    start: Int64s
    """Where it lies at the source, `far` further on in every block."""
    reached: Int64s
    """How far it and all before it reach."""
    dst: Int64s
    length: Int64s
    place: Int64s
    """Where it lies in all that is read, one behind the other."""
    far: int

    @classmethod
    def of(cls, tiles: Sequence[_Tiles], spans: slice) -> _SortedTiles:
        """Tiles with every span."""
        grid, extent = tiles[0].grid, max(one.extent for one in tiles)
        far = 1 + max(one.source_stop for one in tiles)  # so that no two blocks touch
        apart = _blocks(grid.src[spans], grid.dst[spans], extent) * far
        starts, stops, targets, lengths = [], [], [], []
        for one in tiles:
            at, length = one.grid.src[spans] + apart, one.grid.length[spans]
            starts.append((at[:, None] + one.src).reshape(-1))
            stops.append(((at + length + one.reach)[:, None] + one.src).reshape(-1))
            targets.append((one.grid.dst[spans, None] + one.dst).reshape(-1))
            lengths.append(np.repeat(length, len(one.src)))
        owner = np.repeat(np.arange(len(tiles)), [len(one) for one in starts])
        start = np.concatenate(starts)
        order = np.argsort(start, kind="stable")
        columns = (owner, start, *map(np.concatenate, (stops, targets, lengths)))
        owner, start, stop, dst, length = (column[order] for column in columns)
        reached = np.maximum.accumulate(stop)
        skipped = np.maximum(0, start[1:] - reached[:-1]).cumsum()
        place = start - start[0]
        place[1:] -= skipped
        return cls(tiles, owner, start, reached, dst, length, place, far)

    def batches(self, room: int) -> Iterator[LandingBatch]:
        """Some of them at a time, that are read together."""
        cuts = self._cuts(room)
        gaps = np.flatnonzero(self.start[1:] > self.reached[:-1]) + 1
        runs = np.union1d(gaps, cuts[:-1])
        length = self.reached[np.append(runs[1:], len(self.start)) - 1] - self.start[runs]
        src, firsts = self.start[runs] % self.far, np.searchsorted(runs, cuts).tolist()
        alike = [part for number in range(len(self.tiles)) for part in self._alike(number, cuts)]
        pool = self.tiles[0].grid.src_pool
        for number, at in enumerate(self.place[cuts[:-1]].tolist()):
            some = slice(firsts[number], firsts[number + 1])
            placing = [part.placing(number, at) for part in alike]
            yield LandingBatch(pool, src[some], length[some], [one for one in placing if one])

    def _cuts(self, room: int) -> list[int]:
        """With which tiles batches of at most so many bytes begin, and how many tiles there are."""
        edges = np.flatnonzero(self.start[1:] >= self.reached[:-1]) + 1
        edges = np.append(edges, len(self.start))
        end = self.place[-1] + self.reached[-1] - self.start[-1]
        places, cuts = np.append(self.place, end), [0]
        before = places[edges]
        while cuts[-1] < len(self.start):
            limit = places[cuts[-1]] + room
            cut = edges[np.searchsorted(before, limit, side="right") - 1]
            if cut <= cuts[-1] or before[0] > limit:
                # Tiles that reach into each other, and some bytes are read twice.
                cut = np.searchsorted(self.place, limit - room // _SHARE, side="right")
            cuts.append(int(cut))
        return cuts

    def _alike(self, number: int, cuts: list[int]) -> Iterator[_AlikeTiles]:
        """The tiles of a grid by the length of their runs."""
        own = np.flatnonzero(self.owner == number)
        lengths = self.length[own]
        for length in np.unique(lengths).tolist():
            some = own[lengths == length]
            cut = np.searchsorted(some, cuts).tolist()
            yield _AlikeTiles(self.tiles[number], length, self.place[some], self.dst[some], cut)


class _AlikeTiles(NamedTuple):
    """Tiles of one grid whose runs have one length, and with which of them batches begin."""

    tiles: _Tiles
    length: int
    place: Int64s
    dst: Int64s
    cuts: list[int]

    def placing(self, batch: int, at: int) -> Placing | None:
        """Those of a batch, which is read from a place on; None where it has none."""
        some = slice(self.cuts[batch], self.cuts[batch + 1])
        if some.start == some.stop:
            return None
        outer = _nested(self.place[some] - at, self.dst[some])
        nested = NestedSteps(outer.src, outer.dst, outer.steps + self.tiles.steps)
        return Placing(self.tiles.grid.dst_pool, nested, self.length)


def _nested(src: Int64s, dst: Int64s) -> NestedSteps:
    """Offsets as nested steps; those that batches have in common are looked for once."""
    if len(src) > _KEPT:
        return NestedSteps.of(src, dst)
    found = _steps_of((src - src[0]).tobytes(), (dst - dst[0]).tobytes())
    return NestedSteps(found.src + src[0], found.dst + dst[0], found.steps)


@lru_cache(maxsize=32)
def _tiled(
    starts: Starts, length: int, most: int
) -> tuple[Int64s, Int64s, tuple[Steps, ...], int, int]:
    """All of tiles but their grid: what requests of one route have in common."""
    nested = NestedSteps.of(starts.src, starts.dst)
    nbytes, reach, extent, dense = length, 0, 0, list[Steps]()
    for one in sorted(nested.steps, key=lambda one: abs(one.src)):
        extent, nbytes = extent + (one.times - 1) * one.src, nbytes * one.times
        if one.src < 0 or extent + length > _SPARSE * nbytes:
            extent -= (one.times - 1) * one.src
            break
        if extent + length <= most:
            dense.append(one)
            reach = extent
    others = tuple(one for one in nested.steps if one not in dense)
    return *nested.written_out(others), tuple(reversed(dense)), reach, extent


@lru_cache(maxsize=256)
def _steps_of(src: bytes, dst: bytes) -> NestedSteps:
    return NestedSteps.of(np.frombuffer(src, np.int64), np.frombuffer(dst, np.int64))


def _blocks(src: Int64s, dst: Int64s, extent: int) -> Int64s:
    """A number for each span, the same for those whose runs are interleaved at the source.

    Spans that are neighbours at the destination have neighbouring numbers: what is written
    together is then in one batch, if there is room.
    """
    order = np.argsort(src, kind="stable")
    block = np.empty_like(src)
    block[order] = np.cumsum(np.append(0, np.diff(src[order]) > extent))
    first = np.full(int(block.max()) + 1, INT64_MAX)
    np.minimum.at(first, block, dst)
    rank = np.empty_like(first)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    numbers: Int64s = rank[block]
    return numbers
