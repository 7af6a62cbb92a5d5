"""`Replay`: replay the requests of a trace through the pools of a plan, one after the other.

For each request, entries of earlier requests are evicted to make space for new ones, and the
eviction policy ranks the entries that the request uses. An entry is the blocks of one span in one
layer class.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.checkpoints import EveryBlock
from kvatlas.pool.eviction import Use, eviction_policy
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.release_order import along_the_request, by_group
from kvatlas.simulate.replay_base import ReplayBase, ReplayPolicy
from kvatlas.simulate.traces import Ints


class Replay(ReplayBase):
    """A replay of requests one after the other, with any eviction policy.

    If a cached block is computed again, it is still stored once. `VllmReplay` stores it twice.
    """

    def __init__(
        self,
        model: PoolModel,
        spans: Spans,
        policy: ReplayPolicy,
        *,
        in_flight: Ints | None = None,
        saved: Callable[[LayerClass, Ints], NDArray[np.float64]] | None = None,
    ) -> None:
        super().__init__(model, spans, policy)
        self._pinned = np.zeros(len(self._present), bool)
        self._in_parts = not isinstance(policy.checkpoints, EveryBlock)
        self._sizes = np.array([one.blocks for one in model.classes], np.int64)
        self._alike = len(set(self._sizes.tolist())) == 1
        """Whether all entries have the same size."""
        kind = eviction_policy(policy.eviction)
        sized = None if self._alike else self._size
        self._evictions = [kind(len(self._present), sized) for _ in self._blocks]
        self._next = spans.next_uses() if "next_use" in kind.needs else None
        self._saved = saved if "saved" in kind.needs else None
        self._in_flight = np.zeros((len(self._blocks), len(self.outcome.hits)), np.int64)
        if in_flight is not None and not policy.store:
            self._in_flight[: len(in_flight)] = in_flight

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Make space for a request and add its entries. Return False if it can never fit.

        `ReplayBase._admit` describes the arguments.
        """
        if self.policy.store:
            self._store(request, parts)
            return True
        fitting = self._fitting(request, spans, hit, wanted, parts)
        if fitting is None:
            return False
        entries, places = self._in_order(request, fitting)
        here = self._present[entries]
        new = entries[~here]
        for pool in range(len(self._evictions)):
            need = self._room(self._of_pool(new, pool))
            held = int(self._in_flight[pool, request])
            self._evict(pool, self._used[pool] + need + held - self._blocks[pool], entries[here])
            self._used[pool] += need
            self.outcome.peak = max(self.outcome.peak, sum(self._used) + held)
        self._present[new] = True
        self._rank(request, entries, places)
        return True

    def _fitting(
        self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]
    ) -> list[Ints] | None:
        """Return the indices of the request's spans to keep, for each class of layers.

        If the request does not fit into empty pools, the earliest checkpoints are omitted. Returns
        None if it does not fit even without checkpoints.
        """
        while self._too_much(request, parts):
            if not len(wanted):
                return None
            wanted = wanted[-(len(wanted) // 2) :] if len(wanted) > 1 else wanted[:0]
            parts = self._entries(spans, hit, wanted)
        return parts

    def _too_much(self, request: int, parts: list[Ints]) -> bool:
        needs = self._in_flight[:, request].tolist()
        for one, pool, part in zip(self.model.classes, self._pools, parts, strict=True):
            needs[pool] += one.blocks * len(part)
            if needs[pool] > self._blocks[pool]:
                return True
        return False

    def _store(self, request: int, parts: list[Ints]) -> None:
        """Add a request's entries to an external store, then evict entries until they fit.

        Even new entries may be evicted. With `head_first`, the entries are added one by one. An
        entry that was stored before may then be evicted to make space for an earlier entry of the
        request, and is added again.
        """
        entries, places = self._in_order(request, parts)
        while len(entries):
            here = self._present[entries]
            count = len(entries)
            if self.policy.head_first:
                count = int(np.argmax(here != here[0])) or count
            self._bring(request, entries[:count], places[:count])
            entries, places = entries[count:], places[count:]
        self.outcome.peak = max(self.outcome.peak, sum(self._used))

    def _bring(self, request: int, entries: Ints, places: Ints) -> None:
        new = entries[~self._present[entries]]
        self._present[new] = True
        self._rank(request, entries, places)
        for pool in range(len(self._evictions)):
            self._used[pool] += self._room(self._of_pool(new, pool))
            self._evict(pool, self._used[pool] - self._blocks[pool])

    def _in_order(self, request: int, parts: list[Ints]) -> tuple[Ints, Ints]:
        """Return a request's entries in order of eviction, and the span index of each entry."""
        spans = self._of_request(request)
        entries = []
        for number, (one, part) in enumerate(zip(self.model.classes, parts, strict=True)):
            mine = spans if one.needs == "all" else spans[part]
            entries.append(mine + (number << self._bits))
        if not self.policy.by_group:
            return along_the_request(entries, parts, head_first=self.policy.head_first)
        needs = [
            self._reusable[request] if one.needs == "state" else first[len(spans)]
            for one, first in zip(self.model.classes, self._first, strict=True)
        ]
        return by_group(self.model.classes, needs, entries, parts, in_parts=self._in_parts)

    def _rank(self, request: int, entries: Ints, places: Ints) -> None:
        later = saved = None
        if self._next is not None:
            later = self._next[self.spans.starts[request] + places]
        if self._saved is not None:
            saved = np.empty(len(entries))
            kinds = entries >> self._bits
            for place, one in enumerate(self.model.classes):
                mine = kinds == place
                saved[mine] = self._saved(one, places[mine])
        use = Use(request + 1, saved, later)
        for pool, eviction in enumerate(self._evictions):
            if len(self._evictions) == 1:
                eviction.used(entries, use)
            else:
                mine = self._pool_of(entries) == pool
                eviction.used(entries[mine], use.part(mine))

    def _size(self, entries: Ints) -> Ints:
        """Return the number of blocks of each entry."""
        sizes: Ints = self._sizes[entries >> self._bits]
        return sizes

    def _room(self, entries: Ints) -> int:
        """Return the total number of blocks of these entries."""
        if self._alike:
            return len(entries) * int(self._sizes[0])
        return int(self._size(entries).sum())

    def _of_pool(self, entries: Ints, pool: int) -> Ints:
        return entries if len(self._evictions) == 1 else entries[self._pool_of(entries) == pool]

    def _pool_of(self, entries: Ints) -> Ints:
        pools: Ints = np.array(self._pools)[entries >> self._bits]
        return pools

    def _evict(self, pool: int, blocks: int, needed: Ints | None = None) -> None:
        """Free `blocks` blocks of a pool, without evicting entries in `needed`."""
        if blocks <= 0:
            return
        if needed is not None:
            self._pinned[needed] = True
        each = int(self._sizes[0]) if self._alike else 1
        victims = self._evictions[pool].victims(ceil_div(blocks, each), self._pinned)
        if needed is not None:
            self._pinned[needed] = False
        freed = self._room(victims)
        self._gone(victims)
        self._used[pool] -= freed
        self.outcome.evictions += freed

    def _gone(self, victims: Ints) -> None:
        """Mark evicted entries as absent."""
        self._present[victims] = False
