"""Tiers of a simulation: what is evicted is found below, as a cache of single tokens has it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.errors import AtlasError
from kvatlas.planning import plan
from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.simulate import (
    LowerTier,
    PoolModel,
    ReplayPolicy,
    Spans,
    TieredReplay,
    read_trace,
    simulate,
)
from tests.pool.oracle import TieredOracle
from tests.pool.test_replay import KEPT, SAMPLE, random_classes, random_trace, simulated
from tests.profiles import DEEP


@settings(max_examples=5_000 if DEEP else 30)
@given(seed=st.integers(0, 1 << 32))
def test_tiers_find_what_a_cache_of_single_tokens_finds(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, requests = random_trace(dice)
    kinds, step = random_classes(dice), dice.randint(1, 5)
    pools = 1 + max(kind.pool for kind in kinds)
    blocks = [dice.randint(5, 25) for _ in range(pools)]
    held = [[dice.randint(0, 2) for _ in range(pools)] for _ in requests]
    tiers = []
    for name in ("host", "disk")[: dice.randint(1, 2)]:
        share = dice.choice([None, 0.25, 0.5])
        sizes = tuple(dice.randint(1, 9) for _ in kinds)
        tiers.append(LowerTier(name, dice.randint(10, 150), sizes, share))
    states = [int(tier.nbytes * tier.state_share) if tier.state_share else 0 for tier in tiers]
    capacity = [
        [tier.nbytes - part, part] if part else [tier.nbytes]
        for tier, part in zip(tiers, states, strict=True)
    ]
    model = PoolModel(step, tuple(map(simulated, kinds)), tuple(blocks))
    counts = np.diff(trace.starts) * trace.block
    named = np.minimum(trace.lengths, counts).tolist()
    known = [len(r) // trace.block * trace.block for r in requests]
    kept, by_group = dice.choice(KEPT), dice.random() < 0.3
    policy = ReplayPolicy("lru", checkpoint_policy(kept), by_group)
    spans = Spans.of(trace, step)
    replay = TieredReplay(model, spans, policy, in_flight=np.array(held).T, tiers=tiers)
    oracle = TieredOracle(
        step, kinds, blocks, "lru", kept, requests, known, named, held, by_group,
        capacity=capacity, sizes=[list(tier.sizes) for tier in tiers],
    )  # fmt: skip
    assert (replay.run().hits * step).tolist() == oracle.run()
    assert (replay.found.T * step).tolist() == oracle.found


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
    sizes = {one.needs: size for one, size in zip(above.classes, tier.sizes, strict=True)}
    state = next(one for one in below.classes if one.needs == "state")
    assert sizes["state"] == state.blocks * state.block_bytes
    attention = next(one for one in below.classes if one.needs == "all")
    whole = -(-above.step // below.step)
    assert sizes["all"] == whole * attention.blocks * attention.block_bytes


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
