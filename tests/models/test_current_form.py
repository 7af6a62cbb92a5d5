"""Configs in the form that transformers saves, configs that omit defaults, and unread keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.specs import (
    AnySpec,
    FullAttention,
    Indexer,
    LatentAttention,
    SlidingAttention,
    SlidingLatentAttention,
)
from tests.models.configs import FAMILIES

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
BEFORE = {"global_head_dim": 128, "num_global_key_value_heads": 2}
SINCE = {"per_layer_config": {f"0{i}": {"head_dim": 128, "num_key_value_heads": 2} for i in (1, 2)}}


def specs(config: dict[str, Any]) -> list[AnySpec]:
    return [layer.spec for layer in Model.load(config).layers]


def test_sizes_of_single_layers_are_read_in_both_forms() -> None:
    full = FullAttention(heads=2, head_dim=128)
    sliding = SlidingAttention(heads=4, head_dim=64, window=128)
    assert specs(GEMMA4 | BEFORE) == [sliding, full, full]
    assert specs(GEMMA4 | SINCE) == [sliding, full, full]
    assert Model.load(GEMMA4 | SINCE).warnings == ()


@pytest.mark.parametrize(
    "override",
    [
        {"global_window": 7},
        {"layer_types": ["x"]},
        {"conv_kernel": 4},
        {"skip": ["attention"]},
        {"head_dim": None},
    ],
)
def test_an_override_that_may_change_a_cache_in_an_unknown_way_is_refused(
    override: dict[str, Any],
) -> None:
    with pytest.raises(AtlasError, match="per_layer_config changes") as refusal:
        Model.load(GEMMA4 | {"per_layer_config": {"1": override}})
    assert refusal.value.code is Code.BAD_CONFIG


def test_an_override_without_a_layer_number_is_refused() -> None:
    with pytest.raises(AtlasError, match="keyed by layer numbers"):
        Model.load(GEMMA4 | {"per_layer_config": {"last": {"head_dim": 128}}})


@pytest.mark.parametrize("window", [64, None])
def test_the_window_of_an_override_is_not_ignored(window: int | None) -> None:
    with pytest.raises(AtlasError, match="changes sliding_window"):
        Model.load(GEMMA4 | {"per_layer_config": {"0": {"sliding_window": window}}})


def test_layer_numbers_may_be_integers() -> None:
    """A dict of a transformers config may have integers where JSON has strings."""
    overrides = {int(key): value for key, value in SINCE["per_layer_config"].items()}
    assert specs(GEMMA4 | {"per_layer_config": overrides}) == specs(GEMMA4 | SINCE)


def test_indexers_are_read_from_layer_types() -> None:
    config: dict[str, Any] = FAMILIES["minimax_m3"]
    saved = {key: value for key, value in config.items() if key != "sparse_attention_config"}
    saved["layer_types"] = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    saved["index_head_dim"] = config["sparse_attention_config"]["sparse_index_dim"]
    assert specs(saved) == specs(config)
    assert sum(isinstance(spec, Indexer) for spec in specs(saved)) == 2
    with pytest.raises(AtlasError, match="unknown type"):
        Model.load(saved | {"layer_types": ["full_attention", "minimax_m4", "full_attention"]})


def test_compression_is_read_from_layer_types() -> None:
    config: dict[str, Any] = FAMILIES["deepseek_v4"]
    saved = {key: value for key, value in config.items() if key != "compress_ratios"}
    saved |= {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    }
    assert specs(saved) == specs(config)
    factor = saved.pop("qk_rope_head_dim") / saved["head_dim"]
    saved["partial_rotary_factor"] = factor
    assert specs(saved) == specs(config)
    with pytest.raises(AtlasError, match="must be 0, 4 or 128"):
        Model.load(saved | {"compress_rates": {"compressed_sparse_attention": 8}})


def test_windows_of_latents_are_read_with_their_own_rank() -> None:
    layers = ["indexed_attention", "sliding_attention"]
    config = {
        "architectures": ["Dots3NoteForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "sliding_window": 256,
        "layer_types": layers,
        "per_layer_config": {
            "00": {"num_key_value_heads": 4},
            "01": {"kv_lora_rank": 1024, "num_attention_heads": 4},
        },
    }
    assert specs(config) == [
        Indexer(head_dim=128),
        LatentAttention(latent=512, rope=64),
        SlidingLatentAttention(latent=1024, rope=64, window=256),
    ]


def test_a_text_model_that_contradicts_the_whole_is_refused() -> None:
    """transformers saves a flat Step-3.7 config next to a text model with default values."""
    whole: dict[str, Any] = {
        "num_hidden_layers": 2,
        "sliding_window": 512,
        "num_attention_heads": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    text = {**whole, "hidden_size": 1024, "sliding_window": None, "model_type": "step3p5"}
    text["layer_types"] = ["full_attention"] * 2
    config = {"architectures": ["Step3p7FlashForCausalLM"], **whole, "text_config": text}
    with pytest.raises(AtlasError, match="twice, with different values") as refusal:
        Model.load(config)
    assert refusal.value.code is Code.BAD_CONFIG


def test_a_missing_value_is_the_default_of_its_config_class() -> None:
    config = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "dtype": "bfloat16",
        "num_hidden_layers": 2, "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256,
        "sliding_window": 4096, "max_position_embeddings": 8192,
    }  # fmt: skip
    model = Model.load(config)
    assert {layer.spec.heads for layer in model.layers} == {4}  # type: ignore[union-attr]
    assert model.warnings == ("num_key_value_heads is missing: using the default, 4",)
    del config["model_type"]
    (note,) = Model.load(config).warnings
    assert "default of gemma2 is 4" in note


def test_null_is_no_missing_value() -> None:
    config = FAMILIES["mistral"] | {"model_type": "mistral", "sliding_window": None}
    assert {type(spec) for spec in specs(config)} == {FullAttention}


@pytest.mark.parametrize(
    "key",
    ["num_global_kv_pairs", "swa_head_size", "second_window", "decoder_layer_types",
     "kv_index_size", "pre_conv_width", "latent_state_size"],
)  # fmt: skip
def test_an_unread_key_that_may_change_the_caches_is_a_warning(key: str) -> None:
    (note,) = Model.load(FAMILIES["llama"] | {key: 3}).warnings
    assert note == f"{key} was not read, and may change the caches: 3"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["ViTForImageClassification"], "model_type": "vit"}, "vision"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "encoder"),
        ({"model_type": "siglip_vision_model"}, "vision"),
        ({"_class_name": "FluxTransformer2DModel", "num_layers": 19}, "diffusion"),
    ],
)
def test_models_without_a_decoder_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    with pytest.raises(AtlasError, match="has no KV cache") as refusal:
        Model.load(sizes | config)
    assert refusal.value.code is Code.UNKNOWN_ARCHITECTURE
    assert name in str(refusal.value)


PARAMS = {"dim": 4096, "n_layers": 4, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32}


def test_params_json_is_read_with_its_number_of_kv_heads(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"n_kv_heads": 8}))
    expected = [FullAttention(heads=8, head_dim=128)] * 4
    for source in (tmp_path, tmp_path / "params.json"):
        model = Model.load(source)
        assert [layer.spec for layer in model.layers] == expected
        assert model.name == tmp_path.name


def test_params_json_with_windows_latents_and_vision() -> None:
    slid = PARAMS | {"n_kv_heads": 8, "sliding_window": [None, 4096]}
    assert [type(spec) for spec in specs(slid)] == [FullAttention, SlidingAttention] * 2
    latent = PARAMS | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
    assert specs(latent) == [LatentAttention(latent=512, rope=64)] * 4
    seen = Model.load(PARAMS | {"n_kv_heads": 8, "vision_encoder": {"hidden_size": 1024}})
    assert seen.layers[0].name.startswith("language_model.")
    with pytest.raises(AtlasError, match="length of the list must divide"):
        Model.load(slid | {"sliding_window": [None, 4096, 4096]})
