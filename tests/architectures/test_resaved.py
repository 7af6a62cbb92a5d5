"""Configs that transformers has read and saved again: read like the originals, or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.models import Model
from tests.models.configs import FAMILIES

transformers = pytest.importorskip("transformers")

GEMMA4 = {
    "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512, "global_head_dim": 128,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 128,
    "max_position_embeddings": 4096, "dtype": "bfloat16", "architectures": ["Gemma4ForCausalLM"],
}  # fmt: skip
ORIGINALS: dict[str, dict[str, Any]] = {
    "gemma4": GEMMA4,
    "deepseek_v4": FAMILIES["deepseek_v4"] | {"model_type": "deepseek_v4"},
    "minimax_m3": FAMILIES["minimax_m3"] | {"model_type": "minimax_m3_vl_text"},
    "mimo_v2": FAMILIES["mimo_v2"] | {"model_type": "mimo_v2_flash"},
    "gpt_oss": FAMILIES["gpt_oss"] | {"model_type": "gpt_oss"},
    "gemma2": FAMILIES["gemma2"] | {"model_type": "gemma2"},
}
FOLDER = Path(os.environ.get("KVATLAS_FACTS", "no-such-folder")) / "configs"


def saved_again(config: dict[str, Any], *, whole: bool) -> dict[str, Any] | None:
    """Return the config as transformers saves it; None if transformers has no such model."""
    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    values: dict[str, Any] = json.loads(made.to_json_string(use_diff=not whole))
    return values


def assert_alike_or_refused(config: dict[str, Any], *, whole: bool) -> bool:
    """Compare the caches of a config with those of its saved form; return whether it was read."""
    saved = saved_again(config, whole=whole)
    if saved is None:
        return False
    original = Model.load(config)
    try:
        model = Model.load(saved)
    except AtlasError:
        return False
    assert [x.spec for x in model.layers] == [x.spec for x in original.layers]
    assert (model.max_len, model.dtype, model.cache) == (
        original.max_len,
        original.dtype,
        original.cache,
    )
    return True


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_config_that_is_saved_again_is_read_alike(name: str, whole: bool) -> None:
    assert assert_alike_or_refused(ORIGINALS[name], whole=whole)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="KVATLAS_FACTS names no folder with configs")
def test_public_configs_that_are_saved_again_are_read_alike() -> None:
    files = sorted(FOLDER.glob("*.json"))
    read = [
        (file.name, whole)
        for file in files
        for whole in (False, True)
        if assert_alike_or_refused(json.loads(file.read_text()), whole=whole)
    ]
    print(f"{len(read)} of {2 * len(files)} saved configs are read, each like its original")
    assert len(read) > 1.8 * len(files)
