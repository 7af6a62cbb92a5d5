"""`PoolReplay`: serve the requests of a trace as an engine with a `BlockPool` does.

The replay uses the pool's own classes for block ids, eviction, checkpoints and their share. It
differs from `BlockPool` in two ways, which make it fast: a block is found by the number of its
prefix in the trace instead of a hash, and alike groups are processed together, as arrays. Tests
compare it with `BlockPool`, request by request.

A prefix of the trace that ends where a block ends has a number for each block size. `_where` maps
(group, number) to a block id. Recurrent groups keep few prefixes, so they have rows in `_where`:
`Bundle.row_of` maps a number to a row, which has an element for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.integers import ceil_div
from kvatlas.pool.block_ids import BlockIds
from kvatlas.pool.checkpoint_share import CheckpointShare
from kvatlas.pool.checkpoints import Prompt
from kvatlas.pool.eviction import Eviction, Lru, Use, eviction_policy
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prefill_steps import BATCHED_TOKENS, PrefillSteps
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_base import Outcome, Progress, ReplayPolicy
from kvatlas.simulate.traces import Ints, Trace

ABSENT = -1
SEEN = 4
"""Number of prefixes to remember per block of memory, as `BlockPool` does."""


Saved = Callable[[LayerClass, int, Ints], NDArray[np.float64]]
"""Returns the compute that a hit saves, per byte: of blocks with a number of tokens, by their ends
in tokens."""


class _Ids(BlockIds):
    """Block ids that report evicted blocks as an array."""

    def __init__(self, blocks: int, eviction: Eviction, gone: Callable[[Ints], None]) -> None:
        super().__init__(blocks + 1, null_block=True, eviction=eviction)
        self._gone = gone

        self.saved: NDArray[np.float64] | None = None
        """Compute that a hit on each block saves, per byte, for policies that need it."""
        self.next_use: Ints | None = None
        """The next request that uses the content of each block, for policies that need it."""

    def _lose(self, ids: Ints) -> None:
        self._gone(ids)

    def _use(self, ids: Ints) -> Use:
        saved = None if self.saved is None else self.saved[ids]
        return Use(self._clock, saved, None if self.next_use is None else self.next_use[ids])

    @property
    def is_lru(self) -> bool:
        """Whether blocks are evicted in the order of their last use."""
        return isinstance(self._eviction, Lru)

    @property
    def waiting(self) -> int:
        """Number of free blocks without content."""
        return self._waiting

    @property
    def used(self) -> int:
        """Number of blocks with an owner or with kept content."""
        return self.count - 1 - self._waiting

    def pin(self, blocks: Ints) -> None:
        """Protect kept blocks without an owner from eviction, until `queue` is called."""
        self._arrays.woken[blocks] = True
        self._idle -= len(blocks)

    def make_free(self, count: int) -> None:
        """Evict blocks until `count` blocks are free."""
        if count > self._waiting:
            self._evict(count - self._waiting)

    def take_kept(self, count: int) -> Ints:
        """Take free blocks without an owner and mark them as kept.

        The caller must pass the blocks to `queue` later.
        """
        self._waiting -= count
        taken: Ints = self._stack[self._waiting : self._waiting + count].copy()
        self._arrays.kept[taken] = True
        return taken

    def queue(self, blocks: Ints) -> None:
        """Queue kept blocks without an owner for eviction, in this order."""
        if len(blocks):
            self._rest(blocks)


@dataclass
class Bundle:
    """Alike groups: all groups of one layer class."""

    one: LayerClass
    groups: int
    block: int
    """Number of tokens per block."""
    spans: Spans
    """The prompts, cut at the ends of blocks."""
    base: int
    """The index in `_where` of the first element of these groups."""
    width: int
    """Number of elements of each group, or number of rows."""
    keeps_all: bool
    state: bool
    rank: int
    """Groups with lower ranks release blocks of one position first."""
    bases: Ints
    """[group, 1]: the index in `_where` of the first element of each group."""
    row_of: NDArray[np.int32]
    """For recurrent groups, the row of each prefix, or `ABSENT`."""
    prefix_of: Ints
    """For recurrent groups, the number of the prefix of each row."""
    rows: list[int]
    """Free rows."""
    each: Ints
    """The numbers of the groups, from 0."""

    def names(self, numbers: Ints) -> Ints:
        """Return [group, number]: the elements of `_where` for these prefixes."""
        return self.bases + numbers

    def first(self, tokens: int) -> int:
        """Return the first token that the token at position `tokens` sees."""
        return min(int(self.one.visibility.first(tokens)), tokens)

    def window_runs(
        self, ends: list[int], before: int, *, joined: bool = True
    ) -> list[tuple[int, int]]:
        """Return (start, stop) of the table entries that windows need to continue after `ends`.

        Entries before `before` are left out. Adjacent ranges are joined if `joined` is true.
        """
        runs: list[tuple[int, int]] = []
        firsts = self.firsts(np.array(ends, np.int64)).tolist()
        for first, end in zip(firsts, ends, strict=True):
            stop = end // self.block
            start = max(min(first, stop), before)
            if start < stop:
                if runs and joined and runs[-1][1] == start:
                    start = runs.pop()[0]
                runs.append((start, stop))
                before = stop
        return runs

    def firsts(self, ends: Ints) -> Ints:
        """Return, for each of `ends` in tokens, the first block needed to continue."""
        first: Ints = np.minimum(self.one.visibility.first(ends), ends) // self.block
        return first


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


class PoolReplay:
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
        self.model, self.trace, self.policy = model, trace, policy
        self.spans = spans = spans_of(trace, model.step)
        self._kept = policy.checkpoints
        self._build(spans_of)
        kind = eviction_policy(policy.eviction)
        self._ids = [
            _Ids(
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
        self._names = [np.full(blocks + 1, ABSENT, np.int64) for blocks in model.blocks]
        """For each pool, the element of `_where` of each kept block."""
        self._shares = self._checkpoint_shares()
        self._seen = _SeenSpans(spans.count, SEEN * sum(blocks + 1 for blocks in model.blocks))
        states = any(bundle.state for bundle in self._bundles)
        self._windows = windows = any(not (b.state or b.keeps_all) for b in self._bundles)
        # Without windows, a step that ends at no checkpoint makes no difference.
        tokens = batched_tokens if windows else 1 << 62
        self._steps = PrefillSteps(tokens, model.step, ends_at_blocks=states)
        self._lengths, self._outputs = trace.lengths.tolist(), trace.outputs.tolist()
        self._reusable, self._known = spans.reusable.tolist(), spans.known.tolist()
        self.outcome = Outcome(np.zeros(len(trace), np.int64))

    def _build(self, spans_of: Callable[[Trace, int], Spans]) -> None:
        self._bundles: list[Bundle] = []
        self._cuts: dict[int, Spans] = {}
        total = 0
        for one in self.model.classes:
            block = one.block or self.model.step
            spans = self._cuts.setdefault(block, spans_of(self.trace, block))
            state, keeps_all = one.needs == "state", one.needs == "all"
            # Each row has at least one block.
            rows = self.model.blocks[one.pool] if state else 0
            width = rows if state else spans.count
            shift = 1 if state else spans.count
            bases = total + np.arange(one.groups)[:, None] * shift
            self._bundles.append(
                Bundle(
                    one, one.groups, block, spans, total, width, keeps_all, state,
                    0 if state else 1 + keeps_all, bases,
                    np.full(spans.count if state else 0, ABSENT, np.int32),
                    np.zeros(rows, np.int64), list(range(rows))[::-1],
                    np.arange(one.groups),
                )
            )  # fmt: skip
            total += width * one.groups
        self._where = np.full(total, ABSENT, np.int32)
        self._starts = np.array([bundle.base for bundle in self._bundles])
        order = sorted(range(len(self._bundles)), key=lambda n: self._bundles[n].rank)
        self._order = [
            [n for n in order if self._bundles[n].one.pool == pool]
            for pool in range(len(self.model.blocks))
        ]
        """For each pool, its bundles in release order."""

    def _checkpoint_shares(self) -> dict[int, CheckpointShare]:
        share, found = self._kept.share, {}
        for pool, ids in enumerate(self._ids):
            kinds = {one.keeps_all for one in self._bundles if one.one.pool == pool}
            if share is not None and len(kinds) == 2:
                found[pool] = CheckpointShare(ids, int(share * ids.count))
        return found

    # -- requests -----------------------------------------------------------------------

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
        seen = self._count_seen(request, mine) if self._kept.asks_for_seen else 0
        prompt = Prompt(model.step, hit, seen, known, len(mine), attention, reusable)
        wanted: Ints = self._kept.positions(prompt) * model.step
        return CachedPrefix(request, cuts, hit * model.step, wanted.tolist())

    def _count_seen(self, request: int, spans: Ints) -> int:  # noqa: ARG002 - for subclasses
        """Return how many leading spans of a request were seen before. Record all of them."""
        return self._seen.count(spans)

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

    def _is_whole(self, bundle: Bundle, row: int) -> bool:
        """Return whether all groups have the state of a row."""
        start = bundle.base + int(row) * bundle.groups
        return bool(row >= 0 and self._where[start : start + bundle.groups].min() >= 0)

    def _state(self, bundle: Bundle, number: int) -> NDArray[np.int32]:
        """Return the block of each group for a cached state."""
        start = bundle.base + int(bundle.row_of[number]) * bundle.groups
        return self._where[start : start + bundle.groups]

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

    # -- blocks -------------------------------------------------------------------------

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
                entries: Ints | int = max(stop - table.size, 0)
                count = int(entries) * bundle.groups
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
                table.blocks[:, table.size : stop] = mine.reshape(table.bundle.groups, entries)
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
        """Release entries (table, start, stop) by position, the last position first."""
        every, positions = [], []
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

    # -- cached blocks ------------------------------------------------------------------

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

    def _row(self, bundle: Bundle, number: int) -> Ints:
        """Return the elements of `_where` for a state, which gets a row unless it has one."""
        row = int(bundle.row_of[number])
        if row < 0:
            if not bundle.rows:
                self._sweep(bundle)
            row = bundle.rows.pop()
            bundle.row_of[number], bundle.prefix_of[row] = row, number
        return self._elements(bundle, row)

    def _elements(self, bundle: Bundle, row: int) -> Ints:
        """Return the elements of `_where` of a row."""
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

        A block that was computed again replaces its cached copy.
        """
        pool = bundle.one.pool
        names, blocks = names.ravel(), blocks.ravel()
        before = self._where[names]
        there = before >= 0
        if np.count_nonzero(there):
            old = before[there & (before != blocks)].astype(np.int64)
            if len(old):
                self._names[pool][old] = ABSENT
                self._ids[pool].discard(old)
        self._where[names] = blocks
        self._names[pool][blocks] = names
        self._ids[pool].keep(blocks)

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
        names = self._names[pool][blocks]
        self._names[pool][blocks] = ABSENT
        self._where[names] = ABSENT
        if pool in self._shares:
            self._shares[pool].lose(blocks.tolist())
        self.outcome.evictions += len(blocks)

    def _content(self, pool: int, block: int) -> Hashable:
        """Return the content of a kept block: its group and its prefix."""
        name = int(self._names[pool][block])
        bundle = self._bundles[int(np.searchsorted(self._starts, name, side="right")) - 1]
        if not bundle.state:
            return name
        row, group = divmod(name - bundle.base, bundle.groups)
        return bundle.base, group, int(bundle.prefix_of[row])


class _SeenSpans:
    """The most recently requested spans, at most `most`: `SeenPrefixes` for numbered spans."""

    def __init__(self, spans: int, most: int) -> None:
        self._most = most
        self._added = 1
        self._when = np.zeros(spans, np.int64)
        """When each span was added, counted from 1; 0 for spans that were never added."""

    def count(self, spans: Ints) -> int:
        """Return how many leading spans were seen before, and record all of them."""
        oldest = max(self._added - self._most, 1)
        known = self._when[spans] >= oldest
        new = spans[~known]
        self._when[new] = np.arange(self._added, self._added + len(new))
        self._added += len(new)
        return int(known.argmin()) if len(new) else len(spans)


_NOTHING = np.empty(0, np.int64)
