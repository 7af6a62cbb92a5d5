"""Real engines with different weights or settings: no cache of the one is used by the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvatlas import AtlasError
from kvatlas.engines.vllm import ConnectorSettings
from kvatlas.engines.vllm.weights_identity import engine_identity
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_arguments import engine_config
from tests.vllm.engine_process import FOR_ALL, Answer, Engine, EngineStartError, engine
from tests.vllm.models import checkpoint

TOKENS = 200
OTHER_SEED = 8


class Served(NamedTuple):
    """A prefill engine, and folders of checkpoints of one shape."""

    prefill: Engine
    replaced: Path
    """The folder from which it was started, where other weights are stored now."""
    same: Path
    """Another folder with the weights that it serves."""
    other: Path
    """Other weights."""


@pytest.fixture(scope="module")
def served(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    same = checkpoint("llama", checkpoints)
    other = checkpoint("llama", checkpoints, seed=OTHER_SEED)
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(same, folder)
    # A peer that is refused cannot release the offer either.
    about = atlas(lease_seconds=2.0)
    with engine(folder, name="prefill", core="0", connector=about, block_size=64) as prefill:
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        yield Served(prefill, folder, same, other)


@pytest.fixture(scope="module")
def right(served: Served) -> Answer:
    """What an engine alone answers with the other weights."""
    return undisturbed(served.other, [prompt(TOKENS)])[0]


def decoding(model: Path, policy: str, **settings: Any) -> Any:
    about = atlas(policy, **settings)
    return engine(model, name=policy, core="1", connector=about, block_size=64)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("which", ["other", "replaced"])
def test_the_cache_of_other_weights_is_not_read(
    which: str, policy: str, served: Served, right: Answer
) -> None:
    tokens = prompt(TOKENS)
    with decoding(getattr(served, which), policy) as decode:
        got = decode.generate(tokens, params=served.prefill.prefill(tokens).params)
        facts = decode.idle()
        assert facts["pulled"] == 0
        assert str(Code.DIFFERENT_IDENTITY) in facts["warned"]
        if policy == "fail":
            assert (got.reason, got.tokens) == ("error", [])
        else:
            assert_same(right, got, "computed with its own weights")
    assert_nothing_held(served.prefill)


def test_equal_weights_in_another_folder_are_read(served: Served) -> None:
    tokens = prompt(TOKENS)
    alone = undisturbed(served.same, [tokens])[0]
    with decoding(served.same, "fail") as decode:
        got = decode.generate(tokens, params=served.prefill.prefill(tokens).params)
        assert_same(alone, got, "the same weights")
        assert decode.idle()["pulled"] > 0
        assert_nothing_held(served.prefill, decode)


def test_engines_that_check_no_identities_read_each_others_caches(
    served: Served, right: Answer
) -> None:
    """The tokens are those of neither model: this is what the check prevents."""
    tokens = prompt(TOKENS)
    unchecked: dict[str, Any] = {"check_identity": False}
    with (
        decoding(served.other, "fail", **unchecked) as decode,
        engine(
            served.same,
            name="unchecked",
            core="0",
            connector=atlas(**unchecked),
            block_size=64,
        ) as prefill,
    ):
        got = decode.generate(tokens, params=served.prefill.prefill(tokens).params)
        assert got.reason == "error", "one end still checks"
        got = decode.generate(tokens, params=prefill.prefill(tokens).params)
        assert got.reason == "length"
        assert got.tokens != right.tokens
        assert decode.idle()["pulled"] > 0


def test_weights_that_vllm_makes_up_need_a_name(checkpoints: Path) -> None:
    model = checkpoint("small_llama", checkpoints)
    with (
        pytest.raises(EngineStartError, match="weights_identity"),
        engine(model, name="dummy", connector=atlas(), load_format="dummy"),
    ):
        pass


@pytest.fixture
def identify(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CacheIdentity]:
    from kvatlas.engines.vllm.registered_caches import untouched_config

    for name, value in FOR_ALL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # which vLLM changes

    def found(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> CacheIdentity:
        config = engine_config(str(model), None, options)
        untouched = untouched_config(config.model_config)
        made = engine_identity(config, ConnectorSettings.read(settings), untouched)
        assert made is not None
        return made

    return found


def test_arguments_that_change_keys_and_values_make_another_identity(
    identify: Callable[..., CacheIdentity], checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoint("llama", checkpoints)
    plain = identify(model)
    options: dict[str, Any]
    for options in (
        {"dtype": "float16"},
        {"max_model_len": 512},
        {"block_size": 128},
        {"enable_prefix_caching": True},
        {"tensor_parallel_size": 2},
        {"hf_overrides": {"max_position_embeddings": 2048}},  # the checkpoint's own value
    ):
        assert identify(model, **options) == plain, options
    renamed = tmp_path / "renamed"
    shutil.copytree(model, renamed)
    config = json.loads((renamed / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
    assert identify(renamed) == plain
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for options in (
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"rope_parameters": rope}},
        {"quantization": "fp8", "dtype": "float16"},
    ):
        assert identify(model, **options).config != plain.config, options
        assert identify(model, **options).weights == plain.weights
    named = identify(model, {"weights_identity": "v7"}, load_format="dummy")
    assert (named.weights, named.config) == ("v7", plain.config)
    with pytest.raises(AtlasError) as refusal:
        identify(model, load_format="dummy")
    assert refusal.value.code is Code.BAD_CONFIG
    (renamed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert identify(renamed).config != plain.config


def test_latent_attention_on_a_cpu_is_refused(
    identify: Callable[..., CacheIdentity], checkpoints: Path
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvatlas.engines.vllm import KVAtlasConnector

    model = checkpoint("deepseek", checkpoints)
    assert identify(model).weights, "its identity is known, and it is refused all the same"
    with pytest.raises(EngineStartError, match="MLA"), engine(model, name="mla", connector=atlas()):
        pass
    config = engine_config(str(model), None, {})
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        with pytest.raises(AtlasError) as refusal:
            KVAtlasConnector(config, role, None)
        assert refusal.value.code is Code.ENGINE_REFUSES
