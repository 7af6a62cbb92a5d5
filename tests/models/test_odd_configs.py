"""Odd configs: unknown spellings, contradictions, and keys in unexpected places.

None of them is read in silence: each is refused, or a warning names the key.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError, Code
from kvatlas.models import Model, Weights, catalogue
from kvatlas.specs import SlidingAttention
from tests.cases import each

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
WITHOUT_KV = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
WITHOUT_HEAD_DIM = {key: value for key, value in LLAMA.items() if key != "head_dim"}


@each(
    [
        "kv_heads", "n_kv_heads", "n_key_value_heads", "num_query_groups", "num_groups",
        "gqa_groups", "num_key_value_heads_per_layer",
    ]
)  # fmt: skip
def test_another_spelling_of_kv_heads_is_a_warning(key: str) -> None:
    model = Model.load(WITHOUT_KV | {key: 2})
    assert {layer.spec.heads for layer in model.layers} == {8}  # type: ignore[union-attr]
    assert f"{key} was not read, and may change the caches: 2" in model.warnings


@each(
    [
        {"multi_query": True}, {"head_dims": [64, 32]}, {"window_sizes": [128, -1]},
        {"local_window_size": 128}, {"attention_window": [128] * 4}, {"local_attention": 128},
        {"global_attn_every_n_layers": 2}, {"attention_layers": [0, 2]}, {"use_cla": True},
        {"cross_decoder_layers": 2}, {"kv_sharing_target_layer": 2}, {"v_head_dim": 32},
        {"attention_value_dim": 32}, {"num_memory_tokens": 128}, {"attention_sink_size": 4},
        {"mamba_d_state": 16}, {"kv_lora_rank": 128},
    ]
)  # fmt: skip
def test_a_key_that_another_family_reads_is_a_warning(extra: dict[str, Any]) -> None:
    ((key, _),) = extra.items()
    (note,) = Model.load(LLAMA | extra).warnings
    assert note.startswith(f"{key} was not read, and may change the caches: ")


@each(
    [
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"multi_query_group_num": 4}, "multi_query_group_num"),
        ({"attention_head_dim": 128}, "attention_head_dim"),
        ({"kv_channels": 128}, "kv_channels"),
    ]
)
def test_synonyms_with_two_values_are_a_warning(extra: dict[str, Any], key: str) -> None:
    (note,) = Model.load(LLAMA | extra).warnings
    assert note.startswith(f"{key} was not read")
    same = {key: LLAMA["num_key_value_heads" if extra[key] == 4 else "head_dim"]}
    assert Model.load(LLAMA | same).warnings == ()


@each(
    [
        ({"attention": {"num_kv_heads": 1}}, "attention.num_kv_heads"),
        ({"attn_config": {"kv_n_heads": 2}}, "attn_config.kv_n_heads"),
        ({"ssm_cfg": {"d_state": 16}}, "ssm_cfg.d_state"),
        ({"layers": [{"kv_heads": 1}] * 4}, "layers.kv_heads"),
        ({"per_layer_attention": {"1": {"head_dim": 32}}}, "per_layer_attention.1.head_dim"),
    ]
)
def test_a_key_in_a_section_that_no_reader_knows_is_a_warning(
    extra: dict[str, Any], path: str
) -> None:
    assert any(
        note.startswith(f"{path} was not read") for note in Model.load(LLAMA | extra).warnings
    )


@each([("num_key_value_heads", WITHOUT_KV), ("head_dim", WITHOUT_HEAD_DIM)])
def test_a_key_outside_the_text_config_is_a_warning(key: str, text: dict[str, Any]) -> None:
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", key: 1}
    (note,) = Model.load({**whole, "text_config": text}).warnings
    assert note == f"{key} outside the text config was not read, and may change the caches: 1"
    with pytest.raises(AtlasError, match="twice, with different values"):
        Model.load({**whole, "text_config": LLAMA})


@each([3, 16])
def test_kv_heads_that_do_not_divide_the_query_heads_are_a_warning(heads: int) -> None:
    (note,) = Model.load(LLAMA | {"num_key_value_heads": heads}).warnings
    assert note == f"num_key_value_heads ({heads}) does not divide the number of query heads (8)"


@each(["num_key_value_heads", "head_dim", "num_attention_heads", "num_hidden_layers"])
def test_a_list_in_place_of_a_number_is_refused(key: str) -> None:
    for value in ([2, 2, 1, 1], {"0": 2}, "2", 2.0, 0, -1):
        with pytest.raises(AtlasError) as refusal:
            Model.load(LLAMA | {key: value})
        assert refusal.value.code is Code.BAD_CONFIG
        assert key in str(refusal.value)


def test_an_override_of_a_layer_that_does_not_exist_is_refused() -> None:
    one = Model.load(LLAMA | {"per_layer_config": {"3": {"num_key_value_heads": 1}}})
    assert [layer.spec.heads for layer in one.layers] == [2, 2, 2, 1]  # type: ignore[union-attr]
    with pytest.raises(AtlasError, match="from 0 to 3") as refusal:
        Model.load(LLAMA | {"per_layer_config": {"4": {"num_key_value_heads": 1}}})
    assert refusal.value.code is Code.BAD_CONFIG


WORDS = st.sampled_from(
    ["kv", "head", "heads", "window", "layer_types", "index", "conv", "state", "num", "my", "size"]
)


@given(st.sampled_from(sorted(catalogue())), st.lists(WORDS, min_size=2, max_size=4), st.data())
def test_a_key_that_may_change_the_caches_is_never_ignored(
    name: str, words: list[str], data: st.DataObject
) -> None:
    """Any known config with a new key whose name contains one of the words of a cache."""
    key = "new_" + "_".join(words)
    if {"num", "my", "size"} >= set(words):
        key += "_kv_heads"
    config: dict[str, Any] = dict(catalogue()[name].expanded())
    value = data.draw(st.sampled_from([7, [1, 2], "both", {"a": 3}]))
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], key: value}
    else:
        config[key] = value
    try:
        warnings = Model.load(config).warnings
    except AtlasError as refusal:
        assert key in str(refusal)
        return
    assert any(key in note for note in warnings), key


def test_an_architecture_of_another_family_than_the_model_type_is_a_warning() -> None:
    note = Model.load(LLAMA | {"model_type": "deepseek_v4"}).warnings[0]
    assert note.startswith("LlamaForCausalLM is not an architecture of model type 'deepseek_v4'")
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert Model.load(LLAMA | mistral).warnings == ()


@each(["float8_e4m3fn", "int8", "float8_e5m2"])
def test_a_dtype_of_weights_is_not_that_of_the_caches(dtype: str) -> None:
    model = Model.load(LLAMA | {"dtype": dtype})
    assert {layer.spec.page(16).nbytes for layer in model.layers} == {16 * 2 * 2 * 64 * 2}
    assert any("no engine serves a model in its dtype" in note for note in model.warnings)
    weights, plain = Weights.load(LLAMA | {"dtype": dtype}), Weights.load(LLAMA)
    assert weights.estimate
    assert any(dtype in note for note in weights.warnings)
    assert plain.bytes / 2 < weights.bytes < 0.7 * plain.bytes


def test_layers_that_share_caches_are_read_only_in_families_that_have_them() -> None:
    (note,) = Model.load(LLAMA | {"num_kv_shared_layers": 2}).warnings
    assert note.startswith("num_kv_shared_layers was not read")
    assert len(Model.load(LLAMA | {"num_kv_shared_layers": 2}).layers) == 4


CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "dtype": "float16",
    "num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "kv_channels": 64,
    "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 1000,
    "ffn_hidden_size": 1024, "seq_length": 4096,
}  # fmt: skip


@each([(True, 2), (False, 8)])
def test_chatglm_has_groups_only_with_multi_query_attention(grouped: bool, heads: int) -> None:
    config = CHATGLM | {"multi_query_attention": grouped}
    model = Model.load(config)
    assert {layer.spec.heads for layer in model.layers} == {heads}  # type: ignore[union-attr]
    assert model.warnings == ()
    assert Weights.load(config).estimate


@each(
    [
        {"model_type": "clip", "architectures": ["CLIPModel"]},
        {"model_type": "siglip2", "architectures": ["Siglip2Model"]},
    ]
)
def test_a_model_of_images_with_a_text_tower_is_refused(names: dict[str, Any]) -> None:
    tower = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    with pytest.raises(AtlasError, match="has no KV cache") as refusal:
        Model.load(names | {"text_config": tower, "vision_config": tower})
    assert refusal.value.code is Code.UNKNOWN_ARCHITECTURE


def test_an_unknown_vision_model_is_refused() -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    names = {"model_type": "my_vit", "architectures": ["MyVisionModel"], "image_size": 448}
    with pytest.raises(AtlasError, match="has no KV cache"):
        Model.load(sizes | names)
    assert Model.load(sizes | names | {"vocab_size": 1000}).warnings


SMOLLM3: dict[str, Any] = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "sliding_window": 128,
}  # fmt: skip


@each(
    [
        ({}, []),
        ({"use_sliding_window": True}, [3]),
        ({"use_sliding_window": True, "no_rope_layer_interval": 2}, [1, 3]),
        ({"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1]}, [1]),
        ({"use_sliding_window": True, "sliding_window": None}, []),
    ]
)
def test_layers_of_smollm3_without_rotary_positions_have_the_window(
    extra: dict[str, Any], slides: list[int]
) -> None:
    layers = Model.load(SMOLLM3 | extra).layers
    found = [layer.index for layer in layers if isinstance(layer.spec, SlidingAttention)]
    assert found == slides


def test_an_unknown_decoder_without_a_layer_pattern_is_a_warning() -> None:
    unknown = LLAMA | {"architectures": ["NewForCausalLM"], "model_type": "new"}
    notes = Model.load(unknown | {"sliding_window": 128}).warnings
    assert "layer_types is missing: assuming the same attention in all layers" in notes
