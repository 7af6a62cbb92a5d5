"""Configs that are broken, cut, hostile or unknown: each refusal has its code."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError, Code
from kvatlas.models import Model, catalogue
from kvatlas.models.sources import LARGEST_FILE
from tests.cases import each
from tests.models.configs import FAMILIES, GQA, config

LLAMA = FAMILIES["llama"]

BAD: list[tuple[Code, Any]] = [
    (Code.BAD_CONFIG, LLAMA | {"num_hidden_layers": 10**9}),
    (Code.BAD_CONFIG, LLAMA | {"num_hidden_layers": "32"}),
    (Code.BAD_CONFIG, LLAMA | {"num_hidden_layers": -1}),
    (Code.BAD_CONFIG, LLAMA | {"num_attention_heads": 8.0}),
    (Code.BAD_CONFIG, LLAMA | {"num_key_value_heads": True}),
    (Code.BAD_CONFIG, LLAMA | {"hidden_size": 1000, "num_attention_heads": 7}),
    (Code.BAD_CONFIG, LLAMA | {"head_dim": 2**80}),
    (Code.BAD_CONFIG, LLAMA | {"sliding_window": -4096}),
    (Code.BAD_CONFIG, LLAMA | {"sliding_window": [4096]}),
    (Code.BAD_CONFIG, LLAMA | {"layer_types": ["full_attention"]}),
    (Code.BAD_CONFIG, LLAMA | {"layer_types": ["full_attention", "quantum_attention"]}),
    (Code.BAD_CONFIG, LLAMA | {"layer_types": "full_attention"}),
    (Code.BAD_CONFIG, LLAMA | {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 2}),
    (Code.BAD_CONFIG, LLAMA | {"architectures": [7]}),
    (Code.BAD_CONFIG, LLAMA | {"quantization_config": "fp8"}),
    (Code.BAD_CONFIG, {"text_config": 3}),
    (Code.BAD_CONFIG, FAMILIES["qwen2"] | {"use_sliding_window": "yes"}),
    (Code.BAD_CONFIG, FAMILIES["exaone4"] | {"sliding_window_pattern": "LOCAL"}),
    (Code.BAD_CONFIG, FAMILIES["nemotron_h"] | {"hybrid_override_pattern": "M-M*X"}),
    (Code.BAD_CONFIG, FAMILIES["nemotron_h"] | {"hybrid_override_pattern": "M-M*"}),
    (Code.BAD_CONFIG, FAMILIES["granite4"] | {"layer_types": ["mamba", "attention", "tea"]}),
    (Code.BAD_CONFIG, FAMILIES["granite4"] | {"mamba_d_head": "auto", "mamba_n_heads": 7}),
    (Code.BAD_CONFIG, FAMILIES["qwen3_next"] | {"layer_types": ["mlp"] * 4}),
    (Code.BAD_CONFIG, FAMILIES["bamba"] | {"attn_layer_indices": [3]}),
    (Code.BAD_CONFIG, FAMILIES["deepseek_v4"] | {"compress_ratios": [0, 4, 128, 0, 0]}),
    (Code.BAD_CONFIG, FAMILIES["deepseek_v4"] | {"compress_ratios": [0, 4, 7]}),
    (Code.BAD_CONFIG, FAMILIES["mimo_v2"] | {"hybrid_layer_pattern": [0, 1]}),
    (Code.BAD_CONFIG, FAMILIES["deci"] | {"block_configs": [{}, {}, {}]}),
    (Code.BAD_CONFIG, FAMILIES["deci"] | {
        "block_configs": [{"attention": {"n_heads_in_group": 3}}] * 3
    }),
    (Code.BAD_CONFIG, FAMILIES["kimi_linear"] | {
        "linear_attn_config": {"kda_layers": [0], "num_heads": 8, "head_dim": 128}
    }),
    (Code.BAD_CONFIG, FAMILIES["rwkv7"] | {"head_dim": 63}),
    (Code.BAD_CONFIG, FAMILIES["whisper"] | {"decoder_attention_heads": 21}),
    (Code.UNKNOWN_DTYPE, LLAMA | {"dtype": "float7"}),
    (Code.UNKNOWN_DTYPE, FAMILIES["nemotron_h"] | {"mamba_ssm_cache_dtype": "float7"}),
    (Code.MISSING_KEY, {"architectures": ["LlamaForCausalLM"]}),
    (Code.MISSING_KEY, LLAMA | {"hidden_size": None}),
    (Code.MISSING_KEY, FAMILIES["deepseek_v3"] | {"qk_rope_head_dim": None}),
    (Code.MISSING_KEY, FAMILIES["kimi_linear"] | {"linear_attn_config": None}),
    (Code.MISSING_KEY, FAMILIES["qwen3_next"] | {"full_attention_interval": None}),
    (Code.MISSING_KEY, FAMILIES["dbrx"] | {"attn_config": None}),
    (Code.MISSING_KEY, FAMILIES["mimo_v2"] | {"hybrid_layer_pattern": None}),
    (Code.UNKNOWN_ARCHITECTURE, {}),
    (Code.UNKNOWN_ARCHITECTURE, {"architectures": ["BertModel"]}),
    (Code.UNKNOWN_ARCHITECTURE, config("NewForCausalLM", 2, GQA, kv_lora_rank=512)),
    (Code.UNKNOWN_ARCHITECTURE, config("NewForCausalLM", 2, GQA, ssm_state_size=128)),
    (Code.UNKNOWN_ARCHITECTURE, config("NewForCausalLM", 2, GQA, is_encoder_decoder=True)),
    (Code.UNKNOWN_ARCHITECTURE, config("NewForCausalLM", 2, GQA, compress_ratios=[4, 4])),
    (Code.UNREADABLE, 7),
    (Code.UNREADABLE, None),
    (Code.UNREADABLE, SimpleNamespace(to_dict=list)),
    (Code.UNREADABLE, "no/such/config.json"),
    (Code.UNREADABLE, Path("no-such-folder")),
    (Code.UNKNOWN_MODEL, "Qwen9-1T"),
    (Code.UNKNOWN_MODEL, "x" * 10_000),
    (Code.UNKNOWN_MODEL, ""),
    (Code.UNKNOWN_MODEL, "\0"),
]  # fmt: skip


@each(BAD)
def test_bad_input_is_refused_with_its_code(code: Code, source: Any) -> None:
    start = time.perf_counter()
    with pytest.raises(AtlasError) as refusal:
        Model.load(source)
    assert refusal.value.code is code
    assert time.perf_counter() - start < 5


@each(FAMILIES)
def test_a_billion_layers_are_refused_before_they_are_listed(family: str) -> None:
    values = dict(FAMILIES[family])
    part = values["text_config"] = dict(values["text_config"]) if "text_config" in values else {}
    for keys in (values, part):
        for key in ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers"):
            if key in keys:
                keys[key] = 10**9
    if not part:
        del values["text_config"]
    with pytest.raises(AtlasError) as refusal:
        Model.load(values)
    assert refusal.value.code is Code.BAD_CONFIG


NOT_CONFIGS = {
    "half": json.dumps(LLAMA)[: len(json.dumps(LLAMA)) // 2].encode(),
    "empty": b"",
    "list": b"[1, 2]",
    "null": b"null",
    "text": b"not json",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "digits": b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}",
    "large": b" " * (LARGEST_FILE + 1),
}


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for name, content in NOT_CONFIGS.items():
        path.write_bytes(content)
        for source in (path, str(path), tmp_path):
            with pytest.raises(AtlasError) as refusal:
                Model.load(source)
            assert refusal.value.code is Code.UNREADABLE, name


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        Model.load(LLAMA, engine="abacus")  # type: ignore[arg-type]
    assert refusal.value.code is Code.UNKNOWN_ENGINE


@each(["ssm_dtype", "conv_dtype"])
def test_an_unknown_state_dtype_is_refused(option: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        Model.load(LLAMA, **{option: "float7"})  # type: ignore[arg-type]
    assert refusal.value.code is Code.UNKNOWN_DTYPE


def test_a_refused_architecture_says_what_is_missing_and_what_speaks_against_it() -> None:
    with pytest.raises(AtlasError) as refusal:
        Model.load({"architectures": ["NewModel"], "mamba_d_state": 16, "hidden_size": 8})
    assert refusal.value.got == (
        "NewModel: the config lacks num_hidden_layers, num_attention_heads; "
        "the keys mamba_d_state imply caches other than K and V"
    )


def test_a_name_nearly_right_gets_a_hint() -> None:
    with pytest.raises(AtlasError) as refusal:
        Model.load("gpt-oss-21b")
    assert "gpt-oss-20b" in refusal.value.hint


def test_a_hub_id_needs_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AtlasError) as refusal:
        Model.load("some/model")
    assert refusal.value.code is Code.NO_HUB

    def unreachable(repo: str, file: str, **_: object) -> str:
        raise ConnectionError(f"{repo}/{file}")

    hub = SimpleNamespace(hf_hub_download=unreachable)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(AtlasError) as refusal:
        Model.load("some/model")
    assert refusal.value.code is Code.NO_HUB

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    hub.hf_hub_download = lambda repo, file, **_: str(tmp_path / file)  # noqa: ARG005
    assert Model.load("some/model").name == "some/model"


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_given_up_in_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A connection is taken, and nothing ever answered: where a firewall drops everything."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(AtlasError) as refusal:
            Model.load("some/model")
        assert time.monotonic() - start < 5
    assert refusal.value.code is Code.NO_HUB
    assert "did not respond" in str(refusal.value) or "timed out" in str(refusal.value)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-3, 200), st.text(max_size=3), st.none()), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(st.data())
def test_whatever_a_config_holds_it_is_read_or_refused(data: st.DataObject) -> None:
    values: dict[str, Any] = dict(data.draw(st.sampled_from(list(FAMILIES.values()))))
    part = values
    if isinstance(values.get("text_config"), dict) and data.draw(st.booleans()):
        part = values["text_config"] = dict(values["text_config"])
    for key in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=3)):
        part[key] = data.draw(JUNK)
    try:
        model = Model.load(values)
    except AtlasError:
        return
    assert isinstance(model, Model)


def test_words_of_another_family_are_no_kinds_of_layer() -> None:
    """A convolution is a layer of LFM2's, and no Mamba state."""
    given = dict(catalogue()["Granite-4.0-h-small"].expanded())
    for word in ("conv", "short_conv"):
        with pytest.raises(AtlasError) as refusal:
            Model.load(given | {"layer_types": [word, *given["layer_types"][1:]]})
        assert refusal.value.code is Code.BAD_CONFIG


def test_mamba_alone_names_its_head_size() -> None:
    given = dict(catalogue()["Mamba2-2.7B"].expanded())
    del given["head_dim"], given["model_type"]
    with pytest.raises(AtlasError) as refusal:
        Model.load(given)
    assert refusal.value.code is Code.MISSING_KEY
