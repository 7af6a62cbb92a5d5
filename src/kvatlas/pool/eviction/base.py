"""`Eviction`: in which order entries go that nobody uses.

An entry is a small whole number: a block id of a pool, or a span of a simulated trace. Each
has a rank, the lowest goes first; among equals the one that was ranked first, and of those
ranked in one call the first named. Entries are ranked in bulk and kept as arrays in a heap of
segments: an entry that is ranked again leaves its old place behind, which is skipped when it
comes up, or swept away when there are more such than entries. So an operation costs what it
touches, whatever the number of entries, and memory is bounded by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Rank = tuple[float, ...]

SPARE = 1024
"""Places beyond two an entry that a queue may have before it is swept."""
LAST_SERIAL = 2**31 - 1
"""The last number of a segment before they are numbered anew."""


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of entries when they are used, each array as long as theirs."""

    now: int
    """The number of the request."""
    saved: NDArray[np.float64] | None = None
    """Compute that a hit on each of them saves, by byte."""
    next_use: Ids | None = None
    """The next request that comes past each of them: known of traces alone."""

    def part(self, chosen: Any) -> Use:
        """The same of some of the entries."""
        parts = [None if x is None else x[chosen] for x in (self.saved, self.next_use)]
        return Use(self.now, *parts)


@dataclass
class Eviction:
    """A queue of entries; subclasses say how those that are used are ranked."""

    entries: int
    size: Callable[[Ids], Ids] | None = None
    """Blocks that each entry takes; one where nothing is said."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What of `Use` it ranks by."""
    _heap: list[tuple[Rank, int, Ids]] = field(default_factory=list, init=False)
    _stored: int = field(default=0, init=False)
    """Places in the heap, those that were left behind included."""
    _serial: int = field(default=0, init=False)
    _last_rank: Rank = field(default=(0.0,), init=False)
    """Of the last victim."""

    def __post_init__(self) -> None:
        self._place = np.zeros(self.entries, np.int32)
        """The serial number of the segment that an entry is in; 0 for none."""

    def ranked(self, ids: Ids, use: Use) -> Iterator[tuple[Rank, Ids]]:
        """Entries that were used, the first to go first, in segments of one rank each."""
        raise NotImplementedError

    def used(self, ids: Ids, use: Use) -> None:
        """Rank entries that a request has used, or brought."""
        for rank, segment in self.ranked(ids, use):
            self._push(rank, segment)

    def forget(self, ids: Ids) -> None:
        """Take entries out of the queue: they are gone."""
        self._place[ids] = 0

    def victims(self, blocks: int, pinned: NDArray[np.bool_]) -> Ids:
        """Take entries of `blocks` blocks out of the queue, or all that are not pinned."""
        found: list[Ids] = []
        aside = []
        while blocks > 0 and self._heap:
            rank, serial, segment = heapq.heappop(self._heap)
            self._stored -= len(segment)
            passed = []
            while blocks > 0 and len(segment):
                # Only as far as it may be needed: a long segment goes in many small pieces.
                head = segment[: max(blocks, 64)]
                queued = self._place[head] == serial
                held = queued & pinned[head]
                chosen = (queued ^ held).nonzero()[0]
                freed = self.size(head[chosen]).cumsum() if self.size else None
                enough = blocks if freed is None else int(freed.searchsorted(blocks)) + 1
                chosen = chosen[:enough]
                stop = int(chosen[-1]) + 1 if len(chosen) == enough else len(head)
                if len(chosen):
                    blocks -= len(chosen) if freed is None else int(freed[len(chosen) - 1])
                    found.append(head[chosen])
                    self._leave(found[-1])
                    self._last_rank = rank
                if np.count_nonzero(held):
                    passed.append(head[:stop][held[:stop]])
                segment = segment[stop:]
            # The rest keeps its order and its place.
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
        """Forget the places that were left behind, and number the segments anew."""
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
    """Entries of one value each, in their order; the values need not be sorted."""
    if len(ids) and (values == values[0]).all():
        yield float(values[0]), ids
        return
    for value in np.unique(values):
        yield float(value), ids[values == value]
