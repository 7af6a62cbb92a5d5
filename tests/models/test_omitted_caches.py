"""Caches that are left out of a plan: a warning in every output, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.models.not_decoders import WITH_RINGS
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
QWEN4 = SIZES | {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_budget": 512,
}
OMITTED = {"mllama": (MLLAMA, "image rows of 2 cross"), "qwen4": (QWEN4, "4 raw keys of 128")}


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
    without = {key: value for key, value in QWEN4.items() if not key.startswith("indexer")}
    for config in (without, MLLAMA | {"cross_attention_layers": []}):
        assert not any("not planned" in warning for warning in Model.load(config).warnings)


@pytest.mark.parametrize("name", WITH_RINGS)
def test_models_with_rings_are_refused_by_name(name: str) -> None:
    is_architecture = name.endswith(("LM", "Generation"))
    config = SIZES | {"model_type": "unknown" if is_architecture else name}
    if is_architecture:
        config["architectures"] = [name]
    for whole in (config, {**config, "text_config": SIZES}):
        with pytest.raises(AtlasError, match="ring buffer") as refusal:
            Model.load(whole)
        assert refusal.value.code is Code.UNKNOWN_ARCHITECTURE


def test_layer_types_of_older_releases_of_transformers_are_read() -> None:
    """transformers 5.17 calls attention with an indexer qwen_sparse_attention."""
    kinds = ["linear_attention"] * 3 + ["indexed_attention"]
    now = Model.load(QWEN4 | {"layer_types": kinds * 2})
    older = [kind.replace("indexed", "qwen_sparse") for kind in kinds]
    assert Model.load(QWEN4 | {"layer_types": older * 2}).layers == now.layers
    assert len(now.layers) == 10
