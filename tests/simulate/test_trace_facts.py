"""`trace_facts` against counts by hand over every pair of requests."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvatlas.simulate import Trace, read_trace, trace_facts
from kvatlas.simulate.traces import TraceBuilder, TraceRequest

FACTS = os.environ.get("KVATLAS_FACTS")


def drawn(dice: Random) -> Trace:
    builder, time = TraceBuilder("drawn", 4), 0.0
    for _ in range(dice.randrange(1, 40)):
        ids = [dice.randrange(2) for _ in range(dice.randrange(6))]
        length = max(4 * len(ids) - dice.randrange(4), 0)
        time += dice.random() * 30
        request = TraceRequest(length, ids[: -(-length // 4)], dice.randrange(9), time)
        builder.add("line 1", request)
    return builder.finish()


def common_ids(one: list[int], two: list[int]) -> int:
    return [*(a == b for a, b in zip(one, two, strict=False)), False].index(False)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    return next(x for x in sorted(values) if sum(y <= x for y in values) >= share * len(values))


def test_figures_are_those_of_a_count_over_all_pairs() -> None:
    dice = Random(3)  # noqa: S311
    for _ in range(100):
        trace = drawn(dice)
        starts, lengths = trace.starts.tolist(), trace.lengths.tolist()
        prompts = [trace.ids[a:b].tolist() for a, b in pairwise(starts)]
        shared, distances = [], []
        for n, prompt in enumerate(prompts):
            common = [common_ids(prompt, one) for one in prompts[:n]]
            most = max(common, default=0)
            shared.append(min(4 * most, lengths[n]))
            if most:
                last = max(m for m in range(n) if common[m] >= most)
                between = sum(lengths[m] - shared[m] for m in range(last + 1, n))
                distances.append((trace.times[n] - trace.times[last], n - last - 1, between))
        facts = trace_facts(trace)
        assert facts.shared_tokens == pytest.approx(sum(shared) / max(sum(lengths), 1))
        assert facts.distinct_tokens == sum(lengths) - sum(shared)
        minutes = [int((time - trace.times[0]) // 60) for time in trace.times]
        if len(trace) > 1:
            assert facts.busiest_minute == max(map(minutes.count, minutes))
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            assert facts.prompt_lengths[name] == percentile(lengths, share)
            if not distances:
                assert facts.reuse is None
                continue
            assert facts.reuse is not None
            columns = [list(column) for column in zip(*distances, strict=True)]
            reuse: list[Any] = [facts.reuse.seconds, facts.reuse.requests, facts.reuse.new_tokens]
            for column, found in zip(columns, reuse, strict=True):
                assert found[name] == pytest.approx(percentile(column, share))


@pytest.mark.skipif(not FACTS, reason="KVATLAS_FACTS names no folder with traces")
@pytest.mark.parametrize(
    ("name", "requests", "share"),
    [
        ("conversation_trace.jsonl", 12_031, 0.374),
        ("synthetic_trace.jsonl", 3_993, 0.651),
        ("coding_agents", 1_713, None),
    ],
)
def test_public_traces(name: str, requests: int, share: float | None) -> None:
    trace = read_trace(Path(FACTS or "", "traces", name))
    facts = trace_facts(trace)
    assert facts.requests == requests
    assert facts.notes == [], "every field is known, and ids are prefixes"
    if share is not None:
        assert facts.shared_tokens == pytest.approx(share, abs=6e-4)
    else:
        assert trace.within(40_960).set_aside == 1_541, "Qwen3-8B's limit"
