"""`CopyingReplay`: blocks that are computed again are kept beside those that were there.

Where a state or a window is missing, an engine computes attention's blocks anew although it has
them. vLLM's block tables only grow, so it keeps both, each with a place of its own in the queue;
a hit takes the older. So does this replay, and finds what vLLM finds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvatlas.pool.eviction import Lru, Use
from kvatlas.pool.simulation.replay import Replay
from kvatlas.pool.traces import Ints


class CopyingReplay(Replay):
    """A replay of entries with copies: ids below `_entries_end` are first ones, the rest further.

    Evicts the least recently used, as vLLM does.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._entries_end = len(self._present)
        most = sum(self._blocks)
        total = self._entries_end + most
        self._pinned = np.zeros(total, bool)
        sized = None if self._alike else self._size
        self._evictions = [Lru(total, sized) for _ in self._blocks]
        self._owner = np.zeros(most, np.int64)
        """The entry that each further id is a copy of."""
        self._free = list(range(total - 1, self._entries_end - 1, -1))
        self._copies: dict[int, list[int]] = {}
        """Ids of entries that have others than their first, the oldest in front."""
        self._copied = np.zeros(self._entries_end, bool)
        """Whether an entry is in `_copies`."""

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Room for a request: everything behind the hit is new, be it there or not."""
        if self._too_much(request, parts):
            return super()._admit(request, spans, hit, wanted, parts)
        entries, places = self._in_order(request, parts)
        found = places < hit
        new, ids = entries[~found], entries.copy()
        for place in (found & self._copied[entries]).nonzero()[0].tolist():
            ids[place] = self._copies[int(entries[place])][0]
        for pool in range(len(self._evictions)):
            need = self._room(self._of_pool(new, pool))
            held = int(self._in_flight[pool, request])
            self._evict(pool, self._used[pool] + need + held - self._blocks[pool], ids[found])
            self._used[pool] += need
            self.outcome.peak = max(self.outcome.peak, sum(self._used) + held)
        for place in (~found & self._present[entries]).nonzero()[0].tolist():
            ids[place] = self._copy(int(entries[place]))
        self._present[new] = True
        for pool, eviction in enumerate(self._evictions):
            eviction.used(self._of_pool(ids, pool), Use(request + 1))
        return True

    def _copy(self, entry: int) -> int:
        """Another id of an entry that is there."""
        made = self._free.pop()
        self._owner[made - self._entries_end] = entry
        self._copies.setdefault(entry, [entry]).append(made)
        self._copied[entry] = True
        return made

    def _gone(self, victims: Ints) -> None:
        """Entries are gone when the last of their copies is."""
        first = victims[victims < self._entries_end]
        self._present[first[~self._copied[first]]] = False
        further = victims[victims >= self._entries_end]
        for one in [*first[self._copied[first]].tolist(), *further.tolist()]:
            entry = int(self._entry(np.array([one]))[0])
            left = self._copies[entry]
            left.remove(one)
            if one != entry:
                self._free.append(one)
            if left in ([], [entry]):
                del self._copies[entry]
                self._copied[entry] = False
                self._present[entry] = bool(left)

    def _entry(self, ids: Ints) -> Ints:
        further = ids >= self._entries_end
        if not further.any():
            return ids
        found = ids.copy()
        found[further] = self._owner[ids[further] - self._entries_end]
        return found

    def _size(self, entries: Ints) -> Ints:
        """Blocks of each entry."""
        return super()._size(self._entry(entries))

    def _pool_of(self, entries: Ints) -> Ints:
        return super()._pool_of(self._entry(entries))
