"""Queues of what is evicted: bounded, in order, and begun anew when all is dropped."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockIds, block_ids
from kvatlas.pool.block_ids import NO_BLOCK
from kvatlas.pool.checkpoints import EveryBlock, checkpoint_policy
from kvatlas.pool.eviction import EVICTIONS, Eviction, Fifo, Lru, Use
from kvatlas.simulate import LayerClass, PoolModel, Replay, ReplayPolicy, Spans
from kvatlas.simulate.lru_queue import LruQueue

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


def test_states_go_in_the_order_in_which_a_prompt_passed_them() -> None:
    numbers = np.arange(9)
    spans = Spans(1, numbers, np.array([0, 9]), 9, np.array([8]), np.array([8]))
    classes = tuple(LayerClass(needs, 0, 1) for needs in ("all", "state", "state"))
    model = PoolModel(1, classes, (100,))
    parts = [numbers, np.array([2, 7]), np.array([2, 7])]
    orders = {}
    for policy in (checkpoint_policy("vllm-default"), EveryBlock()):
        replay = Replay(model, spans, ReplayPolicy(checkpoints=policy, by_group=True))
        entries, places = replay._in_order(0, parts)
        orders[type(policy)] = list(zip((entries >> 4).tolist(), places.tolist(), strict=True))
    attention = [(0, place) for place in reversed(range(9))]
    assert orders.pop(EveryBlock) == [(1, 7), (1, 2), (2, 7), (2, 2), *attention]
    assert orders.popitem()[1] == [(1, 2), (2, 2), (1, 7), (2, 7), *attention]


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


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_of_segments_evicts_as_lru_does(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    sizes = np.array([dice.choice((1, 4)) for _ in range(20)])
    plain, queue = Lru(20, lambda ids: sizes[ids]), LruQueue(20)
    queue._serial = dice.choice((0, 2**31 - 20))
    inside: set[int] = set()
    for now in range(300):
        used = dice.sample(range(20), dice.randint(1, 12))
        queue.take(np.array([one for one in used if one in inside], np.int64))
        for size in (1, 4):
            some = [one for one in used if sizes[one] == size]
            use(plain, some, now)
            if some:
                queue.put(np.array(some), size)
        inside |= set(used)
        if now > 250:  # by then it was swept
            blocks = dice.randint(1, 30)
            victims, freed = queue.victims(blocks)
            assert victims.tolist() == plain.victims(blocks, NOBODY).tolist()
            assert freed == sizes[victims].sum()
            inside -= set(victims.tolist())
    assert sum(len(ids) for _, ids in queue.queued()) == len(inside)
    assert queue._stored < 1_100
