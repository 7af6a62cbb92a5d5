"""`LruQueue`: entries that nobody uses, the least recently used first.

What `eviction.Lru` does, for a replay that puts entries in when nobody uses them any more, and
takes them out when somebody does: in order of time, so that segments need no heap, and those of
one size together, so that nobody adds sizes up. What is taken out leaves a gap in its segment,
which is skipped when it comes up, or swept away when there are more gaps than entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.eviction.base import LAST_SERIAL, SPARE
from kvatlas.pool.traces import Ints


class LruQueue:
    """Segments of entries, each with the blocks that an entry takes.

    >>> queue = LruQueue(4)
    >>> queue.put(np.array([0, 1, 2]), size=2)
    >>> queue.take(np.array([0]))
    >>> queue.put(np.array([0]), size=2)
    >>> queue.victims(3)  # (entries, their blocks)
    (array([1, 2]), 4)
    """

    def __init__(self, entries: int) -> None:
        self._segments: deque[tuple[int, int, Ints]] = deque()
        """(serial number, blocks of an entry, entries), the first to go in front."""
        self._place = np.zeros(entries, np.int32)
        """The serial number of the last segment that an entry came into; 0 where it was taken."""
        self._serial = 0
        self._stored = 0
        """Places in all segments, gaps included."""
        self._coming: list[Ints] = []
        """Behind the last segment: they become one when somebody asks for them."""
        self._coming_size = 0

    def put(self, ids: Ints, size: int) -> None:
        """Entries of so many blocks each come to the end of the queue, the first to go first."""
        if size != self._coming_size:
            self._join()
            self._coming_size = size
        self._coming.append(ids)

    def take(self, ids: Ints) -> None:
        """Take entries out of the queue: somebody uses them."""
        self._join()
        self._place[ids] = 0

    def victims(self, blocks: int) -> tuple[Ints, int]:
        """Take the first entries of `blocks` blocks out, or all; and the blocks they had."""
        self._join()
        found = [_NOTHING]
        freed = 0
        while freed < blocks and self._segments:
            serial, size, segment = self._segments.popleft()
            enough = ceil_div(blocks - freed, size)
            # Only as far as it may be needed: a long segment goes in many small pieces.
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
        """(blocks of an entry, entries) of every segment, without gaps, the first to go first."""
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
        """Forget all gaps, and number the segments anew."""
        queued = [(size, ids) for size, ids in self.queued() if len(ids)]
        self._segments.clear()
        self._serial = self._stored = 0
        for size, ids in queued:
            self._append(ids, size)


_NOTHING = np.empty(0, np.int64)
