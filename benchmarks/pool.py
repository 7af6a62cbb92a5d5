"""The pool: taking, finding and giving back, by block, beside a dict; and a trace, by span."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas.planning import Policy, plan
from kvatlas.pool import BlockPool, Trace, read_trace, simulate
from kvatlas.pool.simulation import PoolModel, Replay, ReplayPolicy, Spans

TOKENS, BLOCK = 65_536, 16
REQUESTS, PROMPT = 400, 40


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

    least = median_ms(lambda: dictionary(blocks), repeat=5) * 1000 / blocks
    first = median_ms(anew, repeat=5) * 1000 / blocks
    again = median_ms(served, repeat=5) * 1000 / blocks
    show(
        f"pool: {blocks:,} blocks at once",
        ["operation", "us a block"],
        [
            ["hashed, taken, named and given back", f"{first:.2f}"],
            ["hashed, found again and given back", f"{again:.2f}"],
            ["in and out of a dict", f"{least:.2f}"],
        ],
    )
    rows = []
    for times in (1, 4, 16):
        trace = conversations(REQUESTS).repeated(times)
        spans = Spans.of(trace, BLOCK)
        start = time.process_time()
        Replay(PoolModel.plain(BLOCK, 20_000), spans, ReplayPolicy()).run()
        took = time.process_time() - start
        touched = len(spans.numbers)
        rows.append([f"x{times}", f"{touched:,}", f"{took:.2f}", f"{1e9 * took / touched:.0f}"])
    show("replay of a trace", ["trace", "spans", "seconds", "ns a span"], rows)
    facts = os.environ.get("KVATLAS_FACTS")
    if facts:
        whole_traces(Path(facts) / "traces")


def whole_traces(folder: Path) -> None:
    """Real traces, read and simulated for one plan: seconds, and the most memory so far."""
    rows = []
    for name in ("conversation_trace.jsonl", "coding_agents"):
        plans: tuple[tuple[str, Policy], ...] = (
            ("Qwen3.5-397B-A17B", "atlas"),
            ("gpt-oss-120b", "vllm"),
        )
        for model, policy in plans:
            made = plan(model, memory="200GiB", policy=policy)
            start = time.process_time()
            found = simulate(made, read_trace(folder / name))
            took = time.process_time() - start
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            cells = [f"{found.tokens / 1e6:.0f}M", f"{found.block}", f"{took:.1f}", f"{most:.0f}"]
            rows.append([f"{name}, {model}, {policy}", *cells])
    show("simulated", ["trace and plan", "tokens", "block", "seconds", "MB"], rows)


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
