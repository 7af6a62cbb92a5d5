"""Map a request's tokens to the blocks of a tier that hold them.

A key identifies one block of tokens in one of the tier's groups, or a recurrent state. A block need
not contain all of its tokens: the last block of a request may be incomplete, and a window may
begin in the middle of a block. The `Cover` of a block records which tokens it contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from math import lcm
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import needed_states, shared_visibility
from kvatlas.specs import Visibility

LONGEST_KEY = 64
"""Maximum number of bytes of a key, enough for any digest."""

Keys = Sequence[bytes | None] | Mapping[int, Sequence[bytes | None]]
"""A key or None for each block in token order, one list for all groups or one per group."""


KeysByGroup = Mapping[int, Sequence[bytes | None]]
"""A key or None for each block in token order, by group."""


class Cover(NamedTuple):
    """The range of tokens that a block contains, relative to the first token of the block.

    The recurrent state after n tokens covers tokens 0 .. n - 1.
    """

    first: int
    stop: int


class NeededBlock(NamedTuple):
    """One block of the tier that a request needs or stores."""

    group: int
    entry: int
    """Index of the block in the request."""
    key: bytes | None
    cover: Cover
    shape: tuple[Any, ...]
    """Equal for two blocks if and only if the same bytes of them are needed."""


FindBlocks = Callable[[Sequence[NeededBlock]], Sequence[bool]]
"""Returns for each block whether a tier has it."""


class TierSpans:
    """The tokens and blocks that a request needs in each group of a tier.

    `other` is the plan of the cache that the request is stored from or fetched into.
    """

    def __init__(self, tier: Plan, other: Plan) -> None:
        self.tier, self.other = tier, other
        visibilities: dict[int, set[Visibility]] = {}
        for region in tier.regions:
            visibilities.setdefault(region.group, set()).update(
                shared_visibility(tier, other, layer.name)
                for layer in region.layers
                if layer.name in other.layers
            )
        self.visibilities = {group: sorted(own, key=str) for group, own in visibilities.items()}

    def recurrent(self, group: int) -> bool:
        """Return whether a group keeps recurrent states."""
        return self.tier.groups[group].kind == "recurrent"

    def touched(self, group: int, start: int, stop: int) -> tuple[int, int]:
        """Return (first, stop): the range of tokens that at least one layer of a group needs."""
        spans = self._spans(group, start, stop)
        return min(first for first, _ in spans), max(last for _, last in spans)

    def needs(self, start: int, stop: int, keys: KeysByGroup) -> list[NeededBlock]:
        """Return the blocks for tokens start .. stop - 1, ordered by group and token."""
        return [
            need
            for group in range(len(self.tier.groups))
            for need in self.of_group(group, start, stop, keys.get(group, ()))
        ]

    def of_group(
        self, group: int, start: int, stop: int, keys: Sequence[bytes | None]
    ) -> Iterator[NeededBlock]:
        """Yield the blocks of one group for tokens start .. stop - 1."""
        if start >= stop:
            return
        block = self.tier.groups[group].block
        if self.recurrent(group):
            entry = (stop - 1) // block
            key = keys[0] if len(keys) == 1 else _at(keys, entry)
            yield NeededBlock(group, entry, key, Cover(0, stop), (group,))
            return
        spans = self._spans(group, start, stop)
        # The cover of a block contains only tokens that all layers of the group have.
        first, last = max(one for one, _ in spans), min(two for _, two in spans)
        whole = Cover(0, block)
        all_whole = (whole,) * len(spans)
        for entry in range(first // block, -(-last // block)):
            begin = entry * block
            cover, covers = whole, all_whole  # the usual case
            if begin < first or begin + block > last:
                covers = tuple(Cover(max(a - begin, 0), min(b - begin, block)) for a, b in spans)
                cover = Cover(max(first - begin, 0), min(last - begin, block))
            # Context parallelism distributes tokens by their position in the request.
            where = begin if self.other.dcp > 1 else 0
            yield NeededBlock(group, entry, _at(keys, entry), cover, (group, where, covers))

    def longest(
        self, start: int, stop: int, keys: KeysByGroup, stored: FindBlocks, *, at_once: int = 1
    ) -> int:
        """Return the largest number of leading tokens, up to `stop`, that every group can serve.

        `stored` returns for each block whether the tier has it. The possible numbers are tried from
        the largest to the smallest, `at_once` of them with one call of `stored`. Blocks that are
        needed only for tokens before `start` are not looked up. The result is 0 if no number above
        `start` is possible.
        """
        ends: list[int] = [stop, *range((stop - 1) // self.step * self.step, start, -self.step)]
        # Groups that need every token give an upper bound.
        for group in self.keeping_all:
            needs = list(self.of_group(group, start, stop, keys.get(group, ())))
            absent = (need for need, there in zip(needs, stored(needs), strict=True) if not there)
            if (first := next(absent, None)) is not None:
                begin = first.entry * self.tier.groups[group].block
                ends = [end for end in ends if end <= begin]
        others = [
            group
            for group, seen in self.visibilities.items()
            if group not in self.keeping_all or len(seen) > 1
        ]
        for at in range(0, len(ends), at_once):
            some = ends[at : at + at_once]
            needs_of = [
                [n for g in others for n in self.of_group(g, start, end, keys.get(g, ()))]
                for end in some
            ]
            found = iter(stored([need for needs in needs_of for need in needs]))
            for end, needs in zip(some, needs_of, strict=True):
                if all(list(islice(found, len(needs)))):
                    return end
        return 0

    def covers_at_end(self, group: int, stop: int) -> set[Cover]:
        """Return the covers (ranges of tokens) that the last block of a request may have.

        The request has `stop` tokens. The stored part of its last block begins at the block's first
        token or, if a sliding window begins inside the block, possibly at the first token of the
        window.
        """
        if self.recurrent(group):
            return {Cover(0, stop)}
        begin = (stop - 1) // self.tier.groups[group].block * self.tier.groups[group].block
        first = max(one for one, _ in self._spans(group, 0, stop))
        return {Cover(0, stop - begin), Cover(max(first - begin, 0), stop - begin)}

    def covers(self, group: int) -> list[Cover]:
        """Return all covers that a block of an attention group can have."""
        block = self.tier.groups[group].block
        firsts = (
            1 if self.visibilities[group] == [Visibility()] else block
        )  # windows begin anywhere
        return [Cover(a, b) for a in range(firsts) for b in range(a + 1, block + 1)]

    @property
    def step(self) -> int:
        """The least common multiple of the block sizes of attention groups, in tokens."""
        groups = self.tier.groups
        return lcm(*(g.block for i, g in enumerate(groups) if not self.recurrent(i)))

    @cached_property
    def keeping_all(self) -> frozenset[int]:
        """The groups in which a request needs every token, because a layer uses full attention."""
        return frozenset(
            group
            for group, visibilities in self.visibilities.items()
            if not self.recurrent(group) and Visibility() in visibilities
        )

    def whole_blocks(self, start: int) -> int:
        """Return the largest token position up to `start` at which every group begins a block."""
        return start // self.step * self.step

    def _spans(self, group: int, start: int, stop: int) -> list[tuple[int, int]]:
        return [needed_states(seen, 1, start, stop) for seen in self.visibilities[group]]


def block_tables(plan: Plan, ids: Mapping[NeededBlock, int]) -> dict[int, list[int]]:
    """Return a block table for each group of the tier's plan, given the id of each needed block.

    Entries that are not needed are -1, which routes reject.
    """
    tables = {group: [-1] for group in range(len(plan.groups))}
    for need, block_id in ids.items():
        entry = 0 if plan.groups[need.group].kind == "recurrent" else need.entry
        table = tables[need.group]
        table += [-1] * (entry + 1 - len(table))
        table[entry] = block_id
    return tables


def keys_by_group(plan: Plan, keys: Any) -> dict[int, tuple[bytes | None, ...]]:
    """Validate the keys of a call. Return the keys by group of the tier's plan."""
    groups = range(len(plan.groups))
    if isinstance(keys, Mapping):
        unknown = [group for group in keys if group not in groups]
        if unknown:
            hint = f"Use groups 0..{len(groups) - 1} of the tier's plan"
            problem = "The tier has no such group"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=f"groups {unknown[:8]}", hint=hint)
        by_group = {int(group): tuple(row) for group, row in keys.items()}
    elif len(sizes := {group.block for group in plan.groups}) > 1:
        problem = "The tier's groups have different block sizes, so each needs its own list of keys"
        got = f"one list of keys for blocks of {sorted(sizes)} tokens"
        hint = "Pass a mapping from the tier's group index to its keys"
        raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
    else:
        by_group = dict.fromkeys(groups, tuple(keys))
    for key in (key for row in by_group.values() for key in row):
        if key is not None and not (isinstance(key, bytes) and 1 <= len(key) <= LONGEST_KEY):
            problem = f"A key must be None or a bytes object of 1 to {LONGEST_KEY} bytes"
            hint = "Use a digest of the tokens up to the end of the block"
            raise AtlasError(Code.BAD_SIZE, problem, got=repr(key)[:80], hint=hint)
    return by_group


def _at(keys: Sequence[bytes | None], entry: int) -> bytes | None:
    return keys[entry] if entry < len(keys) else None
