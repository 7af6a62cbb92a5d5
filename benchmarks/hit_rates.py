"""The page `docs/reference/data/hits.md`: hit rates under vLLM's plans and atlas's, on real traces.

    python -m benchmarks.hit_rates TRACES --jobs 2 > docs/reference/data/hits.md

TRACES is a folder with Mooncake's `conversation_trace.jsonl` and `synthetic_trace.jsonl`, and
`coding_agents/` with conversations of kv-cache-tester.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hits_page import CONCLUSION, HEAD
from kvatlas.errors import AtlasError
from kvatlas.planning import Plan, plan
from kvatlas.simulate import (
    POLICIES,
    PoolModel,
    Spans,
    Trace,
    TriedPlan,
    choose,
    read_trace,
    simulate,
)

MODELS = (
    "Qwen3.5-397B-A17B", "Nemotron-H-8B", "gpt-oss-120b", "Gemma-3-27B", "DeepSeek-V4-Flash",
    "Llama-3.1-70B",
)  # fmt: skip
HYBRIDS = MODELS[:2]
TRACES = ("coding_agents", "synthetic_trace.jsonl", "conversation_trace.jsonl")
SHARES = (8, 4, 2)
SHORT = 32
"""Hybrids are also looked at where memory is shorter."""
PACKS = (2, 4, 8)
CHOICES = (*POLICIES, ("branch-points", "s3-fifo"), ("vllm-default", "s3-fifo"))
"""Checkpoints and evictions among which the best is taken."""


class Line(NamedTuple):
    """One row of the table."""

    trace: str
    model: str
    share: int
    blocks: tuple[int, int]
    """Of vLLM's plan and atlas's."""
    dense: float
    default: float
    theirs: float
    """vLLM's plan with its best policy."""
    our_dense: float
    our_default: float
    ours: float
    """Atlas's plan, or one of its packs, with its best policy."""
    choice: str
    """The better of both, which is what `kvatlas plan --trace` takes."""
    bound: float
    """The chosen plan, with an eviction that knows the future."""
    ceiling: float
    """Any memory."""

    @property
    def chosen(self) -> float:
        """What the better plan finds with its best policy."""
        return max(self.theirs, self.ours)

    def over(self, base: float) -> float:
        """What is chosen over a base."""
        return self.chosen / base if base else float("inf")

    def __str__(self) -> str:
        sizes = ", ".join(f"{size:,}" for size in self.blocks)
        pairs = (
            (self.dense, self.default, self.theirs),
            (self.our_dense, self.our_default, self.ours),
        )
        best = [f"{rate:.1%}" for *_, rate in pairs]
        best[self.ours >= self.theirs] = f"**{best[self.ours >= self.theirs]}**"
        rates = " | ".join(
            f"{dense:.1%} | {default:.1%} | {one}"
            for (dense, default, _), one in zip(pairs, best, strict=True)
        )
        gains = f"{self.over(self.dense):.2f}x | {self.over(self.default):.2f}x"
        return (
            f"| {self.trace} | {self.model} | 1/{self.share} | {sizes} | {rates} | {self.choice} "
            f"| {gains} | {self.bound:.1%} |"
        )


def main(folder: Path, jobs: int) -> None:
    """Print the page."""
    choices = "; ".join(f"`{kept}` with `{gone}`" for kept, gone in CHOICES)
    print(HEAD.format(choices=choices), end="")
    tasks = [
        (folder / file, model, share)
        for file in TRACES
        for model in MODELS
        for share in ((SHORT, *SHARES) if model in HYBRIDS else SHARES)
    ]
    every: list[Line] = []
    with Pool(jobs) as workers:
        for (path, model, share), line in zip(tasks, workers.imap(_line, tasks), strict=True):
            every.append(line)
            print(line, flush=True)
            if (model, share) == (MODELS[-1], SHARES[-1]):
                print(f"| {line.trace} | *any, without bounds* {_row(line.ceiling)}")
            print(f"{path.name} {model} 1/{share}", file=sys.stderr, flush=True)
    print(conclusion(every), end="")


def _row(ceiling: float) -> str:
    return f"| | | | | | | | | | | | {ceiling:.1%} |"


@cache
def trace_of(path: Path) -> Trace:
    """A trace, read once by each worker."""
    return read_trace(path)


def _line(task: tuple[Path, str, int]) -> Line:
    path, model, share = task
    begun = time.perf_counter()
    trace = trace_of(path)
    memory = whole_memory(model, trace) // share
    vllm = made(model, memory, policy="vllm")
    atlas = {"atlas": made(model, memory)}
    for pack in PACKS if model in HYBRIDS else ():
        with suppress(AtlasError):  # some models have fewer layers of attention
            atlas[f"pack {pack}"] = made(model, memory, pack=pack)
    dense = simulate(vllm, trace, checkpoints="every-block", by_group=True)
    default = simulate(vllm, trace, checkpoints="vllm-default", by_group=True)
    (theirs, *_), ours = (
        choose(plans, trace, policies=CHOICES) for plans in ({"vllm": vllm}, atlas)
    )
    base = max(theirs.rates.hit_rate, dense.hit_rate)
    best = ours[0] if ours[0].rates.hit_rate >= base else theirs
    figures = best.rates
    label = f"{best.name}, {figures.checkpoints}"
    label += "" if figures.eviction == "lru" else f", {figures.eviction}"
    bound = simulate(best.plan, trace, checkpoints="branch-points", eviction="optimal")
    print(f"{time.perf_counter() - begun:.0f} s", *task[1:], file=sys.stderr, flush=True)
    return Line(
        trace.name.removesuffix("_trace").replace("_", " "), model, share,
        (dense.block, ours[0].rates.block), dense.hit_rate, default.hit_rate, base,
        with_checkpoints(ours, "every-block"), with_checkpoints(ours, "vllm-default"),
        ours[0].rates.hit_rate, label, max(bound.hit_rate, base, figures.hit_rate), dense.ceiling,
    )  # fmt: skip


def with_checkpoints(tried: list[TriedPlan], kept: str) -> float:
    """What the best plan finds with one of vLLM's ways; without windows and states all are one."""
    of_plan = [one.rates for one in tried if one.name == tried[0].name]
    plain = [rates for rates in of_plan if rates.eviction == "lru"]
    found = [rates for rates in plain if rates.checkpoints == kept] or plain
    return found[0].hit_rate


def whole_memory(model: str, trace: Trace) -> int:
    """Bytes that hold every block of a trace, under vLLM's plan with dense checkpoints."""
    sample = plan(model, memory="4TiB", policy="vllm", max_len=1 << 17)
    pools = PoolModel.of(sample)
    distinct = len(np.unique(Spans.of(trace, pools.step).numbers))
    blocks = distinct * sum(one.blocks for one in pools.classes)
    return blocks * sample.bytes_per_block


def made(model: str, memory: int, **options: Any) -> Plan:
    """A plan in so much memory, for the longest requests that it fits."""
    for length in (1 << 17, 1 << 16, 1 << 15, 1 << 13, 1 << 11):
        try:
            return plan(model, memory=memory, max_len=length, **options)
        except AtlasError as refusal:
            last = refusal
    raise last


def conclusion(every: list[Line]) -> str:
    """What the table says."""
    hybrids = [line for line in every if line.model in HYBRIDS]
    asked = [line for line in hybrids if line.share != SHORT]
    return CONCLUSION.format(
        asked=len(asked),
        hybrids=len(hybrids),
        short=SHORT,
        dense=sum(line.over(line.dense) >= 1.5 for line in asked),
        dense_short=sum(line.over(line.dense) >= 1.5 for line in hybrids),
        default=sum(line.over(line.default) >= 1.5 for line in hybrids),
        possible=sum(line.ceiling >= 1.5 * line.default for line in asked),
        most=max(line.over(line.default) for line in every),
        least=min(min(line.over(line.dense), line.over(line.default)) for line in every),
        rows=len(every),
        below=sum(round(line.ours, 4) < round(line.theirs, 4) for line in every),
        above=sum(round(line.ours, 4) > round(line.theirs, 4) for line in every),
        default_below=sum(round(line.our_default, 4) < round(line.default, 4) for line in every),
        default_above=sum(round(line.our_default, 4) > round(line.default, 4) for line in every),
        default_lowest=min(line.our_default / line.default for line in every if line.default),
        default_highest=max(line.our_default / line.default for line in every if line.default),
        lowest=min(line.ours / line.theirs for line in every if line.theirs),
        highest=max(line.ours / line.theirs for line in every if line.theirs),
    )


if __name__ == "__main__":
    asked_for = argparse.ArgumentParser(description=__doc__)
    asked_for.add_argument("traces", type=Path)
    asked_for.add_argument("--jobs", type=int, default=os.cpu_count())
    given = asked_for.parse_args()
    main(given.traces, given.jobs)
