"""One engine that nobody disturbs, and the same prompts split between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.models import VOCABULARY, checkpoint
from tests.vllm.verdicts import engine_label

CLOSE = 1e-3
"""Logprobs in float32 that count as equal: engines sum in other orders at other block sizes."""

EDGES = (2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 517)
"""Around the edges of blocks of 64 and 128, and of windows of 64."""

_SMALL, _LARGE, _LARGEST = ({"block_size": size} for size in (64, 128, 256))
_TP = {"tensor_parallel_size": 2}
_PP = {
    "pipeline_parallel_size": 2,
    # On a CPU a stage has no buffer for what the last one sends unless vLLM has warmed up, which
    # it does for models that it compiles; this compiles nothing where torch's compiler is off.
    "enforce_eager": False,
    "compilation_config": {"mode": 1},
}
PAIRS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("llama", _SMALL, _SMALL),
    ("gemma3", _SMALL, _SMALL),
    ("llama", _SMALL, _LARGE),
    ("gemma2", _SMALL, _LARGE),
    ("gemma3", _SMALL, _LARGE),
    # vLLM makes no smaller blocks for the states of these two.
    ("granite", _LARGE, _LARGEST),
    ("falcon_h1", _LARGE, _LARGEST),
    ("llama", _SMALL | _TP, _LARGE),
    ("granite", _LARGE | _TP, _LARGEST),
    ("llama", _SMALL | _PP, _LARGE),
)
"""Models, and the two engines that hand requests to each other, either way."""


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


class Undisturbed:
    """What an engine without any connector answers to prompts of `EDGES`, asked once a model."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._known: dict[str, dict[int, Answer]] = {}

    def __call__(self, name: str) -> dict[int, Answer]:
        if name not in self._known:
            model = checkpoint(name, self._checkpoints)
            answers = undisturbed(model, [prompt(length) for length in EDGES])
            self._known[name] = dict(zip(EDGES, answers, strict=True))
        return self._known[name]


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


def pair_ways(
    one: tuple[Engine, dict[str, Any]], other: tuple[Engine, dict[str, Any]]
) -> list[tuple[tuple[Engine, Engine], str]]:
    """From one engine to the other and back, with the ways' names; once where both are alike."""
    for made, options in (one, other):
        assert made.started["block"] == options["block_size"], "vLLM has chosen another"
    ways = [(one, other)] if one[1] == other[1] else [(one, other), (other, one)]
    return [((a[0], b[0]), f"{engine_label(a[1])} -> {engine_label(b[1])}") for a, b in ways]
