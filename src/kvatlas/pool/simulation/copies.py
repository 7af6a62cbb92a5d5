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
        # No more copies than blocks, and none that nobody computes.
        most = min(sum(self._blocks), len(self.spans.numbers) * len(self.model.classes))
        total = self._entries_end + most
        sized = None if self._alike else self._size
        self._evictions = [Lru(total, sized) for _ in self._blocks]
        self._owner = np.zeros(most, np.int64)
        """The entry that each further id is a copy of."""
        self._free: list[int] = []
        """Further ids that were used and are free again."""
        self._fresh = self._entries_end
        """The first further id that was never used."""
        self._copies: dict[int, list[int]] = {}
        """Ids of entries that have others than their first, the oldest in front."""
        self._copied = np.zeros(self._entries_end, bool)
        """Whether an entry is in `_copies`."""

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Room for a request: everything behind the hit is new, be it there or not."""
        fitting = self._fitting(request, spans, hit, wanted, parts)
        if fitting is None:
            return False
        entries, places = self._in_order(request, fitting)
        ids, new = entries.copy(), entries
        if hit:
            self._take_oldest(ids, (places < hit).nonzero()[0])
            behind = (places >= hit).nonzero()[0]
            new = entries[behind]
        for pool in range(len(self._evictions)):
            need = self._room(self._of_pool(new, pool))
            held = int(self._in_flight[pool, request])
            self._evict(pool, self._used[pool] + need + held - self._blocks[pool])
            self._used[pool] += need
            self.outcome.peak = max(self.outcome.peak, sum(self._used) + held)
        again = self._present[new].nonzero()[0]
        if len(again):
            ids[behind[again] if hit else again] = self._copy(new[again])
        self._present[new] = True
        for pool, eviction in enumerate(self._evictions):
            eviction.used(self._of_pool(ids, pool), Use(request + 1))
        return True

    def _take_oldest(self, ids: Ints, found: Ints) -> None:
        """The oldest copies of what is found; none of them is evicted until ranked anew."""
        if self._copies:
            for place in found[self._copied[ids[found]]].tolist():
                ids[place] = self._copies[int(ids[place])][0]
        for pool, eviction in enumerate(self._evictions):
            eviction.forget(self._of_pool(ids[found], pool))

    def _copy(self, entries: Ints) -> Ints:
        """Another id of each of these entries, which are there."""
        left = max(len(self._free) - len(entries), 0)
        made = self._free[left:]
        del self._free[left:]
        missing = len(entries) - len(made)
        made += range(self._fresh, self._fresh + missing)
        self._fresh += missing
        ids = np.array(made, np.int64)
        self._owner[ids - self._entries_end] = entries
        self._copied[entries] = True
        for entry, one in zip(entries.tolist(), made, strict=True):
            self._copies.setdefault(entry, [entry]).append(one)
        return ids

    def _victims(self, pool: int, blocks: int) -> Ints:
        """None of those that are found: they are not in the queue."""
        return self._evictions[pool].victims(blocks)

    def _gone(self, victims: Ints) -> None:
        """Entries are gone when the last of their copies is."""
        if not self._copies:
            super()._gone(victims)
            return
        entries = self._entry(victims)
        self._present[entries] = False
        copied = self._copied[entries].nonzero()[0]
        if not len(copied):
            return
        owners = entries[copied].tolist()
        for one, entry in zip(victims[copied].tolist(), owners, strict=True):
            self._copies[entry].remove(one)
            if one != entry:
                self._free.append(one)
        there, plain = [], []
        for entry in set(owners):
            left = self._copies[entry]
            if left:
                there.append(entry)
            if not left or left == [entry]:
                plain.append(entry)
                del self._copies[entry]
        self._present[there] = True
        self._copied[plain] = False

    def _entry(self, ids: Ints) -> Ints:
        further = (ids >= self._entries_end).nonzero()[0]
        if not len(further):
            return ids
        found = ids.copy()
        found[further] = self._owner[ids[further] - self._entries_end]
        return found

    def _size(self, entries: Ints) -> Ints:
        """Blocks of each entry."""
        return super()._size(self._entry(entries))

    def _pool_of(self, entries: Ints) -> Ints:
        return super()._pool_of(self._entry(entries))
