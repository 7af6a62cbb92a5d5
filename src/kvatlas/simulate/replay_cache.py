"""`ReplayCache`: the cached blocks of all pools in a replay, by content.

For each block size, the prefixes that end where a block ends are numbered. `_where` maps (group,
number) to a block id. Recurrent groups keep few prefixes, so they have rows in `_where`:
`Bundle.row_of` maps a number to a row, which has an element for each group.

If a cached block is computed again, the new block replaces it, as in `BlockPool`. With
`ReplayPolicy.by_group`, both are kept and a hit uses the oldest, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.pool.checkpoint_share import CheckpointShare
from kvatlas.pool.checkpoints import EveryBlock
from kvatlas.pool.eviction import eviction_policy
from kvatlas.simulate.bundles import ABSENT, Bundle
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_ids import ReplayIds
from kvatlas.simulate.replay_policy import Outcome, ReplayPolicy
from kvatlas.simulate.traces import Ints, Trace
from kvatlas.specs import Visibility

LAST_TOKEN = Visibility(window=2)
"""The tokens that the next token needs from a recurrent group: only the last one."""

Saved = Callable[[LayerClass, int, Ints], NDArray[np.float64]]
"""Returns the compute that a hit saves, per byte: of blocks with a number of tokens, by their ends
in tokens."""


class ReplayCache:
    """The cached blocks of all pools."""

    def __init__(
        self,
        model: PoolModel,
        trace: Trace,
        policy: ReplayPolicy,
        spans_of: Callable[[Trace, int], Spans],
        saved: Saved | None,
    ) -> None:
        self.model, self.trace, self.policy = model, trace, policy
        self._kept = policy.checkpoints
        self._build(spans_of)
        kind = eviction_policy(policy.eviction)
        self._ids = [
            ReplayIds(
                blocks,
                kind(blocks + 1, content=partial(self._content, pool)),
                partial(self._gone, pool),
            )
            for pool, blocks in enumerate(model.blocks)
        ]
        self._saved = saved if "saved" in kind.needs else None
        self._next: dict[int, Ints] = {}
        for ids in self._ids:
            if self._saved:
                ids.saved = np.ones(ids.count)
            if "next_use" in kind.needs:
                ids.next_use = np.zeros(ids.count, np.int64)
                self._next = {block: cut.next_uses() for block, cut in self._cuts.items()}
        narrow: Any = np.int32 if len(self._where) < 1 << 31 else np.int64
        self._names = [np.full(blocks + 1, ABSENT, narrow) for blocks in model.blocks]
        """For each pool, the element of `_where` of each kept block."""
        self._shares = self._checkpoint_shares()
        self._copies = policy.by_group and not self._shares
        sizes = [blocks + 1 if self._copies else 0 for blocks in model.blocks]
        self._newer = [np.arange(size, dtype=np.int32) for size in sizes]
        self._older = [np.arange(size, dtype=np.int32) for size in sizes]
        """For each pool and block, the next newer and the next older copy of its content: rings."""
        self._further = [0] * len(model.blocks)
        """For each pool, the number of blocks with a copy of the content of another block."""
        self.outcome = Outcome(np.zeros(len(trace), np.int64))

    def _build(self, spans_of: Callable[[Trace, int], Spans]) -> None:
        self._bundles: list[Bundle] = []
        self._cuts: dict[int, Spans] = {}
        total = 0
        for number, one in enumerate(self.model.classes):
            block = one.block or self.model.step
            spans = self._cuts.setdefault(block, spans_of(self.trace, block))
            sparse = one.needs == "state" and self.policy.by_group
            if sparse:  # vLLM's recurrent groups have a state per block, and need the last one
                one = replace(one, needs="window", visibility=LAST_TOKEN)
                sparse = not isinstance(self._kept, EveryBlock)
            state, keeps_all = one.needs == "state", one.needs == "all"
            rows = min(self._most_rows(number), spans.count) if state else 0
            width = rows if state else spans.count
            shift = 1 if state else spans.count
            bases = total + np.arange(one.groups)[:, None] * shift
            self._bundles.append(
                Bundle(
                    one, one.groups, block, spans, total, width, keeps_all, state, sparse,
                    0 if state else 1 + keeps_all, bases,
                    np.full(spans.count if state else 0, ABSENT, np.int32),
                    np.zeros(rows, np.int64), list(range(rows))[::-1],
                    np.arange(one.groups),
                )
            )  # fmt: skip
            total += width * one.groups
        self._where = np.full(total, ABSENT, np.int32)
        self._starts = np.array([bundle.base for bundle in self._bundles])
        order = list(range(len(self._bundles)))
        if not self.policy.by_group:
            order.sort(key=lambda n: self._bundles[n].rank)
        self._order = [
            [n for n in order if self._bundles[n].one.pool == pool]
            for pool in range(len(self.model.blocks))
        ]
        """For each pool, its bundles in release order."""

    def _most_rows(self, number: int) -> int:
        """Return how many states of a layer class can be cached at a time."""
        return self.model.blocks[self.model.classes[number].pool]

    def _checkpoint_shares(self) -> dict[int, CheckpointShare]:
        share, found = self._kept.share, {}
        for pool, ids in enumerate(self._ids):
            kinds = {one.keeps_all for one in self._bundles if one.one.pool == pool}
            if share is not None and len(kinds) == 2:
                found[pool] = CheckpointShare(ids, int(share * ids.count))
        return found

    def _describe(self, bundle: Bundle, request: int, first: int, blocks: Ints) -> None:
        """Record the data that the eviction policy needs about `blocks`, an array [group, entry].

        `first` is the table entry of the first column. The entry of a recurrent state is the one
        that ends at the position of the state.
        """
        ids, entries = self._ids[bundle.one.pool], np.arange(first, first + blocks.shape[1])
        if self._saved and ids.saved is not None:
            ends = (entries + 1) * bundle.block
            ids.saved[blocks] = self._saved(bundle.one, bundle.block, ends)
        if ids.next_use is not None:
            start = bundle.spans.starts[request]
            ids.next_use[blocks] = self._next[bundle.block][start + entries]

    def _find(self, cuts: dict[int, Ints], reusable: int) -> tuple[int, int]:
        """Return the number of leading spans after which a request can continue.

        The second result is the number of leading spans that full attention has cached.
        """
        step, longest, others = self.model.step, reusable, []
        for bundle in self._bundles:
            if bundle.keeps_all:
                each = step // bundle.block
                numbers = cuts[bundle.block][: longest * each]
                longest = self._leading(bundle, numbers) // each
            else:
                others.append(bundle)
        attention = longest
        if others and longest and not self._can_serve(cuts, others, longest):
            good = np.ones(longest + 1, bool)
            for bundle in others:
                self._continues(bundle, cuts[bundle.block], good)
            longest -= int(good[::-1].argmax())
        return longest, attention if len(others) < len(self._bundles) else longest

    def _leading(self, bundle: Bundle, numbers: Ints) -> int:
        """Return how many leading blocks are cached in all groups."""
        for base in bundle.bases[:, 0].tolist():
            start, count = 0, 64
            while start < len(numbers):
                there = self._where[base + numbers[start : start + count]] >= 0
                found = int(there.argmin())
                if not there[found]:
                    numbers = numbers[: start + found]
                    break
                start += count
                count *= 4
        return len(numbers)

    def _can_serve(self, cuts: dict[int, Ints], others: list[Bundle], end: int) -> bool:
        """Return whether all windows and states needed to continue after `end` spans are cached."""
        tokens = end * self.model.step
        for bundle in others:
            stop, numbers = tokens // bundle.block, cuts[bundle.block]
            if bundle.state:
                if not self._is_whole(bundle, bundle.row_of[numbers[stop - 1]]):
                    return False
            else:
                needed = numbers[bundle.first(tokens) // bundle.block : stop]
                if np.count_nonzero(self._where[bundle.names(needed)] < 0):
                    return False
        return True

    def _continues(self, bundle: Bundle, numbers: Ints, good: NDArray[np.bool_]) -> None:
        """Clear the elements of `good` for numbers of spans after which groups cannot continue."""
        most, each = len(good) - 1, self.model.step // bundle.block
        if bundle.state:
            rows = bundle.row_of[numbers[each - 1 : most * each : each]]
            good[1:] &= rows >= 0
            places = good[1:].nonzero()[0]
            starts = bundle.base + rows[places].astype(np.int64)[:, None] * bundle.groups
            good[1 + places] = (self._where[starts + bundle.each] >= 0).all(axis=1)
            return
        ends = np.arange(most + 1)
        missing = np.zeros(most * each + 1, np.int32)
        absent = self._where[bundle.names(numbers[: most * each])] < 0
        absent.any(axis=0).cumsum(out=missing[1:])
        good &= missing[ends * each] == missing[bundle.firsts(ends * self.model.step)]

    def _is_whole(self, bundle: Bundle, row: int) -> bool:
        """Return whether all groups have the state of a row."""
        start = bundle.base + int(row) * bundle.groups
        return bool(row >= 0 and self._where[start : start + bundle.groups].min() >= 0)

    def _state(self, bundle: Bundle, number: int) -> NDArray[np.int32]:
        """Return the block of each group for a cached state."""
        start = bundle.base + int(bundle.row_of[number]) * bundle.groups
        return self._where[start : start + bundle.groups]

    def _row(self, bundle: Bundle, number: int) -> Ints:
        """Return the elements of `_where` for a state. If the state has no row yet, it gets one."""
        row = int(bundle.row_of[number])
        if row < 0:
            if not bundle.rows:
                self._sweep(bundle)
            row = bundle.rows.pop()
            bundle.row_of[number], bundle.prefix_of[row] = row, number
        return self._elements(bundle, row)

    def _elements(self, bundle: Bundle, row: int) -> Ints:
        """Return the indices into `_where` at which a row's blocks are recorded."""
        elements: Ints = bundle.each + (bundle.base + int(row) * bundle.groups)
        return elements

    def _sweep(self, bundle: Bundle) -> None:
        """Free the rows of states whose blocks were evicted in every group."""
        start, stop = bundle.base, bundle.base + bundle.width * bundle.groups
        rows = self._where[start:stop].reshape(bundle.width, bundle.groups)
        empty = np.flatnonzero((rows < 0).all(axis=1))
        bundle.row_of[bundle.prefix_of[empty]] = ABSENT
        bundle.rows += empty.tolist()

    def _keep(self, bundle: Bundle, names: Ints, blocks: Ints) -> None:
        """Keep blocks as the content of these elements of `_where`.

        A block that was computed again replaces the cached copy. By vLLM's rules, both are kept.
        """
        pool = bundle.one.pool
        names, blocks = names.ravel(), blocks.ravel()
        before = self._where[names]
        there = before >= 0
        if np.count_nonzero(there):
            if self._copies:
                new = ~self._ids[pool]._arrays.kept[blocks]
                self._ids[pool].keep(blocks[new])
                self._add(pool, names[new], blocks[new], before[new])
                return
            old = before[there & (before != blocks)].astype(np.int64)
            if len(old):
                self._ids[pool].discard(old)
        self._where[names] = blocks
        self._names[pool][blocks] = names
        self._ids[pool].keep(blocks)

    def _add(self, pool: int, names: Ints, blocks: Ints, before: NDArray[np.int32]) -> None:
        """Record new blocks that do not replace cached copies.

        `before` contains, for each new block, the first cached block with the same content, or a
        negative number if there is none. The first block stays the first.
        """
        self._names[pool][blocks] = names
        there = before >= 0
        new = ~there
        self._where[names[new]] = blocks[new]
        first, blocks = before[there].astype(np.int64), blocks[there]
        newer, older = self._newer[pool], self._older[pool]
        self._further[pool] += len(blocks)
        last = older[first]
        newer[last], older[blocks] = blocks, last
        newer[blocks], older[first] = first, blocks

    def _keep_shared(self, bundle: Bundle, names: Ints, blocks: Ints) -> None:
        """Keep blocks of one group, if the share of checkpoints allows it."""
        share = self._shares[bundle.one.pool]
        before = self._where[names]
        found = set(before[before >= 0].tolist())
        if not share.make_room(len(blocks) - len(found), found):
            return
        before = self._where[names]
        new = before < 0
        again = ~new & (before != blocks)
        self._keep(bundle, names, blocks)
        share.use(blocks[new].tolist())
        share.lose(before[again].tolist())
        share.use(blocks[again].tolist())

    def _gone(self, pool: int, blocks: Ints) -> None:
        """Remove evicted blocks from `_where`."""
        self.outcome.evictions += len(blocks)
        names = self._names[pool][blocks]
        if self._further[pool]:
            names = self._remove_copies(pool, names, blocks)
        self._lost(names)
        if pool in self._shares:
            self._shares[pool].lose(blocks.tolist())

    def _lost(self, names: Ints) -> None:
        """Record that these elements of `_where` have no block any longer."""
        self._where[names] = ABSENT

    def _remove_copies(self, pool: int, names: Ints, blocks: Ints) -> Ints:
        """Remove evicted blocks, and return the elements of `_where` that have no other copy."""
        newer, older = self._newer[pool], self._older[pool]
        among = newer[blocks] != blocks
        if not np.count_nonzero(among):
            return names
        lost, names, blocks = [names[~among]], names[among], blocks[among]
        # Neighbours of a ring change each other, so they are removed one after the other.
        kept = self._ids[pool]._arrays.kept
        apart = kept[newer[blocks]] & kept[older[blocks]]
        while len(blocks):
            mine, gone = names[apart], blocks[apart]
            last = newer[gone] == gone
            lost.append(mine[last])
            self._further[pool] -= len(gone) - len(lost[-1])
            after, before = newer[gone], older[gone]
            newer[before], older[after] = after, before
            newer[gone] = older[gone] = gone
            moved = (self._where[mine] == gone) & ~last
            self._where[mine[moved]] = after[moved]
            names, blocks = names[~apart], blocks[~apart]
            apart = np.zeros(len(blocks), bool)
            apart[np.unique(names, return_index=True)[1]] = True
        return np.concatenate(lost)

    def _content(self, pool: int, block: int) -> Hashable:
        """Return the content of a kept block: its group and its prefix."""
        name = int(self._names[pool][block])
        bundle = self._bundles[int(np.searchsorted(self._starts, name, side="right")) - 1]
        if not bundle.state:
            return name
        row, group = divmod(name - bundle.base, bundle.groups)
        return bundle.base, group, int(bundle.prefix_of[row])
