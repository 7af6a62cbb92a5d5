"""Many requests in a row between two engines: blocks, memory, descriptors and threads stay flat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.comparing import assert_nothing_held, atlas, prompt
from tests.vllm.engine_process import Engine, engine
from tests.vllm.models import checkpoint

TIMES = 1000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 200
LENGTHS = 100
"""Different lengths of prompts. torch keeps kernels for each of them, megabytes on some CPUs."""
WARM = LENGTHS
"""Requests after which nothing may grow any more: each length was computed."""
MOST_GROWTH = 16 << 20
"""Bytes: vLLM's own counters grow a little, a leaked connection or table would grow more."""


@dataclass(frozen=True)
class Usage:
    """What a process has."""

    descriptors: int
    threads: int
    resident: int

    @classmethod
    def of(cls, one: Engine) -> Usage:
        proc = Path(f"/proc/{one.process.pid}")
        resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors, threads = (len(list((proc / name).iterdir())) for name in ("fd", "task"))
        return cls(descriptors, threads, resident)


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_many_requests_in_a_row(transport: str, checkpoints: Path) -> None:
    model = checkpoint("llama", checkpoints)
    about = atlas(transport=transport)
    with (
        engine(model, name="prefill", core="0", connector=about, block_size=64) as prefill,
        engine(model, name="decode", core="1", connector=about, block_size=128) as decode,
    ):
        ask(prefill, decode, WARM)
        before = [Usage.of(one) for one in (prefill, decode)]
        ask(prefill, decode, TIMES - WARM)
        after = [Usage.of(one) for one in (prefill, decode)]
        assert_nothing_held(prefill, decode)
        print(f"\n{transport}: {TIMES} requests\n{before}\n{after}")
    for was, has in zip(before, after, strict=True):
        assert has.descriptors <= was.descriptors, (was, has)
        assert has.threads <= was.threads, (was, has)
        assert has.resident <= was.resident + MOST_GROWTH, (was, has)


def ask(prefill: Engine, decode: Engine, times: int) -> None:
    """Requests one after the other, each read by the other engine."""
    for number in range(times):
        tokens = prompt(40 + number % LENGTHS, seed=number)
        params = prefill.prefill(tokens).params
        assert decode.generate(tokens, tokens=1, params=params).reason == "length"
        assert not decode.facts()["warned"]
    prefill.idle()
    decode.idle()
