"""Identities of engines from their checkpoints and configs, without vLLM."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.engines.vllm import ConnectorSettings
from kvatlas.engines.vllm import weights_identity as identities
from kvatlas.engines.vllm.supported_versions import check_backend
from kvatlas.engines.vllm.weights_identity import (
    cache_identity,
    engine_identity,
    stored_identity,
)
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity
from kvatlas.models.row_identity import row_identity
from tests.vllm.shapes import vllm_config

STORED: dict[str, Any] = {"rope_theta": 1e4, "hidden_size": 128}


def test_the_identity_of_a_stored_tier_keeps_its_value(tmp_path: Path) -> None:
    """Prefixes that an earlier version stored are found as long as this digest is the same."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = vllm_config()
    config.model_config.model = str(tmp_path)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"rope": 1, "labels": {1: 2}})
    assert cache_identity(config, None).hex()[:32] == "e5bf04fbe4a9a0eb5b058fe93098b1bc"


def served(folder: Path, **config: Any) -> Any:
    """An engine that serves a folder; `config` is its effective config."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps(STORED | {"_name_or_path": folder.name}))
    made = vllm_config()
    made.model_config.model = str(folder)
    made.model_config.hf_config = SimpleNamespace(to_dict=lambda: STORED | config)
    return made


def test_engines_have_one_identity_if_weights_and_effective_configs_are_equal(
    tmp_path: Path,
) -> None:
    settings = ConnectorSettings()
    one = engine_identity(served(tmp_path / "one"), settings, STORED)
    assert one == engine_identity(served(tmp_path / "two"), settings, STORED)
    assert one == CacheIdentity.of_checkpoint(tmp_path / "one"), "as any user computes it"
    newer = STORED | {"new_default": 1}  # of another version of transformers, at one end
    assert one == engine_identity(served(tmp_path / "one", new_default=1), settings, newer)
    for changed in ({"rope_theta": 1e6}, {"rope_theta": None}, {"sliding_window": 64}):
        other = engine_identity(served(tmp_path / "one", **changed), settings, STORED)
        assert other is not None
        assert other != one, changed
    quantised = served(tmp_path / "one")
    quantised.model_config.quantization = "fp8"
    assert engine_identity(quantised, settings, STORED) != one
    computed = served(tmp_path / "one", torch_dtype="float16")
    computed.model_config.dtype = "torch.float16"
    assert engine_identity(computed, settings, STORED) == one, "plans compare dtypes"
    replaced = served(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"WEIGHTS")
    assert engine_identity(replaced, settings, STORED) != one


def test_rows_of_a_compared_family_have_the_identity_that_all_engines_compute(
    tmp_path: Path,
) -> None:
    settings = ConnectorSettings(check_identity=False)
    folder = tmp_path / "model"
    plain = CacheIdentity.of_checkpoint(served(folder).model_config.model)
    for family, elements in (("llama", "half-split"), ("llama4_text", "vllm"), (None, "vllm")):
        config = STORED if family is None else STORED | {"model_type": family}
        engine = served(folder)
        engine.model_config.hf_config = SimpleNamespace(to_dict=lambda config=config: config)
        found = stored_identity(engine, settings, config, "fp32")
        assert found == row_identity(plain, elements=elements, dtype="fp32")
        assert stored_identity(engine, settings, config, "bf16") != found
    for change in ({"using_transformers_backend": lambda: True}, {"model_class_overrides": "x"}):
        engine = served(folder, model_type="llama")
        vars(engine.model_config).update(change)
        found = stored_identity(engine, settings, STORED | {"model_type": "llama"}, "fp32")
        assert found != row_identity(plain, elements="half-split", dtype="fp32"), change


def test_a_rope_type_that_vllm_renames_as_it_loads_a_model_changes_no_identity(
    tmp_path: Path,
) -> None:
    """The scheduler of several ranks has the config without this change."""
    rope = {"rope_type": "yarn", "factor": 40.0}
    read = STORED | {"rope_parameters": rope}
    found = [
        engine_identity(served(tmp_path, rope_parameters=one), ConnectorSettings(), read)
        for one in (rope, rope | {"rope_type": "deepseek_yarn"}, rope | {"factor": 4.0})
    ]
    assert found[0] == found[1] != found[2]


def test_long_rope_factors_are_part_of_an_identity(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    found = []
    for longest, parameters in ((256, rope), (512, rope), (1024, rope), (2048, {"full": rope})):
        engine = served(tmp_path)
        engine.model_config.max_model_len = longest
        engine.model_config.hf_text_config = SimpleNamespace(rope_parameters=parameters)
        found.append(engine_identity(engine, ConnectorSettings(), STORED))
    assert found[0] == found[1] != found[2] == found[3]


def test_unknown_weights_are_refused_unless_any_identity_is_accepted(tmp_path: Path) -> None:
    accepted = ConnectorSettings(check_identity=False)
    made_up, gone = served(tmp_path), vllm_config()
    made_up.load_config = SimpleNamespace(load_format="dummy")
    gone.model_config.model = "no/such model"
    gone.model_config.hf_config = SimpleNamespace(to_dict=lambda: STORED)
    for config in (made_up, gone):
        with pytest.raises(AtlasError) as refusal:
            engine_identity(config, ConnectorSettings(), STORED)
        assert refusal.value.code is Code.BAD_CONFIG
        assert "weights_identity" in refusal.value.hint
        assert engine_identity(config, accepted, STORED) is None
        named = engine_identity(config, ConnectorSettings(weights_identity="v7"), STORED)
        assert named is not None
        assert named.weights == "v7"


def test_a_checkpoint_that_changed_while_its_engine_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, settings = served(tmp_path), ConnectorSettings()
    engine_identity(config, settings, STORED)  # a process that serves several engines in turn
    monkeypatch.setattr(multiprocessing.current_process(), "name", "VllmWorker-0")
    with pytest.raises(AtlasError, match=r"model\.safetensors|config\.json") as refusal:
        engine_identity(config, settings, STORED)
    assert refusal.value.code is Code.BAD_CONFIG
    monkeypatch.setattr(identities, "_process_start", lambda: time.time() + 60)
    assert engine_identity(config, settings, STORED) is not None


def test_latent_attention_is_refused_on_cpus_alone() -> None:
    for device, latent, refused in (
        ("cpu", True, True),
        ("cpu", False, False),
        ("cuda", True, False),
    ):
        config = vllm_config(use_mla=latent)
        config.device_config = SimpleNamespace(device_type=device)
        if not refused:
            check_backend(config)
            continue
        with pytest.raises(AtlasError) as refusal:
            check_backend(config)
        assert refusal.value.code is Code.ENGINE_REFUSES
