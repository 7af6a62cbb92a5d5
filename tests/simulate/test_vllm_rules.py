"""The replay of vLLM's plans beside a cache in plain Python, and the copies that it keeps."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.simulate import LayerClass, PoolModel, ReplayPolicy
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.pool_replay import PoolReplay
from kvatlas.simulate.traces import TraceBuilder, TraceRequest
from tests.pool.random_traces import random_classes, random_trace, simulated
from tests.profiles import DEEP
from tests.simulate.vllm_oracle import VllmOracle, alone

KEPT = ("every-block", "prompt-end", "vllm-default", "every-5", "vllm-default+every-3")


def random_case(seed: int) -> tuple[VllmOracle, list[Any], PoolModel, Any, ReplayPolicy, int]:
    dice = Random(seed)  # noqa: S311
    trace, requests = random_trace(dice)
    kinds, block = random_classes(dice), dice.randint(1, 5)
    pools = 1 + max(kind.pool for kind in kinds)
    most = dice.choice((60, 120, 400))
    sizes = tuple(dice.randint(most // 4, most) for _ in range(pools))
    model = PoolModel(block, tuple(map(simulated, kinds)), sizes)
    kept, tokens = checkpoint_policy(dice.choice(KEPT)), dice.randint(block, 60)
    oracle = VllmOracle(block, list(alone(kinds)), sizes, kept, tokens)
    return oracle, requests, model, trace, ReplayPolicy("lru", kept, by_group=True), tokens


@pytest.mark.parametrize("kind", [PoolReplay, FastReplay])
@settings(max_examples=5_000 if DEEP else 100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_replay_finds_what_vllm_finds(kind: type[PoolReplay], seed: int) -> None:
    oracle, requests, model, trace, policy, tokens = random_case(seed)
    replay = kind(model, trace, policy, batched_tokens=tokens)
    counts = np.diff(trace.starts) * trace.block
    for number, prompt in enumerate(requests):
        named = min(len(prompt), int(counts[number]))
        known = min(named, len(prompt) // trace.block * trace.block)
        hit = oracle.serve(prompt, named, known)
        assume(hit is not None)  # engines differ in what they do with a request that does not fit
        assert replay.serve(number) * model.step == hit
        assert replay.outcome.evictions == oracle.evictions


@settings(max_examples=5_000 if DEEP else 60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_requests_with_answers_find_the_same_at_once_and_step_by_step(seed: int) -> None:
    _, _, model, trace, policy, tokens = random_case(seed)
    dice = Random(seed)  # noqa: S311
    trace.outputs[:] = [dice.randint(0, 30) for _ in range(len(trace))]
    one, two = (
        kind(model, trace, policy, batched_tokens=tokens).run() for kind in (PoolReplay, FastReplay)
    )
    assert one.hits.tolist() == two.hits.tolist()
    assert (one.evictions, one.peak, one.refused) == (two.evictions, two.peak, two.refused)


@settings(max_examples=2_000 if DEEP else 40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_copies_are_counted_found_and_evicted_one_by_one(seed: int) -> None:
    _, requests, model, trace, policy, tokens = random_case(seed)
    replay = FastReplay(model, trace, policy, batched_tokens=tokens)
    for request in range(len(requests)):
        replay.serve(request)
        kept: list[set[int]] = [set() for _ in model.blocks]
        further = 0
        for bundle in replay._bundles:
            pool = bundle.one.pool
            for name in range(bundle.base, bundle.base + bundle.width * bundle.groups):
                first = block = int(replay._where[name])
                while block >= 0:
                    assert replay._names[pool][block] == name
                    assert block not in kept[pool]
                    kept[pool].add(block)
                    newer = int(replay._newer[pool][block])
                    assert replay._older[pool][newer] == block
                    further += newer != first
                    block = newer if newer != first else -1
        assert further == sum(replay._further)
        for ids, mine, size in zip(replay._ids, kept, model.blocks, strict=True):
            assert np.flatnonzero(ids._arrays.kept).tolist() == sorted(mine)
            assert np.flatnonzero(ids._eviction._place).tolist() == sorted(mine)
            assert (ids.free, ids.used) == (size, len(mine))


def test_what_is_computed_again_takes_room_of_its_own() -> None:
    builder = TraceBuilder("made", 1)
    for line, ids in enumerate(([0, 1, 2, 3], [9], [0, 1, 2, 3])):
        builder.add(f"line {line}", TraceRequest(len(ids), ids))
    trace = builder.finish()
    model = PoolModel(1, (LayerClass("all", 0, 1), LayerClass("state", 0, 1)), (20,))
    kept = checkpoint_policy("prompt-end")
    replaced, copied = (
        FastReplay(model, trace, ReplayPolicy(checkpoints=kept, by_group=by_group))
        for by_group in (False, True)
    )
    # The state is at the prompt's end, so that the same prompt finds nothing.
    assert replaced.run().hits.tolist() == copied.run().hits.tolist() == [0, 0, 0]
    assert [ids.used for ids in replaced._ids] == [7]
    assert [ids.used for ids in copied._ids] == [12]
