"""The same pairs of engines with vLLM's own NixlConnector: what each makes of them, in one table.

Only this connector's column is asserted; the other is printed as it is found.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import CLOSE, atlas, difference, prompt, undisturbed
from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.models import checkpoint

LENGTHS = (128, 191, 192, 255)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PAIRS = [("llama", 64, 64), ("llama", 64, 128), ("llama", 128, 64), ("gemma3", 64, 64)]
_PORTS = count(17300, 10)


def verdict(prefill: Engine, decode: Engine, tokens: list[int], right: Any) -> str:
    begun = prefill.prefill(tokens)
    got = decode.generate(tokens, params=begun.params)
    if got.reason != "length":
        return "refused"
    off = difference(right, got)
    return "right" if off < CLOSE else f"wrong ({off:.3f})"


def verdicts(model: Path, connector: Any, blocks: tuple[int, int], right: Any) -> list[str]:
    """What a connector makes of every length between two engines."""
    made: list[dict[str, Any]] = [
        {
            "name": name,
            "core": core,
            "connector": connector,
            "block_size": block,
            "environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(_PORTS))},
        }
        for name, core, block in zip(("prefill", "decode"), "01", blocks, strict=True)
    ]
    with engine(model, **made[0]) as prefill, engine(model, **made[1]) as decode:
        return [
            verdict(prefill, decode, prompt(length), answer)
            for length, answer in zip(LENGTHS, right, strict=True)
        ]


def test_pairs_that_the_other_connector_refuses_or_corrupts(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print("\nmodel    blocks      tokens  kvatlas        NixlConnector")
    known: dict[str, list[Answer]] = {}
    for name, *blocks in PAIRS:
        model = checkpoint(name, checkpoints)
        if name not in known:
            known[name] = undisturbed(model, [prompt(length) for length in LENGTHS])
        pair = (blocks[0], blocks[1])
        ours = verdicts(model, atlas(), pair, known[name])
        theirs = verdicts(model, NIXL, pair, known[name])
        with capsys.disabled():
            for length, mine, other in zip(LENGTHS, ours, theirs, strict=True):
                print(f"{name:8} {pair[0]:>3} -> {pair[1]:>3} {length:>7}  {mine:14} {other}")
        assert ours == ["right"] * len(LENGTHS)
