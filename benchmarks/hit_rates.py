"""The page `docs/hits.md`: hit rates of vLLM's plans and policies beside atlas's, on real traces.

    python -m benchmarks.hit_rates TRACES > docs/hits.md

TRACES is a folder with Mooncake's `conversation_trace.jsonl` and `synthetic_trace.jsonl`, and
`coding_agents/` with conversations of kv-cache-tester.
"""

from __future__ import annotations

import sys
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.planning import Plan, plan
from kvatlas.pool import PrefillCost, Trace, read_trace, simulate
from kvatlas.pool.simulation import PoolModel, Spans

MODELS = (
    "Qwen3.5-397B-A17B", "Nemotron-H-8B", "gpt-oss-120b", "Gemma-3-27B", "DeepSeek-V4-Flash",
    "Llama-3.1-70B",
)  # fmt: skip
HYBRIDS = MODELS[:2]
TRACES = ("coding_agents", "synthetic_trace.jsonl", "conversation_trace.jsonl")
SHARES = (8, 4, 2)
SHORT = 32
"""Hybrids are also looked at where memory is shorter."""
CHOICES = (
    ("every-block", "lru"),
    ("branch-points", "lru"),
    ("branch-points", "saved-compute"),
)
"""Checkpoints and evictions among which the best is taken."""

_HEAD = """\
# Hit rates: vLLM's plans and checkpoints beside atlas's

The share of prompt tokens that need not be computed, over whole traces, one request after the
other. The memory is a part of what would hold every block of the trace under vLLM's plan with
vLLM's checkpoints: a state at the end of every block, and every block of a window. *theirs*
keeps those checkpoints; under vLLM's plan the least recently used go first, group by group.
*best* takes the best of: {choices}. *gain* is atlas's plan with the best policy over vLLM's
plan with vLLM's checkpoints; *policy* is that best one.

Traces: two of Mooncake's (FAST'25), and 40 conversations of coding agents (kv-cache-tester),
read at the granularity of their ids: 512 and 64 tokens. Llama-3.1-70B stands for
Llama-3.3-70B, whose cache is the same. All at tp 1.

This page is made by a command, from traces that are not part of the repository:

```sh
make hits TRACES=folder
```

| trace | model | memory | blocks | vLLM: theirs | best | atlas: theirs | best | policy | gain |
|---|---|--:|--:|--:|--:|--:|--:|---|--:|
"""


class Line(NamedTuple):
    """One row of the table."""

    trace: str
    model: str
    share: int
    blocks: tuple[int, int]
    rates: tuple[float, float, float, float]
    policy: str

    @property
    def gain(self) -> float:
        """Atlas's plan with the best policy over vLLM's plan with vLLM's checkpoints."""
        return self.rates[3] / self.rates[0] if self.rates[0] else float("inf")

    def __str__(self) -> str:
        sizes = ", ".join(f"{size:,}" for size in self.blocks)
        rates = " | ".join(f"{rate:.1%}" for rate in self.rates)
        gain = f"{self.gain:.2f}x"
        return (
            f"| {self.trace} | {self.model} | 1/{self.share} | {sizes} | {rates} | {self.policy} "
            f"| {gain} |"
        )


def main(folder: Path) -> None:
    """Print the page."""
    choices = "; ".join(f"`{kept}` with `{gone}`" for kept, gone in CHOICES)
    print(_HEAD.format(choices=choices), end="")
    tasks = [(folder / file, model) for file in TRACES for model in MODELS]
    every: list[Line] = []
    with Pool() as workers:
        for (_, model), (found, ceiling) in zip(tasks, workers.imap(_lines, tasks), strict=True):
            every += found
            print("\n".join(map(str, found)), flush=True)
            if model == MODELS[-1]:
                name = found[0].trace
                print(f"| {name} | *without bounds, any* | | | | | | {ceiling:.1%} | | |")
    print(conclusion(every), end="")


@cache
def trace_of(path: Path) -> Trace:
    """A trace, read once by each worker."""
    return read_trace(path)


def _lines(task: tuple[Path, str]) -> tuple[list[Line], float]:
    """A row for each memory, and what no memory would exceed."""
    path, model = task
    trace = trace_of(path)
    name = trace.name.removesuffix("_trace").replace("_", " ")
    memory = whole_memory(model, trace)
    found = []
    ceiling = 0.0
    for share in (SHORT, *SHARES) if model in HYBRIDS else SHARES:
        theirs, ours = (made(model, memory // share, policy) for policy in ("vllm", "atlas"))
        first = simulate(theirs, trace, checkpoints="every-block", by_group=True)
        ceiling = first.ceiling
        alike = (theirs.groups, theirs.pools) == (ours.groups, ours.pools)
        under_theirs = rates(theirs, trace)
        under_ours = under_theirs if alike else rates(ours, trace)
        best = max(CHOICES, key=lambda choice: under_ours[choice])
        figures = (
            first.hit_rate,
            max(first.hit_rate, *under_theirs.values()),
            under_ours["every-block", "lru"],
            under_ours[best],
        )
        sizes = PoolModel.of(theirs).step, PoolModel.of(ours).step
        label = best[0] if best[1] == "lru" else ", ".join(best)
        found.append(Line(name, model, share, sizes, figures, label))
    return found, ceiling


def rates(made_plan: Plan, trace: Trace) -> dict[tuple[str, str], float]:
    """What each choice finds; compute saved is weighed by tokens."""
    cost = PrefillCost(1.0)
    return {
        (kept, gone): simulate(
            made_plan, trace, checkpoints=kept, eviction=gone, by_group=False, cost=cost
        ).hit_rate
        for kept, gone in CHOICES
    }


def whole_memory(model: str, trace: Trace) -> int:
    """Bytes that hold every block of a trace, under vLLM's plan with vLLM's checkpoints."""
    sample = plan(model, memory="4TiB", policy="vllm", max_len=1 << 17)
    pools = PoolModel.of(sample)
    distinct = len(np.unique(Spans.of(trace, pools.step).numbers))
    blocks = distinct * sum(one.blocks for one in pools.classes)
    return blocks * sample.bytes_per_block


def made(model: str, memory: int, policy: str) -> Plan:
    """A plan in so much memory, for the longest requests that it fits."""
    for length in (1 << 17, 1 << 16, 1 << 15, 1 << 13, 1 << 11):
        try:
            return plan(model, memory=memory, policy=policy, max_len=length)  # type: ignore[arg-type]
        except AtlasError as refusal:
            last = refusal
    raise last


def conclusion(every: list[Line]) -> str:
    """What the table says."""
    hybrids = [line for line in every if line.model in HYBRIDS]
    most = max(every, key=lambda line: line.gain)
    least = min(every, key=lambda line: line.gain)
    many = [sum(line.gain >= 1.5 for line in lines) for lines in (hybrids, every)]
    return f"""
At least 1.5 times as much is found in {many[1]} of {len(every)} rows, {many[0]} of {len(hybrids)}
of them hybrids'. The most is {most.gain:.2f} times ({most.model}, {most.trace}, 1/{most.share}),
the least {least.gain:.2f} times ({least.model}, {least.trace}, 1/{least.share}).
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
