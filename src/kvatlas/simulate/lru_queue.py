"""`LruQueue`: unused entries, least recently used first.

It does the same as `eviction.Lru`, for a replay that adds entries when they become unused and
removes them when they are used again. Entries are added in order of time and stored in segments, so
no heap is needed. All entries of a segment have the same size, so sizes need not be summed. A
removed entry leaves a gap in its segment. Gaps are skipped during eviction, and removed when they
outnumber the entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.eviction.base import LAST_SERIAL, SPARE
from kvatlas.simulate.traces import Ints


class LruQueue:
    """A queue of entries in LRU order, in segments of entries with equal numbers of blocks.

    >>> queue = LruQueue(4)
    >>> queue.put(np.array([0, 1, 2]), size=2)
    >>> queue.take(np.array([0]))
    >>> queue.put(np.array([0]), size=2)
    >>> queue.victims(3)  # (entries, their blocks)
    (array([1, 2]), 4)
    """

    def __init__(self, entries: int) -> None:
        self._segments: deque[tuple[int, int, Ints]] = deque()
        """(serial number, blocks per entry, entries), in order of eviction."""
        self._place = np.zeros(entries, np.int32)
        """The serial number of each entry's segment; 0 for removed entries."""
        self._serial = 0
        self._stored = 0
        """Number of places in all segments, including gaps."""
        self._coming: list[Ints] = []
        """Entries that were added after the last segment; joined into a segment when needed."""
        self._coming_size = 0

    def put(self, ids: Ints, size: int) -> None:
        """Append entries of `size` blocks each. The first of them is evicted first."""
        if size != self._coming_size:
            self._join()
            self._coming_size = size
        self._coming.append(ids)

    def take(self, ids: Ints) -> None:
        """Remove entries that are in use again."""
        self._join()
        self._place[ids] = 0

    def victims(self, blocks: int) -> tuple[Ints, int]:
        """Remove the first entries, and return them and their total number of blocks.

        The total is at least `blocks`, unless the whole queue has fewer blocks.
        """
        self._join()
        found = [_NOTHING]
        freed = 0
        while freed < blocks and self._segments:
            serial, size, segment = self._segments.popleft()
            enough = ceil_div(blocks - freed, size)
            # Process a long segment in pieces, because it may be needed only in part.
            head = segment[: max(enough, 64)]
            queued = self._place[head] == serial
            if np.count_nonzero(queued) == len(head):
                chosen = head[:enough]
                stop = len(chosen)
            else:
                places = queued.nonzero()[0][:enough]
                chosen = head[places]
                stop = int(places[-1]) + 1 if len(places) == enough else len(head)
            found.append(chosen)
            freed += len(chosen) * size
            self._stored -= stop
            if stop < len(segment):
                self._segments.appendleft((serial, size, segment[stop:]))
        return np.concatenate(found), freed

    def queued(self) -> Iterator[tuple[int, Ints]]:
        """Yield (blocks per entry, entries) of each segment, in order of eviction, without gaps."""
        self._join()
        for serial, size, segment in self._segments:
            yield size, segment[self._place[segment] == serial]

    def _join(self) -> None:
        if self._coming:
            ids, self._coming = np.concatenate(self._coming, axis=None), []
            self._append(ids, self._coming_size)
            if self._stored > 2 * len(self._place) + SPARE or self._serial == LAST_SERIAL:
                self._sweep()

    def _append(self, ids: Ints, size: int) -> None:
        self._serial += 1
        self._place[ids] = self._serial
        self._segments.append((self._serial, size, ids))
        self._stored += len(ids)

    def _sweep(self) -> None:
        """Remove all gaps and renumber the segments."""
        queued = [(size, ids) for size, ids in self.queued() if len(ids)]
        self._segments.clear()
        self._serial = self._stored = 0
        for size, ids in queued:
            self._append(ids, size)


_NOTHING = np.empty(0, np.int64)
