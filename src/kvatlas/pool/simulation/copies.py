"""`CopyingReplay`: requests as vLLM serves them, block table by block table.

A prompt is computed in steps, and each group's table grows with them. Where a state or a window
is missing, attention's blocks are computed anew although they are there. vLLM's tables only grow,
so it keeps both, each with a place of its own in the queue; a hit takes the older. So does this
replay, and finds what vLLM finds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvatlas.pool.checkpoints import EveryBlock
from kvatlas.pool.eviction import Lru, Use
from kvatlas.pool.simulation.block_tables import SimulatedTable, StateTable
from kvatlas.pool.simulation.layer_classes import LayerClass
from kvatlas.pool.simulation.prefill_steps import BATCHED_TOKENS, PrefillSteps
from kvatlas.pool.simulation.replay import Replay
from kvatlas.pool.traces import MOST_TOKENS, Ints, Trace


class AlikeGroups(NamedTuple):
    """Groups that have equal tables, but for the blocks in them."""

    one: LayerClass
    first: int
    """The number of the first of these classes."""
    pool: int
    table: type[SimulatedTable]
    bases: Ints
    """[group, 1] the first entry of each."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is left behind."""
        return self.one.needs == "all"


class CopyingReplay(Replay):
    """A replay of entries with copies: ids below `_entries_end` are first ones, the rest further.

    Evicts the least recently used, as vLLM does. `batched_tokens` are computed in a step.
    """

    def __init__(
        self, *given: Any, trace: Trace, batched_tokens: int = BATCHED_TOKENS, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self._lengths, self._outputs = trace.lengths.tolist(), trace.outputs.tolist()
        self._groups = self._alike_groups()
        few_states = any(some.table is StateTable for some in self._groups)
        if all(some.keeps_all for some in self._groups):
            batched_tokens = MOST_TOKENS  # steps make no difference
        self._steps = PrefillSteps(batched_tokens, self.model.step, few_states)
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

    def _alike_groups(self) -> list[AlikeGroups]:
        """Classes that follow each other and differ in nothing: vLLM's groups of one kind."""
        few = not isinstance(self.policy.checkpoints, EveryBlock)
        runs: list[list[int]] = []
        for number, one in enumerate(self.model.classes):
            if runs and one == self.model.classes[runs[-1][0]]:
                runs[-1].append(number)
            else:
                runs.append([number])
        found = []
        for run in runs:
            one = self.model.classes[run[0]]
            table = StateTable if few and one.needs == "state" else SimulatedTable
            bases = np.array(run, np.int64)[:, None] << self._bits
            found.append(AlikeGroups(one, run[0], self._pools[run[0]], table, bases))
        return found

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Serve a request step by step; False where even an empty pool has no room for it."""
        step, length = self.model.step, self._lengths[request]
        kept = (wanted * step).tolist() if self._steps.ends_at_blocks else ()
        steps = list(self._steps.between(hit * step, length, kept))
        end = length + self._outputs[request]
        if not self._fits(steps, end, hit, parts):
            return False
        tables = self._begin(hit, parts)
        ids = [spans[parts[some.first]] + some.bases for some in self._groups]
        for some, table, mine in zip(self._groups, tables, ids, strict=True):
            self._take_oldest(some.pool, mine[:, : table.named])
        use = Use(request + 1)
        self._make_room(length, end, tables, ids)
        for start, stop in steps:
            self._leave(start, tables, ids, use)
            self._take(stop, end if stop == length else stop, tables)
            self._name(stop, tables, ids)
        for some, table, mine in zip(self._groups, tables, ids, strict=True):
            self._let_go(some, mine[:, table.left : table.named], use)
            self._used[some.pool] -= table.unnamed * len(some.bases)
        return True

    def _begin(self, hit: int, parts: list[Ints]) -> list[SimulatedTable]:
        """The tables of a request that has found `hit` spans; alike groups have alike ones."""
        step = self.model.step
        return [some.table(some.one, step, parts[some.first], hit) for some in self._groups]

    def _fits(self, steps: list[tuple[int, int]], end: int, hit: int, parts: list[Ints]) -> bool:
        """Whether what a request has in use at a time has room; it ends with its answer."""
        spans, most = end // self.model.step + 2, [0] * len(self._blocks)
        for some in self._groups:
            most[some.pool] += some.one.blocks * spans * len(some.bases)
        if all(need <= room for need, room in zip(most, self._blocks, strict=True)):
            return True
        tables = self._begin(hit, parts)
        for start, stop in steps:
            needs = [0] * len(self._blocks)
            for some, table in zip(self._groups, tables, strict=True):
                table.leave(start)
                table.take(end if some.keeps_all and stop == steps[-1][1] else stop)
                table.name(stop)
                needs[some.pool] += table.in_use * len(some.bases)
            if any(need > room for need, room in zip(needs, self._blocks, strict=True)):
                return False
        return True

    def _make_room(
        self, length: int, end: int, tables: list[SimulatedTable], ids: list[Ints]
    ) -> None:
        """Evict at once what all steps will: for what is named, and for the last step's rest."""
        needs = [0] * len(self._blocks)
        for some, table, mine in zip(self._groups, tables, ids, strict=True):
            more = (mine.shape[1] - table.named) * some.one.blocks
            more += table.behind(end, mine.shape[1]) if some.keeps_all else table.behind(length)
            needs[some.pool] += more * len(some.bases)
        for pool, need in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])

    def _leave(self, start: int, tables: list[SimulatedTable], ids: list[Ints], use: Use) -> None:
        """Before a step, let go of what windows and states have left behind."""
        for some, table, mine in zip(self._groups, tables, ids, strict=True):
            if not some.keeps_all:
                before = table.unnamed
                self._let_go(some, mine[:, table.leave(start)], use)
                self._used[some.pool] -= (before - table.unnamed) * len(some.bases)

    def _take(self, stop: int, end: int, tables: list[SimulatedTable]) -> None:
        """Blocks for a step up to `stop`; those of attention up to `end`, for the answer too.

        Windows and states go on in what they leave. Nobody knows an answer's tokens.
        """
        needs = [0] * len(self._blocks)
        for some, table in zip(self._groups, tables, strict=True):
            needs[some.pool] += table.take(end if some.keeps_all else stop) * len(some.bases)
        for pool, need in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])
            self._used[pool] += need
        self.outcome.peak = max(self.outcome.peak, sum(self._used))

    def _name(self, stop: int, tables: list[SimulatedTable], ids: list[Ints]) -> None:
        """Blocks that are whole can be found, beside those that were there."""
        for table, mine in zip(tables, ids, strict=True):
            new = mine[:, table.name(stop)]
            if new.size:
                again = self._present[new]
                self._present[new] = True
                if again.any():
                    new[again] = self._copy(new[again])

    def _let_go(self, some: AlikeGroups, named: Ints, use: Use) -> None:
        """What nobody uses waits to be evicted: group after group, the last blocks first."""
        if named.size:
            self._evictions[some.pool].used(named[:, ::-1].ravel(), use)

    def _take_oldest(self, pool: int, found: Ints) -> None:
        """The oldest copies of what is found; none of them is evicted until ranked anew."""
        if not found.size:
            return
        if self._copies and (copied := self._copied[found]).any():
            for place in zip(*copied.nonzero(), strict=True):
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
