"""S3-FIFO (SOSP'23): a small queue for new entries and a main queue for reused entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from kvatlas.pool.eviction.base import Eviction, Ids, Use

MOST_USES = 3
SHARE = 0.1
"""Entries are evicted from the small queue while it has more than this share of all entries."""


class S3Fifo(Eviction):
    """Evict entries that are used only once before entries that are used again.

    A new entry enters the small queue, or the main queue if its content was recently evicted from
    the small one. When an entry reaches the head of the small queue, it is evicted, or moved to the
    main queue if it was used since it entered. In the main queue, an entry that reaches the head
    goes back to the end once for each use, up to three times.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        """Both queues map entries, in order of insertion, to the number of uses since then."""
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        """Contents recently evicted from the small queue, at most as many as both queues have."""

    def used(self, ids: Ids, use: Use) -> None:  # noqa: ARG002 - only the order matters
        """Count a use of each entry that is in a queue, and add all other entries to a queue."""
        small, main, ghosts, content = self._small, self._main, self._ghosts, self.content
        for entry in ids.tolist():
            if entry in small:
                small[entry] = min(small[entry] + 1, MOST_USES)
            elif entry in main:
                main[entry] = min(main[entry] + 1, MOST_USES)
            elif ghosts and (known := content(entry) if content else entry) in ghosts:
                del ghosts[known]
                main[entry] = 0
            else:
                small[entry] = 0

    def forget(self, ids: Ids) -> None:
        """Remove entries, and do not remember them as recently evicted."""
        for entry in ids.tolist():
            self._small.pop(entry, None)
            self._main.pop(entry, None)

    def victims(self, blocks: int, pinned: NDArray[np.bool_] | None) -> Ids:
        """Evict entries with at least `blocks` blocks in total, except pinned entries.

        Entries of the small queue are evicted while this queue contains more than the fraction
        `SHARE` of all entries.
        """
        found: list[int] = []
        aside: list[tuple[OrderedDict[int, int], int, int]] = []
        skipped = 0  # pinned entries of the small queue
        while blocks > 0 and (self._small or self._main):
            total = len(self._small) + len(self._main) + len(aside)
            many = len(self._small) + skipped > SHARE * total
            small = bool(self._small) and (many or not self._main)
            queue = self._small if small else self._main
            entry, uses = queue.popitem(last=False)
            if pinned is not None and pinned[entry]:
                aside.append((queue, entry, uses))
                skipped += small
            elif uses:
                self._main[entry] = 0 if small else uses - 1
            else:
                found.append(entry)
                blocks -= int(self.size(np.array([entry]))[0]) if self.size else 1
                if small:
                    self._ghosts[self.content(entry) if self.content else entry] = None
                    while len(self._ghosts) > total:
                        self._ghosts.popitem(last=False)
        for queue, entry, uses in reversed(aside):
            queue[entry] = uses
            queue.move_to_end(entry, last=False)
        return np.array(found, np.int64)
