"""Real engines of several processes on one tier: unlike ranks and blocks, at once and in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

ROOT = Path(__file__).parents[2]
LENGTH = 300


def keeping(path: Path | str) -> dict[str, Any]:
    """The flag of an engine with a tier and nobody to speak to."""
    return atlas(transport="none", tier=str(path), tier_memory="16MiB")


def test_engines_of_unlike_ranks_find_at_once_what_the_other_has_stored(
    checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts = [prompt(LENGTH, seed) for seed in (1, 2, 3)]
    right = undisturbed(model, prompts)
    with (
        engine(
            model, name="two", connector=keeping(path), block_size=64, tensor_parallel_size=2
        ) as two,
        engine(model, name="one", core="1", connector=keeping(path), block_size=128) as one,
    ):
        for first, second, asked in ((two, one, 0), (one, two, 1)):
            for made, found in ((first, 0), (second, 256)):
                got = made.generate(prompts[asked])
                assert_same(right[asked], got, (made.process.name, asked))
                assert got.cached == found, "blocks of the tier have 64 tokens"
                made.idle()
        assert_nothing_held(one, two)
        # Whoever serves the tier goes without a word: the other computes, and goes on keeping.
        two.kill()
        until = time.monotonic() + 60
        while (got := one.generate(prompts[2])).cached != 256:
            assert_same(right[2], got, "after the other engine was killed")
            assert time.monotonic() < until, "kept by the one that is left"
            one.idle()
        assert_same(right[2], got, "read from the tier")
        assert_nothing_held(one)


def test_a_prefix_outlives_engines_whose_core_is_another_process(
    checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts = [prompt(LENGTH)]
    right = undisturbed(model, prompts)[0].tokens
    first = asked_elsewhere(tmp_path, model, keeping(path), prompts, block_size=64)
    assert first == [[[right, 0], [right, 256]]]
    other = asked_elsewhere(tmp_path, model, keeping(path), prompts, block_size=128)
    assert other == [[[right, 256], [right, 256]]]


def asked_elsewhere(folder: Path, model: Path, connector: Any, prompts: Any, **options: Any) -> Any:
    """What an engine of processes of its own answers to prompts, each asked twice."""
    file = folder / "asked.json"
    about = {"model": str(model), "connector": connector, "prompts": prompts, "options": options}
    file.write_text(json.dumps(about))
    run = subprocess.run(
        [sys.executable, "-m", "tests.vllm.llm_process", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
             "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(file.read_text())
