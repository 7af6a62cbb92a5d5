"""The index of cached prefixes: the block ids of every group, by prefix hash.

The hash of a block covers everything from the beginning of the prompt to the end of the block.

If hits may end at any token, the index also finds a block of which only the first tokens match the
prompt. The blocks that follow one prefix are sorted by their tokens, so the longest match is next
to the position where the prompt's tokens would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import repeat, takewhile
from typing import NamedTuple

import msgspec

from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Group, Plan
from kvatlas.pool.group_needs import (
    can_be_cut,
    hit_step,
    keeps_all,
    last_without_need,
    needed_blocks,
    reuses_prefixes,
)
from kvatlas.pool.prefix_hash import TOKEN, HashChain


class BlockName(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a cached block. There are many, so the garbage collector does not track them."""

    row: bytes
    """The block's packed tokens up to the first image or audio clip; empty if `cut` is False."""
    digest: bytes
    """The hash of the prefix up to the end of the block."""
    before: bytes
    """The hash of the prefix before the block."""
    group: int


class GroupIndex:
    """The cached blocks of one group."""

    def __init__(self, number: int, group: Group, *, cut: bool) -> None:
        self.number = number
        self.group = group
        self.cut = cut
        """Whether a hit may end inside a block, so that only its first tokens match."""
        self.blocks: dict[bytes, int] = {}
        """Block ids by the hash of the prefix up to the end of the block."""
        self.keeps_all = keeps_all(group)
        """Whether every earlier token is needed to continue."""
        self._behind: dict[bytes, BlockName | list[BlockName]] = {}
        """By hash of a prefix, the blocks that follow it: usually one name, or a sorted list."""

    # -- lookups ----------------------------------------------------------------------

    def reach(self, chain: HashChain, tokens: int) -> int:
        """Return the length in tokens of the longest prefix after which this group can continue.

        That is, all blocks that the next token needs are cached. The result is at most `tokens`.
        """
        block = self.group.block
        if self.keeps_all:
            count = _leading(self.blocks, chain.ends(block, 0, tokens // block))
            start = count * block
            return self._within(chain, count, min(tokens, start + block))
        recurrent = self.group.kind == "recurrent"
        if self.group.kind == "ring":
            return last_without_need(self.group, tokens)
        least = last_without_need(self.group, tokens)
        entry = (tokens // block if recurrent else ceil_div(tokens, block)) - 1
        while (entry + 1) * block > least:
            stop = min(tokens, (entry + 1) * block)
            found = stop if recurrent else self._within(chain, entry, stop)
            missing = self._missing(chain, found) if found > max(entry * block, least) else None
            if missing == -1:
                return found
            # Every window that contains the missing block fails, so continue inside or before it.
            entry = entry - 1 if missing is None else min(entry - 1, missing)
        return least

    def needed(self, chain: HashChain, tokens: int) -> list[int]:
        """Return the ids of the cached blocks that are needed to continue after `tokens` tokens.

        The caller must ensure that all are cached. If `tokens` ends inside the last block, only the
        first tokens of that block match the prompt.
        """
        if self.group.kind == "ring":
            return []
        block = self.group.block
        entries, whole = needed_blocks(self.group, tokens), tokens // block
        digests = chain.ends(block, entries.start, min(entries.stop, whole))
        if whole < entries.stop:
            digests.append(self._agreeing(chain, whole * block, tokens)[1])
        return list(map(self.blocks.__getitem__, digests))

    def _within(self, chain: HashChain, entry: int, stop: int) -> int:
        """Return how many leading tokens of the prompt are cached, at most `stop`.

        The search is limited to the block at table entry `entry`; the tokens before it must be
        cached.
        """
        start = entry * self.group.block
        if stop - start == self.group.block and chain.at(stop) in self.blocks:
            return stop
        return start + self._agreeing(chain, start, stop)[0]

    def _agreeing(self, chain: HashChain, start: int, stop: int) -> tuple[int, bytes]:
        """Return the block with the most leading tokens in common with tokens start .. stop - 1.

        Only cached blocks that follow the first `start` tokens are compared. The result is the
        number of equal tokens and the block's hash, or (0, b"") if there is no such block.
        """
        followers = self._behind.get(chain.at(start))
        if followers is None or start == stop:
            return 0, b""
        row = chain.row(start, stop)
        if isinstance(followers, BlockName):
            followers = [followers]
        place = bisect_left(followers, row, key=lambda name: name.row)
        near = followers[max(place - 1, 0) : place + 1]
        return max((_equal_tokens(row, name.row), name.digest) for name in near)

    def _missing(self, chain: HashChain, tokens: int) -> int:
        """Return the last complete block that is needed after `tokens` tokens but not cached.

        The result is the table entry of this block, or -1 if all needed blocks are cached.
        """
        block, entries = self.group.block, needed_blocks(self.group, tokens)
        digests = chain.ends(block, entries.start, min(entries.stop, tokens // block))
        for place in range(len(digests) - 1, -1, -1):
            if digests[place] not in self.blocks:
                return entries.start + place
        return -1

    # -- changes ----------------------------------------------------------------------

    def add(self, blocks: list[int], chain: HashChain, first: int) -> list[BlockName]:
        """Add blocks as table entries first, first + 1, ..., and return their keys.

        The caller must ensure that the entries are not in the index yet.
        """
        size, stop = self.group.block, first + len(blocks)
        digests, before = chain.ends(size, first, stop), chain.starts(size, first, stop)
        rows = chain.rows(size, first, stop) if self.cut else [b""] * len(blocks)
        names = list(map(BlockName, rows, digests, before, repeat(self.number)))
        self.blocks.update(zip(digests, blocks, strict=True))
        if self.cut and self._behind.keys().isdisjoint(before):
            self._behind.update(zip(before, names, strict=True))
        elif self.cut:
            for name in names:
                self._add_behind(name)
        return names

    def _add_behind(self, name: BlockName) -> None:
        others = self._behind.setdefault(name.before, name)
        if isinstance(others, list):
            insort(others, name)
        elif others is not name:
            self._behind[name.before] = sorted((others, name))

    def remove(self, name: BlockName) -> None:
        """Remove the block with this key from the index."""
        del self.blocks[name.digest]
        if self.cut:
            others = self._behind[name.before]
            if isinstance(others, list) and len(others) > 1:
                del others[bisect_left(others, name)]
            else:
                del self._behind[name.before]

    def clear(self) -> None:
        """Remove all blocks of the group from the index."""
        self.blocks.clear()
        self._behind.clear()


class Added(NamedTuple):
    """The effect of adding blocks to the index."""

    runs: list[tuple[int, list[int]]]
    """(first entry, blocks) of each run of blocks whose prefixes were not in the index."""
    replaced: list[tuple[int, int]]
    """(old block, new block) for each prefix that was in the index with another block."""


class PrefixIndex:
    """The cached blocks of all groups of a plan.

    A hit is the longest prefix after which every group has the blocks that the next token needs.
    It ends where a block of every group ends. If both `can_be_cut` and `partial_hits` are true, it
    may end at any token.
    """

    def __init__(self, plan: Plan, *, partial_hits: bool) -> None:
        self._reuses = reuses_prefixes(plan)
        cut = partial_hits and can_be_cut(plan)
        self._step = 1 if cut else hit_step(plan)
        self.groups = [GroupIndex(n, group, cut=cut) for n, group in enumerate(plan.groups)]
        self._names: dict[int, dict[int, BlockName]] = {group.pool: {} for group in plan.groups}
        """The name of each block, by pool and block id."""

    def longest(self, chain: HashChain) -> tuple[int, int]:
        """Return how many leading tokens of a prompt are cached in every group.

        The second result is the number of leading tokens that full attention has cached; without
        full attention, it equals the first. The last token is excluded, because it is always
        computed.
        """
        if not self._reuses:
            return 0, 0
        # A group that keeps all tokens can serve any shorter prefix, so one lookup is enough.
        longest = self._whole(len(chain) - 1)
        for group in self.groups:
            if group.keeps_all:
                longest = self._whole(group.reach(chain, longest))
        attention = longest
        others = [group for group in self.groups if not group.keeps_all]
        before = -1
        while longest != before:
            before = longest
            for group in others:
                longest = self._whole(group.reach(chain, longest))
        return longest, attention if len(others) < len(self.groups) else longest

    def _whole(self, tokens: int) -> int:
        return max(tokens, 0) // self._step * self._step

    def add(self, number: int, chain: HashChain, first: int, blocks: list[int]) -> Added:
        """Add a group's blocks as entries first, first + 1, ...

        A block replaces the block that is in the index for the same prefix. Blocks that are in the
        index already are skipped.
        """
        group = self.groups[number]
        names, found = self._names[group.group.pool], group.blocks
        digests = chain.ends(group.group.block, first, first + len(blocks))
        replaced = []
        if found.keys().isdisjoint(digests) and names.keys().isdisjoint(blocks):
            stretches = [(0, len(blocks))] if blocks else []
        else:
            pairs = list(zip(digests, blocks, strict=True))
            stretches = _stretches([d not in found and b not in names for d, b in pairs])
            for digest, block in pairs:
                if digest in found and block not in names:
                    replaced.append((found[digest], block))
                    names[block] = names.pop(found[digest])
                    found[digest] = block
        runs = []
        for start, stop in stretches:
            part = blocks[start:stop]
            names.update(zip(part, group.add(part, chain, first + start), strict=True))
            runs.append((first + start, part))
        return Added(runs, replaced)

    def found(self, number: int, chain: HashChain, first: int, count: int) -> set[int]:
        """Return the ids of the blocks in the index for entries first .. first + count - 1.

        Entries that are not in the index are skipped.
        """
        group = self.groups[number]
        digests = chain.ends(group.group.block, first, first + count)
        return {group.blocks[one] for one in digests if one in group.blocks}

    def name(self, pool: int, block: int) -> BlockName:
        """Return the key of a pool's block."""
        return self._names[pool][block]

    def remove(self, pool: int, blocks: Iterable[int]) -> list[BlockName]:
        """Remove blocks of a pool from the index, and return their keys."""
        names = self._names[pool]
        removed = [names.pop(block) for block in blocks]
        for name in removed:
            self.groups[name.group].remove(name)
        return removed

    def clear(self) -> None:
        """Remove the blocks of all groups."""
        for group in self.groups:
            group.clear()
        for names in self._names.values():
            names.clear()


def _leading(known: dict[bytes, int], digests: list[bytes]) -> int:
    """Return how many leading elements of `digests` are in `known`."""
    return len(list(takewhile(known.__contains__, digests)))


def _equal_tokens(one: bytes, two: bytes) -> int:
    """Return the number of leading tokens that two packed sequences of tokens share."""
    most = min(len(one), len(two))
    ends = range(TOKEN, most + 1, TOKEN)
    return next(
        (n for n, end in enumerate(ends) if one[end - TOKEN : end] != two[end - TOKEN : end]),
        most // TOKEN,
    )


def _stretches(chosen: list[bool]) -> list[tuple[int, int]]:
    """Return the (start, stop) of each run of chosen elements.

    >>> _stretches([True, True, False, True])
    [(0, 2), (3, 4)]
    """
    start, found = 0, []
    while start < len(chosen):
        if not chosen[start]:
            start += 1
            continue
        stop = next((n for n in range(start, len(chosen)) if not chosen[n]), len(chosen))
        found.append((start, stop))
        start = stop
    return found
