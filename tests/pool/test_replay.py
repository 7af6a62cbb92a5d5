"""The hits of plain LRU stores beside a dict, and beside published figures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvatlas.simulate import PoolModel, ReplayPolicy
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import Ints, Trace, read_trace
from tests.pool.random_traces import SAMPLE
from tests.pool.span_store import store_hits

FACTS = os.environ.get("KVATLAS_FACTS")
FIGURES = {1_000: 0.045, 10_000: 0.215, 30_000: 0.332, 50_000: 0.362, 10**9: 0.374}


def found(trace: Trace, blocks: int) -> float:
    """The share of prompt tokens that a plain cache of the trace's blocks finds."""
    return share(trace, store_hits(Spans.of_ids(trace), blocks, head_first=True))


def share(trace: Trace, hits: Ints) -> float:
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
    for blocks in (20, 100, 10**9):
        assert found(trace, blocks) == naive(trace, blocks)


def test_an_engine_with_enough_memory_finds_what_a_store_finds() -> None:
    """The engine computes at least the last token, and keeps no incomplete block."""
    trace = read_trace(SAMPLE)
    spans = Spans.of(trace, trace.block)
    engine = FastReplay(PoolModel.plain(trace.block, 10**6), trace, ReplayPolicy()).run()
    hits = np.minimum(store_hits(spans, 10**9), spans.reusable)
    assert engine.hits.tolist() == hits.tolist()


@pytest.mark.skipif(not FACTS, reason="KVATLAS_FACTS names no folder with traces")
def test_published_traces_give_the_figures_that_were_recomputed() -> None:
    folder = Path(FACTS or "") / "traces"
    trace = read_trace(folder / "conversation_trace.jsonl")
    for blocks, figure in FIGURES.items():
        assert round(found(trace, blocks), 3) == figure
    synthetic = read_trace(folder / "synthetic_trace.jsonl")
    assert round(found(synthetic, 10**9), 3) == 0.651
