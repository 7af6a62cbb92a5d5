"""A pool under random requests, beside memory that remembers what was written to it.

The machine plays the engine: it zeroes, copies and writes what the pool says. What a token's
cell holds is the whole prefix up to it, so that a block that two requests were given, that was
reused too early, or that is found under a wrong hash shows at once.
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
from kvatlas.pool import GONE, BlockPool, PrefixIdentity, checkpoint_policy
from kvatlas.pool.group_needs import first_needed
from tests.pool.models import MODELS, small_plan

DEEP = settings.get_current_profile_name() == "deep"
EXAMPLES, STEPS = (10_000, 100) if DEEP else (60, 30)
PIECES = [tuple(range(16 * n, 16 * n + 16)) for n in range(3)]
PLANS = {name: small_plan(name, 24 if name != "compressed" else 200) for name in MODELS}

prompts = st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=4), st.integers(0, 20), st.sampled_from([b"", b"s"])
)


class Engine(RuleBasedStateMachine):
    """Requests on a pool, and the memory behind it."""

    plan: Plan
    checkpoints = "every-block"
    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        keep = checkpoint_policy(self.checkpoints)
        self.pool = BlockPool(self.plan, eviction=self.eviction, checkpoints=keep)
        self.memory: dict[tuple[int, int], tuple[int, dict[int, Any]]] = {}
        self.requests: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.named = 0

    # -- what an engine does ------------------------------------------------------------

    def go_on(self, request: int, tokens: int) -> None:
        """Compute a request up to `tokens` tokens, as the pool wants it."""
        stops = [*self.pool.stops(request, tokens), tokens]
        for stop in dict.fromkeys(stops):
            made = self.pool.reserve(request, stop)
            for group, blocks in made.clear.items():
                for block in blocks:
                    self.memory[self.plan.groups[group].pool, block] = (group, {})
            for group, source, destination in made.copies:
                pool = self.plan.groups[group].pool
                owner, content = self.memory[pool, source]
                assert owner == group
                self.memory[pool, destination] = (group, dict(content))
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

    def mark(self, request: int, tokens: int) -> tuple[bytes, tuple[int, ...]]:
        return self.salts[request], tuple(self.requests[request][:tokens])

    # -- rules --------------------------------------------------------------------------

    @rule(prompt=prompts)
    def admit(self, prompt: tuple[list[tuple[int, ...]], int, bytes]) -> None:
        pieces, tail, salt = prompt
        tokens = [token for piece in pieces for token in piece] + list(range(900, 900 + tail))
        self.named += 1
        self.requests[self.named], self.salts[self.named] = tokens, salt
        hit = self.pool.admit(self.named, tokens, PrefixIdentity(salt=salt))
        assert hit == 0 or hit < len(tokens)
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
        self.pool.admit(request, tokens, PrefixIdentity(salt=salt))
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
            {"plan": PLANS[name], "checkpoints": checkpoints, "eviction": eviction},
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


def test_other_weights_adapters_salts_and_images_find_nothing() -> None:
    prompt = range(64)
    base = PrefixIdentity(weights="a")
    others = [
        PrefixIdentity(weights="b"),
        PrefixIdentity(weights="a", salt=b"tenant"),
        PrefixIdentity(weights="a", lora="adapter"),
        PrefixIdentity(weights="a", media=((3, b"image"),)),
    ]
    for number, identity in enumerate(others):
        pool = BlockPool(PLANS["dense"])
        pool.admit("first", prompt, base)
        pool.reserve("first", 64)
        pool.computed("first", 64)
        assert pool.admit(("same", number), prompt, base) == 48
        assert pool.admit(("other", number), prompt, identity) == 0
        late = PrefixIdentity(weights="a", media=((40, b"image"),))
        assert pool.admit(("image in the third block", number), prompt, late) == 32


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
    ]
    for code, call in refused:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is code
    assert free == {index: ids.free for index, ids in pool.ids.items()}
