"""The same pairs of engines with vLLM's own NixlConnector: its verdicts, in the same table.

Nothing is asserted of it: what it makes of a pair is entered as it is found.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import (
    CLOSE,
    PAIRS,
    Undisturbed,
    difference,
    pair_ways,
    prompt,
)
from tests.vllm.engine_process import Answer, Engine, EngineStartError, engine
from tests.vllm.models import checkpoint
from tests.vllm.verdicts import RIGHT, THEIRS, Verdicts, engine_label

LENGTHS = (128, 191, 192, 255)
NIXL = {"kv_connector": THEIRS, "kv_role": "kv_both"}
PATIENCE = 40.0
_PORTS = count(17300, 10)


@pytest.mark.parametrize(("name", "one", "other"), PAIRS)
def test_what_the_other_connector_makes_of_a_pair(
    name: str,
    one: dict[str, Any],
    other: dict[str, Any],
    checkpoints: Path,
    right: Undisturbed,
    verdicts: Verdicts,
) -> None:
    model, answers = checkpoint(name, checkpoints), right(name)
    try:
        with (
            start(model, "one", "0", one) as first,
            start(model, "other", "1", other) as second,
        ):
            for way, label in pair_ways((first, one), (second, other)):
                for length in LENGTHS:
                    found = verdict(*way, prompt(length), answers[length])
                    verdicts.note(name, label, THEIRS, length, found)
    except EngineStartError:
        label = f"{engine_label(one)} -> {engine_label(other)}"
        verdicts.note(name, label, THEIRS, 0, "refused at the start")


def start(model: Path, name: str, core: str, options: dict[str, Any]) -> Any:
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(_PORTS))}
    return engine(model, name=name, core=core, connector=NIXL, environment=environment, **options)


def verdict(prefill: Engine, decode: Engine, tokens: list[int], answer: Answer) -> str:
    try:
        begun = prefill.prefill(tokens)
        name = decode.add(tokens, params=begun.params)
        got = decode.wait(name, PATIENCE)
    except (AssertionError, EOFError, OSError):
        return "no answer"
    if got.reason != "length":
        return "refused"
    off = difference(answer, got)
    if off < CLOSE:
        return RIGHT
    return f"wrong ({off:.3f})" if off < float("inf") else "wrong tokens"
