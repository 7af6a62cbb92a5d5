"""`FastReplay`: `PoolReplay` that serves most requests at once instead of step by step.

A request is served at once if this does not change the order of evictions: all blocks that the
request evicts must have been unused before it began. For this, the pools need enough unused blocks.
In addition, either eviction is LRU or the request releases kept blocks only at its end. Other
requests are served step by step. Blocks that a request takes and releases without keeping them are
counted, and get no ids.
"""

from __future__ import annotations

import numpy as np

from kvatlas.geometry.integers import ceil_div
from kvatlas.simulate.bundles import ABSENT, Bundle
from kvatlas.simulate.pool_replay import CachedPrefix, PoolReplay
from kvatlas.simulate.traces import Ints

Run = tuple[int, int]


class _Part:
    """The steps of one request in the groups of one bundle."""

    def __init__(self, bundle: Bundle, numbers: Ints, hit: int, owned: Ints, first: int) -> None:
        self.bundle, self.numbers, self.pool = bundle, numbers, bundle.one.pool
        self.begun = hit // bundle.block
        self.size, self.gone = self.begun, first
        """Number of table entries, and of leading entries that windows no longer need."""
        self.owned, self.first = owned, first
        """[group, entry]: cached blocks that the request uses, and the entry of the first."""
        self.runs: list[Run] = []
        """Table entries that the request computes and keeps, as disjoint ascending ranges."""
        self.states: dict[int, Ints] = {hit: owned.ravel()} if bundle.state and hit else {}
        """The blocks of kept states, by number of tokens."""
        self.blocks = owned
        """[group, entry - first]: kept blocks, or `ABSENT`."""
        self.unkept: list[int] = []
        """The entries with blocks that are not kept, if not all entries have blocks."""

    def unkept_until(self, stop: int) -> int:
        """Return how many entries before `stop` have blocks that are in use and not kept."""
        if self.bundle.sparse:
            before = len(self.unkept)
            self.unkept = [entry for entry in self.unkept if entry >= stop]
            return before - len(self.unkept)
        kept = sum(
            max(min(last, stop) - max(first, self.gone), 0)
            for first, last in ((self.first, self.begun), *self.runs)
        )
        return stop - self.gone - kept


Released = list[tuple[_Part, int, int]]
"""Ranges of table entries that are released together. A state has the range (tokens, tokens)."""


class FastReplay(PoolReplay):
    """A replay that gives the same hits as `PoolReplay`, in less time."""

    def _serve(self, found: CachedPrefix) -> bool:
        if self._shares or any(self.model.rings) or not (self._dense or self._ids[0].is_lru):
            return super()._serve(found)
        parts = [self._part(bundle, found) for bundle in self._bundles]
        pinned: list[Ints] = [_NOTHING] * len(self._ids)
        if found.hit:
            for pool in range(len(self._ids)):
                mine = [one.owned.ravel() for one in parts if one.pool == pool]
                pinned[pool] = _joined(mine)
        if not self._fits_at_once(parts, found, pinned):
            return super()._serve(found)
        for ids, blocks in zip(self._ids, pinned, strict=True):
            ids.pin(blocks)
        self._at_once(parts, found)
        return True

    def _part(self, bundle: Bundle, found: CachedPrefix) -> _Part:
        numbers, hit = found.cuts[bundle.block], found.hit
        stop = first = hit // bundle.block
        owned = np.empty((bundle.groups, 0), np.int64)
        if hit and bundle.state:
            owned = self._state(bundle, int(numbers[stop - 1])).astype(np.int64)[:, None]
        elif hit:
            first = 0 if bundle.keeps_all else min(bundle.first(hit) // bundle.block, stop)
            owned = self._where[bundle.names(numbers[first:stop])].astype(np.int64)
        return _Part(bundle, numbers, hit, owned, first)

    def _fits_at_once(self, parts: list[_Part], found: CachedPrefix, pinned: list[Ints]) -> bool:
        """Return whether enough blocks are free or unused, whatever the request releases."""
        end = self._lengths[found.request] + self._outputs[found.request]
        free = [ids.free - len(used) for ids, used in zip(self._ids, pinned, strict=True)]
        for part in parts:
            states = len(found.ends) + 3
            count = states if part.bundle.state else ceil_div(end, part.bundle.block) - part.begun
            count = min(count, states) if part.bundle.sparse else count
            free[part.pool] -= count * part.bundle.groups
        return min(free) >= 0

    def _at_once(self, parts: list[_Part], found: CachedPrefix) -> None:
        """Serve a request that fits: evict step by step, and assign block ids at the end."""
        length, outputs = self._lengths[found.request], self._outputs[found.request]
        released: list[Released] = []
        # In vLLM, cached copies of computed blocks stay.
        copies = [not self._copies and self._has_copies(part, length, found.ends) for part in parts]
        computed = found.hit
        if self._windows or any(copies):
            computed = self._in_steps(parts, found, copies, released)
        elif length or outputs:
            computed = length
            self._in_one_step(parts, found, released)
        self._assign(parts)
        queued: list[list[Ints]] = [[] for _ in self._ids]
        for ranges in released:
            if ranges[0][0].bundle.state:
                queued[ranges[0][0].pool].append(ranges[0][0].states[ranges[0][1]])
            else:
                self._queue(ranges, queued)
        if self._next or self._saved:
            for part in parts:  # of full attention, because other parts are used by LRU only
                stop = min(part.size, len(part.numbers))
                self._describe(part.bundle, found.request, 0, part.blocks[:, :stop])
        ends: list[Released] = []
        for order in self._order:
            mine = [parts[number] for number in order]
            ending = [(one, computed, computed) for one in mine if computed in one.states]
            ending = [] if outputs else ending
            ending += [(one, one.gone, one.size) for one in mine if not one.bundle.state]
            ends.append(ending)
        for ranges in self._in_turn(ends):
            self._queue(ranges, queued)
        for ids, blocks in zip(self._ids, queued, strict=True):
            ids.queue(_joined(blocks))

    def _in_turn(self, released: list[Released]) -> list[Released]:
        """Return lists of ranges; the ranges in a list are released together.

        They are all ranges of a pool or, by vLLM's rules, the range of one layer class.
        """
        if self.policy.by_group:
            return [[one] for ranges in released for one in ranges]
        return [ranges for ranges in released if ranges]

    def _in_steps(
        self, parts: list[_Part], found: CachedPrefix, copies: list[bool], released: list[Released]
    ) -> int:
        """Count and evict blocks for all steps, and return the number of computed tokens."""
        length, outputs = self._lengths[found.request], self._outputs[found.request]
        held = [0] * len(self._ids)
        some = any(copies)
        computed = found.hit
        counts: list[list[int]] = []
        for start, stop in self._steps.between(found.hit, length, found.ends):
            self._step(parts, held, released, start, stop)
            counts.append(list(held))
            if some:  # they may be evicted before they are computed again
                self._make_free(counts)
            ends = [one for one in found.ends if start < one <= stop]
            for part, again in zip(parts, copies, strict=True):
                self._publish_part(part, start, stop, ends, again=again)
            computed = stop
        if outputs:
            self._step(parts, held, released, computed, length + outputs, answer=True)
            counts.append(list(held))
        self._make_free(counts)
        return computed

    def _in_one_step(
        self, parts: list[_Part], found: CachedPrefix, released: list[Released]
    ) -> None:
        """Do the same as `_in_steps`, for a request without windows and cached copies.

        No block becomes free before the end, so all steps together need the sum of their blocks.
        """
        length, outputs = self._lengths[found.request], self._outputs[found.request]
        held = [0] * len(self._ids)
        # The state of each step is copied by the next step, if it is kept.
        copied = [end for end in found.ends if end < length or outputs]
        for part in parts:
            bundle = part.bundle
            if bundle.state:
                held[part.pool] += (1 + len(copied)) * bundle.groups
                part.states.update(dict.fromkeys(found.ends, _NOTHING))
                continue
            part.size = ceil_div(length + outputs, bundle.block)
            held[part.pool] += (part.size - part.begun) * bundle.groups
            stop = min(length // bundle.block, len(part.numbers))
            if stop > part.begun:
                part.runs.append((part.begun, stop))
        for tokens in ([found.hit] if found.hit else []) + copied:
            released += [[(part, tokens, tokens)] for part in parts if part.bundle.state]
        self._make_free([held])

    def _make_free(self, counts: list[list[int]]) -> None:
        """Evict enough blocks for several steps, and clear `counts`.

        For each step and pool, `counts` contains the number of blocks without ids that the request
        owns.
        """
        peaks = [0] * len(counts)
        for pool, ids in enumerate(self._ids):
            most = 0
            for step, held in enumerate(counts):
                most = max(most, held[pool])
                peaks[step] += ids.used - max(most - ids.waiting, 0) + held[pool]
            ids.make_free(most)
        self.outcome.peak = max(self.outcome.peak, *peaks, 0)
        counts.clear()

    def _step(
        self,
        parts: list[_Part],
        held: list[int],
        released: list[Released],
        computed: int,
        stop: int,
        *,
        answer: bool = False,
    ) -> None:
        """Count the blocks that a step releases and takes.

        The step computes tokens computed .. stop - 1. `held` contains, for each pool, the number of
        blocks without ids that the request owns.
        """
        left: list[Released] = [[] for _ in self._ids]
        copied: list[Released] = []
        for part in parts:
            bundle, pool = part.bundle, part.pool
            if bundle.state:
                if computed in part.states:
                    copied.append([(part, computed, computed)])
                    held[pool] += bundle.groups
                elif not part.size:
                    held[pool] += bundle.groups
                part.size = 1
                continue
            size = ceil_div(stop, bundle.block)
            if not bundle.keeps_all:
                gone = min(bundle.first(computed) // bundle.block, part.size)
                if gone > part.gone:
                    left[pool].append((part, part.gone, gone))
                    held[pool] -= part.unkept_until(gone) * bundle.groups
                    part.gone = gone
                size = min(size, part.size + 1) if answer else size
            if size > part.size:
                taken = size - part.size
                if bundle.sparse:
                    taken = 1
                    part.unkept.append(size - 1)
                held[pool] += taken * bundle.groups
                part.size = size
        released += self._in_turn(left)
        released += copied

    def _has_copies(self, part: _Part, length: int, ends: list[int]) -> bool:
        """Return whether a block that the request will compute may be cached."""
        bundle = part.bundle
        if bundle.state:
            rows = (bundle.row_of[part.numbers[one // bundle.block - 1]] for one in ends)
            return any(
                self._where[self._elements(bundle, row)].max() >= 0 for row in rows if row >= 0
            )
        if not (bundle.keeps_all or ends):
            return False
        stop = min(length // bundle.block, len(part.numbers))
        names = bundle.names(part.numbers[part.begun : stop])
        return bool(np.count_nonzero(self._where[names] >= 0))

    def _publish_part(
        self, part: _Part, start: int, stop: int, ends: list[int], *, again: bool
    ) -> None:
        """Record which blocks a step keeps, and discard their cached copies."""
        bundle = part.bundle
        if bundle.state:
            if ends and ends[-1] == stop:
                part.states[stop] = _NOTHING
                number = int(part.numbers[stop // bundle.block - 1])
                row = int(bundle.row_of[number]) if again else ABSENT
                if row >= 0:
                    self._discard(bundle, self._elements(bundle, row))
            return
        if bundle.keeps_all:
            runs = [(start // bundle.block, min(stop // bundle.block, len(part.numbers)))]
        else:
            before = max(part.gone, part.begun, part.runs[-1][1] if part.runs else 0)
            runs = bundle.window_runs(ends, before) if ends else []
        if again:
            for first, last in runs:
                self._discard(bundle, bundle.names(part.numbers[first:last]))
        for first, last in runs:
            if part.runs and part.runs[-1][1] == first:
                first = part.runs.pop()[0]
            if first < last:
                part.runs.append((first, last))
                if bundle.sparse:
                    part.unkept.remove(last - 1)

    def _discard(self, bundle: Bundle, names: Ints) -> None:
        """Discard cached blocks that were computed again."""
        cached = self._where[names].ravel()
        old: Ints = cached[cached >= 0].astype(np.int64)
        if len(old):
            self._where[names] = ABSENT
            self._ids[bundle.one.pool].discard(old)

    def _assign(self, parts: list[_Part]) -> None:
        """Give ids to the blocks that the request computed and keeps."""
        for part in parts:
            bundle, names = part.bundle, self._names[part.pool]
            if bundle.state:
                for tokens, blocks in part.states.items():
                    if not len(blocks):
                        part.states[tokens] = blocks = self._ids[part.pool].take_kept(bundle.groups)
                        mine = self._row(bundle, int(part.numbers[tokens // bundle.block - 1]))
                        self._where[mine], names[blocks] = blocks, mine
                continue
            pieces = [part.owned] if part.owned.size else []
            place = part.begun
            for first, last in part.runs:
                if first > place:
                    pieces.append(np.full((bundle.groups, first - place), ABSENT))
                blocks = self._ids[part.pool].take_kept(bundle.groups * (last - first))
                mine = bundle.names(part.numbers[first:last]).ravel()
                if self._copies and np.count_nonzero((before := self._where[mine]) >= 0):
                    self._add(part.pool, mine, blocks, before)
                else:
                    names[blocks], self._where[mine] = mine, blocks
                pieces.append(blocks.reshape(bundle.groups, last - first))
                place = last
            if pieces:
                part.blocks = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def _queue(self, ranges: Released, queued: list[list[Ints]]) -> None:
        """Append the kept blocks in ranges of one pool to `queued`, the last position first."""
        if self.policy.by_group:
            part, start, stop = ranges[0]
            mine = part.blocks[:, start - part.first : stop - part.first][:, ::-1].ravel()
            queued[part.pool].append(mine if part.bundle.keeps_all else mine[mine >= 0])
            return
        every: list[Ints] = []
        ends: list[Ints] = []
        for part, start, stop in ranges:
            bundle = part.bundle
            if bundle.state:
                every.append(part.states[start])
            else:
                blocks = part.blocks[:, start - part.first : stop - part.first]
                every.append(blocks[:, ::-1].T.ravel())
            if self._windows and len(ranges) > 1:
                if bundle.state:
                    here = np.array([start])
                else:
                    here = np.arange(start + blocks.shape[1], start, -1) * bundle.block
                ends.append(here.repeat(bundle.groups) if bundle.groups > 1 else here)
        if not every:
            return
        # Without windows, states are after all complete blocks, so they are in order.
        blocks = _joined(every)
        if self._windows:
            if ends:
                blocks = blocks[np.argsort(-_joined(ends), kind="stable")]
            blocks = blocks[blocks >= 0]
        queued[ranges[0][0].pool].append(blocks)


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate([_NOTHING, *parts])


_NOTHING = np.empty(0, np.int64)
