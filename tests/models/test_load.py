"""All the forms in which a model may come give the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model, catalogue
from tests.cases import each
from tests.models.configs import FAMILIES

LLAMA = FAMILIES["llama"]


def test_a_path_a_folder_a_dict_and_an_object_are_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    sources = (folder, str(folder), folder / "config.json", str(folder / "config.json"))
    models = {Model.load(source).layers for source in sources}
    models |= {Model.load(LLAMA).layers, Model.load(SimpleNamespace(to_dict=lambda: LLAMA)).layers}
    assert len(models) == 1
    assert Model.load(folder).name == "Tiny-Llama"
    assert Model.load(folder).source == str(folder)


def test_a_model_says_what_topologies_must_respect() -> None:
    model = Model.load(LLAMA)
    assert (model.depth, model.attention_heads, model.max_len) == (2, 8, 32768)
    assert (model.architecture, model.dtype, model.cache) == ("LlamaForCausalLM", "bf16", "auto")


def test_a_model_without_query_heads_has_none_to_divide() -> None:
    assert Model.load(FAMILIES["mamba"]).attention_heads == 0
    assert Model.load(FAMILIES["mamba2"]).attention_heads == 0


def test_numbers_that_json_does_not_have_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "llama_config.json"
    path.write_text(json.dumps(LLAMA | {"time_step_limit": [0.0, math.inf]}))
    assert "Infinity" in path.read_text()
    assert Model.load(path).name == "llama"


def test_what_is_given_is_not_changed() -> None:
    for values in FAMILIES.values():
        before = json.dumps(values)
        Model.load(values)
        assert json.dumps(values) == before


def test_a_model_and_an_entry_load_as_themselves() -> None:
    model = Model.load("Llama-3.1-8B")
    assert Model.load(model) is model
    assert Model.load(catalogue()["Llama-3.1-8B"]) == model


@each([{"ssm_dtype": "float32"}, {"conv_dtype": "float32"}, {"engine": "sglang"}])
def test_options_for_a_model_that_is_already_read_are_refused(options: dict[str, Any]) -> None:
    """They were ignored once: a model no longer knows the config that they are about."""
    model = Model.load("Qwen3-Next-80B-A3B")
    with pytest.raises(AtlasError) as refusal:
        Model.load(model, **options)
    assert refusal.value.code is Code.UNREADABLE


@each(["Qwen3.5-397B-A17B", "qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B"])
def test_a_catalogue_name_is_read_in_any_case(name: str) -> None:
    assert Model.load(name).name == "Qwen3.5-397B-A17B"


def test_a_file_goes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(LLAMA))
    assert Model.load("Qwen3-8B").depth == 2


@pytest.mark.slow
def test_a_transformers_object_is_read_where_transformers_is_there() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(num_hidden_layers=3, num_key_value_heads=2, head_dim=64)
    assert len(Model.load(config).layers) == 3


def test_a_model_travels_as_json() -> None:
    model = Model.load("DeepSeek-V4-Flash")
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model
    assert hash(model) == hash(Model.load("DeepSeek-V4-Flash"))
