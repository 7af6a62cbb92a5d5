"""The identity of a transformers model: its checkpoint's, or a digest of its tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvatlas.engines.transformers import model_identity
from kvatlas.models import CacheIdentity

CONFIG: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def made(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made(0).save_pretrained(tmp_path / "one")
    return tmp_path / "one"


def loaded(folder: Path, **about: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **about)


def test_a_loaded_model_has_the_identity_of_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    identity = model_identity(loaded(saved))
    assert identity == CacheIdentity.of_checkpoint(saved)
    shutil.copytree(saved, tmp_path / "copy")
    assert model_identity(loaded(tmp_path / "copy")) == identity
    assert model_identity(loaded(saved, dtype=torch.float16)) == identity


def test_weights_that_changed_after_loading_are_another_identity(saved: Path) -> None:
    model = loaded(saved)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2.0)
    identity = model_identity(model)
    assert identity.weights != model_identity(loaded(saved)).weights
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2.0)
    assert model_identity(model) != identity


def test_a_config_that_changed_after_loading_is_another_identity(saved: Path) -> None:
    model = loaded(saved)
    model.config.rms_norm_eps = 0.5
    identity = model_identity(model)
    assert identity.config != model_identity(loaded(saved)).config
    model.config.rms_norm_eps = 0.25
    assert model_identity(model) != identity


def test_a_checkpoint_replaced_under_its_path_is_another_identity(saved: Path) -> None:
    model = loaded(saved)
    before = model_identity(model)
    made(1).save_pretrained(saved)
    assert model_identity(loaded(saved)) != before
    assert model_identity(model) != model_identity(loaded(saved)), "it has the old weights"


def test_models_without_a_checkpoint_are_told_apart_by_their_tensors() -> None:
    assert model_identity(made(0)) == model_identity(made(0))
    assert model_identity(made(0)) != model_identity(made(1))
