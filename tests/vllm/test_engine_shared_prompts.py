"""Real engines with windows or states, a tier, and requests that share a system prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

SHARED, OWN = 200, 90
"""Tokens of the system prompt, and of what each request adds."""
STATES: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": 128,
    # A step over several blocks keeps states inside it, which vLLM 0.32 cannot do on a CPU.
    "max_num_batched_tokens": 128,
}
"""vLLM keeps states by position only if it caches prefixes, in blocks no smaller than this."""


def tier_at(kind: str, folder: Path) -> dict[str, Any]:
    where = f"folder://{folder}/store" if kind == "folder" else str(folder / "prefixes.tier")
    return atlas("recompute", transport="none", tier=where, tier_memory="32MiB")


def requests() -> list[list[int]]:
    """Four requests that share a system prompt; the last is the first once more."""
    system = prompt(SHARED, seed=3)
    first, second, third = (system + prompt(OWN, seed=seed) for seed in (11, 12, 13))
    return [first, second, third, first]


@pytest.mark.parametrize(
    ("name", "kind", "options", "found"),
    [
        ("gemma3", "folder", {"block_size": 64}, [0, 128, 192, 256]),
        ("gemma3", "file", {"block_size": 64}, [0, 128, 192, 256]),
        ("gemma2", "folder", {"block_size": 64, "tensor_parallel_size": 2}, [0, 128, 192, 256]),
        ("gpt_oss", "folder", {"block_size": 64}, [0, 128, 192, 256]),
        ("gpt_oss", "folder", {"block_size": 64, "max_num_batched_tokens": 96}, [0, 128, 192, 256]),
        ("mistral", "folder", {"block_size": 64}, [0, 128, 128, 256]),
        ("granite", "folder", STATES, [0, 0, 128, 256]),
        ("falcon_h1", "file", STATES, [0, 0, 128, 256]),
    ],
)
def test_a_shared_system_prompt_is_found_by_the_second_or_third_request(
    name: str, kind: str, options: dict[str, Any], found: list[int], checkpoints: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Windows by the second, states by the third; and the same prompt again to its last block.

    The engine forgets what it has itself, so that all is read from the tier.
    """
    model = checkpoint(name, checkpoints)
    right = undisturbed(model, requests())
    with engine(model, name="tiered", connector=tier_at(kind, tmp_path), **options) as tiered:
        got = []
        for tokens, answer in zip(requests(), right, strict=True):
            got.append(tiered.generate(tokens))
            assert_same(answer, got[-1], (name, len(got)))
            assert not tiered.idle()["warned"]
            if "enable_prefix_caching" in options:
                tiered.forget()
        assert [one.cached for one in got] == found
        assert_nothing_held(tiered)
