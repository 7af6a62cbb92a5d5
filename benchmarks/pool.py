"""The pool: taking, finding and giving back, by block, beside a dict; and traces, by span.

Each line stands beside the bar that it is held to: `make bench`, or `python -m benchmarks.pool`.
Seconds are those of the processor, so that others on the machine do not count.
Real traces are simulated where `KVATLAS_FACTS` names a folder with `traces/`.
"""

from __future__ import annotations

import os
import resource
import time
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas.planning import Policy, plan
from kvatlas.pool import BlockPool
from kvatlas.simulate import PoolModel, ReplayPolicy, Spans, Trace, read_trace, simulate
from kvatlas.simulate.fast_replay import FastReplay

TOKENS, BLOCK = 65_536, 16
REQUESTS, PROMPT = 400, 40
MOST_MICROSECONDS = 2.0
"""Of an operation, by block."""
MOST_GROWTH = 1.5
"""Of what a span costs, between a trace and one that is 16 times as long."""
MOST_SECONDS = {"conversation_trace.jsonl": 3.0, "coding_agents": 10.0}
"""Of reading and simulating a trace, for one plan."""
MOST_MEGABYTES = 1_000


def verdict(figure: float, bar: float) -> str:
    """Whether a bar is met."""
    return "met" if figure <= bar else "missed"


def dictionary(blocks: int) -> None:
    """What a block costs at least: one entry in and out of a dict."""
    kept = {block: block for block in range(blocks)}
    for block in range(blocks):
        del kept[block]


def main() -> None:
    """Print two tables, and a third where `KVATLAS_FACTS` names a folder with traces."""
    made = plan("Qwen3-8B", memory="20GiB", block_size=BLOCK)
    blocks = TOKENS // BLOCK
    prompt = list(range(TOKENS))
    pools = [BlockPool(made) for _ in range(20)]
    pool = pools[0]

    def served(pool: BlockPool = pool) -> None:
        pool.admit("request", prompt)
        pool.reserve("request", TOKENS)
        pool.computed("request", TOKENS)
        pool.free("request")

    def anew() -> None:
        served(pools.pop())

    least = median_ms(lambda: dictionary(blocks), 5, time.process_time) * 1000 / blocks
    first = median_ms(anew, 5, time.process_time) * 1000 / blocks
    again = median_ms(served, 5, time.process_time) * 1000 / blocks
    bar = f"{MOST_MICROSECONDS:g}"
    show(
        f"pool: {blocks:,} blocks at once",
        ["operation", "us a block", "bar", ""],
        [
            ["hashed, taken, named and given back", f"{first:.2f}", bar,
             verdict(first, MOST_MICROSECONDS)],
            ["hashed, found again and given back", f"{again:.2f}", bar,
             verdict(again, MOST_MICROSECONDS)],
            ["in and out of a dict", f"{least:.2f}", "", ""],
        ],
    )  # fmt: skip
    repeated_traces()
    facts = os.environ.get("KVATLAS_FACTS")
    if facts:
        whole_traces(Path(facts) / "traces")
    else:
        print("Real traces were not simulated: KVATLAS_FACTS names no folder with traces.")


def repeated_traces() -> None:
    """A made-up trace, and it behind itself with new ids: what a span costs stays the same."""
    rows: list[list[str]] = []
    alone = 0.0
    for times in (1, 4, 16):
        trace = conversations(REQUESTS).repeated(times)
        spans = Spans.of(trace, BLOCK)
        start = time.process_time()
        FastReplay(PoolModel.plain(BLOCK, 20_000), trace, ReplayPolicy()).run()
        took = time.process_time() - start
        each = 1e9 * took / len(spans.numbers)
        alone = alone or each
        row = [f"x{times}", f"{len(spans.numbers):,}", f"{took:.2f}", f"{each:.0f}"]
        growth = each / alone
        last = [f"{MOST_GROWTH:g} x", verdict(growth, MOST_GROWTH)] if times > 1 else ["", ""]
        rows.append([*row, f"{growth:.2f} x", *last])
    show("replay", ["trace", "spans", "seconds", "ns a span", "of x1", "bar", ""], rows)


def whole_traces(folder: Path) -> None:
    """Real traces, read and simulated for one plan: seconds, and the most memory so far."""
    rows = []
    plans: tuple[tuple[str, Policy], ...] = (
        ("Qwen3.5-397B-A17B", "atlas"),
        ("gpt-oss-120b", "vllm"),
    )
    for (name, bar), (model, policy) in product(MOST_SECONDS.items(), plans):
        made = plan(model, memory="200GiB", policy=policy)
        start = time.process_time()
        found = simulate(made, read_trace(folder / name))
        took = time.process_time() - start
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append([
            f"{name.partition('_trace')[0]}, {model}, {policy}", f"{found.tokens / 1e6:.0f}M",
            f"{found.block}", f"{took:.1f}", f"{bar:g}", verdict(took, bar), f"{most:.0f}",
            f"{MOST_MEGABYTES:,}", verdict(most, MOST_MEGABYTES),
        ])  # fmt: skip
    columns = ["trace and plan", "tokens", "block", "seconds", "bar", "", "MB", "bar", ""]
    show("traces that are read and simulated", columns, rows)


def conversations(requests: int) -> Trace:
    """Prompts of which half begin with an earlier one's."""
    rng = np.random.default_rng(0)
    ids: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    new = 0
    for number in range(requests):
        kept = (
            ids[int(rng.integers(number))][: PROMPT // 2] if number % 2 else np.empty(0, np.int64)
        )
        more = np.arange(new, new + PROMPT - len(kept))
        new += len(more)
        ids.append(np.concatenate([kept, more]).astype(np.int64))
    lengths = np.full(requests, PROMPT * 512)
    starts = np.arange(requests + 1) * PROMPT
    nothing = np.zeros(requests, np.int64)
    return Trace("made", 512, np.concatenate(ids), starts, lengths, nothing, np.zeros(requests))


if __name__ == "__main__":
    main()
