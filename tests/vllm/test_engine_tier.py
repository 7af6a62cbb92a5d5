"""Real engines of several processes on one tier: unlike ranks and blocks, at once and in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

ROOT = Path(__file__).parents[2]
LENGTH = 300
TP: dict[str, Any] = {"tensor_parallel_size": 2}
PP: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,  # as in `tests.vllm.comparing`
    "compilation_config": {"mode": 1},
}


def keeping(path: Path | str) -> dict[str, Any]:
    """The flag of an engine with a tier and nobody to speak to."""
    return atlas(transport="none", tier=str(path), tier_memory="16MiB")


@pytest.mark.parametrize(
    ("name", "ranks", "found"), [("llama", TP, 256), ("gemma3", TP, LENGTH + 7), ("llama", PP, 256)]
)
def test_engines_of_unlike_ranks_find_at_once_what_the_other_has_stored(
    name: str, ranks: dict[str, Any], found: int, checkpoints: Path, tmp_path: Path
) -> None:
    """Whole blocks of 64 tokens; with windows, all that was computed of a request that goes on."""
    model, path = checkpoint(name, checkpoints), tmp_path / "prefixes.tier"
    with engine(model, name="undisturbed", core="0|1") as alone:
        begun = [prompt(LENGTH, seed) for seed in (1, 2)]
        right = [alone.generate(one) for one in begun]
        longer = [
            one + answer.tokens + prompt(40, 5) for one, answer in zip(begun, right, strict=True)
        ]
        right_after = [alone.generate(one) for one in longer]
    with (
        engine(model, name="several", connector=keeping(path), block_size=64, **ranks) as several,
        engine(model, name="one", core="1", connector=keeping(path), block_size=128) as one,
    ):
        for asked, (first, second) in enumerate(((several, one), (one, several))):
            got = first.generate(begun[asked])
            assert_same(right[asked], got, (first.process.name, asked))
            assert got.cached == 0
            first.idle()
            got = second.generate(longer[asked])
            assert_same(right_after[asked], got, (second.process.name, asked))
            assert got.cached == found
            second.idle()
        assert_nothing_held(one, several)


def test_an_engine_goes_on_when_the_one_that_served_the_tier_is_killed(
    checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts = [prompt(LENGTH, seed) for seed in (1, 2)]
    right = undisturbed(model, prompts)
    with (
        engine(model, name="serving", connector=keeping(path), block_size=64) as serving,
        engine(model, name="other", core="1", connector=keeping(path), block_size=128) as other,
    ):
        assert_same(right[0], serving.generate(prompts[0]), "stored")
        serving.idle()
        serving.kill()
        for answer, tokens in zip(right, prompts, strict=True):
            until = time.monotonic() + 60
            while (got := other.generate(tokens)).cached != 256:
                assert_same(answer, got, "computed while nobody serves the tier")
                assert time.monotonic() < until, "found by the one that is left"
                other.idle()
            assert_same(answer, got, "read from the tier")
        assert_nothing_held(other)


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
