"""What moving a request costs two vLLM engines, beside the raw calls of the transport below.

`make bench-vllm`, in the environment that has vLLM: a prefill and a decode engine on the CPU,
a core each, over NIXL. Everything is compared within the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.vllm.comparing import atlas, prompt
from tests.vllm.engine_process import Engine, engine
from tests.vllm.models import checkpoint

from benchmarks.timing import show
from benchmarks.wires import POOL, in_turns, peer, raw_nixl, scattered
from kvatlas.wire import Memory, make_transport

TOKENS = 1025
"""A token more than whole blocks: where the rest is cached, it alone is computed."""
PER_TOKEN, RUN = 64 << 10, 256 << 10
"""Bytes of a token's cache, and of a layer's page of 64 tokens: the longest run there is."""
TURNS = 5
DECODING, ARRIVING, LENGTH = 4, 4, 80
"""Requests that are decoded at once, those that are read meanwhile, and the former's tokens."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "num_gpu_blocks_override": 160,
    "enable_prefix_caching": True,
}


def raw_seconds() -> float:
    """The request's bytes by NIXL's own calls, in the longest runs, between two processes."""
    with tempfile.TemporaryDirectory() as folder, peer("nixl", folder) as (metadata, far):
        end = make_transport("nixl")
        pool = np.ones(POOL, np.uint8)
        end.register({0: Memory(pool.ctypes.data, POOL)})
        link: Any = end.connect(metadata, {0: Memory(far, POOL)})
        copy = scattered(RUN, (TOKENS - 1) * PER_TOKEN)
        (taken,) = in_turns([raw_nixl(link.agent, link.peer, far, pool.ctypes.data, copy)])
        link.close()
        end.close()
    return taken


def first_token(decode: Engine, tokens: list[int], params: Any = None) -> float:
    """Seconds until the first token is there."""
    begun = time.perf_counter()
    decode.generate(tokens, tokens=1, params=params)
    return time.perf_counter() - begun


def added(prefill: Engine, decode: Engine) -> tuple[float, float]:
    """Least seconds of a first token whose request was read, and of one that was here."""
    read, here = [], []
    for turn in range(TURNS + 1):
        tokens = prompt(TOKENS, seed=turn + 100)
        params = prefill.prefill(tokens).params
        prefill.until(lambda facts: facts["requests"] == 1)
        times = first_token(decode, tokens, params), first_token(decode, tokens)
        if turn:
            read.append(times[0])
            here.append(times[1])
    return min(read), min(here)  # as the raw calls are taken: other work only adds


def step_times(prefill: Engine, decode: Engine) -> tuple[float, float, int]:
    """Median seconds of steps without and with reads under way, and how many of the latter."""
    quiet: list[float] = []
    busy: list[float] = []
    for turn in range(2):
        seeds = [1000 + 100 * turn + n for n in range(ARRIVING)]
        coming = [prompt(TOKENS, seed=seed) for seed in seeds]
        params = [prefill.prefill(tokens).params for tokens in coming]
        running = [decode.add(prompt(300, seed=2000 + n), tokens=LENGTH) for n in range(DECODING)]
        decode.steps()
        time.sleep(0.3)
        for tokens, told in zip(coming, params, strict=True):
            decode.wait(decode.add(tokens, tokens=1, params=told))
        for name in running:
            decode.wait(name)
        # A step that computes a request's last token too, or a prompt, is none of either.
        for seconds, outputs, reading in decode.steps():
            if outputs == DECODING:
                (busy if reading else quiet).append(seconds)
        prefill.idle()
    return statistics.median(quiet), statistics.median(busy), len(busy)


def main() -> None:
    settings = atlas(transport="nixl", lease_seconds=300.0)
    limit = raw_seconds()
    rows, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint("wide", Path(folder))
        for block in (64, 128):
            with (
                engine(model, name="prefill", core="0", connector=settings, block_size=64,
                       **OPTIONS) as prefill,
                engine(model, name="decode", core="1", connector=settings, block_size=block,
                       **OPTIONS) as decode,
            ):  # fmt: skip
                read, here = added(prefill, decode)
                more = read - here
                rows.append(
                    [f"64 -> {block}", *(f"{1e3 * s:.1f}" for s in (read, here, more, limit)),
                     f"{more / limit:.2f}"]
                )  # fmt: skip
                quiet, busy, count = step_times(prefill, decode)
                steps.append(
                    [f"64 -> {block}", f"{1e3 * quiet:.2f}", f"{1e3 * busy:.2f}", str(count),
                     f"{busy / quiet:.3f}"]
                )  # fmt: skip
    size = TOKENS * PER_TOKEN >> 20
    show(
        f"The first token of a request of {TOKENS:,} tokens ({size} MiB), ms",
        ["blocks", "read", "cached here", "added", "NIXL alone", "ratio"],
        rows,
    )
    print("NIXL alone: the same bytes in runs of 256 KiB by its own calls. The aim: 1.10.\n")
    show(
        f"A decode engine's step with {DECODING} requests, ms",
        ["blocks", "without reads", "while reading", "steps", "ratio"],
        steps,
    )
    print("Two cores: what reads beside an engine takes from it. The aim: 1.03.\n")


if __name__ == "__main__":
    main()
