"""The identity of a transformers model: its checkpoint's, or a digest of its tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvatlas.engines.transformers import make_plan, model_identity
from kvatlas.engines.transformers.identity_of_model import loaded_weights, stored_identity
from kvatlas.models import CacheIdentity
from kvatlas.models.row_identity import row_identity

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


def stored(model: Any, **options: Any) -> CacheIdentity:
    plan = make_plan(model.config, batch=1, max_len=64, **options)
    return stored_identity(model, plan)


def test_rows_have_the_identity_of_the_checkpoint_if_nothing_else_is_in_them(saved: Path) -> None:
    model = loaded(saved)
    expected = row_identity(CacheIdentity.of_checkpoint(saved), elements="half-split", dtype="fp32")
    assert stored(model) == expected
    assert stored(loaded(saved, dtype=torch.float16)) != expected
    assert stored(model, kv_dtype="fp8") == CacheIdentity(weights=loaded_weights(model))


def other_rope(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "some_factor": 2.0}


def other_class(model: Any) -> None:
    """A class of the checkpoint's own code, which may do anything."""
    model.__class__ = type("Remote", (type(model),), {"__module__": "transformers_modules.x"})


def tensor_that_no_file_has(model: Any) -> None:
    model.register_buffer("merged", torch.ones(3))


def scaled_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)


def token_with_another_embedding(model: Any) -> None:
    """A reserved token that was given a meaning: few elements of a large tensor differ."""
    with torch.no_grad():
        model.model.embed_tokens.weight[51, 3] += 1.0


@pytest.mark.parametrize(
    "change",
    [
        other_rope,
        other_class,
        tensor_that_no_file_has,
        scaled_weight,
        token_with_another_embedding,
    ],
)
def test_rows_that_other_engines_may_compute_differently_have_another_identity(
    change: Any, saved: Path
) -> None:
    model = loaded(saved)
    change(model)
    assert stored(model) == CacheIdentity(weights=loaded_weights(model))


def test_a_class_that_orders_elements_differently_has_another_identity(tmp_path: Path) -> None:
    """transformers permutes the rotary part of K of DeepSeek-V3, and vLLM does not."""
    config = DeepseekV3Config(
        **CONFIG | {"num_key_value_heads": 4}, first_k_dense_replace=2, kv_lora_rank=16,
        q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert model_identity(model).weights == CacheIdentity.of_checkpoint(tmp_path).weights
    assert model_identity(model).config != CacheIdentity.of_checkpoint(tmp_path).config
    assert stored(model) == CacheIdentity(weights=loaded_weights(model))
