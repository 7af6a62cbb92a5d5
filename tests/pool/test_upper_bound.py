"""The upper bound of hits beside an exhaustive search, and beside every policy."""

from __future__ import annotations

from pathlib import Path as FilePath
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import plan
from kvatlas.pool import CHECKPOINTS, checkpoint_policy
from kvatlas.simulate import (
    LayerClass,
    PoolModel,
    ReplayPolicy,
    Spans,
    Trace,
    read_trace,
    simulate,
)
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.traces import TraceBuilder, TraceRequest
from kvatlas.simulate.upper_bound import upper_bound
from kvatlas.specs import Visibility
from tests.pool.best_hits import Path, TinyCache
from tests.pool.random_traces import KEPT, random_classes, random_trace, simulated
from tests.profiles import DEEP

SAMPLE = FilePath(__file__).parent / "sample_trace.jsonl"


def tiny_requests(dice: Random) -> list[Path]:
    """A few short prompts, most of which continue or repeat an earlier one."""
    found: list[Path] = []
    for _ in range(dice.randint(3, 5)):
        before = dice.choice(found) if found and dice.random() < 0.85 else ()
        before = before[: dice.randint(1, 5)] if dice.random() < 0.4 else before
        path = before + tuple(dice.randint(0, 1) for _ in range(dice.randint(1, 2)))
        found.append(path[:4])
    return found


def tiny_cache(dice: Random) -> TinyCache:
    kinds = dice.choice(["dense", "hybrid", "hybrid", "windowed"])
    state = dice.randint(1, 2) if kinds == "hybrid" else 0
    window, width = (1, dice.randint(1, 2)) if kinds == "windowed" else (0, 0)
    return TinyCache(dice.randint(4, 9), 1, state, window, width)


def as_trace(requests: list[Path]) -> Trace:
    builder = TraceBuilder("tiny", 1)
    numbers: dict[Path, int] = {}
    for line, path in enumerate(requests):
        ids = [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
        builder.add(f"line {line}", TraceRequest(len(ids), ids))
    return builder.finish()


def as_model(tiny: TinyCache) -> PoolModel:
    classes = [LayerClass("all", 0, tiny.attention)]
    if tiny.state:
        classes.append(LayerClass("state", 0, tiny.state))
    if tiny.window:  # a token sees itself and the window - 1 tokens before it
        seen = Visibility(window=tiny.width + 1)
        classes.append(LayerClass("window", 0, tiny.window, seen))
    return PoolModel(1, tuple(classes), (tiny.blocks,))


@settings(max_examples=5_000 if DEEP else 60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_policy_can_find_more_and_the_best_finds_almost_as_much(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    requests, tiny = tiny_requests(dice), tiny_cache(dice)
    trace = as_trace(requests)
    bound = upper_bound(as_model(tiny), Spans.of(trace, 1), trace)
    best = tiny.best(requests)
    assert np.floor(bound + 1e-6) >= best


def test_a_hybrids_bound_is_above_every_policy() -> None:
    """Belady's algorithm, which knows no states, was below LRU on hybrids."""
    trace = read_trace(SAMPLE)
    for model in ("Qwen3.5-397B-A17B", "gpt-oss-120b"):
        made = plan(model, memory="6GiB", max_len=8192, policy="vllm")
        best = simulate(made, trace, eviction="optimal")
        for kept in CHECKPOINTS:
            for eviction in ("lru", "s3-fifo"):
                rates = simulate(made, trace, checkpoints=kept, eviction=eviction)
                assert rates.found <= best.found <= best.ceiling * best.tokens
                assert rates.hit_rate_by_request <= best.hit_rate_by_request + 1e-9
                assert rates.hit_rate_last_half <= best.hit_rate_last_half + 1e-9


def test_the_bound_is_refused_beside_tiers_and_arrivals() -> None:
    trace = read_trace(SAMPLE)
    made = plan("gpt-oss-120b", memory="6GiB", max_len=8192)
    for options in ({"arrivals": True}, {"tiers": {"host": made}}):
        with pytest.raises(AtlasError) as refusal:
            simulate(made, trace, eviction="optimal", **options)
        assert refusal.value.code is Code.CONTRADICTORY


@settings(max_examples=2_000 if DEEP else 25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=517)  # an engine refuses a request that another engine serves, and so keeps a hit
def test_random_replays_are_not_above_the_bound(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, _ = random_trace(dice)
    kinds, step = random_classes(dice), dice.randint(1, 5)
    pools = 1 + max(kind.pool for kind in kinds)
    blocks = tuple(dice.randint(5, 50) for _ in range(pools))
    model = PoolModel(step, tuple(map(simulated, kinds)), blocks)
    spans = Spans.of(trace, step)
    bound = np.floor(upper_bound(model, spans, trace) + 1e-6)
    for kept in KEPT:
        tokens = dice.randint(step, 40)
        within = np.floor(upper_bound(model, spans, trace, step_tokens=tokens) + 1e-6)
        for by_group in (False, True):
            policy = ReplayPolicy("lru", checkpoint_policy(kept), by_group)
            hits = FastReplay(model, trace, policy, batched_tokens=tokens).run().hits.sum()
            assert hits <= within <= bound


def gap(traces: int) -> str:
    """How far the bound is from the optimum, summed over tiny traces."""
    total = optimum = exact = 0
    for seed in range(traces):
        dice = Random(seed)  # noqa: S311
        requests, tiny = tiny_requests(dice), tiny_cache(dice)
        trace = as_trace(requests)
        bound = int(upper_bound(as_model(tiny), Spans.of(trace, 1), trace) + 1e-6)
        best = tiny.best(requests)
        assert bound >= best, (seed, bound, best)
        total, optimum, exact = total + bound, optimum + best, exact + (bound == best)
    return (
        f"{traces} traces, exact in {exact}, in total {total / optimum - 1:.1%} above the optimum"
    )


if __name__ == "__main__":
    print(gap(2_000))
