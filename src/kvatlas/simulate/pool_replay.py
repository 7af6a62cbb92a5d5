"""`PoolReplay`: serve the requests of a trace as an engine with a `BlockPool` does.

The replay uses the pool's own classes for block ids, eviction, checkpoints and their share. It
differs from `BlockPool` in two ways, which make it fast: a block is found by the number of its
prefix in the trace instead of a hash, and alike groups are processed together, as arrays. Tests
compare it with `BlockPool`, request by request.

Plans of vLLM are replayed by vLLM's rules (`ReplayPolicy.by_group`). Other tests compare such
replays with vLLM's own manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.checkpoints import Prompt
from kvatlas.simulate.bundles import ABSENT, Bundle
from kvatlas.simulate.layer_classes import PoolModel
from kvatlas.simulate.prefill_steps import BATCHED_TOKENS, PrefillSteps
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_cache import ReplayCache, Saved
from kvatlas.simulate.replay_policy import Outcome, Progress, ReplayPolicy
from kvatlas.simulate.seen_spans import SeenSpans
from kvatlas.simulate.traces import Ints, Trace

SEEN = 4
"""Number of prefixes to remember per block of memory, as `BlockPool` does."""


@dataclass
class _Table:
    """The block tables of one request in alike groups."""

    bundle: Bundle
    numbers: Ints
    """The prefix number at the end of each block of the prompt."""
    blocks: Ints
    """[group, entry]: block ids. Recurrent groups have one entry."""
    size: int = 0
    """Number of entries, including those that are gone."""
    gone: int = 0
    """Number of leading entries that windows no longer need."""


@dataclass
class Request:
    """A request that is being served."""

    number: int
    tables: list[_Table]
    ends: list[int]
    """Checkpoints to keep, in tokens."""
    hit: int
    """Number of tokens that were cached."""
    computed: int
    rings: list[Ints] = field(default_factory=list)


@dataclass
class CachedPrefix:
    """The cached prefix of a request, before the request takes blocks."""

    request: int
    cuts: dict[int, Ints]
    """The prefix numbers of the prompt, by block size."""
    hit: int
    """Number of cached tokens."""
    ends: list[int]
    """Checkpoints to keep, in tokens."""


class PoolReplay(ReplayCache):
    """A replay of a trace through the pools of a plan."""

    def __init__(
        self,
        model: PoolModel,
        trace: Trace,
        policy: ReplayPolicy,
        *,
        batched_tokens: int = BATCHED_TOKENS,
        spans_of: Callable[[Trace, int], Spans] = Spans.of,
        saved: Saved | None = None,
    ) -> None:
        super().__init__(model, trace, policy, spans_of, saved)
        self.spans = spans = spans_of(trace, model.step)
        self._seen = SeenSpans(spans.count, SEEN * sum(blocks + 1 for blocks in model.blocks))
        states = any(bundle.state or bundle.sparse for bundle in self._bundles)
        self._windows = windows = any(not (b.state or b.keeps_all) for b in self._bundles)
        self._dense = all(bundle.keeps_all for bundle in self._bundles)
        # Without windows, a step that ends at no checkpoint makes no difference.
        tokens = batched_tokens if windows else 1 << 62
        self._steps = PrefillSteps(tokens, model.step, ends_at_blocks=states)
        self._lengths, self._outputs = trace.lengths.tolist(), trace.outputs.tolist()
        self._reusable, self._known = spans.reusable.tolist(), spans.known.tolist()

    def run(self, progress: Progress | None = None) -> Outcome:
        """Serve all requests in order and return their hits."""
        requests = len(self.trace)
        for request in range(requests):
            self.serve(request)
            if progress and not request % 128:
                progress(request / requests)
        return self.outcome

    def serve(self, request: int) -> int:
        """Serve one request and return how many of its leading spans were cached."""
        found = self._look(request)
        fits = self._serve(found)
        hit = found.hit // self.model.step if fits else 0
        self.outcome.refused += not fits
        self.outcome.hits[request] = hit
        return hit

    def _serve(self, found: CachedPrefix) -> bool:
        """Serve a request step by step. Return whether the pools had enough blocks."""
        asked = self._admit(found)
        fits = self._compute_all(asked)
        self._end(asked)
        return fits

    def _compute_all(self, asked: Request) -> bool:
        """Compute a prompt and its answer. Return False if the pools have too few blocks."""
        steps = self._steps.between(asked.hit, self._lengths[asked.number], asked.ends)
        fits = all(self._compute(asked, stop) for _, stop in steps)
        return fits and (not self._outputs[asked.number] or self._answer(asked))

    def _compute(self, asked: Request, tokens: int) -> bool:
        if not self._reserve(asked, tokens):
            return False
        self._publish(asked, tokens)
        asked.computed = tokens
        return True

    def _answer(self, asked: Request) -> bool:
        """Take the blocks of the answer, which no later request can find.

        Windows reuse the blocks that they release, so they take one block at most.
        """
        length = self._lengths[asked.number]
        return self._reserve(asked, length + self._outputs[asked.number], answer=True)

    def _look(self, request: int) -> CachedPrefix:
        """Return the longest cached prefix of a request, and the checkpoints to keep."""
        model, cuts = self.model, {}
        for block, spans in self._cuts.items():
            cuts[block] = spans.of_request(request)
        mine = cuts[model.step] if model.step in cuts else self.spans.of_request(request)
        reusable, known = self._reusable[request], self._known[request]
        hit, attention = self._find(cuts, reusable)
        wanted: list[int] = []
        if not self._dense:
            seen = self._count_seen(request, mine) if self._kept.asks_for_seen else 0
            prompt = Prompt(model.step, hit, seen, known, len(mine), attention, reusable)
            wanted = (self._kept.positions(prompt) * model.step).tolist()
        return CachedPrefix(request, cuts, hit * model.step, wanted)

    def _count_seen(self, request: int, spans: Ints) -> int:  # noqa: ARG002 - for subclasses
        """Return how many leading spans of a request were seen before. Record all of them."""
        return self._seen.count(spans)

    def _admit(self, found: CachedPrefix) -> Request:
        """Begin a request, which then owns the blocks of the longest cached prefix."""
        request, cuts = found.request, found.cuts
        end = self._lengths[request] + self._outputs[request]
        tokens, tables = found.hit, []
        shared: list[list[Ints]] = [[] for _ in self._ids]
        for bundle in self._bundles:
            numbers = cuts[bundle.block]
            entries = 1 if bundle.state else ceil_div(end, bundle.block)
            table = _Table(bundle, numbers, np.empty((bundle.groups, entries), np.int64))
            tables.append(table)
            if not tokens:
                continue
            table.size = stop = tokens // bundle.block
            if bundle.state:
                there = self._state(bundle, numbers[stop - 1])
                table.blocks[:, 0], table.size = there, 1
            else:
                table.gone = min(bundle.first(tokens) // bundle.block, stop)
                there = self._where[bundle.names(numbers[table.gone : stop])]
                table.blocks[:, table.gone : stop] = there
            blocks = there.astype(np.int64).ravel()
            shared[bundle.one.pool].append(blocks)
            if self._shares and not bundle.keeps_all and bundle.one.pool in self._shares:
                self._shares[bundle.one.pool].use(blocks.tolist())
        for ids, parts in zip(self._ids, shared, strict=True):
            if parts:
                ids.share_array(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return Request(request, tables, found.ends, tokens, tokens)

    def _reserve(self, asked: Request, tokens: int, *, answer: bool = False) -> bool:
        """Take blocks for the first `tokens` tokens. Return False if a pool has too few."""
        self._leave(asked)
        needs, wanted = [0] * len(self._ids), []
        for table in asked.tables:
            bundle = table.bundle
            if not bundle.state:
                stop = ceil_div(tokens, bundle.block)
                if answer and not bundle.keeps_all:
                    stop = min(stop, table.size + 1)
                more = max(stop - table.size, 0)
                entries: Ints | int = more
                count = (min(more, 1) if bundle.sparse else more) * bundle.groups
            elif table.size:
                entries = self._copied(table) if tokens > asked.computed else _NOTHING
                count = len(entries)
            else:
                entries, count = np.arange(bundle.groups), bundle.groups
            wanted.append((table, entries, count))
            needs[bundle.one.pool] += count
        if self.model.rings and not asked.rings:
            needs = [need + ring for need, ring in zip(needs, self.model.rings, strict=True)]
        if any(need > ids.free for need, ids in zip(needs, self._ids, strict=True)):
            return False
        taken = [ids.take_array(need) for need, ids in zip(needs, self._ids, strict=True)]
        left: list[tuple[int, Ints]] = []
        used = [0] * len(self._ids)
        for table, entries, count in wanted:
            if not count:
                continue
            pool = table.bundle.one.pool
            mine = taken[pool][used[pool] : used[pool] + count]
            used[pool] += count
            if isinstance(entries, int):
                stop = table.size + entries
                first = stop - count // table.bundle.groups
                table.blocks[:, table.size : first] = ABSENT
                table.blocks[:, first:stop] = mine.reshape(table.bundle.groups, -1)
                table.size = stop
            else:
                if table.size:
                    left.append((pool, table.blocks[entries, 0]))
                table.blocks[entries, 0], table.size = mine, 1
        if self.model.rings and not asked.rings:
            asked.rings = [one[count:] for one, count in zip(taken, used, strict=True)]
        for pool, blocks in left:
            self._ids[pool].release_array(blocks)
        self.outcome.peak = max(self.outcome.peak, sum(ids.used for ids in self._ids))
        return True

    def _copied(self, table: _Table) -> Ints:
        """Return the groups whose state must be copied, because it is shared or kept."""
        blocks = table.blocks[:, 0]
        arrays = self._ids[table.bundle.one.pool]._arrays
        copied: Ints = np.flatnonzero(arrays.kept[blocks] | (arrays.owners[blocks] > 1))
        return copied

    def _leave(self, asked: Request) -> None:
        """Release the blocks that have left the windows of their groups."""
        for pool, order in enumerate(self._order):
            left = []
            for number in order:
                table = asked.tables[number]
                bundle = table.bundle
                if bundle.keeps_all or bundle.state:
                    continue
                stop = min(bundle.first(asked.computed) // bundle.block, table.size)
                if stop > table.gone:
                    left.append((table, table.gone, stop))
                    table.gone = stop
            if left:
                self._release(pool, left, asked.computed)

    def _release(self, pool: int, parts: list[tuple[_Table, int, int]], computed: int) -> None:
        """Release entries (table, start, stop) by position, the last position first.

        By vLLM's rules (`ReplayPolicy.by_group`), release the entries of one group after the other
        instead.
        """
        every, positions = [], []
        if self.policy.by_group:
            every = [table.blocks[:, start:stop][:, ::-1].ravel() for table, start, stop in parts]
            blocks = np.concatenate(every)
            self._ids[pool].release_array(blocks[blocks >= 0])
            return
        for table, start, stop in parts:
            every.append(table.blocks[:, start:stop][:, ::-1].T.ravel())
            if len(parts) > 1:
                groups, block = table.bundle.groups, table.bundle.block
                ends = np.arange(stop, start, -1) * block if not table.bundle.state else [computed]
                positions.append(np.repeat(ends, groups) if groups > 1 else np.asarray(ends))
        if len(parts) == 1:
            self._ids[pool].release_array(every[0])
            return
        order = np.argsort(-np.concatenate(positions), kind="stable")
        self._ids[pool].release_array(np.concatenate(every)[order])

    def _end(self, asked: Request) -> None:
        """Release all blocks of a request."""
        if self._next:
            for table in asked.tables:
                stop = min(table.size, len(table.numbers))
                if not table.bundle.state:
                    blocks = table.blocks[:, table.gone : stop]
                    self._describe(table.bundle, asked.number, table.gone, blocks)
        for pool, order in enumerate(self._order):
            tables = [asked.tables[number] for number in order]
            parts = [(one, one.gone, one.size) for one in tables if one.size > one.gone]
            if parts:
                self._release(pool, parts, asked.computed)
            if asked.rings:
                self._ids[pool].release_array(asked.rings[pool])

    def _publish(self, asked: Request, tokens: int) -> None:
        """Make the complete blocks of the first `tokens` tokens available to later requests."""
        ends = [end for end in asked.ends if asked.computed < end <= tokens]
        for table in asked.tables:
            bundle = table.bundle
            if self._saved:
                first = tokens // bundle.block - 1 if bundle.state else table.gone
                stop = 1 if bundle.state else min(tokens // bundle.block, table.size)
                blocks = table.blocks[:, 0 if bundle.state else first : stop]
                self._describe(bundle, asked.number, first, blocks)
            if bundle.keeps_all:
                stop = min(tokens // bundle.block, len(table.numbers))
                first = asked.computed // bundle.block
                if first < stop:
                    blocks = table.blocks[:, first:stop]
                    self._keep(bundle, bundle.names(table.numbers[first:stop]), blocks)
            elif not ends:
                continue
            elif bundle.state:
                if ends[-1] == tokens:
                    self._keep_state(table, tokens)
            else:
                self._keep_windows(table, ends)

    def _keep_windows(self, table: _Table, ends: list[int]) -> None:
        bundle = table.bundle
        shared = bundle.one.pool in self._shares
        runs = bundle.window_runs(ends, table.gone, joined=not shared)
        if shared:
            for group in range(bundle.groups):
                for start, stop in runs:
                    names = bundle.bases[group] + table.numbers[start:stop]
                    self._keep_shared(bundle, names, table.blocks[group, start:stop])
        else:
            for start, stop in runs:
                names = bundle.names(table.numbers[start:stop])
                self._keep(bundle, names, table.blocks[:, start:stop])

    def _keep_state(self, table: _Table, tokens: int) -> None:
        bundle = table.bundle
        number = int(table.numbers[tokens // bundle.block - 1])
        names = self._row(bundle, number)
        if bundle.one.pool in self._shares:
            for group in range(bundle.groups):
                part = slice(group, group + 1)
                self._keep_shared(bundle, names[part], table.blocks[part, 0])
        else:
            self._keep(bundle, names, table.blocks[:, 0])


_NOTHING = np.empty(0, np.int64)
