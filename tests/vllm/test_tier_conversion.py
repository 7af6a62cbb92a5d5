"""An engine reads from a tier what engines of another cache dtype have stored, where it asks to."""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.copying import copy_request
from kvatlas.engines.vllm import ConnectorSettings, describe_stage, prefix_tier
from kvatlas.engines.vllm.describe import described_model, join_stages
from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.engine_tier import _check_stored, find_tier, open_tier
from kvatlas.engines.vllm.fleet_tier import find_fleet_tier, open_fleet_tier
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.tier_conversion import (
    keeps_finished,
    layer_scales,
    prefix_identity,
    stored_cache,
    tier_converting,
)
from kvatlas.engines.vllm.tier_worker import TierWorker
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity
from kvatlas.routing import route
from kvatlas.specs import FullAttention
from kvatlas.tier import Converting, Tier
from kvatlas.wire import Memory
from tests.tier.test_topologies import MODELS
from tests.tier.world import small, tier_plan
from tests.vllm.shapes import Config, FullAttentionSpec, Group, vllm_config
from tests.vllm.test_prefix_tier import LAYERS, MEMORY, TOKENS, EngineWithTier, asking

OWN_SCALES = dict.fromkeys(LAYERS[0], (0.5, 0.25))


class Mode(Enum):
    FP8_PER_TENSOR = 1


KEPT: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "torch.float32", "item": 4},
    "fp16": {"dtype": "torch.float16", "item": 2},
    "bf16": {"dtype": "torch.bfloat16", "item": 2},
    "fp8": {"dtype": "torch.uint8", "item": 1, "kv_quant_mode": Mode.FP8_PER_TENSOR},
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the scheduler wait for answers that it can do without, on a busy machine too."""
    monkeypatch.setattr(prefix_tier, "_SOON", 10.0)


class ConvertingEngine(EngineWithTier):
    """An engine with some cache dtype, and settings as the connector reads them."""

    def __init__(
        self, where: str, kept: str, *, block: int = 64, backend: str = "", **settings: Any
    ) -> None:
        served = vllm_config()
        served.cache_config.cache_dtype = "fp8" if kept == "fp8" else "auto"
        served.model_config.dtype = "torch.bfloat16" if kept == "fp8" else KEPT[kept]["dtype"]
        served.model_config.hf_config.to_dict = lambda: {"rope": 1}
        config = Config([Group(FullAttentionSpec(block_size=block, **KEPT[kept]), LAYERS[0])], 24)
        stage = describe_stage(served, config, backends=dict.fromkeys(LAYERS[0], backend))
        modules = {
            name: SimpleNamespace(_k_scale_float=k, _v_scale_float=v)
            for name, (k, v) in OWN_SCALES.items()
        }
        served.compilation_config = SimpleNamespace(static_forward_context=modules)
        said: dict[str, Any] = {"transport": "none", "tier": where, "weights_identity": "weights"}
        if where.startswith("folder:"):
            said["tier_options"] = {"staging": 1 << 18}
        given = ConnectorSettings.read(said | settings)
        self.plan = join_stages([stage])
        size = self.plan.pools[0].nbytes
        # Numbers of every format, and no infinities.
        self.pool = np.random.default_rng(5).integers(0, 0x40, size, np.uint8)
        self.converting = tier_converting(given, layer_scales(served, stage))
        identity = prefix_identity(given, served)
        name = f"engine {id(self)}"
        self.tier: PrefixTier
        whose = CacheIdentity(weights=identity.hex())
        if given.fleet_tier:
            opened: Any = open_fleet_tier(given, self.plan, whose, self.converting)
            asked: Any = find_fleet_tier(given, opened.plan.to_json(), whose)
            identity = b""
        else:
            about = (described_model([stage]), self.plan, name, self.converting)
            opened, asked = open_tier(where, MEMORY, *about), find_tier(where, name)
        self.usable = opened is not None
        assert asked is not None
        self.ended = EndedRequests()
        held = Memory(self.pool.ctypes.data, size, owner=self.pool)
        self.worker = TierWorker(opened, self.plan, 0, held, self.ended, self.converting)
        self.scheduler = SchedulerSide(served, config, alone=True)
        keeps = keeps_finished(given, served.model_config)
        self.scheduler.use_tier(PrefixTier(asked, self.plan.max_len, identity), 20.0, keeps=keeps)


def converted(src: ConvertingEngine, dst: ConvertingEngine, *ends: list[int], tokens: Any) -> Any:
    """What the other engine's pool should be, by a route that meets no tier."""
    expected, how = dst.pool.copy(), dst.converting
    assert how is not None
    copy_request(
        route(
            src.plan, dst.plan, convert=how.name, source_scales=how.source_scales,
            destination_scales=how.destination_scales,
        ),
        {0: {0: src.pool}}, {0: {0: expected}},
        source_blocks={0: ends[0]}, destination_blocks={0: ends[1]}, tokens=tokens,
    )  # fmt: skip
    return expected


@pytest.mark.parametrize("kind", ["file", "store"])
def test_an_engine_reads_what_others_have_stored_in_their_cache_dtype(
    kind: str, tmp_path: Path
) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("bf16", "fp8", {"convert": "bf16->fp8"}),
        ("fp8", "bf16", {"convert": "fp8->bf16", "convert_scales": 0.5}),
        ("fp32", "fp16", {"convert": "fp32->fp16"}),
    ]
    for number, (stored, own, settings) in enumerate(cases):
        where = f"{tmp_path}/{number}" if kind == "file" else f"folder://{tmp_path}/{number}"
        table, tokens = [3, 9, 1, 7, 5], TOKENS[:300]
        first = ConvertingEngine(where, stored)
        assert first.finish(tokens, table)
        other = ConvertingEngine(where, own, block=128, **settings)
        request = asking(tokens[:200] + [5] * 50)
        assert other.matched(request) == 192, (stored, own)
        expected = converted(first, other, table, [6, 2], tokens=192)
        ended = other.load(request, [6, 2], external=192)
        assert (ended.received, ended.failed) == ({"r"}, set())
        np.testing.assert_array_equal(other.pool, expected)
        # What it computes itself it keeps in a store, under the name of its own dtype alone.
        own_prompt = [77, *tokens]
        keeps = kind == "store" and stored != "fp32"
        assert other.finish(own_prompt, [1, 3, 5], name="own") is keeps
        assert other.matched(asking(own_prompt, "again")) == (256 if keeps else 0)
        assert first.matched(asking(own_prompt, "theirs")) == 0
        for one in (first, other):
            one.close()


def test_a_file_that_is_not_there_yet_is_made_for_the_engines_that_store(tmp_path: Path) -> None:
    where = str(tmp_path / "tier")
    early = ConvertingEngine(where, "fp8", convert="bf16->fp8")
    first = ConvertingEngine(where, "bf16")
    assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    assert early.matched(asking(TOKENS[:300])) == 256
    first.close()
    early.close()


def test_a_conversion_that_the_tier_does_not_need_or_know_is_refused(tmp_path: Path) -> None:
    where = str(tmp_path / "tier")
    ConvertingEngine(where, "fp8").close()
    refused: list[tuple[str, dict[str, Any], Code]] = [
        ("fp8", {"convert": "bf16->fp8"}, Code.BAD_CONVERSION),
        ("bf16", {"convert": "fp16->bf16"}, Code.BAD_CONVERSION),
        ("bf16", {"convert": "fp8->bf16"}, Code.MISSING_SCALES),
    ]
    for kept, settings, code in refused:
        with pytest.raises(AtlasError) as refusal:
            ConvertingEngine(where, kept, **settings)
        assert refusal.value.code is code, settings


def test_unlike_scales_of_layers_that_are_not_converted_are_refused_at_the_start() -> None:
    quantised = MODELS["dense"].with_cache("fp8")
    first, *rest = quantised.layers[0], *MODELS["dense"].layers[1:]
    own = small(msgspec.structs.replace(quantised, layers=(first, *rest)))
    for scale, code in ((0.5, None), (0.25, Code.BAD_CONVERSION)):
        how = Converting("fp8->bf16", source_scales=0.5, destination_scales={first.name: scale})
        with pytest.raises(AtlasError) if code else nullcontext() as refusal:
            _check_stored(tier_plan(quantised), own, how)
        assert refusal is None or refusal.value.code is code


def test_another_models_file_is_not_used_by_an_engine_that_converts(tmp_path: Path) -> None:
    dense, quantised = MODELS["dense"], MODELS["dense"].with_cache("fp8")
    replace = msgspec.structs.replace
    wider = tuple(replace(one, spec=FullAttention(heads=8, head_dim=16)) for one in dense.layers)
    unlike = tuple(replace(one, name=f"other.{one.name}") for one in dense.layers)
    for number, layers in enumerate((wider, unlike, dense.layers[:-1])):
        where = tmp_path / str(number)
        Tier.open(where, tier_plan(replace(dense, layers=layers))).close()
        how = Converting("bf16->fp8", source_scales={"no layer of it": 1.0}, destination_scales=1.0)
        assert open_tier(str(where), MEMORY, quantised, small(quantised), "engine", how) is None


def test_an_engine_finds_nothing_in_a_file_that_its_workers_cannot_read(tmp_path: Path) -> None:
    where = str(tmp_path / "tier")
    first = ConvertingEngine(where, "bf16")
    assert first.usable
    assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    other = ConvertingEngine(where, "fp8")  # without being asked nothing is converted
    assert not other.usable
    assert first.matched(asking(TOKENS[:300], "first")) == 256
    assert other.matched(asking(TOKENS[:300], "other")) == 0
    other.close()
    first.close()


def test_a_cache_dtype_has_one_name_whatever_engines_call_it() -> None:
    served = vllm_config()
    served.model_config.dtype = "torch.bfloat16"
    for said, convert, name in (
        ("auto", None, "bf16"),
        ("bfloat16", None, "bf16"),
        ("fp8_e4m3", None, "fp8"),
        ("fp8_ds_mla", None, "fp8"),
        ("fp8_inc", None, "fp8_inc"),
        ("fp8", "bfloat16->fp8", "bf16"),
    ):
        served.cache_config.cache_dtype = said
        settings = ConnectorSettings.read({"tier": "/f", "convert": convert})
        assert stored_cache(settings, served) == name


def test_what_was_read_in_another_dtype_is_kept_whole_in_ones_own(tmp_path: Path) -> None:
    where, longer = f"folder://{tmp_path}", TOKENS[:400]
    first = ConvertingEngine(where, "bf16")
    assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    other = ConvertingEngine(where, "fp8", convert="bf16->fp8")
    assert other.matched(asking(longer, "before")) == 256
    assert other.finish(longer, [1, 3, 5, 7, 9, 11, 13], name="longer")
    alone = ConvertingEngine(where, "fp8")
    for engine in (other, alone):
        assert engine.matched(asking([*longer, 7], "after")) == 384
    for engine in (first, other, alone):
        engine.close()


def test_rows_of_another_dtype_are_found_where_a_backend_packs_them_its_own_way(
    tmp_path: Path,
) -> None:
    where = f"folder://{tmp_path}"
    first = ConvertingEngine(where, "fp32", backend="CPU_ATTN")
    assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    other = ConvertingEngine(where, "fp16", backend="CPU_ATTN", convert="fp32->fp16")
    assert other.matched(asking(TOKENS[:300])) == 256
    for engine in (first, other):
        engine.close()


def test_scales_of_single_heads_are_not_taken_for_those_of_a_tensor() -> None:
    config = Config([Group(FullAttentionSpec(block_size=64, **KEPT["fp8"]), LAYERS[0])], 24)
    served = vllm_config()
    stage = describe_stage(served, config)
    by_head = SimpleNamespace(numel=lambda: 2)
    module = SimpleNamespace(_k_scale=by_head, _k_scale_float=0.5, _v_scale_float=0.5)
    modules = dict.fromkeys(LAYERS[0], module)
    served.compilation_config = SimpleNamespace(static_forward_context=modules)
    with pytest.raises(AtlasError) as refusal:
        layer_scales(served, stage)
    assert refusal.value.code is Code.CANNOT_CONVERT


def test_what_cannot_be_converted_from_is_refused_in_the_settings() -> None:
    for settings, hint in (
        ({"convert": "bf16->fp8"}, "other engines"),
        ({"convert": "bf16->fp8", "tier": "memory"}, "other engines"),
        ({"convert": "bf16->fp8, fp32->bf16", "tier": "/f"}, "one pair"),
        ({"convert_scales": 1.0, "tier": "/f"}, "Set convert"),
        ({"convert": "fp8->bf16", "tier": "/f", "convert_scales": -1}, "docs/how-to/vllm.md"),
        ({"convert": "bf16", "tier": "/f"}, "fp8->bf16"),
    ):
        with pytest.raises(AtlasError) as refusal:
            ConnectorSettings.read(settings)
        assert hint in refusal.value.hint, settings
