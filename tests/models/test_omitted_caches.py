"""Caches that are left out of a plan are a warning in every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from kvatlas.models import Model
from kvatlas.planning import fit, plan
from tests.cli.helpers import shown

SIZES: dict[str, Any] = {
    "dtype": "bfloat16", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "num_hidden_layers": 8, "max_position_embeddings": 4096, "vocab_size": 1000,
    "intermediate_size": 1024,
}  # fmt: skip
MLLAMA = SIZES | {
    "architectures": ["MllamaForCausalLM"],
    "model_type": "mllama_text_model",
    "cross_attention_layers": [3, 7],
}
OMITTED = {"mllama": (MLLAMA, "image rows of 2 cross")}


@pytest.mark.parametrize("name", OMITTED)
def test_a_cache_that_is_left_out_is_a_warning_in_every_output(name: str, tmp_path: Path) -> None:
    config, words = OMITTED[name]
    assert any(words in warning for warning in Model.load(config).warnings)
    for policy in ("atlas", "vllm"):
        made = plan(config, memory="4GiB", policy=policy)
        assert any(words in warning for warning in made.warnings)
        assert words in made.explain()
    assert any(words in warning for warning in fit(config, "H100").warnings)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for command in ("plan", "explain", "models", "plan --json", "fit --json"):
        name, *options = command.split()
        options += {"models": [], "fit": ["--gpu", "H100"]}.get(name, ["--memory", "4GiB"])
        assert words in " ".join(shown(name, str(file), *options).split()), command


def test_a_config_without_such_caches_has_no_such_warning() -> None:
    without = MLLAMA | {"cross_attention_layers": []}
    assert not any("not planned" in warning for warning in Model.load(without).warnings)
