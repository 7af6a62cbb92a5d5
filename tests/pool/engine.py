"""An engine on a pool, beside memory that remembers what was written to it.

It zeroes, copies and writes what the pool says. What a token's cell holds is a number for the
whole prefix up to it, so that a block that two requests were given, that was reused too early,
or that is found under a wrong hash shows at once. From the pool's events it knows the prefixes
that can be found, and from these, token by token, every hit that there must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.pool import (
    NO_BLOCK,
    AllBlocksCleared,
    BlockEvent,
    BlockPool,
    BlockStored,
    HashChain,
    PrefixIdentity,
    checkpoint_policy,
)
from kvatlas.pool.group_needs import first_needed
from tests.pool.models import MODELS, small_plan

PIECES = [tuple(range(16 * n, 16 * n + 16)) for n in range(3)]
PIECES += [(*PIECES[0][:5], *PIECES[1][5:]), (*PIECES[0][:11], *PIECES[2][11:])]
"""Blocks of tokens, some of which begin alike."""
PLANS = {name: small_plan(name, 24 if name != "compressed" else 200) for name in MODELS}
POLICIES = [
    ("every-block", "lru"),
    ("branch-points", "s3-fifo"),
    ("every-20", "lfu"),
    ("every-block-within-25", "s3-fifo"),
]
CUT = ("dense", "sliding", "chunked")
"""Models whose hits end at any token."""


class Engine:
    """Requests on a pool, and the memory behind it."""

    def __init__(self, name: str, checkpoints: str, eviction: str) -> None:
        self.name = name
        self.plan: Plan = PLANS[name]
        self.pool = BlockPool(
            self.plan,
            eviction=eviction,
            checkpoints=checkpoint_policy(checkpoints),
            events=self.listen,
        )
        self.memory: dict[tuple[int, int], tuple[int, list[int | None]]] = {}
        """What is in a block of a pool: the group that wrote it, and its cells."""
        self.requests: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.marks: dict[int, list[int]] = {}
        """A number for each prefix of a request, equal for equal ones, that of none included."""
        self.prefixes: dict[tuple[Any, Any], int] = {}
        self.named = 0
        self.counts = Counter[str]()
        """Prompts that found something, inside a block too, and blocks that were evicted."""
        self.now = 0
        """Which request is computed."""
        self.found: list[dict[Any, tuple[int, list[int]]]] = [{} for _ in self.plan.groups]
        """What can be found of each group, by hash: where it ends, and marks of its tokens."""

    # -- what users do ------------------------------------------------------------------

    def admit(self, tokens: list[int], salt: bytes, loaded: int = 0) -> None:
        """Begin a request, whose first tokens may come from elsewhere."""
        self.named += 1
        self.requests[self.named], self.salts[self.named] = tokens, salt
        self._count(self.named)
        self._begin(self.named, loaded)

    def _begin(self, request: int, loaded: int = 0) -> None:
        tokens, salt = self.requests[request], self.salts[request]
        expected = self.longest(self.marks[request])
        assert self.pool.admit(request, tokens, PrefixIdentity(salt=salt)) == expected
        self.counts["hits"] += expected > 0
        self.counts["hits inside a block"] += bool(expected % self.plan.block_size)
        if expected < min(loaded, len(tokens)):
            self._load(request, min(loaded, len(tokens)))
        self._try(request, len(tokens))

    def _load(self, request: int, stop: int) -> None:
        """Have tokens come from elsewhere, as far as the next one sees them."""
        if self.name == "compressed":
            stop -= stop % max(group.block for group in self.plan.groups)
        self.now = request
        try:
            self._reserve(request, max(stop, self.pool.tokens(request)))
        except AtlasError as refusal:
            assert refusal.code is Code.NO_BLOCKS
            return
        if stop > self.pool.tokens(request):
            self._write(request, stop, as_seen=True)
            self.pool.loaded(request, stop)
            self.counts["loaded"] += 1

    def decode(self, request: int, more: int) -> None:
        begun, new = self.pool.tokens(request), [7] * more
        self.requests[request] += new
        self._count(request)
        self.pool.computed(request, begun, new)  # tokens are known before they are computed
        self._try(request, begun + more)

    def fork(self, request: int) -> None:
        self.named += 1
        self.pool.fork(request, self.named)
        self.requests[self.named] = list(self.requests[request])
        self.marks[self.named] = list(self.marks[request])
        self.salts[self.named] = self.salts[request]

    def free(self, request: int) -> None:
        self.pool.free(request)
        del self.requests[request], self.salts[request], self.marks[request]

    def preempt(self, request: int) -> None:
        assert self.pool.preempt(request) == len(self.requests[request])
        self._begin(request)

    def _try(self, request: int, tokens: int) -> None:
        try:
            self._compute(request, tokens)
        except AtlasError as refusal:
            assert refusal.code is Code.NO_BLOCKS
            self.free(request)

    def _count(self, request: int) -> None:
        marks = self.marks.setdefault(request, [-1 - len(self.salts[request])])
        for token in self.requests[request][len(marks) - 1 :]:
            marks.append(self.prefixes.setdefault((marks[-1], token), len(self.prefixes)))

    # -- what an engine does ------------------------------------------------------------

    def _compute(self, request: int, tokens: int) -> None:
        """Compute a request up to `tokens` tokens, as the pool wants it."""
        self.now = request
        for stop in dict.fromkeys([*self.pool.stops(request, tokens), tokens]):
            self._reserve(request, stop)
            self._write(request, stop)
            self.pool.computed(request, stop)

    def _reserve(self, request: int, stop: int) -> None:
        made = self.pool.reserve(request, stop)
        for group, blocks in made.clear.items():
            for block in blocks:
                self.memory[self.plan.groups[group].pool, block] = self._empty(group)
        for group, source, destination, of_it in made.copies:
            pool = self.plan.groups[group].pool
            owner, content = self.memory[pool, source]
            assert owner == group
            if group in self.plan.groups_to_clear and self.plan.groups[group].kind != "recurrent":
                assert destination in made.clear[group]
            _, copied = self.memory[pool, destination] = self._empty(group)
            copied[:of_it] = content[:of_it]

    def _empty(self, group: int) -> tuple[int, list[int | None]]:
        return group, [None] * self.plan.groups[group].block

    def _write(self, request: int, stop: int, *, as_seen: bool = False) -> None:
        tables, begun = self.pool.tables(request), self.pool.tokens(request)
        marks = self.marks[request]
        for index, group in enumerate(self.plan.groups):
            if group.kind == "recurrent":
                _, content = self.memory[group.pool, tables[index][0]] = self._empty(index)
                content[0] = marks[stop]
                continue
            written = max(begun, first_needed(group, stop)) if as_seen else begun
            for entry, first, last in _in_blocks(group.block, written, stop):
                block = group.pool, tables[index][entry]
                assert block[1] != NO_BLOCK
                if self.memory.get(block, (-1,))[0] != index:
                    self.memory[block] = self._empty(index)
                start = entry * group.block
                self.memory[block][1][first - start : last - start] = marks[first + 1 : last + 1]

    # -- what a listener knows ----------------------------------------------------------

    def listen(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.found = [{} for _ in self.plan.groups]
                continue
            assert event.group_idx is not None
            found = self.found[event.group_idx]
            if not isinstance(event, BlockStored):
                self.counts["evicted blocks"] += len(event.block_hashes)
                for one in event.block_hashes:
                    del found[one]
                continue
            ends = self._hashes(self.now)
            assert event.parent_block_hash is None or event.parent_block_hash in ends
            end = ends.get(event.parent_block_hash, 0)
            for number, one in enumerate(event.block_hashes):
                begin, end = end, end + event.block_size
                assert ends[one] == end
                assert one not in found
                tokens = event.token_ids[number * event.block_size :][: event.block_size]
                assert tokens == self.requests[self.now][begin:end]
                found[one] = (end, self.marks[self.now][begin + 1 : end + 1])

    def _hashes(self, request: int) -> dict[Any, int]:
        """Where each hash of a request's prefixes ends."""
        grain = min(group.block for group in self.plan.groups)
        chain = HashChain(PrefixIdentity(salt=self.salts[request]), grain)
        chain.extend(self.requests[request])
        ends = range(grain, len(chain) + 1, grain)
        return {int.from_bytes(chain.at(end)[-8:], "big"): end for end in ends}

    def longest(self, marks: list[int]) -> int:
        """The hit that there must be: the last token at which every group has what it needs."""
        agreed = [self._agreed(group, marks) for group in range(len(self.found))]
        step = 1 if self.name in CUT else max(group.block for group in self.plan.groups)
        ends = range(0, max(len(marks) - 1, 1), step)
        return max(n for n in ends if self._serves(agreed, n))

    def _agreed(self, index: int, marks: list[int]) -> dict[int, int]:
        """For each entry of a table the tokens up to which some block agrees, itself included."""
        block, longest = self.plan.groups[index].block, dict[int, int]()
        for end, cells in self.found[index].values():
            begin = end - block
            pairs = zip(cells, marks[begin + 1 :], strict=False)
            count = sum(one == other for one, other in pairs)  # marks of prefixes: no gaps
            if count:
                longest[begin // block] = max(longest.get(begin // block, 0), begin + count)
        return longest

    def _serves(self, agreed: list[dict[int, int]], tokens: int) -> bool:
        for group, longest in zip(self.plan.groups, agreed, strict=True):
            if group.kind == "recurrent":
                if tokens and longest.get(tokens // group.block - 1, 0) < tokens:
                    return False
                continue
            for position in range(first_needed(group, tokens), tokens):
                if longest.get(position // group.block, 0) <= position:
                    return False
        return True

    # -- what holds always --------------------------------------------------------------

    def check(self) -> None:
        self.no_block_is_lost_or_given_twice()
        self.a_listener_knows_what_can_be_found()
        self.every_request_has_what_its_next_token_sees()
        self.checkpoints_stay_within_their_share()

    def checkpoints_stay_within_their_share(self) -> None:
        share = self.pool.checkpoints.share
        for pool, ids in self.pool.ids.items():
            groups = [one for one in self.pool._index.groups if one.group.pool == pool]
            sparse = [one for one in groups if not one.keeps_all]
            if share is not None and 0 < len(sparse) < len(groups):
                kept = sorted(block for one in sparse for block in one.blocks.values())
                assert len(kept) <= share * ids.count
                assert sorted(self.pool._shares[pool]._kept) == kept
                self.counts["checkpoints within a share"] += bool(kept)

    def no_block_is_lost_or_given_twice(self) -> None:
        owners: dict[int, Counter[int]] = {index: Counter() for index in self.pool.ids}
        group_of: dict[tuple[int, int], int] = {}
        for request in self.requests:
            for index, table in self.pool.tables(request).items():
                pool = self.plan.groups[index].pool
                for block in table:
                    if block != NO_BLOCK:
                        owners[pool][block] += 1
                        assert group_of.setdefault((pool, block), index) == index
        for index, ids in self.pool.ids.items():
            assert 0 not in owners[index]
            blocks = range(1, ids.count)
            assert list(map(ids.owners, blocks)) == list(map(owners[index].__getitem__, blocks))
            assert ids.free == ids.count - 1 - len(owners[index])

    def a_listener_knows_what_can_be_found(self) -> None:
        for known, index in zip(self.found, self.pool._index.groups, strict=True):
            assert len(known) == len(index.blocks)
            for digest, block in index.blocks.items():
                _, marks = known[int.from_bytes(digest[-8:], "big")]
                owner, content = self.memory[index.group.pool, block]
                assert owner == index.number
                recurrent = index.group.kind == "recurrent"
                assert content[:1] == marks[-1:] if recurrent else content == marks

    def every_request_has_what_its_next_token_sees(self) -> None:
        for request, marks in self.marks.items():
            tables, computed = self.pool.tables(request), self.pool.tokens(request)
            assert computed == len(self.requests[request])
            for index, group in enumerate(self.plan.groups):
                if group.kind == "recurrent":
                    if computed:
                        owner, content = self.memory[group.pool, tables[index][0]]
                        assert (owner, content[0]) == (index, marks[computed])
                    continue
                first_seen = first_needed(group, computed)
                for entry, first, last in _in_blocks(group.block, first_seen, computed):
                    owner, content = self.memory[group.pool, tables[index][entry]]
                    assert owner == index
                    start = entry * group.block
                    assert content[first - start : last - start] == marks[first + 1 : last + 1]


def _in_blocks(block: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(entry, first, last) of the tokens from `start` to `stop` in each block."""
    for entry in range(start // block, -(-stop // block)):
        yield entry, max(start, entry * block), min(stop, (entry + 1) * block)
