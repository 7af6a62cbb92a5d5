"""Blocks that are computed again and kept twice: what is counted is what is there."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.simulate import (
    LayerClass,
    PoolModel,
    Replay,
    ReplayPolicy,
    Spans,
    VllmReplay,
)
from kvatlas.simulate.traces import TraceBuilder, TraceRequest
from tests.pool.test_replay import KEPT, random_classes, random_trace, simulated
from tests.profiles import DEEP


def ids_there(replay: VllmReplay) -> list[int]:
    """The id of every copy of every entry that is found."""
    firsts = len(replay._present)
    alone = np.flatnonzero(replay._present & ~replay._copied[:firsts]).tolist()
    return alone + [one for copies in replay._copies.values() for one in copies]


@settings(max_examples=2_000 if DEEP else 25)
@given(seed=st.integers(0, 1 << 32))
def test_copies_are_counted_found_and_evicted_one_by_one(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, _ = random_trace(dice)
    kinds, step = random_classes(dice), dice.randint(1, 5)
    pools = 1 + max(kind.pool for kind in kinds)
    blocks = tuple(dice.randint(5, 50) for _ in range(pools))
    model = PoolModel(step, tuple(map(simulated, kinds)), blocks)
    policy = ReplayPolicy(checkpoints=checkpoint_policy(dice.choice(KEPT)), by_group=True)
    spans, tokens = Spans.of(trace, step), dice.randint(step, 40)
    replay = VllmReplay(model, spans, policy, trace=trace, batched_tokens=tokens)
    for request in range(len(trace)):
        replay.serve(request)
        there = ids_there(replay)
        assert len(set(there)) == len(there)
        entries = {one: entry for entry, copies in replay._copies.items() for one in copies}
        queued: list[int] = []
        for pool, queue in enumerate(replay._queues):
            used = 0
            for size, ids in queue.queued():
                for one in ids.tolist():
                    kind = kinds[entries.get(one, one) >> replay._bits]
                    assert (kind.pool, simulated(kind).blocks) == (pool, size)
                used += size * len(ids)
                queued += ids.tolist()
            assert used == replay._used[pool] <= blocks[pool]
        assert sorted(queued) == sorted(there)
        assert all(len(copies) > 1 or copies != [one] for one, copies in replay._copies.items())


def test_what_is_computed_again_takes_room_of_its_own() -> None:
    builder = TraceBuilder("made", 1)
    for line, ids in enumerate(([0, 1, 2, 3], [9], [0, 1, 2, 3])):
        builder.add(f"line {line}", TraceRequest(len(ids), ids))
    trace = builder.finish()
    spans = Spans.of_ids(trace)
    classes = (LayerClass("all", 0, 1), LayerClass("state", 0, 1))
    policy = ReplayPolicy(checkpoints=checkpoint_policy("prompt-end"), by_group=True)
    # The first state goes when the second request comes; attention's four blocks stay.
    once = Replay(PoolModel(1, classes, (6,)), spans, policy)
    twice = VllmReplay(PoolModel(1, classes, (6,)), spans, policy, trace=trace)
    assert once.run().hits.tolist() == twice.run().hits.tolist() == [0, 0, 0]
    assert once.outcome.evictions < twice.outcome.evictions
