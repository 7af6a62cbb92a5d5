"""Hit rates beside kvcache-simulator's, which knows full attention alone.

`make test-kvcache-simulator` installs the package and runs this; elsewhere it is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvatlas.simulate import Spans
from kvatlas.simulate.traces import read_trace
from tests.pool.span_store import store_hits

FACTS = os.environ.get("KVATLAS_FACTS")
SAMPLE = Path(__file__).parent / "sample_trace.jsonl"
CAPACITIES = {
    "conversation_trace.jsonl": (1_000, 3_000, 10_000, 30_000, 50_000),
    "synthetic_trace.jsonl": (300, 1_000, 3_000, 6_000, 10_000),
}


def files() -> dict[Path, tuple[int, ...]]:
    """Whole traces where there are some, a small one of our own elsewhere."""
    if not FACTS:
        return {SAMPLE: (10, 20, 40, 60, 80)}
    return {Path(FACTS) / "traces" / name: sizes for name, sizes in CAPACITIES.items()}


def test_fifo_lru_and_optimal_find_as_much() -> None:
    theirs = pytest.importorskip("kvcache_sim.policies")
    plans = pytest.importorskip("kvcache_sim.plan")
    traces = pytest.importorskip("kvcache_sim.trace")
    for path, capacities in files().items():
        trace = read_trace(path)
        half = len(trace) // 2
        spans = Spans.of_ids(trace)
        plan = plans.build_execution_plan(traces.parse_trace_file(path, block_size=trace.block))
        for blocks in capacities:
            for eviction in ("fifo", "lru", "optimal"):
                told = theirs.simulate_policy(plan, eviction, blocks)
                assert told.measurementMode == "fixed_window", (path.name, blocks)
                # In theirs, too, only FIFO lets a prompt's first block go before its last.
                hits = store_hits(spans, blocks, eviction, head_first=eviction == "fifo")
                found = np.minimum(hits * trace.block, trace.lengths)
                rate = found[half:].sum() / trace.lengths[half:].sum()
                print(f"{path.name} {eviction} {blocks}: {told.hitRate:.5f}, {rate:.5f} here")
                assert abs(rate - told.hitRate) <= 0.001, (path.name, eviction, blocks)
