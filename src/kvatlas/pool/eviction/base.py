"""`Eviction`: the order in which unused entries are evicted.

An entry is a small integer: a block id of a pool, or the number of a span (a fixed number of
tokens) in a simulated trace. Each entry has a rank, and the entry with the lowest rank is evicted
first. Among equal ranks, the entry that was ranked earlier is evicted first. Entries are ranked in
bulk, and arrays of entries with equal ranks, called segments, are stored in a heap. When an entry
is ranked again, its old place in a segment becomes stale. Stale places are skipped during eviction,
and removed when they outnumber the entries. The cost of an operation therefore depends only on the
entries that it touches, and the memory on the number of entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Rank = tuple[float, ...]

SPARE = 1024
"""A queue is swept when it has more places than two per entry plus this number."""
LAST_SERIAL = 2**31 - 1
"""The largest serial number of a segment. When it is reached, segments are renumbered."""


@dataclass(frozen=True, slots=True)
class Use:
    """A request's use of some entries. Each array has one element per entry."""

    now: int
    """The index of the current request."""
    saved: NDArray[np.float64] | None = None
    """Compute that a hit on each entry saves, per byte."""
    next_use: Ids | None = None
    """The index of the next request that uses each entry. Only known when a trace is replayed."""

    def part(self, chosen: Any) -> Use:
        """Return the use of some of the entries. `chosen` is a numpy index or mask."""
        parts = [None if x is None else x[chosen] for x in (self.saved, self.next_use)]
        return Use(self.now, *parts)


@dataclass
class Eviction:
    """A priority queue of entries. Subclasses define how used entries are ranked."""

    entries: int
    size: Callable[[Ids], Ids] | None = None
    """Function that returns the number of blocks of each entry; None if all have one block."""
    content: Callable[[int], Hashable] | None = None
    """Function that returns the content of an entry; None if entries are their own content."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The fields of `Use` that the policy requires."""
    _heap: list[tuple[Rank, int, Ids]] = field(default_factory=list, init=False)
    _stored: int = field(default=0, init=False)
    """Number of places in the heap, including stale ones."""
    _serial: int = field(default=0, init=False)
    _last_rank: Rank = field(default=(0.0,), init=False)
    """The rank of the last victim."""

    def __post_init__(self) -> None:
        self._place = np.zeros(self.entries, np.int32)
        """The serial number of each entry's segment; 0 if the entry is not in the queue."""

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Yield (rank, entries) for used entries, in order of eviction.

        Each array of entries becomes a segment of the queue.
        """
        raise NotImplementedError

    def used(self, ids: Ids, use: Use) -> None:
        """Rank entries that a request has used or added."""
        for rank, segment in self.ranked(ids, use):
            self._push(rank, segment)

    def forget(self, ids: Ids) -> None:
        """Remove entries from the queue."""
        self._place[ids] = 0

    def victims(self, blocks: int, pinned: NDArray[np.bool_] | None) -> Ids:
        """Remove and return the first entries that have at least `blocks` blocks in total.

        Entries whose element of `pinned` is true are skipped. If all other entries together have
        fewer blocks, all of them are returned.
        """
        found: list[Ids] = []
        aside = []
        while blocks > 0 and self._heap:
            rank, serial, segment = heapq.heappop(self._heap)
            self._stored -= len(segment)
            passed = []
            while blocks > 0 and len(segment):
                # Process a long segment in pieces, because it may be needed only in part.
                head = segment[: max(blocks, 64)]
                queued = self._place[head] == serial
                passes = 0
                if pinned is not None:
                    held = pinned[head]
                    passes = int(np.count_nonzero(held))
                if passes:
                    held &= queued
                    queued ^= held
                if self.size is None and np.count_nonzero(queued) == len(head):
                    taken = head[:blocks]  # the usual case, without an array of indices
                    stop = freed = len(taken)
                else:
                    chosen = queued.nonzero()[0]
                    sums = self.size(head[chosen]).cumsum() if self.size else None
                    enough = blocks if sums is None else int(sums.searchsorted(blocks)) + 1
                    chosen = chosen[:enough]
                    stop = int(chosen[-1]) + 1 if len(chosen) == enough else len(head)
                    taken = head[chosen]
                    freed = len(chosen) if sums is None else int(sums[: len(chosen)].max(initial=0))
                if len(taken):
                    blocks -= freed
                    found.append(taken)
                    self._leave(taken)
                    self._last_rank = rank
                if passes:
                    passed.append(head[:stop][held[:stop]])
                segment = segment[stop:]
            # The remaining entries keep their order and their rank.
            rest = np.concatenate([*passed, segment]) if passed else segment
            if len(rest):
                aside.append((rank, serial, rest))
        for one in aside:
            heapq.heappush(self._heap, one)
            self._stored += len(one[2])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _leave(self, segment: Ids) -> None:
        self._place[segment] = 0

    def _push(self, rank: Rank, segment: Ids) -> None:
        if not len(segment):
            return
        if self._stored > 2 * self.entries + SPARE or self._serial == LAST_SERIAL:
            self._sweep()
        self._serial += 1
        self._place[segment] = self._serial
        heapq.heappush(self._heap, (rank, self._serial, segment))
        self._stored += len(segment)

    def _sweep(self) -> None:
        """Remove stale places from all segments and renumber the segments."""
        queued, self._heap, self._serial, self._stored = sorted(self._heap, key=_order), [], 0, 0
        for rank, serial, segment in queued:
            left = segment[self._place[segment] == serial]
            if len(left):
                self._serial += 1
                self._heap.append((rank, self._serial, left))  # sorted, so it is a heap
                self._stored += len(left)
        for _, serial, segment in self._heap:
            self._place[segment] = serial


def _order(queued: tuple[Rank, int, Ids]) -> tuple[Rank, int]:
    return queued[:2]


def by_value(ids: Ids, values: NDArray[Any]) -> Iterator[tuple[float, Ids]]:
    """Yield (value, entries) by ascending value; entries with equal values keep their order."""
    if len(ids) and (values == values[0]).all():
        yield float(values[0]), ids
        return
    for value in np.unique(values):
        yield float(value), ids[values == value]
