"""`CopyingReplay`: requests as vLLM serves them, block table by block table.

A prompt is computed in steps, and each group's table grows with them. Where a state or a window
is missing, attention's blocks are computed anew although they are there. vLLM's tables only grow,
so it keeps both, each with a place of its own in the queue; a hit takes the older. So does this
replay, and finds what vLLM finds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvatlas.pool.checkpoints import EveryBlock
from kvatlas.pool.eviction import Lru, Use
from kvatlas.pool.simulation.block_tables import BlockTable, StateTable
from kvatlas.pool.simulation.prefill_steps import BATCHED_TOKENS, PrefillSteps
from kvatlas.pool.simulation.replay import Replay
from kvatlas.pool.traces import Ints, Trace


class CopyingReplay(Replay):
    """A replay of entries with copies: ids below `_entries_end` are first ones, the rest further.

    Evicts the least recently used, as vLLM does. `batched_tokens` are computed in a step.
    """

    def __init__(
        self, *given: Any, trace: Trace, batched_tokens: int = BATCHED_TOKENS, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._lengths, self._outputs = trace.lengths.tolist(), trace.outputs.tolist()
        states = any(one.needs == "state" for one in self.model.classes)
        few = not isinstance(self.policy.checkpoints, EveryBlock)
        self._steps = PrefillSteps(batched_tokens, self.model.step, states and few)
        self._tables = [
            StateTable if few and one.needs == "state" else BlockTable for one in self.model.classes
        ]
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
        """Serve a request step by step; False where even an empty pool has no room for it."""
        step, length, output = self.model.step, self._lengths[request], self._outputs[request]
        steps = list(self._steps.between(hit * step, length, (wanted * step).tolist()))
        if output:  # what the answer holds at its end; nobody knows its tokens
            steps.append((length + output - 1, length + output))
        if not self._fits(steps, hit, parts):
            return False
        tables = self._begin(hit, parts)
        ids = [spans[part] + (n << self._bits) for n, part in enumerate(parts)]
        for pool, table, mine in zip(self._pools, tables, ids, strict=True):
            self._take_oldest(pool, mine[: table.named])
        use = Use(request + 1)
        for start, stop in steps:
            self._make_step(start, stop, tables, ids, use)
        for pool, table, mine in zip(self._pools, tables, ids, strict=True):
            self._evictions[pool].used(mine[table.left : table.named][::-1], use)
            self._used[pool] -= table.unnamed
        return True

    def _begin(self, hit: int, parts: list[Ints]) -> list[BlockTable]:
        """The tables of a request that has found `hit` spans."""
        made = zip(self._tables, self.model.classes, parts, strict=True)
        return [kind(one, self.model.step, part, hit) for kind, one, part in made]

    def _fits(self, steps: list[tuple[int, int]], hit: int, parts: list[Ints]) -> bool:
        """Whether what a request has in use at a time has room."""
        most = [0] * len(self._blocks)
        for one, pool in zip(self.model.classes, self._pools, strict=True):
            last = steps[-1][1] if steps else 0
            most[pool] += one.blocks * (last // self.model.step + 2)
        if all(need <= room for need, room in zip(most, self._blocks, strict=True)):
            return True
        tables = self._begin(hit, parts)
        for start, stop in steps:
            needs = [0] * len(self._blocks)
            for pool, table in zip(self._pools, tables, strict=True):
                table.leave(start)
                table.take(stop)
                table.name(stop)
                needs[pool] += table.in_use
            if any(need > room for need, room in zip(needs, self._blocks, strict=True)):
                return False
        return True

    def _make_step(
        self, start: int, stop: int, tables: list[BlockTable], ids: list[Ints], use: Use
    ) -> None:
        """Let go of what is left behind, take blocks, and name those that are whole."""
        needs = [0] * len(self._blocks)
        for one, pool, table, mine in zip(
            self.model.classes, self._pools, tables, ids, strict=True
        ):
            if one.needs != "all":
                before = table.unnamed
                left = table.leave(start)
                self._evictions[pool].used(mine[left][::-1], use)
                self._used[pool] -= before - table.unnamed
            needs[pool] += table.take(stop)
        for pool, need in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])
            self._used[pool] += need
        self.outcome.peak = max(self.outcome.peak, sum(self._used))
        for table, mine in zip(tables, ids, strict=True):
            new = mine[table.name(stop)]
            again = self._present[new].nonzero()[0]
            self._present[new] = True
            if len(again):
                new[again] = self._copy(new[again])

    def _take_oldest(self, pool: int, found: Ints) -> None:
        """The oldest copies of what is found; none of them is evicted until ranked anew."""
        if self._copies:
            for place in self._copied[found].nonzero()[0].tolist():
                found[place] = self._copies[int(found[place])][0]
        self._evictions[pool].forget(found)

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
