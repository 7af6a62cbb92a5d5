"""One engine that nobody disturbs, and the same prompts split between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.models import VOCABULARY

CLOSE = 1e-3
"""Logprobs in float32 that count as equal: engines sum in other orders at other block sizes."""


def prompt(length: int, seed: int = 1) -> list[int]:
    """Tokens that do not repeat, so that a cache at the wrong place gives other tokens."""
    return [(seed * 7919 + 31 * i + i * i * (seed + 3)) % VOCABULARY for i in range(length)]


def atlas(policy: str = "fail", **settings: Any) -> dict[str, Any]:
    """The flag with which an engine takes this connector; `policy` for what cannot be read."""
    return {
        "kv_load_failure_policy": policy,
        "kv_connector": "KVAtlasConnector",
        "kv_connector_module_path": "kvatlas.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transport": "shm", **settings},
    }


def undisturbed(model: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
    """What an engine without any connector answers."""
    with engine(model, name="undisturbed", core="0|1", **options) as alone:
        return [alone.generate(one) for one in prompts]


def split(prefill: Engine, decode: Engine, tokens: Sequence[int]) -> Answer:
    """What two engines answer, the one having read the prompt and the other going on."""
    begun = prefill.prefill(tokens)
    assert begun.params is not None, begun
    return decode.generate(tokens, params=begun.params)


def difference(right: Answer, got: Answer) -> float:
    """The greatest difference of a token's logprob; infinite where tokens differ."""
    if got.tokens != right.tokens or len(got.logprobs) != len(right.logprobs):
        return float("inf")
    return max(abs(a - b) for a, b in zip(right.logprobs, got.logprobs, strict=True))


def assert_same(right: Answer, got: Answer, what: object) -> None:
    assert difference(right, got) < CLOSE, (what, right, got)


def assert_nothing_held(*engines: Engine) -> None:
    """All blocks of engines that cache no prefixes are free again, but vLLM's null block."""
    for one in engines:
        assert one.idle()["free"] == one.started["free"], one.process.name
