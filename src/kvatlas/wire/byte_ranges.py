"""Sorted arrays of the byte ranges that one transfer reads from the source's pools.

A source checks that a peer reads only inside these ranges. A reader that joins neighbouring runs
(contiguous bytes to read) uses the ranges to skip the bytes between the runs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy, Stream
from kvatlas.routing.binding import Starts

_MOST_RANGES = 1 << 19
"""The approximate maximum number of ranges per `Copy` of a stream. They take 8 MB.

If there are more, neighbouring runs of a block are joined, including the gaps between them. A gap
belongs to the same block, and so to the same request.
"""

_KEPT_STARTS = 1 << 15
"""Ranges are cached for at most this many starts, whose arrays the cache keeps in memory."""


class ByteRanges(NamedTuple):
    """Byte ranges of one memory region. They are sorted, and neither overlap nor touch.

    >>> ranges = ByteRanges.of(np.array([40, 0, 8]), np.array([50, 8, 12]))
    >>> ranges.starts.tolist(), ranges.stops.tolist()
    ([0, 40], [12, 50])
    >>> ranges.cover(np.array([4, 40]), np.array([8, 10])), ranges.cover(*np.array([[11], [2]]))
    (True, False)
    """

    starts: Int64s
    stops: Int64s

    @classmethod
    def of(cls, starts: Int64s, stops: Int64s, gap: int = 0) -> ByteRanges:
        """Return the sorted ranges; ranges with at most `gap` bytes between them are joined."""
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], np.maximum.accumulate(stops[order])
        first = np.flatnonzero(np.append(True, starts[1:] - stops[:-1] > gap))
        return cls(starts[first], stops[np.append(first[1:], len(starts)) - 1])

    def cover(self, starts: Int64s, lengths: Int64s) -> bool:
        """Whether every run of `lengths` bytes at `starts` is inside one of the ranges."""
        at = np.searchsorted(self.starts, starts, side="right") - 1
        return bool(((at >= 0) & (starts + lengths <= self.stops[at])).all())

    def clip(self, copy: Copy) -> Copy:
        """Return the runs of `copy`, cut to the parts whose source bytes are inside a range.

        >>> ranges = ByteRanges.of(np.array([0, 40]), np.array([12, 50]))
        >>> some = ranges.clip(Copy(0, 0, np.array([8]), np.array([100]), np.array([34])))
        >>> some.source.tolist(), some.destination.tolist(), some.length.tolist()
        ([8, 40], [100, 132], [4, 2])
        """
        stop = copy.source + copy.length
        first = np.searchsorted(self.stops, copy.source, side="right")
        count = np.searchsorted(self.starts, stop, side="left") - first
        run = np.repeat(np.arange(len(count)), count)
        at = np.arange(len(run)) - np.repeat(np.cumsum(count) - count - first, count)
        source = np.maximum(copy.source[run], self.starts[at])
        length = np.minimum(stop[run], self.stops[at]) - source
        destination = copy.destination[run] + source - copy.source[run]
        return Copy(copy.source_pool, copy.destination_pool, source, destination, length)


def source_ranges(stream: AnyStream) -> dict[int, ByteRanges]:
    """Return the byte ranges that a transfer reads from the source's pools, by pool index.

    The result is empty for a transfer that converts the format. The source gathers the bytes of
    such a transfer into staging buffers if the transport checks ranges. The peer then reads no
    pools.
    """
    found: defaultdict[int, list[ByteRanges]] = defaultdict(list)
    if isinstance(stream, Stream):
        for index, grid in enumerate(stream.grids()):
            found[grid.source_pool] += _grid_ranges(grid, stream, index)
    return {pool: _joined(several) for pool, several in found.items() if several}


def _joined(several: list[ByteRanges]) -> ByteRanges:
    starts = np.concatenate([one.starts for one in several])
    return ByteRanges.of(starts, np.concatenate([one.stops for one in several]))


def _grid_ranges(grid: Copy, stream: Stream, index: int) -> list[ByteRanges]:
    """Return the byte ranges that `grid` reads at the source, one entry per distinct run length.

    `index` is the index of the grid in the stream. If there are very many ranges, ranges in one
    block are joined across small gaps.
    """
    found = []
    for length in np.unique(grid.length).tolist():
        spans, gap = grid.source[grid.length == length], 0
        inner = _block_ranges(grid.starts, length)
        if len(inner.starts) * len(spans) > _MOST_RANGES:
            block = abs(stream.shape().patterns[index].strides[0])
            while len(inner.starts) * len(spans) > _MOST_RANGES and gap < block - 1:
                gap = min(2 * gap + length, block - 1)
                at = grid.starts.source
                inner = ByteRanges.of(at, at + length, gap)
        starts, stops = ((spans[:, None] + one).reshape(-1) for one in inner)
        found.append(ByteRanges(starts, stops))
    return found


def _block_ranges(starts: Starts, length: int) -> ByteRanges:
    """Return the source ranges of one block, with adjacent ranges joined.

    The result is cached unless there are many starts, because all requests between the same two
    plans have the same `Starts`.
    """
    make = _kept_ranges if len(starts.source) <= _KEPT_STARTS else _kept_ranges.__wrapped__
    return make(starts, length)


@lru_cache(maxsize=32)
def _kept_ranges(starts: Starts, length: int) -> ByteRanges:
    return ByteRanges.of(starts.source, starts.source + length)
