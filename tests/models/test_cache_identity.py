"""Identities: equal where K and V are equal, different where anything changes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity, config_identity

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "_name_or_path": "/models/one",
    "torch_dtype": "bfloat16",
    "transformers_version": "5.17.0",
    "eos_token_id": 2,
}


def folder(path: Path, weights: bytes = b"some weights", **changed: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    (path / "model.safetensors").write_bytes(weights)
    return path


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_multiplier": 0.5},
        {"a_key_of_next_year": 1},
    ],
    ids=str,
)
def test_config_values_that_change_k_and_v_count(changed: dict[str, Any]) -> None:
    assert config_identity(CONFIG | changed) != config_identity(CONFIG)
    assert config_identity(CONFIG, **changed) != config_identity(CONFIG)


@pytest.mark.parametrize(
    "changed",
    [
        {"_name_or_path": "/models/another"},
        {"torch_dtype": "float16"},
        {"dtype": "float32"},
        {"transformers_version": "5.23.0"},
        {"eos_token_id": [2, 3]},
        {"use_cache": False},
        {"sliding_window": None},
        {"rope_theta": 10000},
    ],
    ids=str,
)
def test_config_values_without_effect_do_not_count(changed: dict[str, Any]) -> None:
    assert config_identity(CONFIG | changed) == config_identity(CONFIG)


def test_keys_of_inner_configs_follow_the_same_rules() -> None:
    inner = {"text_config": CONFIG}
    same = {"text_config": CONFIG | {"torch_dtype": "float16"}}
    other = {"text_config": CONFIG | {"rope_theta": 1.0}}
    assert config_identity(inner) == config_identity(same) != config_identity(other)


def test_equal_checkpoints_under_different_paths_are_one(tmp_path: Path) -> None:
    one = CacheIdentity.of_checkpoint(folder(tmp_path / "one"))
    assert CacheIdentity.of_checkpoint(folder(tmp_path / "two" / "copy")) == one
    assert CacheIdentity.of_checkpoint(str(tmp_path / "one")) == one


def test_another_checkpoint_under_the_same_path_is_another(tmp_path: Path) -> None:
    path = folder(tmp_path / "served")
    before = CacheIdentity.of_checkpoint(path)
    (path / "model.safetensors").write_bytes(b"same weight!")
    after = CacheIdentity.of_checkpoint(path)
    assert after.config == before.config
    assert after.weights != before.weights
    assert before.weights in before.differences(after)
    (path / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 1.0}))
    assert CacheIdentity.of_checkpoint(path).config != after.config


def test_weights_may_be_named_and_overrides_count(tmp_path: Path) -> None:
    path = folder(tmp_path / "served")
    named = CacheIdentity.of_checkpoint(path, weights="release 7")
    assert named.weights == "release 7"
    assert CacheIdentity.of_checkpoint(path, weights="release 7", rope_theta=1.0) != named


@pytest.mark.parametrize("text", [None, "{", "[1]"], ids=["absent", "cut", "list"])
def test_a_checkpoint_without_a_config_is_refused(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(AtlasError) as refusal:
        CacheIdentity.of_checkpoint(tmp_path)
    assert refusal.value.code is Code.UNREADABLE


def test_what_an_identity_was_computed_with_tells_all_parts_apart() -> None:
    parts = ("weights", "config", "adapter", "salt")
    plain: dict[str, Any] = {"weights": "w"}
    found = {CacheIdentity(**plain | {part: f"other {part}"}).computed_with for part in parts}
    found |= {CacheIdentity(weights="w", config="x", adapter="y").computed_with}
    found |= {CacheIdentity(weights="w", config="x", salt="y").computed_with}
    assert len(found) == 6
    assert CacheIdentity(**plain, tenant="t").computed_with == "w"


def test_an_identity_survives_a_journey() -> None:
    one = CacheIdentity(weights="w", config="c", adapter="a", salt="s", tenant="t")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=CacheIdentity) == one
    assert one.differences(one) == ""
    assert one.for_request().adapter == ""
