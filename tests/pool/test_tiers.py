"""Tiers of a simulation: what is evicted is found below, as a cache of single tokens has it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.errors import AtlasError
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import plan
from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.simulate import LowerTier, PoolModel, ReplayPolicy, TieredReplay, read_trace, simulate
from kvatlas.simulate.pool_replay import PoolReplay
from kvatlas.simulate.tiers import LOWER
from tests.pool.oracle import OracleClass, TieredOracle
from tests.pool.random_traces import KEPT, SAMPLE, random_classes, random_trace, simulated
from tests.profiles import DEEP


def random_tiers(dice: Random, classes: int, least: int, most: int) -> list[LowerTier]:
    tiers = []
    for name in ("host", "disk")[: dice.randint(1, 2)]:
        share = dice.choice([None, 0.25, 0.5])
        sizes = tuple(dice.randint(1, 9) for _ in range(classes))
        tiers.append(LowerTier(name, dice.randint(least, most), sizes, share))
    return tiers


@settings(max_examples=5_000 if DEEP else 30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=209)
@example(seed=13889498)
def test_tiers_find_what_a_cache_of_single_tokens_finds(seed: int) -> None:
    """With full attention in one or two pools, in which a running request fits."""
    dice = Random(seed)  # noqa: S311
    trace, requests = random_trace(dice)
    step = dice.randint(1, 5)
    kinds = [OracleClass("all", pool, 1) for pool in range(dice.randint(1, 2))]
    longest = ceil_div(int(trace.lengths.max()), step)
    blocks = [longest + dice.randint(0, 12) for _ in kinds]
    counts = np.diff(trace.starts) * trace.block
    named = np.minimum(trace.lengths, counts).tolist()
    held = [[ceil_div(len(r), step) - n // step] * len(kinds)
            for r, n in zip(requests, named, strict=True)]  # fmt: skip
    tiers = random_tiers(dice, len(kinds), 10, 150)
    states = [int(tier.nbytes * tier.state_share) if tier.state_share else 0 for tier in tiers]
    capacity = [
        [tier.nbytes - part, part] if part else [tier.nbytes]
        for tier, part in zip(tiers, states, strict=True)
    ]
    model = PoolModel(step, tuple(map(simulated, kinds)), tuple(blocks))
    replay = TieredReplay(model, trace, ReplayPolicy(), tiers=tiers)
    sizes = [list(tier.sizes) for tier in tiers]
    oracle = TieredOracle(step, kinds, blocks, requests, named, held, capacity, sizes)
    assert (replay.run().hits * step).tolist() == oracle.run()
    assert (replay.found.T * step).tolist() == oracle.found


@settings(max_examples=5_000 if DEEP else 40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_each_block_is_in_one_tier_and_nothing_is_lost_in_a_large_one(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, _ = random_trace(dice)
    kinds, step = random_classes(dice), dice.randint(1, 5)
    large = dice.random() < 0.5
    pools = 1 + max(kind.pool for kind in kinds)
    blocks = tuple(dice.randint(30, 120) for _ in range(pools))
    classes = tuple(map(simulated, kinds))
    tiers = random_tiers(dice, len(kinds), *((10**6, 10**6) if large else (20, 400)))
    policy = ReplayPolicy("lru", checkpoint_policy(dice.choice(KEPT)), by_group=dice.random() < 0.3)
    tokens = dice.randint(step, 40)
    model = PoolModel(step, classes, blocks)
    replay = TieredReplay(model, trace, policy, tiers=tiers, batched_tokens=tokens)
    endless = PoolReplay(
        PoolModel(step, classes, (10_000,) * pools), trace, policy, batched_tokens=tokens
    )
    for request in range(len(trace)):
        hit, refused = replay.serve(request), replay.outcome.refused
        assert replay.found[:, request].sum() == hit
        if large and not refused:
            assert hit == endless.serve(request)
        on_gpu = replay._where[(replay._where >= 0) & (replay._where < LOWER)]
        kept = sum(np.count_nonzero(ids._arrays.kept) for ids in replay._ids)
        assert kept == len(on_gpu) + sum(replay._further)
        assert [ids.free for ids in replay._ids] == list(blocks)
        for number, store in enumerate(replay._stores, 1):
            names = np.flatnonzero(replay._where == LOWER + number)
            for part, mine in store._by_part(names):
                assert store._queues[part]._place[mine].all()
                assert np.count_nonzero(store._queues[part]._place) == len(mine)
                assert store._size(mine).sum() == store._used[part] <= store._room[part]


def test_a_host_tier_finds_what_the_gpu_lost() -> None:
    trace = read_trace(SAMPLE)
    small = plan("Qwen3.5-397B-A17B", memory="2GiB", max_len="8K")
    host = plan("Qwen3.5-397B-A17B", memory="16GiB", max_len="8K")
    alone = simulate(small, trace)
    both = simulate(small, trace, tiers={"host": host})
    assert both.found_by_tier["gpu"] + both.found_by_tier["host"] == both.found > alone.found
    assert alone.found_by_tier == {"gpu": alone.found}
    # As much as a GPU with the memory of both would find, or nearly.
    large = simulate(plan("Qwen3.5-397B-A17B", memory="18GiB", max_len="8K"), trace)
    assert abs(both.hit_rate - large.hit_rate) < 0.02
    apart = simulate(small, trace, tiers={"host": host}, state_share=0.01)
    assert apart.found < both.found


def test_an_entry_takes_the_bytes_of_the_tiers_own_plan() -> None:
    theirs = plan("Qwen3.5-397B-A17B", memory="8GiB", max_len="8K", policy="vllm")
    ours = plan("Qwen3.5-397B-A17B", memory="8GiB", max_len="8K")
    above, below = PoolModel.of(theirs), PoolModel.of(ours)
    tier = LowerTier.of("host", ours, above)
    sizes = {
        one.needs: (one.blocks * size, one.blocks)
        for one, size in zip(above.classes, tier.sizes, strict=True)
    }
    state = next(one for one in below.classes if one.needs == "state")
    _is_rounded_up(*sizes["state"], state.blocks * state.block_bytes)
    attention = next(one for one in below.classes if one.needs == "all")
    whole = -(-above.step // below.step)
    _is_rounded_up(*sizes["all"], whole * attention.blocks * attention.block_bytes)


def _is_rounded_up(total: int, blocks: int, exact: int) -> None:
    """Assert that `blocks` blocks, of which each is rounded up, take `exact` bytes."""
    assert exact <= total < exact + blocks


def test_tiers_that_cannot_be_are_refused() -> None:
    trace = read_trace(SAMPLE)
    made = plan("Llama-3.1-8B", memory="2GiB", max_len="8K")
    other = plan("Qwen3.5-397B-A17B", memory="8GiB", max_len="8K")
    refused: tuple[dict[str, Any], ...] = (
        {"tiers": {"host": other}},
        {"tiers": {"host": made}, "arrivals": True},
        {"tiers": {"host": made}, "state_share": 1.5},
    )
    for options in refused:
        with pytest.raises(AtlasError):
            simulate(made, trace, **options)
