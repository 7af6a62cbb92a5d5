"""Queues of what is evicted: bounded, in order, and begun anew when all is dropped."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockIds, block_ids
from kvatlas.pool.block_ids import NO_BLOCK
from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.pool.eviction import EVICTIONS, Eviction, Fifo, Lru, Use
from kvatlas.simulate import LayerClass, PoolModel, ReplayPolicy, Spans
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.traces import TraceBuilder, TraceRequest
from tests.pool.plain_store import PlainStore, worth
from tests.pool.random_traces import random_trace
from tests.pool.span_store import store_hits
from tests.profiles import DEEP

NOBODY = np.zeros(20, bool)


def use(queue: Eviction, entries: list[int], now: int) -> None:
    later = np.array(entries) + now
    queue.used(np.array(entries, np.int64), Use(now, np.ones(len(entries)), later))


def test_a_queue_of_which_nothing_is_evicted_does_not_grow() -> None:
    for name, kind in EVICTIONS.items():
        if name == "s3-fifo":  # it has no segments
            continue
        dice = Random(3)  # noqa: S311
        queue, never_swept = kind(20), kind(20)
        never_swept.entries = 10**9
        for now in range(250):
            entries = dice.sample(range(20), dice.randint(5, 20))
            use(queue, entries, now)
            use(never_swept, entries, now)
        assert sum(len(segment) for _, _, segment in queue._heap) < 1_100
        for _ in range(20):
            assert queue.victims(1, NOBODY).tolist() == never_swept.victims(1, NOBODY).tolist()


def test_segments_are_numbered_anew_when_their_numbers_end() -> None:
    queue = Lru(4)
    use(queue, [0, 1, 2], 1)
    queue._serial = 2**31 - 1
    use(queue, [3, 0], 2)
    assert queue.victims(4, NOBODY).tolist() == [1, 2, 3, 0]


def test_what_is_dropped_while_it_is_in_use_is_queued_anew() -> None:
    lost: list[int] = []
    ids = BlockIds(3, eviction=Fifo(3), evicted=lost.extend)
    first = ids.take()
    ids.keep([first])
    ids.release([first])
    ids.share([first])
    ids.drop()
    ids.release([first])
    blocks = ids.take_many(3)
    ids.keep(blocks)
    others = [block for block in blocks if block != first]
    ids.release([*others, first])
    ids.take()
    assert lost == others[:1]


@settings(max_examples=10_000 if DEEP else 60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_policy_evicts_what_a_plain_store_evicts(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, _ = random_trace(dice)
    spans, room = Spans.of(trace, dice.randint(1, 3)), dice.randint(1, 30)
    requests = [spans.of_request(number).tolist() for number in range(len(trace))]
    for eviction in EVICTIONS:
        hits = store_hits(spans, room, eviction, saved=worth)
        assert hits.tolist() == PlainStore(room, eviction, requests).run(), eviction


def test_states_go_in_the_order_in_which_a_prompt_passed_them() -> None:
    builder = TraceBuilder("made", 1)
    builder.add("line 1", TraceRequest(9, list(range(9))))
    trace = builder.finish()
    classes = (LayerClass("all", 0, 1), LayerClass("state", 0, 2, groups=2))
    model = PoolModel(1, classes, (100,))
    orders = {}
    for kept in ("vllm-default+every-3", "every-block"):
        policy = ReplayPolicy(checkpoints=checkpoint_policy(kept), by_group=True)
        replay = FastReplay(model, trace, policy, batched_tokens=4)
        replay.run()
        blocks = replay._ids[0]._eviction.victims(100, None)
        groups, places = np.divmod(replay._names[0][blocks], trace.distinct)
        orders[kept] = list(zip(groups.tolist(), places.tolist(), strict=True))
    attention = [(0, place) for place in reversed(range(9))]
    last = [(1, 8), (1, 7), (2, 8), (2, 7)]  # in the tables of both groups at the end
    few = [(group, place) for place in (2, 5) for group in (1, 2)]
    assert orders["vllm-default+every-3"] == [*few, *attention, *last]
    # A step has four tokens. When the next one begins, its groups release all states but the last.
    passed = range(3), range(3, 7)
    every = [(group, place) for some in passed for group in (1, 2) for place in reversed(some)]
    assert orders["every-block"] == [*every, *attention, *last]


def test_many_blocks_are_counted_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken, shared, kept, given back and evicted together, and one by one."""

    def state(ids: BlockIds) -> tuple[object, ...]:
        each = [(ids.owners(block), ids.is_kept(block)) for block in range(20)]
        return each, ids.free, ids.kept, ids._stack[: ids._waiting].tolist()

    dice = Random(5)  # noqa: S311
    lost: tuple[list[int], list[int]] = ([], [])
    both = [BlockIds(20, null_block=True, eviction=Lru(20), evicted=one.extend) for one in lost]
    for _ in range(500):
        act = dice.choice(("take_many", "share", "release", "release", "keep"))
        names = range(1, 20)
        owned = [block for block in names if both[0].owners(block)]
        found = owned + [block for block in names if both[0].is_kept(block)]
        given: Any = dice.sample(owned, dice.randint(0, len(owned)))
        if act == "take_many":
            given = dice.randint(0, both[0].free)
        elif act == "share":  # those that are both owned and kept may be named twice
            given = dice.sample(found, dice.randint(0, len(found))) + dice.choice(([], [NO_BLOCK]))
        for ids, many in zip(both, (1, 1000), strict=True):
            monkeypatch.setattr(block_ids, "_MANY", many)
            getattr(ids, act)(given)
        assert state(both[0]) == state(both[1]), (act, given)
    assert lost[0] == lost[1] != []
    monkeypatch.setattr(block_ids, "_MANY", 1)
    fresh = BlockIds(20, null_block=True)
    before = state(fresh)
    for act, wrong in (("share", 7), ("keep", 7), ("release", 7), ("release", 0)):
        with pytest.raises(AtlasError) as refusal:
            getattr(fresh, act)([wrong])
        assert refusal.value.code is Code.OUT_OF_RANGE
    assert state(fresh) == before


def test_a_copy_of_block_ids_counts_its_own_blocks_alone() -> None:
    ids = BlockIds(300)
    taken = ids.take_many(200)
    other = deepcopy(ids)
    more = other.take_many(20)
    other.share(more[:5])
    other.release(more)
    other.release(taken)
    assert (ids.free, other.free) == (100, 295)
    assert [other.owners(block) for block in more] == [1] * 5 + [0] * 15
