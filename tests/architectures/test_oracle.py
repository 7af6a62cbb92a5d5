"""`Model.load(..., oracle="transformers")`: the check of a user's own config."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.models.architectures import FAMILIES, Family
from kvatlas.models.cache_comparison import CachedLayer, differences
from kvatlas.models.dense import dense

transformers = pytest.importorskip("transformers")

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "dtype": "bfloat16",
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97, "sliding_window": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


def test_a_config_that_is_read_right_is_verified() -> None:
    assert Model.load(GEMMA2, oracle="transformers") == Model.load(GEMMA2)


def test_a_reader_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as if every layer were sliding, Gemma-2 has other caches than transformers."""
    monkeypatch.setitem(FAMILIES, "Gemma2ForCausalLM", Family(lambda d: dense(d, every=99)))
    assert Model.load(GEMMA2)
    with pytest.raises(AtlasError, match="expect different caches") as refusal:
        Model.load(GEMMA2, oracle="transformers")
    assert refusal.value.code is Code.UNKNOWN_ARCHITECTURE
    assert "differences in 2 layers" in str(refusal.value)


def test_a_text_model_without_a_causal_head_is_verified() -> None:
    text = {**GEMMA2, "model_type": "qwen3_vl_text"}
    del text["architectures"], text["sliding_window"]
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "text_config": text,
    }
    assert Model.load(config, oracle="transformers").layers[0].spec.heads == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ({**GEMMA2, "model_type": "gemma99"}, Code.UNKNOWN_ARCHITECTURE),
        ({**GEMMA2, "hidden_act": 7, "hidden_activation": 7}, Code.UNKNOWN_ARCHITECTURE),
    ],
)
def test_a_config_that_transformers_cannot_run_is_refused(source: Any, code: Code) -> None:
    with pytest.raises(AtlasError, match="cannot be verified") as refusal:
        Model.load(source, oracle="transformers")
    assert refusal.value.code is code


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_falcon_caches_a_head_for_each_query_head_in_transformers(kv_heads: int) -> None:
    """Falcon-40B repeats its KV heads before it caches them; engines cache each once."""
    config = {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "dtype": "bfloat16",
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 97,
        "num_kv_heads": kv_heads, "new_decoder_architecture": True, "multi_query": True,
    }  # fmt: skip
    model = Model.load(config, oracle="transformers")
    assert {layer.spec.heads for layer in model.layers} == {kv_heads}  # type: ignore[union-attr]


def test_an_unknown_oracle_is_refused() -> None:
    with pytest.raises(AtlasError, match="checked against is transformers"):
        Model.load(GEMMA2, oracle="vllm")  # type: ignore[arg-type]


def test_each_kind_of_difference_is_found() -> None:
    """A changed size, head count or window, a missing layer, and one too many."""
    caches = Model.load(GEMMA2).layers
    rows: dict[str, tuple[int, ...]] = {"keys": (2, 7, 16), "values": (2, 7, 16)}
    right = [CachedLayer(rows, 64), CachedLayer(rows)] * 2
    assert differences(caches, right) == []
    wrong = [
        CachedLayer({**rows, "keys": (1, 7, 16)}, 64),
        CachedLayer({**rows, "values": (2, 7, 8)}, 64),
        CachedLayer(rows, 63),
        CachedLayer(rows),
        CachedLayer({}, 64),
        CachedLayer({**rows, "indexer_keys": (7, 32)}, 64),
        CachedLayer({**rows, "conv_states": (64, 4)}, 64),
    ]
    for layer in wrong:
        assert len(differences(caches, [layer, *right[1:]])) == 1
    assert len(differences(caches, right[:3])) == 1
    assert len(differences(caches, [*right, right[0]])) == 1
