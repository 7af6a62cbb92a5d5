"""The replay beside `BlockPool`, by request: every model, eviction and checkpoint policy."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.pool import BlockPool, checkpoint_policy
from kvatlas.pool.group_needs import hash_grain, keeps_all
from kvatlas.simulate import LayerClass, PoolModel, ReplayPolicy, Trace
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.pool_replay import PoolReplay
from kvatlas.simulate.prefill_cost import DECODE_SECONDS
from kvatlas.simulate.prefill_steps import PrefillSteps
from kvatlas.simulate.timed_replay import TimedReplay
from kvatlas.simulate.traces import Ints, TraceBuilder, TraceRequest
from tests.pool.models import small_plan
from tests.profiles import DEEP

EVICTIONS = ("lru", "fifo", "lfu", "s3-fifo", "saved-compute")
CHECKPOINTS = (
    "every-block", "prompt-end", "branch-points", "vllm-default", "every-40",
    "every-block-within-25",
)  # fmt: skip
MODELS = ("dense", "sliding", "chunked", "uneven chunks", "hybrid", "mixed", "compressed")


def prompts(dice: Random, block: int, longest: int) -> Trace:
    """Requests along the branches of a small tree; their last tokens may be theirs alone."""
    builder = TraceBuilder("drawn", block)
    numbers: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = [()]
    for line in range(dice.randint(2, 30)):
        before = dice.choice(paths[-8:])
        keep = dice.randint(0, len(before)) if dice.random() < 0.4 else len(before)
        more = dice.randint(0, max(longest // 3, 1))
        path = (*before[:keep], *(dice.randint(0, 1) for _ in range(more)))[:longest]
        paths.append(path)
        ids = [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
        tail = dice.randint(0, block - 1)
        builder.add(f"line {line}", TraceRequest(len(ids) * block + tail, ids))
    return builder.finish()


def tokens_of(trace: Trace, request: int) -> list[int]:
    """Tokens that are equal exactly where the trace's ids are."""
    ids = trace.ids[trace.starts[request] : trace.starts[request + 1]].astype(np.int64)
    spread = np.repeat(ids * trace.block, trace.block) + np.tile(np.arange(trace.block), len(ids))
    alone = (1 << 40) + request * 1000 + np.arange(trace.lengths[request] - len(spread))
    return [*spread.tolist(), *alone.tolist()]


def served(made: Plan, trace: Trace, policy: ReplayPolicy, steps: PrefillSteps) -> Iterator[int]:
    """Serve the requests with a `BlockPool`, as an engine does; yield the tokens that it found."""
    pool = BlockPool(
        made, eviction=policy.eviction, checkpoints=policy.checkpoints, partial_hits=False
    )
    for request in range(len(trace)):
        prompt = tokens_of(trace, request)
        hit = pool.admit(request, prompt)
        try:
            for _, stop in steps.between(hit, len(prompt), pool.stops(request, len(prompt))):
                pool.reserve(request, stop)
                pool.computed(request, stop)
            if trace.outputs[request]:
                pool.reserve(request, len(prompt) + int(trace.outputs[request]))
        except AtlasError as refusal:
            assert refusal.code is Code.NO_BLOCKS
            hit = 0
        pool.free(request)
        yield hit


def made_blocks(made: Plan) -> Iterator[int]:
    """Blocks of each pool, without the null block."""
    return (one.blocks - 1 for one in made.pools)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=3_000 if DEEP else 30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_replay_finds_what_the_pool_finds(model: str, seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    compressed = model == "compressed"
    apart = model in ("hybrid", "mixed") and dice.random() < 0.3
    least, most = (150, 900) if compressed else (40 if apart else 14, 90)
    blocks = dice.randint(least, most)
    # States in a pool of their own, with space for so many requests.
    made = small_plan(model, blocks, **({"requests": dice.randint(2, 6)} if apart else {}))
    block = dice.choice([2, 4] if compressed else [4, 8, 16])
    assert hash_grain(made) % block == 0
    trace = prompts(dice, block, (1200 if compressed else 320) // block)
    if not compressed and dice.random() < 0.5:
        windows = any(not keeps_all(g) and g.kind != "recurrent" for g in made.groups)
        longest = 1 if windows else 40  # windows release blocks while an answer grows
        trace.outputs[:] = [dice.randint(0, longest) for _ in range(len(trace))]
    policy = ReplayPolicy(dice.choice(EVICTIONS), checkpoint_policy(dice.choice(CHECKPOINTS)))
    batched = dice.choice([32, 100, 10_000])
    replay = PoolReplay(PoolModel.of(made), trace, policy, batched_tokens=batched)
    expected = list(served(made, trace, policy, replay._steps))
    assert (replay.run().hits * replay.model.step).tolist() == expected, policy
    fast = FastReplay(PoolModel.of(made), trace, policy, batched_tokens=batched)
    assert (fast.run().hits * replay.model.step).tolist() == expected, policy
    assert fast.outcome.evictions == replay.outcome.evictions
    assert fast.outcome.peak == replay.outcome.peak
    assert [ids.free for ids in fast._ids] == list(made_blocks(made))


@settings(max_examples=2_000 if DEEP else 30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_requests_that_never_overlap_find_what_they_find_one_after_the_other(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    made = small_plan(dice.choice(MODELS[:-1]), dice.randint(14, 90))
    trace = prompts(dice, dice.choice([4, 8, 16]), 40)
    policy = ReplayPolicy(
        dice.choice(EVICTIONS), checkpoint_policy(dice.choice(CHECKPOINTS)), dice.random() < 0.3
    )
    model = PoolModel.of(made, by_group=policy.by_group)
    alone = PoolReplay(model, trace, policy).run()
    timed = TimedReplay(model, trace, policy)
    assert timed.run().hits.tolist() == alone.hits.tolist()
    assert timed.outcome.refused == alone.refused
    # Where they overlap, all blocks come back, and no pool is too full.
    trace.outputs[:] = [dice.randint(0, 99) for _ in range(len(trace))]
    crowd = TimedReplay(model, trace, policy)
    crowd.run()
    assert [ids.free for ids in crowd._ids] == list(made_blocks(made))
    assert crowd.outcome.peak <= sum(made_blocks(made))
    assert crowd.waited >= 0 == len(crowd._running)


def test_a_request_waits_until_another_one_ends() -> None:
    made = small_plan("dense", 14)
    builder = TraceBuilder("drawn", 16)
    for line in range(2):
        ids = list(range(line * 8, line * 8 + 8))
        builder.add(f"line {line}", TraceRequest(128, ids, output=50))
    timed = TimedReplay(PoolModel.of(made), builder.finish(), ReplayPolicy())
    timed.run()
    assert timed.waited == pytest.approx(50 * DECODE_SECONDS)
    assert timed.outcome.refused == 0


@pytest.mark.parametrize("eviction", ["saved-compute", "optimal"])
def test_policies_that_need_more_than_the_order_get_it(eviction: str) -> None:
    """With a trace that a policy without this knowledge serves worse."""
    made = small_plan("dense", 22)
    builder = TraceBuilder("drawn", 16)
    for line, ids in enumerate([range(10), range(100, 110), range(200, 210)] * 5):
        builder.add(f"line {line}", TraceRequest(161, list(ids)))
    trace, model = builder.finish(), PoolModel.of(made)

    def saved(one: LayerClass, block: int, ends: Ints) -> NDArray[np.float64]:
        assert (one.needs, block) == ("all", 16)
        worth: NDArray[np.float64] = np.exp2(161.0 - ends)
        return worth

    found = {
        name: int(kind(model, trace, ReplayPolicy(name), saved=saved).run().hits.sum())
        for name, kind in ((eviction, FastReplay), ("lru", FastReplay))
    }
    assert (
        found[eviction]
        == PoolReplay(model, trace, ReplayPolicy(eviction), saved=saved).run().hits.sum()
    )
    assert found[eviction] > found["lru"] == 0
