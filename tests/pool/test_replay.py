"""Simulated hits beside a cache that keeps every token by itself, for every policy."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.pool.eviction import EVICTIONS
from kvatlas.simulate import Replay, ReplayPolicy
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import Trace, TraceBuilder, TraceRequest, read_trace
from kvatlas.specs import Visibility
from tests.pool.oracle import Oracle, OracleClass, worth
from tests.profiles import DEEP

KEPT = ("every-block", "prompt-end", "branch-points", "vllm-default", "every-5")


Requests = list[tuple[Any, ...]]


def random_trace(dice: Random) -> tuple[Trace, Requests]:
    """Requests along the branches of a small tree of ids, and their tokens."""
    block, whole = dice.randint(1, 4), dice.random() < 0.5
    builder = TraceBuilder("drawn", block)
    numbers: dict[tuple[int, ...], int] = {}
    paths: list[list[int]] = [[]]
    requests = []
    for line in range(dice.randint(1, 20)):
        before = dice.choice(paths[-6:])
        path = before[: dice.randint(0, len(before))] if dice.random() < 0.4 else list(before)
        path += [dice.randint(0, 2) for _ in range(dice.randint(0, 4))]
        paths.append(path)
        length = max(len(path) * block - dice.randint(0, block - 1), 0)
        tokens: list[Any] = []
        ids = []
        for depth in range(-(-length // block)):
            count = min(block, length - depth * block)
            if count < block and whole:  # the last block of a prompt is not full, and has no id
                tokens += [(-1 - line, n) for n in range(count)]
                continue
            name = (*path[: depth + 1], *([-count] if count < block else []))
            ids.append(numbers.setdefault(name, len(numbers)))
            tokens += [(ids[-1], n) for n in range(count)]
        builder.add(f"line {line}", TraceRequest(length, ids))
        requests.append(tuple(tokens))
    return builder.finish(), requests


def random_classes(dice: Random) -> list[OracleClass]:
    """Alike groups of one or two pools: attention, windows, chunks, states."""
    pools = dice.randint(1, 2)
    found: dict[tuple[str, int, int, int], int] = {}
    for _ in range(dice.randint(1, 4)):
        needs = dice.choice(["all", "window", "chunk", "state"])
        width = dice.randint(1, 9)
        shape = (width * (needs == "window"), width * (needs == "chunk"))
        kind = "window" if any(shape) else needs
        found[kind, dice.randint(0, pools - 1), *shape] = dice.randint(1, 3)
    used = sorted({pool for _, pool, _, _ in found})
    return [OracleClass(k, used.index(p), size, w, c) for (k, p, w, c), size in found.items()]


def simulated(kind: OracleClass) -> LayerClass:
    seen = Visibility(window=kind.window or None, chunk=kind.chunk or None)
    return LayerClass(kind.needs, kind.pool, kind.size, seen)  # type: ignore[arg-type]


@settings(max_examples=10_000 if DEEP else 40)
@given(seed=st.integers(0, 1 << 32))
@example(seed=54162)  # chunks alone: a hit where one begins, of a prefix that nobody asked for
def test_every_policy_finds_what_a_cache_of_single_tokens_finds(seed: int) -> None:
    dice = Random(seed)  # noqa: S311
    trace, requests = random_trace(dice)
    kinds, step = random_classes(dice), dice.randint(1, 5)
    pools = 1 + max(kind.pool for kind in kinds)
    blocks = [dice.randint(5, 50) for _ in range(pools)]
    held = [[dice.randint(0, 2) for _ in range(pools)] for _ in requests]
    by_group = dice.random() < 0.3
    spans = Spans.of(trace, step)
    model = PoolModel(step, tuple(map(simulated, kinds)), tuple(blocks))
    known = [len(r) // trace.block * trace.block for r in requests]
    counts = np.diff(trace.starts) * trace.block
    named = np.minimum(trace.lengths, counts).tolist()
    for eviction in EVICTIONS:
        kept = dice.choice(KEPT)
        policy = ReplayPolicy(eviction, checkpoint_policy(kept), by_group)
        replay = Replay(model, spans, policy, in_flight=np.array(held).T, saved=saved_of(model))
        oracle = Oracle(step, kinds, blocks, eviction, kept, requests, known, named, held, by_group)
        assert (replay.run().hits * step).tolist() == oracle.run(), (eviction, kept)


def test_a_share_of_the_memory_is_a_pool_of_its_own() -> None:
    trace = read_trace(SAMPLE)
    spans = Spans.of(trace, 256)
    shared = PoolModel(256, (LayerClass("all", 0, 1), LayerClass("state", 0, 4)), (200,))
    apart = PoolModel(256, (LayerClass("all", 0, 1), LayerClass("state", 1, 4)), (150, 50))
    within = ReplayPolicy(checkpoints=checkpoint_policy("every-block-within-25"))
    found = Replay(shared, spans, within).run()
    assert found.hits.tolist() == Replay(apart, spans, ReplayPolicy()).run().hits.tolist()
    assert found.hits.tolist() != Replay(shared, spans, ReplayPolicy()).run().hits.tolist()


def saved_of(model: PoolModel) -> Any:
    return lambda one, places: np.array(
        [worth(model.classes.index(one), int(place)) for place in places]
    )


FACTS = os.environ.get("KVATLAS_FACTS")
SAMPLE = Path(__file__).parent / "sample_trace.jsonl"
FIGURES = {1_000: 0.045, 10_000: 0.215, 30_000: 0.332, 50_000: 0.362, 10**9: 0.374}


def found(trace: Trace, blocks: int, policy: ReplayPolicy) -> float:
    """The share of prompt tokens that a plain cache of the trace's blocks finds."""
    model = PoolModel.plain(trace.block, blocks)
    hits = Replay(model, Spans.of_ids(trace), policy).run().hits
    return float(np.minimum(hits * trace.block, trace.lengths).sum() / trace.tokens)


def naive(trace: Trace, blocks: int) -> float:
    """The same by a dict, one block after the other."""
    cache: dict[int, None] = {}
    tokens = 0
    for number, length in enumerate(trace.lengths.tolist()):
        ids = trace.ids[trace.starts[number] : trace.starts[number + 1]].tolist()
        count = next((n for n, one in enumerate(ids) if one not in cache), len(ids))
        tokens += min(count * trace.block, length)
        for one in ids:
            cache.pop(one, None)
            cache[one] = None
            if len(cache) > blocks:
                del cache[next(iter(cache))]
    return tokens / trace.tokens


def test_plain_lru_is_that_of_a_dict() -> None:
    trace = read_trace(SAMPLE)
    policy = ReplayPolicy(head_first=True, store=True)
    for blocks in (20, 100, 10**9):
        assert found(trace, blocks, policy) == naive(trace, blocks)


@pytest.mark.skipif(not FACTS, reason="KVATLAS_FACTS names no folder with traces")
def test_published_traces_give_the_figures_that_were_recomputed() -> None:
    folder = Path(FACTS or "") / "traces"
    policy = ReplayPolicy(head_first=True, store=True)
    trace = read_trace(folder / "conversation_trace.jsonl")
    for blocks, figure in FIGURES.items():
        assert round(found(trace, blocks, policy), 3) == figure
    synthetic = read_trace(folder / "synthetic_trace.jsonl")
    assert round(found(synthetic, 10**9, policy), 3) == 0.651
