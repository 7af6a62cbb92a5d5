"""What moving a request costs two vLLM engines, beside the raw calls of the transport below.

`make bench-vllm`, in the environment that has vLLM: a prefill and a decode engine on the CPU,
with a compute thread each, over NIXL. Everything is compared within the same run: raw calls
and a plain session in turns, then requests that are read, that a control calls read after as
long as the raw calls take, and that are here already, in turns too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.vllm.comparing import atlas, prompt
from tests.vllm.engine_process import Engine, engine
from tests.vllm.models import checkpoint

from benchmarks.timing import show
from benchmarks.vllm_pull import pull_times

TOKENS = 1025
"""A token more than whole blocks: where the rest is cached, it alone is computed."""
PER_TOKEN, RUN = 64 << 10, 256 << 10
"""Bytes of a token's cache, and of a layer's page of 64 tokens: the longest run there is."""
TURNS = 12
DECODING, ARRIVING, LENGTH, ROUNDS = 4, 8, 80, 2
"""Requests that are decoded at once, those that are read meanwhile, the former's tokens."""
STARTING = 4
"""Turns that nobody counts: memory is touched for the first time, links are measured."""
CONTROL = "benchmarks.vllm_control"
THEIRS = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's own connector, which reads blocks of one size alone."""


def first_token(decode: Engine, tokens: list[int], params: Any = None) -> float:
    """Seconds until the first token is there."""
    begun = time.perf_counter()
    decode.generate(tokens, tokens=1, params=params)
    return time.perf_counter() - begun


def first_tokens(prefill: Engine, decode: Engine, raw: float | None) -> dict[str, float]:
    """Median seconds of a first token: read, called read by the control, and cached here.

    Without `raw` there is no control.
    """
    taken: defaultdict[str, list[float]] = defaultdict(list)
    tokens = prompt(TOKENS, seed=100)
    for turn in range(TURNS + STARTING):
        params: dict[str, Any] = {} if raw is None else {"control": {"seconds_to_be_read": raw}}
        params["read"] = prefill.prefill(tokens).params
        prefill.until(lambda facts: facts["requests"] == 1)
        for way in params if turn % 2 else reversed(params):
            decode.forget()
            seconds = {way: first_token(decode, tokens, params[way])}
            seconds["here"] = first_token(decode, tokens)
            for name, one in seconds.items():
                taken[name] += [one] if turn >= STARTING else []
        prefill.idle()
    return {name: statistics.median(times) for name, times in taken.items()}


def step_times(prefill: Engine, decode: Engine) -> tuple[float, float, int]:
    """Median seconds of steps without and with reads under way, and how many of the latter."""
    quiet: list[float] = []
    busy: list[float] = []
    coming = [prompt(TOKENS, seed=1000 + n) for n in range(ARRIVING)]
    for turn in range(ROUNDS + 1):
        params = [prefill.prefill(tokens).params for tokens in coming]
        running = [decode.add(prompt(300, seed=2000 + n), tokens=LENGTH) for n in range(DECODING)]
        time.sleep(0.5)
        decode.steps()
        for tokens, told in zip(coming, params, strict=True):
            decode.wait(decode.add(tokens, tokens=1, params=told))
        for name in running:
            decode.wait(name)
        # A step that computes a request's last token too, or a prompt, is none of either.
        for seconds, outputs, reading in decode.steps() if turn else ():
            if outputs == DECODING:
                (busy if reading else quiet).append(seconds)
        prefill.idle()
        decode.forget()
    return statistics.median(quiet), statistics.median(busy), len(busy)


def engine_options(block: int, tokens: int) -> dict[str, Any]:
    """An engine with blocks for so many tokens."""
    return {
        "block_size": block,
        "num_gpu_blocks_override": tokens // block,
        "max_model_len": 2048,
        "enable_prefix_caching": True,
    }


def added_by_theirs(model: Path) -> float:
    """Seconds that vLLM's own connector adds to a first token, from blocks of 64 to such."""
    ports = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in (17_900, 17_910)]
    with (
        engine(model, name="theirs", core="0", connector=THEIRS, environment=ports[0],
               **engine_options(64, 10_240)) as prefill,
        engine(model, name="reads", core="1", connector=THEIRS, environment=ports[1],
               **engine_options(64, 4_096)) as decode,
    ):  # fmt: skip
        seconds = first_tokens(prefill, decode, None)
    return seconds["read"] - seconds["here"]


def measure(model: Path, block: int) -> tuple[list[str], list[str], list[str]]:
    """The rows of all tables for a decode engine with blocks of so many tokens."""
    raw, same_runs, pulled, runs = pull_times(block, TOKENS - 1, PER_TOKEN, RUN)
    ours = atlas(transport="nixl", lease_seconds=300.0)
    ours |= {"kv_connector": "ControlConnector", "kv_connector_module_path": CONTROL}
    with (
        engine(model, name="prefill", core="0", connector=ours,
               **engine_options(64, 10_240)) as prefill,
        engine(model, name="decode", core="1", connector=ours,
               **engine_options(block, 4_096)) as decode,
    ):  # fmt: skip
        seconds = first_tokens(prefill, decode, raw)
        quiet, busy, count = step_times(prefill, decode)
    here, blocks = seconds["here"], f"64 -> {block}"
    added, control = seconds["read"] - here, seconds["control"] - here
    theirs = added_by_theirs(model) if block == 64 else None
    first = [blocks, *_ms(raw, pulled, seconds["read"], here, added)]
    first += [f"{added / raw:.2f}"]
    peers = [blocks, *_ms(added, raw, same_runs), f"{runs:,}", *_ms(control)]
    peers += _ms(theirs) if theirs else ["wrong"]
    peers += [f"{added / one:.2f}" if one else "-" for one in (same_runs, control, theirs)]
    step = [blocks, f"{1e3 * quiet:.2f}", f"{1e3 * busy:.2f}", str(count), f"{busy / quiet:.3f}"]
    return first, peers, step


def _ms(*seconds: float) -> list[str]:
    return [f"{1e3 * one:.1f}" for one in seconds]


def main() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint("wide", Path(folder))
        made = (measure(model, block) for block in (64, 128))
        first, peers, steps = zip(*made, strict=True)
    size = TOKENS * PER_TOKEN >> 20
    show(
        f"The first token of a request of {TOKENS:,} tokens ({size} MiB), ms",
        ["blocks", "NIXL alone", "session alone", "read", "cached here", "added", "of NIXL"],
        list(first),
    )
    print(
        "NIXL alone: the same bytes in runs of 256 KiB by its own calls. Session alone: a pull\n"
        "without vLLM. Added: beyond a first token whose prompt is cached here. Medians of\n"
        f"{TURNS} turns. The aim: 1.10 of NIXL.\n"
    )
    show(
        "What is added beside what else could be, ms",
        [
            "blocks", "added", "NIXL", "by runs", "runs", "control", "vLLM's", "of runs",
            "of control", "of vLLM's",
        ],
        list(peers),
    )  # fmt: skip
    print(
        "By runs: NIXL's own calls for the runs between the two engines' blocks, which are all\n"
        "that it can move by itself. Control: what vLLM's steps add where nothing is read, and it\n"
        "is told so after as long as NIXL takes. vLLM's: what its own NixlConnector adds,\n"
        "which gives wrong tokens where blocks are unlike.\n"
    )
    show(
        f"A decode engine's step with {DECODING} requests, ms",
        ["blocks", "without reads", "while reading", "steps", "ratio"],
        list(steps),
    )
    print("Two cores: what reads beside an engine takes from it. The aim: 1.03.\n")


if __name__ == "__main__":
    main()
