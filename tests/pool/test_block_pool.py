"""A pool under random requests, beside memory that remembers what was written to it.

The machine plays the engine: it zeroes, copies and writes what the pool says. What a token's
cell holds is the whole prefix up to it, so that a block that two requests were given, that was
reused too early, or that is found under a wrong hash shows at once. From the pool's events it
knows the prefixes that can be found, and from these, token by token, every hit there must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.pool import (
    GONE,
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

DEEP = settings.get_current_profile_name() == "deep"
EXAMPLES, STEPS = (10_000, 100) if DEEP else (60, 30)
PIECES = [tuple(range(16 * n, 16 * n + 16)) for n in range(3)]
PIECES += [(*PIECES[0][:5], *PIECES[1][5:]), (*PIECES[0][:11], *PIECES[2][11:])]
"""Blocks of tokens, some of which begin alike."""
PLANS = {name: small_plan(name, 24 if name != "compressed" else 200) for name in MODELS}

CUT = ("dense", "sliding")
"""Models whose hits end at any token."""
Prefix = tuple[bytes, tuple[int, ...]]

prompts = st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=4), st.integers(0, 20), st.sampled_from([b"", b"s"])
)


class Engine(RuleBasedStateMachine):
    """Requests on a pool, and the memory behind it."""

    name: str
    plan: Plan
    checkpoints = "every-block"
    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        keep = checkpoint_policy(self.checkpoints)
        self.pool = BlockPool(
            self.plan, eviction=self.eviction, checkpoints=keep, events=self.listen
        )
        self.memory: dict[tuple[int, int], tuple[int, dict[int, Any]]] = {}
        self.requests: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.named = 0
        self.now = 0
        """Which request is computed."""
        self.found: list[dict[Any, Prefix]] = [{} for _ in self.plan.groups]
        """What can be found of each group, by hash: the salt and all tokens up to a block's end."""

    # -- what an engine does ------------------------------------------------------------

    def go_on(self, request: int, tokens: int) -> None:
        """Compute a request up to `tokens` tokens, as the pool wants it."""
        self.now = request
        stops = [*self.pool.stops(request, tokens), tokens]
        for stop in dict.fromkeys(stops):
            made = self.pool.reserve(request, stop)
            for group, blocks in made.clear.items():
                for block in blocks:
                    self.memory[self.plan.groups[group].pool, block] = (group, {})
            for group, source, destination, tokens_of_it in made.copies:
                pool = self.plan.groups[group].pool
                owner, content = self.memory[pool, source]
                assert owner == group
                copied = {n: cell for n, cell in content.items() if n < tokens_of_it}
                self.memory[pool, destination] = (group, copied)
            self.write(request, stop)
            self.pool.computed(request, stop)

    def write(self, request: int, stop: int) -> None:
        tables, begun = self.pool.tables(request), self.pool.tokens(request)
        for index, group in enumerate(self.plan.groups):
            if group.kind == "recurrent":
                self.memory[group.pool, tables[index][0]] = (index, {0: self.mark(request, stop)})
                continue
            for position in range(begun, stop):
                block = tables[index][position // group.block]
                assert block != GONE
                owner, content = self.memory.get((group.pool, block), (index, {}))
                if owner != index:
                    content = {}
                content[position % group.block] = self.mark(request, position + 1)
                self.memory[group.pool, block] = (index, content)

    def mark(self, request: int, tokens: int) -> Prefix:
        return self.salts[request], tuple(self.requests[request][:tokens])

    # -- what a listener knows ----------------------------------------------------------

    def listen(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.found = [{} for _ in self.plan.groups]
                continue
            assert event.group_idx is not None
            found = self.found[event.group_idx]
            if not isinstance(event, BlockStored):
                for one in event.block_hashes:
                    del found[one]
                continue
            ends = self.hashes(self.now)
            assert event.parent_block_hash is None or event.parent_block_hash in ends
            end = ends.get(event.parent_block_hash, 0)
            for number, one in enumerate(event.block_hashes):
                begin, end = end, end + event.block_size
                assert ends[one] == end
                assert one not in found
                tokens = event.token_ids[number * event.block_size :][: event.block_size]
                assert tokens == self.requests[self.now][begin:end]
                found[one] = self.mark(self.now, end)

    def hashes(self, request: int) -> dict[Any, int]:
        """Where each hash of a request's prefixes ends."""
        grain = min(group.block for group in self.plan.groups)
        chain = HashChain(PrefixIdentity(salt=self.salts[request]), grain)
        chain.extend(self.requests[request])
        ends = range(grain, len(chain) + 1, grain)
        return {int.from_bytes(chain.at(end)[-8:], "big"): end for end in ends}

    def longest(self, salt: bytes, tokens: list[int]) -> int:
        """The hit that there must be: the last token at which every group has what it needs."""
        agreed = [self.agreed(group, salt, tokens) for group in range(len(self.found))]
        step = 1 if self.name in CUT else max(group.block for group in self.plan.groups)
        ends = range(0, len(tokens), step)
        return max((n for n in ends if self.serves(agreed, n)), default=0)

    def agreed(self, index: int, salt: bytes, tokens: list[int]) -> dict[int, int]:
        """For each entry of a table the tokens up to which some block agrees, itself included."""
        block, longest = self.plan.groups[index].block, dict[int, int]()
        for other, prefix in self.found[index].values():
            entry = len(prefix) // block - 1
            pairs = enumerate(zip(prefix, tokens, strict=False))
            count = next((n for n, (a, b) in pairs if a != b), min(len(prefix), len(tokens)))
            if other == salt:
                longest[entry] = max(longest.get(entry, 0), count)
        return longest

    def serves(self, agreed: list[dict[int, int]], tokens: int) -> bool:
        for group, longest in zip(self.plan.groups, agreed, strict=True):
            if group.kind == "recurrent":
                if tokens and longest.get(tokens // group.block - 1, 0) < tokens:
                    return False
                continue
            for position in range(first_needed(group, tokens), tokens):
                if longest.get(position // group.block, 0) <= position:
                    return False
        return True

    # -- rules --------------------------------------------------------------------------

    @rule(prompt=prompts)
    def admit(self, prompt: tuple[list[tuple[int, ...]], int, bytes]) -> None:
        pieces, tail, salt = prompt
        tokens = [token for piece in pieces for token in piece] + list(range(900, 900 + tail))
        self.named += 1
        self.requests[self.named], self.salts[self.named] = tokens, salt
        expected = self.longest(salt, tokens)
        assert self.pool.admit(self.named, tokens, PrefixIdentity(salt=salt)) == expected
        self.try_to_go_on(self.named, len(tokens))

    def try_to_go_on(self, request: int, tokens: int) -> None:
        try:
            self.go_on(request, tokens)
        except AtlasError as refusal:
            assert refusal.code is Code.NO_BLOCKS
            self.end(request)

    def end(self, request: int) -> None:
        self.pool.free(request)
        del self.requests[request], self.salts[request]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(1, 20))
    def decode(self, data: st.DataObject, more: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        begun = self.pool.tokens(request)
        new = [7] * more
        self.requests[request] += new
        try:
            self.pool.computed(request, begun, new)  # tokens are known before they are computed
            self.go_on(request, begun + more)
        except AtlasError as refusal:
            assert refusal.code is Code.NO_BLOCKS
            self.end(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.named += 1
        self.pool.fork(request, self.named)
        self.requests[self.named] = list(self.requests[request])
        self.salts[self.named] = self.salts[request]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        tokens, salt = self.requests[request], self.salts[request]
        assert self.pool.preempt(request) == len(tokens)
        expected = self.longest(salt, tokens)
        assert self.pool.admit(request, tokens, PrefixIdentity(salt=salt)) == expected
        self.try_to_go_on(request, len(tokens))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    # -- what holds always --------------------------------------------------------------

    @invariant()
    def no_block_is_lost_or_given_twice(self) -> None:
        owners: dict[int, Counter[int]] = {index: Counter() for index in self.pool.ids}
        group_of: dict[tuple[int, int], int] = {}
        for request in self.requests:
            for index, table in self.pool.tables(request).items():
                pool = self.plan.groups[index].pool
                for block in table:
                    if block != GONE:
                        owners[pool][block] += 1
                        assert group_of.setdefault((pool, block), index) == index
        for index, ids in self.pool.ids.items():
            assert 0 not in owners[index]
            assert all(ids.owners(b) == owners[index][b] for b in range(1, ids.count))
            assert ids.free == ids.count - 1 - len(owners[index])

    @invariant()
    def a_listener_knows_what_can_be_found(self) -> None:
        for known, index in zip(self.found, self.pool._index.groups, strict=True):
            digests = {int.from_bytes(one[-8:], "big") for one in index.blocks}
            assert digests == known.keys()
            for digest, block in index.blocks.items():
                salt, prefix = known[int.from_bytes(digest[-8:], "big")]
                owner, content = self.memory[index.group.pool, block]
                recurrent = index.group.kind == "recurrent"
                last = 0 if recurrent else (len(prefix) - 1) % index.group.block
                assert (owner, content[last]) == (index.number, (salt, prefix))

    @invariant()
    def every_request_has_what_its_next_token_sees(self) -> None:
        for request in self.requests:
            tables, computed = self.pool.tables(request), self.pool.tokens(request)
            assert computed == len(self.requests[request])
            for index, group in enumerate(self.plan.groups):
                if group.kind == "recurrent":
                    found = self.memory[group.pool, tables[index][0]] if computed else None
                    assert found in (None, (index, {0: self.mark(request, computed)}))
                    continue
                for position in range(first_needed(group, computed), computed):
                    block = tables[index][position // group.block]
                    owner, content = self.memory[group.pool, block]
                    assert owner == index
                    assert content[position % group.block] == self.mark(request, position + 1)


@pytest.mark.parametrize("name", MODELS)
def test_no_block_has_two_owners_and_none_is_lost(name: str) -> None:
    policies = [("every-block", "lru"), ("branch-points", "s3-fifo"), ("every-20", "lfu")]
    many = EXAMPLES // len(MODELS) // len(policies) + 1
    for checkpoints, eviction in policies:
        machine = type(
            "Machine",
            (Engine,),
            {"name": name, "plan": PLANS[name], "checkpoints": checkpoints, "eviction": eviction},
        )
        # Making a failure small takes minutes, and its steps are printed anyway.
        phases = [Phase.reuse, Phase.generate]
        chosen = settings(
            max_examples=many, stateful_step_count=STEPS, deadline=None, phases=phases
        )
        run_state_machine_as_test(machine, settings=chosen)


def test_a_hit_ends_where_every_group_can_go_on() -> None:
    """A hybrid with its attention all there, and a state at the end of the prompt alone."""
    for keep, expected in (("every-block", 48), ("prompt-end", 0)):
        pool = BlockPool(PLANS["hybrid"], checkpoints=checkpoint_policy(keep))
        step = PLANS["hybrid"].block_size
        prompt = list(range(4 * step))
        pool.admit(1, prompt)
        for stop in [*pool.stops(1, len(prompt)), len(prompt)]:
            pool.reserve(1, stop)
            pool.computed(1, stop)
        pool.free(1)
        assert pool.admit(2, [*prompt[: 3 * step], 5]) == expected // 16 * step
        assert pool.admit(3, [*prompt, 5]) == 4 * step


def computed(pool: BlockPool, name: object, prompt: list[int], identity: PrefixIdentity) -> None:
    """Serve a request up to the end of its prompt."""
    pool.admit(name, prompt, identity)
    pool.reserve(name, len(prompt))
    pool.computed(name, len(prompt))


def test_other_weights_adapters_salts_and_images_find_nothing() -> None:
    prompt = list(range(64))
    base = PrefixIdentity(weights="a")
    image = PrefixIdentity(weights="a", media=((3, b"image"),))
    late = PrefixIdentity(weights="a", media=((40, b"image"),))
    other = PrefixIdentity(weights="a", media=((40, b"other"),))
    strangers = [
        PrefixIdentity(weights="b"),
        PrefixIdentity(weights="a", salt=b"tenant"),
        PrefixIdentity(weights="a", lora="adapter"),
    ]
    for partial, same, early, third in ((False, 48, 0, 32), (True, 63, 3, 40)):
        pool = BlockPool(PLANS["dense"], partial_hits=partial)
        computed(pool, "first", prompt, base)
        assert pool.admit("same", prompt, base) == same
        assert [pool.admit(one, prompt, one) for one in strangers] == [0, 0, 0]
        assert pool.admit("image in the first block", prompt, image) == early
        computed(pool, "image in the third block", prompt, late)
        assert pool.admit("the same image", prompt, late) == same
        assert pool.admit("another image", prompt, other) == third
        assert pool.admit("text", prompt, base) == same


def test_a_block_that_begins_alike_is_copied_up_to_where_it_differs() -> None:
    pool = BlockPool(PLANS["dense"])
    prompt = list(range(48))
    computed(pool, 1, prompt, PrefixIdentity())
    computed(pool, 2, [*prompt[:32], 90, 91, *prompt[34:]], PrefixIdentity())
    longer = [*prompt[:32], 90, 5, 5, 5]
    assert pool.admit(3, longer) == 33
    (source,) = pool.tables(2)[0][2:]
    free = pool.ids[0].free
    (copy,) = pool.reserve(3, 36).copies
    assert (copy.group, copy.source, copy.tokens) == (0, source, 1)
    assert pool.tables(3)[0] == [*pool.tables(1)[0][:2], copy.destination]
    assert pool.ids[0].free == free - 1
    assert pool.ids[0].owners(source) == 1


def test_what_cannot_be_had_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(PLANS["dense"])
    pool.admit(1, range(64))
    free = {index: ids.free for index, ids in pool.ids.items()}
    refused: list[tuple[Code, Callable[[], object]]] = [
        (Code.NO_BLOCKS, lambda: pool.reserve(1, 16 * 10_000)),
        (Code.TWICE, lambda: pool.admit(1, range(3))),
        (Code.UNKNOWN_REQUEST, lambda: pool.free(2)),
        (Code.BAD_TOKENS, lambda: pool.computed(1, 16)),
        (Code.UNKNOWN_POLICY, lambda: BlockPool(PLANS["dense"], eviction="mru")),
        (Code.UNKNOWN_POLICY, lambda: checkpoint_policy("sometimes")),
        (Code.BAD_SIZE, lambda: checkpoint_policy("prompt-end-within-100")),
        (Code.NOT_AN_INTEGER, lambda: pool.admit(3, [1 << 70] * 16)),
        (Code.NOT_AN_INTEGER, lambda: pool.admit(3, [1.5] * 16)),  # type: ignore[list-item]
        (Code.NOT_AN_INTEGER, lambda: pool.computed(1, 0, [1, "a"])),  # type: ignore[list-item]
    ]
    for code, call in refused:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is code
    assert free == {index: ids.free for index, ids in pool.ids.items()}
