"""`LruQueue`: entries that nobody uses, the least recently used first.

What `eviction.Lru` does, for a replay that gives and takes in bulk and in order of time: what is
used comes to the end, so segments need no heap, and a segment's entries are equally large, so
that nobody adds sizes up. An entry that is used again leaves its old place behind, which is
skipped when it comes up, or swept away when there are more such than entries.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvatlas.geometry import ceil_div
from kvatlas.pool.eviction.base import LAST_SERIAL, SPARE
from kvatlas.pool.traces import Ints


class LruQueue:
    """Segments of entries, each with the blocks that an entry takes.

    >>> queue = LruQueue(4)
    >>> queue.used(np.array([0, 1, 2]), size=2)
    >>> queue.used(np.array([0]), size=2)
    >>> queue.victims(3)  # (entries, their blocks)
    (array([1, 2]), 4)
    """

    def __init__(self, entries: int) -> None:
        self._segments: deque[tuple[int, int, Ints]] = deque()
        """(serial number, blocks of an entry, entries), the first to go in front."""
        self._place = np.zeros(entries, np.int32)
        """The serial number of the segment that an entry is in; 0 for none."""
        self._serial = 0
        self._stored = 0
        """Places in all segments, those that were left behind included."""

    def used(self, ids: Ints, size: int) -> None:
        """Entries of so many blocks each come to the end of the queue, the first to go first."""
        if self._stored > 2 * len(self._place) + SPARE or self._serial == LAST_SERIAL:
            self._sweep()
        self._serial += 1
        self._place[ids] = self._serial
        self._segments.append((self._serial, size, ids))
        self._stored += len(ids)

    def forget(self, ids: Ints) -> None:
        """Take entries out of the queue: somebody uses them."""
        self._place[ids] = 0

    def victims(self, blocks: int) -> tuple[Ints, int]:
        """Take entries of `blocks` blocks out of the queue, or all; and the blocks they had."""
        found: list[Ints] = []
        freed = 0
        while freed < blocks and self._segments:
            serial, size, segment = self._segments.popleft()
            # Only as far as it may be needed: a long segment goes in many small pieces.
            enough = ceil_div(blocks - freed, size)
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
        gone = found[0] if len(found) == 1 else np.concatenate([*found, _NOTHING])
        self._place[gone] = 0
        return gone, freed

    def _sweep(self) -> None:
        """Forget the places that were left behind, and number the segments anew."""
        queued, self._segments = self._segments, deque()
        self._serial = self._stored = 0
        for serial, size, segment in queued:
            left = segment[self._place[segment] == serial]
            if len(left):
                self._serial += 1
                self._segments.append((self._serial, size, left))
                self._stored += len(left)
        for serial, _, segment in self._segments:
            self._place[segment] = serial


_NOTHING = np.empty(0, np.int64)
