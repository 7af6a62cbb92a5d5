"""`VllmReplay`: replay requests exactly as vLLM serves them, block table by block table.

A prompt is computed in steps, and each group's table grows with them. If a state or a window is
missing, attention's blocks are computed again although they are cached. vLLM then keeps both
copies, because it never replaces a block in a table. Each copy has a separate place in the eviction
queue, and a hit uses the older one. This replay does the same and finds the same hits as vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.pool.checkpoints import EveryBlock
from kvatlas.simulate.block_tables import AttentionTable, SimulatedTable, StateTable
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.lru_queue import LruQueue
from kvatlas.simulate.prefill_steps import BATCHED_TOKENS, PrefillSteps
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_base import ReplayBase, ReplayPolicy
from kvatlas.simulate.traces import MOST_TOKENS, Ints, Trace


class AlikeGroups(NamedTuple):
    """Consecutive groups of one kind, whose tables differ only in their block ids."""

    one: LayerClass
    first: int
    """The index of the first class."""
    number: int
    """The number of groups."""
    pool: int
    table: type[SimulatedTable]
    bases: Ints
    """[group, 1]: the first entry of each group."""
    keeps_all: bool
    """Whether all blocks are kept to the end of the request."""


Served = tuple[AlikeGroups, SimulatedTable, Ints]
"""Groups of one kind, their table, and [group, index]: the ids of the table's `_places`."""


class VllmReplay(ReplayBase):
    """A replay in which entries may have several copies, with LRU eviction, as in vLLM.

    An entry is the blocks of one span in one group. Each copy has an id: the first copy has the id
    of the entry, and further copies have ids from `_entries_end` on. A prefill step computes at
    most `batched_tokens` tokens.
    """

    def __init__(
        self,
        model: PoolModel,
        spans: Spans,
        policy: ReplayPolicy,
        *,
        trace: Trace,
        batched_tokens: int = BATCHED_TOKENS,
    ) -> None:
        super().__init__(model, spans, policy)
        self._lengths, self._outputs = trace.lengths.tolist(), trace.outputs.tolist()
        self._groups = self._alike_groups()
        few_states = any(some.table is StateTable for some in self._groups)
        if all(some.keeps_all for some in self._groups):
            batched_tokens = MOST_TOKENS  # for full attention, steps make no difference
        self._steps = PrefillSteps(batched_tokens, self.model.step, few_states)
        self._span_blocks = [
            sum(some.one.blocks * some.number for some in self._groups if some.pool == pool)
            for pool in range(len(self._blocks))
        ]
        """For each pool, the number of blocks per span in all groups together."""
        self._entries_end = len(self._present)
        # There are at most as many copies as blocks, and as many as spans are computed.
        most = min(sum(self._blocks), len(self.spans.numbers) * len(self.model.classes))
        total = self._entries_end + most
        self._queues = [LruQueue(total) for _ in self._blocks]
        self._owner = np.zeros(most, np.int64)
        """The entry that each further id is a copy of."""
        self._free: list[int] = []
        """Further ids that were used and are free again."""
        self._fresh = self._entries_end
        """The first further id that was never used."""
        self._copies: dict[int, list[int]] = {}
        """For each entry with further copies, the ids of its copies, oldest first."""
        self._copied = np.zeros(total, bool)
        """Whether an id belongs to an entry in `_copies`; True for all further ids."""
        self._copied[self._entries_end :] = True

    def _alike_groups(self) -> list[AlikeGroups]:
        """Return vLLM's groups of each kind: consecutive layer classes that are equal."""
        few = not isinstance(self.policy.checkpoints, EveryBlock)
        runs: list[list[int]] = []
        for number, one in enumerate(self.model.classes):
            if runs and one == self.model.classes[runs[-1][0]]:
                runs[-1].append(number)
            else:
                runs.append([number])
        found = []
        for run in runs:
            first, one = run[0], self.model.classes[run[0]]
            keeps_all = one.needs == "all"
            table = AttentionTable if keeps_all else SimulatedTable
            if few and one.needs == "state":
                table = StateTable
            bases = np.array(run, np.int64)[:, None] << self._bits
            pool = self._pools[first]
            found.append(AlikeGroups(one, first, len(run), pool, table, bases, keeps_all))
        return found

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Serve a request step by step. Return False if it does not fit even into empty pools."""
        step, length = self.model.step, self._lengths[request]
        kept = (wanted * step).tolist() if self._steps.ends_at_blocks else ()
        steps = list(self._steps.between(hit * step, length, kept))
        end = length + self._outputs[request]
        if not self._fits(steps, end, hit, parts):
            return False
        served = self._begin(spans, hit, parts)
        for some, table, ids in served:
            self._take_oldest(some.pool, ids[:, : table.named])
        self._make_room(length, end, served)
        for start, stop in steps:
            if start > hit * step:
                self._leave(start, served)
            self._take(stop, end if stop == length else stop, served)
            self._name(stop, served)
        for some, table, ids in served:
            self._let_go(some, ids[:, table.left : table.named])
            self._used[some.pool] -= table.unnamed * some.number
        return True

    def _begin(self, spans: Ints, hit: int, parts: list[Ints]) -> list[Served]:
        """Return the block tables of a request, one per kind of group.

        The first `hit` spans of the request are cached.
        """
        served = []
        for some, table in zip(self._groups, self._tables(hit, parts), strict=True):
            mine = spans if some.keeps_all else spans[parts[some.first]]
            served.append((some, table, mine + some.bases))
        return served

    def _tables(self, hit: int, parts: list[Ints]) -> list[SimulatedTable]:
        step, tables = self.model.step, []
        for some in self._groups:
            part = parts[some.first]
            places: Sequence[int] = range(len(part)) if some.keeps_all else part.tolist()
            tables.append(some.table(some.one, step, places, hit))
        return tables

    def _fits(self, steps: list[tuple[int, int]], end: int, hit: int, parts: list[Ints]) -> bool:
        """Return whether the pools have space for a request at every step, including its answer."""
        spans = end // self.model.step + 2
        if all(
            spans * blocks <= room
            for blocks, room in zip(self._span_blocks, self._blocks, strict=True)
        ):
            return True
        tables = self._tables(hit, parts)
        for start, stop in steps:
            needs = [0] * len(self._blocks)
            for some, table in zip(self._groups, tables, strict=True):
                table.leave(start)
                table.take(end if some.keeps_all and stop == steps[-1][1] else stop)
                table.name(stop)
                needs[some.pool] += table.in_use * some.number
            if any(need > room for need, room in zip(needs, self._blocks, strict=True)):
                return False
        return True

    def _make_room(self, length: int, end: int, served: list[Served]) -> None:
        """Evict enough blocks for all steps of a request at once."""
        needs = [0] * len(self._blocks)
        for some, table, ids in served:
            named = ids.shape[1]
            more = (named - table.named) * some.one.blocks
            more += table.behind(end, named) if some.keeps_all else table.behind(length)
            needs[some.pool] += more * some.number
        for pool, need in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])

    def _leave(self, start: int, served: list[Served]) -> None:
        """Before a step, free blocks that windows and states no longer need."""
        for some, table, ids in served:
            if not some.keeps_all:
                before = table.unnamed
                self._let_go(some, ids[:, table.leave(start)])
                self._used[some.pool] -= (before - table.unnamed) * some.number

    def _take(self, stop: int, end: int, served: list[Served]) -> None:
        """Take blocks for the tokens up to `stop`. Full attention takes blocks up to `end`.

        In the last step, `end` includes the answer. Windows and recurrent layers need no blocks for
        the answer, because they reuse the blocks that they free. Blocks of the answer never get a
        hash, because a trace does not contain the tokens of answers.
        """
        needs = [0] * len(self._blocks)
        for some, table, _ in served:
            needs[some.pool] += table.take(end if some.keeps_all else stop) * some.number
        for pool, need in enumerate(needs):
            self._evict(pool, self._used[pool] + need - self._blocks[pool])
            self._used[pool] += need
        self.outcome.peak = max(self.outcome.peak, sum(self._used))

    def _name(self, stop: int, served: list[Served]) -> None:
        """Make the complete blocks of the first `stop` tokens findable by later requests.

        Blocks that can be found already are skipped. If an entry is cached already, its new blocks
        become a further copy.
        """
        for _, table, ids in served:
            new = ids[:, table.name(stop)]
            if new.size:
                entries = new.ravel()
                again = self._present[entries]
                self._present[entries] = True
                if np.count_nonzero(again):
                    new[again.reshape(new.shape)] = self._copy(entries[again])

    def _let_go(self, some: AlikeGroups, named: Ints) -> None:
        """Add released copies to the eviction queue, group by group, the last spans first."""
        if named.size:
            self._queues[some.pool].put(named[:, ::-1], some.one.blocks)

    def _take_oldest(self, pool: int, found: Ints) -> None:
        """Replace each entry in the array `found` by the id of its oldest copy, in place.

        Removes these copies from the eviction queue, because the request uses them.
        """
        if not found.size:
            return
        ids = found.ravel()
        if self._copies and np.count_nonzero(copied := self._copied[ids]):
            ids[copied] = [self._copies[entry][0] for entry in ids[copied].tolist()]
            found[:] = ids.reshape(found.shape)
        self._queues[pool].take(ids)

    def _copy(self, entries: Ints) -> Ints:
        """Add a further copy of each of these cached entries, and return the new ids."""
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

    def _evict(self, pool: int, blocks: int) -> None:
        """Evict at least `blocks` blocks of a pool. Blocks in use are not in the queue."""
        if blocks <= 0:
            return
        victims, freed = self._queues[pool].victims(blocks)
        self._gone(victims)
        self._used[pool] -= freed
        self.outcome.evictions += freed

    def _gone(self, victims: Ints) -> None:
        """Remove evicted copies, and mark entries whose last copy was evicted as absent."""
        if self._copies and np.count_nonzero(copied := self._copied[victims]):
            self._lose_copies(victims[copied])
            victims = victims[~copied]
        self._present[victims] = False

    def _lose_copies(self, ids: Ints) -> None:
        """Remove evicted copies of entries that have, or had, several copies."""
        further = ids >= self._entries_end
        self._free += ids[further].tolist()
        entries = ids.copy()
        entries[further] = self._owner[ids[further] - self._entries_end]
        owners = entries.tolist()
        for one, entry in zip(ids.tolist(), owners, strict=True):
            self._copies[entry].remove(one)
        gone, plain = [], []
        for entry in set(owners):
            left = self._copies[entry]
            if not left:
                gone.append(entry)
            if not left or left == [entry]:
                plain.append(entry)
                del self._copies[entry]
        self._present[gone] = False
        self._copied[plain] = False
