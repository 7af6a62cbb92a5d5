"""A pool under random requests, beside memory that remembers what was written to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from threading import Thread

import numpy as np
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
from kvatlas.planning import plan
from kvatlas.pool import BlockIds, BlockPool, EventSubscriber, PrefixIdentity, checkpoint_policy
from tests.pool.engine import PIECES, PLANS, POLICIES, Engine
from tests.pool.million import run
from tests.pool.models import MODELS, small_plan
from tests.profiles import DEEP

EXAMPLES, STEPS = (16_000, 100) if DEEP else (60, 30)
"""With some 65 rules an example, a million operations in the deep profile, as make test-pool has
them from a seed; both check everything after each."""

prompts = st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=4), st.integers(0, 20), st.sampled_from([b"", b"s"])
)


class Machine(RuleBasedStateMachine):
    """Requests on an engine, drawn."""

    kind: tuple[str, str, str]
    """The model, its checkpoints and its eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(*self.kind)

    @property
    def requests(self) -> list[int]:
        return sorted(self.engine.requests)

    @rule(prompt=prompts, loaded=st.sampled_from([0, 0, 16, 23, 40, 57, 64]))
    def admit(self, prompt: tuple[list[tuple[int, ...]], int, bytes], loaded: int) -> None:
        pieces, tail, salt = prompt
        tokens = [token for piece in pieces for token in piece] + list(range(900, 900 + tail))
        self.engine.admit(tokens, salt, loaded)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(1, 20))
    def decode(self, data: st.DataObject, more: int) -> None:
        self.engine.decode(data.draw(st.sampled_from(self.requests)), more)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.engine.fork(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.engine.free(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.requests)))

    @rule()
    def clear(self) -> None:
        self.engine.pool.clear()

    @invariant()
    def all_is_well(self) -> None:
        self.engine.check()


@pytest.mark.parametrize("name", MODELS)
def test_no_block_has_two_owners_and_none_is_lost(name: str) -> None:
    many = EXAMPLES // len(MODELS) // len(POLICIES) + 1
    for policy in POLICIES:
        machine = type("Drawn", (Machine,), {"kind": (name, *policy)})
        # Making a failure small takes minutes, and its steps are printed anyway.
        phases = [Phase.reuse, Phase.generate]
        chosen = settings(
            max_examples=many, stateful_step_count=STEPS, deadline=None, phases=phases
        )
        run_state_machine_as_test(machine, settings=chosen)


def test_hundreds_of_operations_in_a_row_find_copy_and_evict() -> None:
    done, counts = run(500, seed=1)
    assert done.total() == 500
    kinds = ("hits", "hits inside a block", "evicted blocks", "loaded")
    assert min(counts[one] for one in kinds) > 0


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


def test_checkpoints_within_a_share_leave_the_rest_to_attention() -> None:
    """Else states of one long prompt would drive out what all others are found by."""
    made = small_plan("hybrid", 60)
    step, found = made.block_size, {}
    for keep in ("every-block", "every-block-within-25"):
        pool = BlockPool(made, checkpoints=checkpoint_policy(keep))
        prompts = [[user, *range(100, 99 + 5 * step)] for user in range(6)]
        for number, prompt in enumerate(prompts):
            pool.admit(number, prompt)
            for stop in [*pool.stops(number, len(prompt)), len(prompt)]:
                pool.reserve(number, stop)
                pool.computed(number, stop)
            pool.free(number)
        attention = [one for one in pool._index.groups if one.keeps_all]
        found[keep] = sum(len(one.blocks) for one in attention)
        assert pool.admit("last", [*prompts[-1], 5]) == 5 * step
    assert found["every-block-within-25"] == 30 > found["every-block"]


def test_a_share_is_kept_to_where_a_part_of_a_window_is_found_already() -> None:
    made = small_plan("sliding", 100)
    pool = BlockPool(made, checkpoints=checkpoint_policy("prompt-end-within-3"))
    (share,) = pool._shares.values()
    prompt = list(range(4 * made.block_size + 1))
    for number in (4, 3):  # under way at once, so that neither finds what the other has
        pool.admit(number, prompt[: number * made.block_size + 1])
    for number in (4, 3):
        pool.reserve(number, number * made.block_size + 1)
        pool.computed(number, number * made.block_size + 1)
        assert len(share) == share.most == 3
        pool.free(number)


def test_compressed_caches_are_found_at_whole_blocks() -> None:
    dense = checkpoint_policy("every-block")
    pool = BlockPool(small_plan("compressed", 600, max_len=1024), checkpoints=dense)
    prompt = list(range(700))
    computed(pool, 1, prompt, PrefixIdentity())
    pool.free(1)
    for count, expected in ((700, 512), (513, 512), (512, 256), (300, 256), (200, 0)):
        assert pool.admit(2, [*prompt[:count], 7]) == expected + 256 * (count == 512)
        assert pool.admit(3, prompt[:count]) == expected
        for request in (2, 3):
            pool.reserve(request, len(prompt) + 1)
            pool.free(request)


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


def test_names_that_are_no_text_are_refused_before_anything_is_taken() -> None:
    pool = BlockPool(PLANS["dense"])
    for identity in (PrefixIdentity(weights="half a \ud83d pair"), PrefixIdentity(lora="\udca9")):
        with pytest.raises(AtlasError) as refusal:
            pool.admit("request", [1, 2, 3], identity)
        assert refusal.value.code == Code.BAD_CONFIG
        assert str(refusal.value).encode(), "what is said of it is text"
    assert pool.admit("request", [1, 2, 3]) == 0


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


def test_tokens_of_a_call_that_was_refused_are_not_known() -> None:
    """Else they would be there twice, and another prompt would be found for this one."""
    pool = BlockPool(PLANS["dense"])
    pool.admit(1, range(31))
    with pytest.raises(AtlasError):
        pool.computed(1, 32, [900])
    pool.reserve(1, 48)
    pool.computed(1, 32, [900])
    pool.computed(1, 48, range(901, 917))
    assert pool.admit(2, [*range(31), *range(900, 917), 5]) == 48


@pytest.mark.parametrize("eviction", ["fifo", "lru", "s3-fifo"])
def test_what_is_copied_from_is_nobody_elses_before(eviction: str) -> None:
    """Else a full pool deals a source out to another group, which zeroes it before the copy."""
    made, rng = small_plan("hybrid", 14), np.random.default_rng(7)
    pool, step, copied = BlockPool(made, eviction=eviction), made.block_size, 0
    for number in range(200):
        tokens = int(rng.integers(1, 4)) * step
        prompt = [int(rng.integers(4)), *range(100, 99 + tokens)]
        pool.admit(number, [*prompt, *[7] * int(rng.integers(1, step))])
        try:
            given = pool.reserve(number, tokens + 1)
        except AtlasError:  # no blocks
            pool.free(number)
            continue
        sources = {(made.groups[one.group].pool, one.source) for one in given.copies}
        written = {(made.groups[one.group].pool, one.destination) for one in given.copies}
        written |= {(made.groups[g].pool, one) for g, ids in given.clear.items() for one in ids}
        assert not sources & written
        copied += len(sources)
        pool.computed(number, tokens)
        pool.free(number)
    assert copied


def test_tokens_before_a_window_that_did_not_come_are_not_found_where_all_tokens_are_kept() -> None:
    """A plan of one group for all layers: of those that see a window, a tier has no more."""
    pool = BlockPool(plan("gpt-oss-20b", memory="40GiB", policy="uniform"))
    pool.admit("first", range(1000))
    pool.reserve("first", 1000)
    pool.loaded("first", 900)  # from token 773 on, in every second layer
    pool.computed("first", 1000)
    pool.free("first")
    assert pool.admit("shorter", [*range(500), 7]) == 0
    pool.reserve("shorter", 501)
    pool.computed("shorter", 501)
    assert pool.admit("longer", range(1001)) == 496, "whole blocks that were computed here are"


def test_calls_that_overlap_are_refused_and_change_nothing() -> None:
    """Four threads on one pool used to lose blocks. The listener is called during a call."""
    refused: list[Code] = []

    def intrude() -> None:
        for call in (lambda: pool.free(1), lambda: pool.reserve(1, 64), lambda: pool.tables(1)):
            with pytest.raises(AtlasError) as refusal:
                call()
            refused.append(refusal.value.code)

    def listen(_: object) -> None:
        thread = Thread(target=intrude)
        thread.start()
        thread.join()

    pool = BlockPool(PLANS["dense"], events=listen)
    pool.admit(1, range(64))
    pool.reserve(1, 64)
    free = pool.ids[0].free
    pool.computed(1, 64)
    assert refused == [Code.CONCURRENT_CALLS] * 3
    assert (pool.ids[0].free, pool.tokens(1)) == (free, 64)
    other = deepcopy(BlockPool(PLANS["dense"]))
    assert other.admit(1, range(64)) == 0


def test_checkpoints_are_vllms_unless_others_are_asked_for() -> None:
    """The end of the prompt alone, and later where attention has more than the states."""
    made = small_plan("hybrid", 100)
    pool, step = BlockPool(made), made.block_size
    prompt = list(range(4 * step + 1))
    for number, expected in enumerate([[4 * step], [2 * step, 3 * step], []]):
        mine = [prompt, [*prompt[: 2 * step], *[5] * (step + 1)], prompt][number]
        pool.admit(number, mine)
        assert pool.stops(number, len(mine)) == expected
        for stop in [*expected, len(mine)]:
            pool.reserve(number, stop)
            pool.computed(number, stop)
        pool.free(number)


def test_a_fork_copies_only_what_was_computed() -> None:
    pool = BlockPool(PLANS["dense"])
    pool.admit(1, range(64))
    pool.reserve(1, 64)
    pool.computed(1, 20)
    pool.fork(1, 2)
    given = pool.reserve(2, 64)
    assert {one.tokens for one in given.copies} == {4}


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
        (Code.NOT_AN_INTEGER, lambda: pool.loaded(1, math.nan)),  # type: ignore[arg-type]
        (Code.BAD_TOKENS, lambda: pool.loaded(1, 64)),
        (Code.NEGATIVE, lambda: BlockIds(-1)),
        (Code.BAD_QUANTITY, lambda: EventSubscriber("inproc://here", replay_timeout=math.nan)),
    ]
    for code, call in refused:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is code
    assert free == {index: ids.free for index, ids in pool.ids.items()}
