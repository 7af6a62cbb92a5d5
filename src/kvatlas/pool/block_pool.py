"""`BlockPool`: the blocks of every request, in every group of a plan.

The life of a request: `admit` finds the longest prefix that every group can serve and shares its
blocks. `reserve` takes blocks before tokens are computed and returns which blocks to zero and to
copy. `computed` records that the tokens are stored, so that other requests can reuse them. `free`
releases all blocks. Published blocks, which other requests can find, are immutable: a request that
continues inside such a block gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div, integer
from kvatlas.planning import Plan
from kvatlas.planning.plans import checked_plan
from kvatlas.pool.block_ids import NO_BLOCK, BlockIds
from kvatlas.pool.checkpoint_share import checkpoint_shares
from kvatlas.pool.checkpoints import Checkpoints, Prompt, VllmDefault
from kvatlas.pool.events import AllBlocksCleared, BlockEvent, removed_events, stored_event
from kvatlas.pool.eviction import eviction_policy
from kvatlas.pool.group_needs import (
    first_needed,
    first_seen,
    hash_grain,
    hit_step,
    needed_blocks,
    release_order,
    reuses_prefixes,
)
from kvatlas.pool.one_call import CallGuard, one_call_at_a_time
from kvatlas.pool.prefix_hash import HashChain, PrefixIdentity
from kvatlas.pool.prefix_index import PrefixIndex
from kvatlas.pool.reservation import CopyOnWrite, Reservation, checked_tokens
from kvatlas.pool.seen_prefixes import SeenPrefixes

SEEN = 4
"""Number of prefixes to remember per block of memory, including prefixes that were evicted."""


@dataclass
class _Request:
    chain: HashChain
    tables: list[list[int]]
    prompt: int
    hit: int
    seen: int
    """Number of tokens of the longest prefix shared with an earlier request."""
    attention: int
    """Number of tokens of the longest prefix that full attention had cached."""
    computed: int
    reserved: int
    incomplete: Sequence[int]
    """For each group, how many leading table entries are not fully loaded, so not published."""
    gone: list[int]
    """For each group, how many leading table entries are `NO_BLOCK`."""


class BlockPool:
    """Allocates the blocks of a plan's pools to requests, by group, with prefix caching.

    `events` is a function that is called with the events of stored and evicted blocks. It must
    not raise. With `partial_hits`, a hit may end inside a block if every layer supports that.

    A pool does not lock. Calls of one pool must not overlap: use the pool from one thread, as a
    scheduler does, or hold a lock during each call. A call that begins during another call raises
    `concurrent_calls` and changes nothing. This also applies to calls from `events`.

    >>> from kvatlas.planning import plan
    >>> pool = BlockPool(plan("gpt-oss-20b", memory="40GiB"))
    >>> pool.admit("first", range(100))
    0
    >>> pool.reserve("first", 100)
    Reservation(clear={}, copies=[])
    >>> pool.computed("first", 100); pool.free("first")
    >>> pool.admit("second", [*range(50), 7, 7, 7])  # 48 tokens are whole blocks
    50
    >>> [copy.tokens for copy in pool.reserve("second", 53).copies]  # of each group's fourth block
    [2, 2]
    """

    def __init__(
        self,
        plan: Plan,
        *,
        null_block: bool = True,
        eviction: str = "lru",
        checkpoints: Checkpoints | None = None,
        weights: str = "",
        partial_hits: bool = True,
        events: Callable[[list[BlockEvent]], None] | None = None,
    ) -> None:
        self.plan = checked_plan(plan)
        self.checkpoints = checkpoints or VllmDefault()
        self.weights = weights
        kind = eviction_policy(eviction)
        sizes: dict[int, int] = {}
        for one in plan.pools:
            sizes[one.index] = min(one.blocks, sizes.get(one.index, one.blocks))
        self._index = PrefixIndex(plan, partial_hits=partial_hits)
        self.ids = {
            index: BlockIds(
                blocks,
                null_block=null_block,
                eviction=kind(blocks, content=partial(self._index.name, index)),
                evicted=partial(self._lost, index),
            )
            for index, blocks in sizes.items()
        }
        """The block ids of each pool, by pool index."""
        self._calls = CallGuard()
        self._requests: dict[Hashable, _Request] = {}
        self._listener = events
        self._news: list[BlockEvent] = []
        """Events that are sent to the listener at the end of the current call."""
        self._seen = SeenPrefixes(SEEN * sum(sizes.values()))
        self._shares = checkpoint_shares(plan, self.ids, self.checkpoints.share)
        self._reuses = reuses_prefixes(plan)
        self._release_order = release_order(plan)
        self._step, self._grain = hit_step(plan), hash_grain(plan)

    def __repr__(self) -> str:
        pools = ", ".join(f"{ids.free} of {ids.count} free" for ids in self.ids.values())
        return f"<BlockPool {self.plan.model}: {len(self._requests)} requests, {pools}>"

    # -- queries ----------------------------------------------------------------------

    @one_call_at_a_time
    def tables(self, request: Hashable) -> dict[int, list[int]]:
        """Return the block tables by group. Entries that windows no longer need are `NO_BLOCK`."""
        return {group: list(table) for group, table in enumerate(self._get(request).tables)}

    @one_call_at_a_time
    def tokens(self, request: Hashable) -> int:
        """Return the number of computed tokens of a request."""
        return self._get(request).computed

    @one_call_at_a_time
    def match(self, chain: HashChain) -> int:
        """Return how many leading tokens of a prompt are cached in all groups.

        The last token never counts, because it is always computed.
        """
        return self._index.longest(chain)[0]

    @one_call_at_a_time
    def stops(self, request: Hashable, tokens: int) -> list[int]:
        """Return the numbers of tokens after which the engine must call `computed`.

        These are the checkpoints of recurrent layers up to `tokens`. A state is kept only if
        `computed` is called exactly when the state exists.
        """
        asked = self._get(request)
        recurrent = any(group.kind == "recurrent" for group in self.plan.groups)
        return self._kept_ends(asked, tokens) if recurrent else []

    # -- the life of a request ----------------------------------------------------------

    @one_call_at_a_time
    def admit(
        self, request: Hashable, prompt: Sequence[int], identity: PrefixIdentity | None = None
    ) -> int:
        """Begin a request and return how many leading tokens of its prompt are cached."""
        self._require_new(request)
        identity = identity or PrefixIdentity(weights=self.weights)
        chain = HashChain(identity, self._grain)
        chain.extend(prompt)
        hit, attention = self._index.longest(chain)
        tables: list[list[int]] = []
        for index, group in enumerate(self.plan.groups):
            blocks = self._index.groups[index].needed(chain, hit)
            self.ids[group.pool].share(blocks)
            if group.pool in self._shares and not self._index.groups[index].keeps_all:
                self._shares[group.pool].use(blocks)
            recurrent = group.kind == "recurrent"
            gone = 0 if recurrent else needed_blocks(group, hit).start
            tables.append([NO_BLOCK] * gone + blocks)
        seen, all_there = self._count_seen(chain), (0,) * len(tables)
        absent = [table.count(NO_BLOCK) for table in tables]
        counts = (len(chain), hit, seen, attention, hit, hit)
        self._requests[request] = _Request(chain, tables, *counts, all_there, absent)
        return hit

    @one_call_at_a_time
    def reserve(self, request: Hashable, tokens: int) -> Reservation:
        """Reserve blocks for a request's first `tokens` tokens, including computed ones.

        Blocks that have left the window of all layers are freed first. If a pool has too few free
        blocks, `no_blocks` is raised and no block is taken.
        """
        asked = self._get(request)
        tokens = integer(tokens, "the number of tokens")
        if tokens < asked.computed:
            problem = f"`tokens` must be at least {asked.computed}, the number of computed tokens"
            got, hint = f"{tokens} tokens", "Pass the total number of tokens, not only new ones"
            raise AtlasError(Code.BAD_TOKENS, problem, got=got, hint=hint)
        self._leave_behind(asked)
        needs: dict[int, int] = {}
        wanted = []
        for index, group in enumerate(self.plan.groups):
            entries = self._entries(index, asked, tokens)
            copied = self._copied(index, asked, tokens)
            wanted.append((entries, copied))
            needs[group.pool] = needs.get(group.pool, 0) + entries + len(copied)
        for pool, count in needs.items():
            self.ids[pool].require(count)
        made = Reservation()
        left: list[tuple[int, int]] = []
        for index, (entries, copied) in enumerate(wanted):
            left += self._take(index, asked, entries, copied, made)
        # Release the sources of copies last, so that no group can take them before the copy.
        for pool, block in left:
            self.ids[pool].release([block])
        asked.reserved = max(asked.reserved, tokens)
        self._tell()
        return made

    @one_call_at_a_time
    def computed(self, request: Hashable, tokens: int, new: Sequence[int] = ()) -> None:
        """Record that the first `tokens` tokens are stored. `new` are generated tokens to append.

        Other requests can reuse complete blocks from now on. A recurrent state is kept only if the
        checkpoint policy requests a checkpoint at exactly `tokens` tokens; see `stops`.
        """
        asked = self._get(request)
        tokens = checked_tokens(tokens, asked.computed, asked.reserved, len(asked.chain) + len(new))
        asked.chain.extend(new)
        self._record(asked, tokens)

    def _record(self, asked: _Request, tokens: int) -> None:
        """Publish the blocks of the first `tokens` tokens, which are now stored."""
        if self._reuses and self._publish(asked, tokens):
            asked.reserved = tokens  # the next reserve copies the state, which is now immutable
        asked.computed = tokens
        self._tell()

    @one_call_at_a_time
    def loaded(self, request: Hashable, tokens: int) -> None:
        """Record that the cache of the first `tokens` tokens was loaded instead of computed.

        In each group, only the tokens to which the next token attends in all layers of the group
        are assumed to be loaded. Blocks with earlier tokens are not published to other requests.
        """
        asked = self._get(request)
        tokens = checked_tokens(tokens, asked.computed, asked.reserved, len(asked.chain))
        asked.incomplete = [
            ceil_div(first_seen(self.plan, index, tokens), group.block)
            for index, group in enumerate(self.plan.groups)
        ]
        self._record(asked, tokens)

    @one_call_at_a_time
    def fork(self, request: Hashable, child: Hashable) -> None:
        """Duplicate a request as `child`. Both share all blocks copy-on-write."""
        asked = self._get(request)
        self._require_new(child)
        tables = [list(table) for table in asked.tables]
        for group, table in zip(self.plan.groups, tables, strict=True):
            self.ids[group.pool].share(table)
        asked.reserved = asked.computed  # the next reserve of either request copies shared blocks
        chain, gone = asked.chain.copy(), list(asked.gone)
        self._requests[child] = replace(asked, chain=chain, tables=tables, gone=gone)

    @one_call_at_a_time
    def free(self, request: Hashable) -> None:
        """End a request and release its blocks. Published blocks are kept.

        In all groups, blocks at the end of the request are evicted before blocks at its beginning.
        """
        self._end(request)

    def _end(self, request: Hashable) -> int:
        """Release the blocks of a request and return its number of computed tokens."""
        asked = self._get(request)
        del self._requests[request]
        for groups in self._release_order.values():
            self._release(
                [(n, asked.gone[n], asked.tables[n][asked.gone[n] :]) for n in groups],
                asked.computed,
            )
        return asked.computed

    def _release(self, parts: list[tuple[int, int, list[int]]], computed: int) -> None:
        """Release blocks of one pool by position, the last position first.

        `parts` contains a tuple for each group, in release order: (group, table entry of the first
        block, blocks). The position of a block is the number of tokens up to the block's end. The
        position of a recurrent state is `computed`, the number of computed tokens of the request.
        """
        parts = [part for part in parts if part[2]]
        if not parts:
            return
        ids = self.ids[self.plan.groups[parts[0][0]].pool]
        if len(parts) == 1:
            ids.release(parts[0][2][::-1])
            return
        positions = []
        for index, first, blocks in parts:
            group = self.plan.groups[index]
            ends = np.arange(first + 1, first + len(blocks) + 1) * group.block
            positions.append(ends if group.kind != "recurrent" else ends * 0 + computed)
        every = np.concatenate([blocks for _, _, blocks in parts])
        order = np.argsort(-np.concatenate(positions), kind="stable")
        ids.release(every[order].tolist())

    @one_call_at_a_time
    def preempt(self, request: Hashable) -> int:
        """Free a request that will resume later and return its number of computed tokens.

        To resume, admit it again with all of its tokens as the prompt. It then reuses the blocks
        that have not been evicted.
        """
        return self._end(request)

    @one_call_at_a_time
    def clear(self) -> None:
        """Remove all cached prefixes. Active requests keep their blocks."""
        self._index.clear()
        self._seen.clear()
        for pool, ids in self.ids.items():
            ids.drop()
            if pool in self._shares:
                self._shares[pool].clear()
        self._news = [AllBlocksCleared()] if self._listener else []
        self._tell()

    # -- internals ----------------------------------------------------------------------

    def _require_new(self, request: Hashable) -> None:
        if request in self._requests:
            problem = "A request with this name already exists"
            hint = "Free that request first, or use another name"
            raise AtlasError(Code.TWICE, problem, got=repr(request), hint=hint)

    def _get(self, request: Hashable) -> _Request:
        found = self._requests.get(request)
        if found is None:
            problem, hint = "The pool has no such request", "Call admit first"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(request), hint=hint)
        return found

    def _count_seen(self, chain: HashChain) -> int:
        """Return how many leading tokens were part of an earlier request. Record all prefixes."""
        if not self.checkpoints.asks_for_seen:
            return 0
        digests = chain.ends(self._step, 0, len(chain) // self._step)
        return self._seen.count(digests) * self._step

    def _leave_behind(self, asked: _Request) -> None:
        """Release the blocks that have left the windows of all layers of their group."""
        for groups in self._release_order.values():
            left = []
            for index in groups:
                group, table = self.plan.groups[index], asked.tables[index]
                if group.kind in ("recurrent", "ring", "cross_attention"):
                    continue
                stop = min(first_needed(group, asked.computed) // group.block, len(table))
                gone = asked.gone[index]
                if stop > gone:
                    left.append((index, gone, table[gone:stop]))
                    table[gone:stop] = [NO_BLOCK] * (stop - gone)
                    asked.gone[index] = stop
            self._release(left, asked.computed)

    def _entries(self, index: int, asked: _Request, tokens: int) -> int:
        """Return how many blocks must be added to a group's block table to hold `tokens` tokens."""
        group = self.plan.groups[index]
        if group.kind in ("recurrent", "ring"):
            stop = 1
        else:
            of = group.source if group.kind == "cross_attention" else tokens
            stop = ceil_div(of, group.block)
        return max(0, stop - len(asked.tables[index]))

    def _copied(self, index: int, asked: _Request, tokens: int) -> list[int]:
        """Return the table entries whose blocks are shared or kept, so a write must copy them."""
        group, table = self.plan.groups[index], asked.tables[index]
        if tokens == asked.computed or group.kind in ("cross_attention", "ring"):
            return []
        first = 0 if group.kind == "recurrent" else asked.computed // group.block
        stop = len(table) if group.kind == "recurrent" else ceil_div(tokens, group.block)
        ids = self.ids[group.pool]
        return [
            entry
            for entry in range(first, min(stop, len(table)))
            if table[entry] != NO_BLOCK
            and (ids.is_shared(table[entry]) or ids.is_kept(table[entry]))
        ]

    def _take(
        self, index: int, asked: _Request, entries: int, copied: list[int], made: Reservation
    ) -> list[tuple[int, int]]:
        """Add `entries` new blocks to a group's table, and replace the entries in `copied`.

        Records in `made` which blocks to zero and to copy. Returns the (pool, block id) of each
        replaced block, which the caller must release.
        """
        if not entries and not copied:
            return []
        group, table = self.plan.groups[index], asked.tables[index]
        ids = self.ids[group.pool]
        new = ids.take_many(entries + len(copied))
        recurrent = group.kind == "recurrent"
        unwritten = new[:entries] if recurrent else list(new)  # copied states need no zeros
        if unwritten and index in self.plan.groups_to_clear:
            made.clear[index] = unwritten
        left = []
        for entry in copied:
            block = new.pop()
            tokens = group.block if recurrent else asked.computed - entry * group.block
            if tokens > 0:  # otherwise the block has no computed tokens
                made.copies.append(CopyOnWrite(index, table[entry], block, tokens))
            left.append((group.pool, table[entry]))
            table[entry] = block
        table += new
        return left

    def _publish(self, asked: _Request, tokens: int) -> bool:
        """Make complete blocks available to other requests.

        Full attention publishes every block. Windows and recurrent layers publish checkpoints.
        Returns whether a recurrent state was published.
        """
        everything = all(group.keeps_all for group in self._index.groups)
        ends = [] if everything else self._kept_ends(asked, tokens)
        kept_state = False
        for index, group in enumerate(self.plan.groups):
            table = asked.tables[index]
            if group.kind == "ring":
                continue
            if group.kind == "recurrent":
                if tokens in ends:
                    kept_state |= self._keep(index, asked.chain, tokens // group.block - 1, table)
            elif self._index.groups[index].keeps_all:
                first = max(asked.computed // group.block, asked.incomplete[index])
                self._keep(index, asked.chain, first, table[first : tokens // group.block])
            else:
                least = max(asked.incomplete[index], asked.gone[index])
                for first, stop in self._window_runs(index, ends):
                    first = max(first, least)
                    self._keep(index, asked.chain, first, table[first:stop])
        return kept_state

    def _window_runs(self, index: int, ends: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) for the table entries that windows need after each of `ends`.

        Entries that several windows need are yielded once. Adjacent ranges are joined. If the pool
        limits the share of checkpoints, they stay separate, because the limit is checked for each
        checkpoint.
        """
        group = self.plan.groups[index]
        joins = group.pool not in self._shares
        firsts = group.visibility.first(np.array(ends, np.int64)) // group.block
        begun = before = -1
        for first, end in zip(firsts.tolist(), ends, strict=True):
            start, stop = max(min(first, end // group.block), before), end // group.block
            if not joins or start > before:
                if before > begun:
                    yield begun, before
                begun = start
            before = stop
        if before > begun:
            yield begun, before

    def _kept_ends(self, asked: _Request, tokens: int) -> list[int]:
        """Return the numbers of tokens, up to `tokens`, after which to keep a new checkpoint."""
        begun, stop = asked.computed // self._step, tokens // self._step
        seen, end = asked.seen // self._step, asked.prompt // self._step
        attention, resend = asked.attention // self._step, max(asked.prompt - 1, 0) // self._step
        known = Prompt(self._step, begun, seen, end, max(stop, end), attention, resend)
        chosen = self.checkpoints.positions(known).tolist()
        return [one * self._step for one in chosen if begun < one <= stop]

    def _keep(self, index: int, chain: HashChain, first: int, blocks: list[int]) -> bool:
        """Publish a group's blocks from table entry `first` on. Return whether any is new.

        A block that was computed again replaces the cached copy. The new block is evicted later
        than the old copy would have been.
        """
        group, kept = self.plan.groups[index], False
        share = None if self._index.groups[index].keeps_all else self._shares.get(group.pool)
        if share is not None:
            found = self._index.found(index, chain, first, len(blocks))
            if not share.make_room(len(blocks) - len(found), found):
                return False
        ids, added = self.ids[group.pool], self._index.add(index, chain, first, blocks)
        for start, part in added.runs:
            ids.keep(part)
            if share is not None:
                share.use(part)
            kept = True
            if self._listener:
                self._news.append(stored_event(index, group, chain, start, len(part)))
        if added.replaced:
            old, new = map(list, zip(*added.replaced, strict=True))
            ids.keep(new)
            ids.discard(old)
            if share is not None:
                share.lose(old)
                share.use(new)
            kept = True
        return kept

    def _lost(self, pool: int, blocks: list[int]) -> None:
        names = self._index.remove(pool, blocks)
        if pool in self._shares:
            self._shares[pool].lose(blocks)
        if self._listener:
            self._news += removed_events(names)

    def _tell(self) -> None:
        """Pass pending events to the function `events`."""
        if self._listener and self._news:
            news, self._news = self._news, []
            self._listener(news)
