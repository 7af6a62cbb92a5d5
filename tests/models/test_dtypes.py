"""State dtypes by engine, and cache dtypes by checkpoint and by wish."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.specs import (
    CompressorState,
    FullAttention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba2,
    SlidingLatentAttention,
)
from tests.cases import each
from tests.models.configs import FAMILIES


@each(
    [
        ("qwen3_next", "bf16", "fp32"),
        ("qwen3_5", "fp32", "fp32"),
        ("kimi_linear", "fp32", "fp32"),
        ("nemotron_h", "fp32", "fp32"),
        ("granite4", "bf16", "fp32"),
        ("jamba", "bf16", "fp32"),
        ("mamba", "bf16", "fp32"),
        ("mamba2", "bf16", "fp32"),
        ("minimax_text", "bf16", "fp32"),
        ("rwkv7", "fp32", "fp32"),
    ],
)
def test_states_are_kept_in_what_the_engine_keeps_them_in(
    family: str, vllm: str, sglang: str
) -> None:
    def ssm(**options: Any) -> str:
        spec = Model.load(FAMILIES[family], **options).layers[0].spec.ssm_dtype  # type: ignore[union-attr]
        return str(spec)

    assert ssm() == vllm
    assert ssm(engine="sglang") == sglang
    assert ssm(ssm_dtype="float16") == "fp16"
    assert ssm(ssm_dtype="bfloat16", engine="sglang") == "bf16"


def test_what_a_config_asks_for_counts_where_vllm_listens() -> None:
    heard = (
        Model.load(FAMILIES["nemotron_h"] | {"mamba_ssm_cache_dtype": "bfloat16"}).layers[0].spec
    )
    assert isinstance(heard, Mamba2)
    assert heard.page(1).fields[1].dtype.name == "bf16"
    deaf = Model.load(FAMILIES["qwen3_next"] | {"mamba_ssm_dtype": "float32"}).layers[0].spec
    assert isinstance(deaf, GatedDeltaNet)
    assert deaf.ssm_dtype == "bf16"


def test_a_convolution_is_kept_in_the_models_dtype_unless_told() -> None:
    for options, name in (({}, "bf16"), ({"conv_dtype": "float32"}, "fp32")):
        spec = Model.load(FAMILIES["lfm2"], **options).layers[0].spec  # type: ignore[arg-type]
        assert spec.page(1).fields[0].dtype.name == name


@each(
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"kv_cache_quant_algo": None, "quant_algo": "NVFP4"}, "auto"),
        ({}, "auto"),
    ],
)
def test_a_checkpoint_says_what_its_cache_is_kept_in(
    quantization: dict[str, Any], cache: str
) -> None:
    root = FAMILIES["llama"] | {"quantization_config": quantization}
    text = dict(FAMILIES["gemma4"]["text_config"], quantization_config=quantization)
    for model in (Model.load(root), Model.load(FAMILIES["gemma4"] | {"text_config": text})):
        assert model.cache == cache
        assert {layer.spec.cache for layer in model.layers} == {cache}  # type: ignore[union-attr]
        assert model.warnings == ()


def test_an_unknown_scheme_is_named_and_left() -> None:
    values = FAMILIES["llama"] | {"quantization_config": {"kv_cache_quant_algo": "FP3"}}
    assert Model.load(values).warnings == (
        "unknown cache scheme 'FP3' in the checkpoint: using auto",
    )


@each(
    [("auto", 512, 2), ("fp8", 256, 2), ("int8_per_token_head", 264, 2), ("nvfp4", 72, 4)],
)
def test_attention_takes_another_cache(cache: str, content: int, heads: int) -> None:
    page = Model.load(FAMILIES["llama"]).with_cache(cache).layers[0].spec.page(16)
    assert (page.content, page.heads) == (content, heads)


def test_a_wish_overrides_the_checkpoint_and_can_be_taken_back() -> None:
    model = Model.load(FAMILIES["llama"])
    assert model.with_cache("nvfp4").with_cache("auto") == model
    assert model.with_cache("fp8").cache == "fp8"
    in_half = model.with_cache("float16").layers[0].spec
    assert in_half == FullAttention(heads=2, head_dim=128, dtype="fp16")


def test_states_and_indexers_keep_what_they_have() -> None:
    for family in ("qwen3_5", "deepseek_v32", "deepseek_v4", "minimax_m3"):
        model = Model.load(FAMILIES[family])
        for before, after in zip(model.layers, model.with_cache("fp8").layers, strict=True):
            if isinstance(before.spec, GatedDeltaNet | Indexer | CompressorState):
                assert before == after


def test_sparse_latents_keep_fp8_in_their_kernels_format() -> None:
    def contents(family: str, cache: str) -> set[int]:
        layers = Model.load(FAMILIES[family]).with_cache(cache).layers
        rows = [la.spec for la in layers if isinstance(la.spec, LatentAttention)]
        return {spec.page(256).content for spec in rows}

    assert contents("deepseek_v3", "fp8") == {576}
    assert contents("deepseek_v32", "fp8") == {656}
    assert contents("deepseek_v32", "nvfp4_ds_mla") == {352}
    assert contents("deepseek_v4", "auto") == contents("deepseek_v4", "fp8") == {584}
    assert Model.load(FAMILIES["deepseek_v4"]).cache == "auto"


def test_deepseek_v4_pads_its_pages() -> None:
    window = Model.load(FAMILIES["deepseek_v4"]).layers[0].spec
    assert isinstance(window, SlidingLatentAttention)
    assert window.page(64).nbytes == 37440


@each(
    [
        ("llama", "fp7", Code.UNKNOWN_DTYPE),
        ("llama", None, Code.UNKNOWN_DTYPE),
        ("llama", "fp8_ds_mla", Code.BAD_SPEC),
        ("deepseek_v3", "int8_per_token_head", Code.BAD_SPEC),
        ("deepseek_v4", "nvfp4_ds_mla", Code.BAD_SPEC),
        ("mimo_v2", "nvfp4", Code.BAD_SPEC),
    ],
)
def test_a_cache_that_no_layer_can_have_is_refused(family: str, cache: str, code: Code) -> None:
    with pytest.raises(AtlasError) as refusal:
        Model.load(FAMILIES[family]).with_cache(cache)
    assert refusal.value.code is code


def test_a_model_is_served_in_another_dtype_than_its_config_says() -> None:
    """Engines serve fp32 checkpoints in 16 bits, unless they are asked not to."""
    config = {**FAMILIES["llama"], "dtype": "float32"}
    for asked, served in ((None, "bf16"), ("float32", "fp32"), ("fp16", "fp16")):
        model = Model.load(config, dtype=asked)
        assert {layer.spec.dtype for layer in model.layers} == {served}  # type: ignore[union-attr]
        assert Model.load(model, dtype=served) is model
    with pytest.raises(AtlasError) as refusal:
        Model.load(Model.load(config), dtype="fp32")
    assert refusal.value.code is Code.UNREADABLE
