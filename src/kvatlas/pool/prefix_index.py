"""What can be found: for every group, its blocks by the hash of everything up to their end.

A block that agrees with a prompt only in its first tokens is found too, where a cache can be
cut between any two tokens: the blocks that follow one prefix are kept in the order of their
tokens, so the one that agrees the longest is a neighbour of where the prompt's would be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import repeat, takewhile

import msgspec

from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Group, Plan
from kvatlas.pool.group_needs import (
    can_be_cut,
    hit_step,
    last_without_need,
    needed_blocks,
    reuses_prefixes,
)
from kvatlas.pool.prefix_hash import TOKEN, HashChain
from kvatlas.specs import Visibility


class BlockName(msgspec.Struct, frozen=True, order=True, gc=False):
    """What a block is found by. There are as many as blocks, so the collector is kept off them."""

    row: bytes
    """Its tokens up to the first image or sound, or none where blocks are not cut."""
    digest: bytes
    """The hash up to its end."""
    before: bytes
    """The hash before it."""
    group: int


class GroupIndex:
    """The blocks of one group that can be found."""

    def __init__(self, number: int, group: Group, *, cut: bool) -> None:
        self.number = number
        self.group = group
        self.cut = cut
        """Whether a block may be found by its first tokens alone."""
        self.blocks: dict[bytes, int] = {}
        """By the hash up to its end."""
        self.keeps_all = group.kind != "recurrent" and group.visibility == Visibility()
        """Whether every token is needed to go on: then so are those of any shorter prefix."""
        self._behind: dict[bytes, BlockName | list[BlockName]] = {}
        """The blocks that follow a prefix: mostly one, which stands by itself, else sorted."""

    # -- asking -----------------------------------------------------------------------

    def reach(self, chain: HashChain, tokens: int) -> int:
        """The longest prefix of at most `tokens` tokens that this group can go on behind."""
        block = self.group.block
        if self.keeps_all:
            count = _leading(self.blocks, chain.ends(block, 0, tokens // block))
            start = count * block
            return self._within(chain, count, min(tokens, start + block))
        recurrent = self.group.kind == "recurrent"
        least = last_without_need(self.group, tokens)
        entry = (tokens // block if recurrent else ceil_div(tokens, block)) - 1
        while (entry + 1) * block > least:
            stop = min(tokens, (entry + 1) * block)
            found = stop if recurrent else self._within(chain, entry, stop)
            if found > max(entry * block, least) and self._has(chain, found):
                return found
            entry -= 1
        return least

    def needed(self, chain: HashChain, tokens: int) -> list[int]:
        """The blocks to go on with behind `tokens` tokens; of the last perhaps the first tokens."""
        block = self.group.block
        entries, whole = needed_blocks(self.group, tokens), tokens // block
        digests = chain.ends(block, entries.start, min(entries.stop, whole))
        if whole < entries.stop:
            digests.append(self._agreeing(chain, whole * block, tokens)[1])
        return list(map(self.blocks.__getitem__, digests))

    def _within(self, chain: HashChain, entry: int, stop: int) -> int:
        """Where the block that is found of an entry stops to agree with the prompt."""
        start = entry * self.group.block
        if stop - start == self.group.block and chain.at(stop) in self.blocks:
            return stop
        return start + self._agreeing(chain, start, stop)[0]

    def _agreeing(self, chain: HashChain, start: int, stop: int) -> tuple[int, bytes]:
        """The block that agrees the longest with the tokens behind a prefix: (tokens, hash)."""
        followers = self._behind.get(chain.at(start))
        if followers is None or start == stop:
            return 0, b""
        row = chain.row(start, stop)
        if isinstance(followers, BlockName):
            followers = [followers]
        place = bisect_left(followers, row, key=lambda name: name.row)
        near = followers[max(place - 1, 0) : place + 1]
        return max((_equal_tokens(row, name.row), name.digest) for name in near)

    def _has(self, chain: HashChain, tokens: int) -> bool:
        """Whether all whole blocks are found that are needed behind so many tokens."""
        block, entries = self.group.block, needed_blocks(self.group, tokens)
        digests = chain.ends(block, entries.start, min(entries.stop, tokens // block))
        return _leading(self.blocks, digests) == len(digests)

    # -- changing ---------------------------------------------------------------------

    def add(self, blocks: list[int], chain: HashChain, first: int) -> list[BlockName]:
        """Have blocks found as entries from `first` on, where none is yet; by what they are."""
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
        """Find a block no more."""
        del self.blocks[name.digest]
        if self.cut:
            others = self._behind[name.before]
            if isinstance(others, list) and len(others) > 1:
                del others[bisect_left(others, name)]
            else:
                del self._behind[name.before]

    def clear(self) -> None:
        """Find nothing any more."""
        self.blocks.clear()
        self._behind.clear()


class PrefixIndex:
    """The blocks of all groups of a plan that can be found.

    A hit is the longest prefix at which every group has what the next token needs. It ends
    at any token where all groups can be cut there, else where whole blocks of all groups end.
    """

    def __init__(self, plan: Plan, *, partial_hits: bool) -> None:
        self._reuses = reuses_prefixes(plan)
        cut = partial_hits and can_be_cut(plan)
        self._step = 1 if cut else hit_step(plan)
        self.groups = [GroupIndex(n, group, cut=cut) for n, group in enumerate(plan.groups)]
        self._names: dict[int, dict[int, BlockName]] = {group.pool: {} for group in plan.groups}
        """What a block is found by, by its pool and its id."""

    def longest(self, chain: HashChain) -> int:
        """The most tokens of a prompt that every group can serve; the last is computed anyway."""
        if not self._reuses:
            return 0
        # A group that keeps all tokens can serve less than it has: it is asked once.
        longest = self._whole(len(chain) - 1)
        for group in self.groups:
            if group.keeps_all:
                longest = self._whole(group.reach(chain, longest))
        others = [group for group in self.groups if not group.keeps_all]
        before = -1
        while longest != before:
            before = longest
            for group in others:
                longest = self._whole(group.reach(chain, longest))
        return longest

    def _whole(self, tokens: int) -> int:
        return max(tokens, 0) // self._step * self._step

    def add(
        self, number: int, chain: HashChain, first: int, blocks: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Have a group's entries found, those that are not yet: stretches (first, blocks)."""
        group = self.groups[number]
        names, found = self._names[group.group.pool], group.blocks
        digests = chain.ends(group.group.block, first, first + len(blocks))
        if found.keys().isdisjoint(digests) and names.keys().isdisjoint(blocks):
            stretches = [(0, len(blocks))] if blocks else []
        else:
            pairs = zip(digests, blocks, strict=True)
            stretches = _stretches([d not in found and b not in names for d, b in pairs])
        for start, stop in stretches:
            part = blocks[start:stop]
            names.update(zip(part, group.add(part, chain, first + start), strict=True))
            yield first + start, part

    def found(self, number: int, chain: HashChain, first: int, count: int) -> set[int]:
        """The blocks in which so many entries of a group are found by now."""
        group = self.groups[number]
        digests = chain.ends(group.group.block, first, first + count)
        return {group.blocks[one] for one in digests if one in group.blocks}

    def remove(self, pool: int, blocks: Iterable[int]) -> list[BlockName]:
        """Find blocks of a pool no more; what they were found by."""
        names = self._names[pool]
        removed = [names.pop(block) for block in blocks]
        for name in removed:
            self.groups[name.group].remove(name)
        return removed

    def clear(self) -> None:
        """Find nothing any more."""
        for group in self.groups:
            group.clear()
        for names in self._names.values():
            names.clear()


def _leading(known: dict[bytes, int], digests: list[bytes]) -> int:
    """How many of the first hashes are known."""
    return len(list(takewhile(known.__contains__, digests)))


def _equal_tokens(one: bytes, two: bytes) -> int:
    """How many tokens two rows have in common before they differ."""
    most = min(len(one), len(two))
    ends = range(TOKEN, most + 1, TOKEN)
    return next(
        (n for n, end in enumerate(ends) if one[end - TOKEN : end] != two[end - TOKEN : end]),
        most // TOKEN,
    )


def _stretches(chosen: list[bool]) -> list[tuple[int, int]]:
    """(start, stop) of neighbours that are chosen.

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
