"""Places where configs mislead: each of these was read wrong by somebody."""

from __future__ import annotations

from kvatlas.models import Model
from kvatlas.specs import (
    CompressorState,
    FullAttention,
    KimiDelta,
    LatentAttention,
    Mamba1,
    Mamba2,
    SlidingAttention,
)
from tests.cases import each
from tests.models.configs import FAMILIES, GQA, MLA, config


def test_a_mixers_width_is_not_expand_times_hidden() -> None:
    spec = Model.load(FAMILIES["nemotron_h"] | {"hidden_size": 1344}).layers[0].spec
    assert isinstance(spec, Mamba2)
    assert (spec.heads * spec.head_dim, 2 * 1344) == (1024, 2688)
    beside = Model.load(FAMILIES["falcon_h1"] | {"mamba_d_head": "auto"}).layers[1].spec
    assert isinstance(beside, Mamba2)
    assert beside.heads * beside.head_dim == 1024


def test_an_mlps_width_is_not_the_mixers() -> None:
    spec = Model.load(FAMILIES["jamba"]).layers[0].spec
    assert isinstance(spec, Mamba1)
    assert spec.inner == 2048


def test_compress_ratios_are_one_longer_than_the_layers() -> None:
    assert Model.load(FAMILIES["deepseek_v4"]).depth == 3
    assert not any(layer.index == 3 for layer in Model.load(FAMILIES["deepseek_v4"]).layers)


def test_v4_compressors_run_over_twice_the_ratio_where_windows_overlap() -> None:
    states = [
        (layer.name.split(".", 4)[-1], layer.spec.width, layer.spec.window)
        for layer in Model.load(FAMILIES["deepseek_v4"]).layers
        if isinstance(layer.spec, CompressorState)
    ]
    assert states == [
        ("indexer.compressor.state_cache", 512, 8),
        ("compressor.state_cache", 2048, 8),
        ("compressor.state_cache", 1024, 128),
    ]


def test_shared_weights_are_not_shared_caches() -> None:
    model = Model.load(FAMILIES["zamba2"])
    assert sum(isinstance(layer.spec, FullAttention) for layer in model.layers) == 3
    assert sum(isinstance(layer.spec, Mamba2) for layer in model.layers) == 6


def test_zamba_attends_over_two_rows_at_once() -> None:
    assert Model.load(FAMILIES["zamba2"]).layers[0].spec == FullAttention(heads=8, head_dim=256)


def test_layers_that_share_a_cache_keep_none() -> None:
    model = Model.load(FAMILIES["gemma3n"])
    assert (model.depth, [layer.index for layer in model.layers]) == (5, [0, 1, 2])


def test_kda_layers_count_from_one() -> None:
    model = Model.load(FAMILIES["kimi_linear"])
    assert [isinstance(layer.spec, KimiDelta) for layer in model.layers] == [True] * 3 + [False]


def test_kimis_head_dim_is_not_a_cache_size() -> None:
    model = Model.load(FAMILIES["kimi_linear"] | {"head_dim": 72, "mla_use_nope": True})
    assert model.layers[3].spec == LatentAttention(latent=512, rope=64)


def test_62_layers_are_no_multiple_of_6() -> None:
    model = Model.load("Gemma-3-27B")
    full = [layer.index for layer in model.layers if isinstance(layer.spec, FullAttention)]
    assert full == list(range(5, 62, 6))
    assert len(full) == 10


def test_head_dim_is_not_hidden_size_over_heads() -> None:
    spec = Model.load("Gemma-2-2b").layers[1].spec
    assert spec == FullAttention(heads=4, head_dim=256)


def test_mtp_layers_are_no_part_of_the_plan() -> None:
    model = Model.load(FAMILIES["deepseek_v3"])
    assert len(model.layers) == model.depth == 2
    assert len(Model.load(FAMILIES["step"]).layers) == 4


def test_a_leftover_chunk_size_makes_no_chunks() -> None:
    assert {type(layer.spec) for layer in Model.load(FAMILIES["mimo_v2"]).layers} == {
        FullAttention,
        SlidingAttention,
    }


def test_sinks_that_are_weights_take_no_rows() -> None:
    spec = Model.load("gpt-oss-20b").layers[1].spec
    assert spec == FullAttention(heads=8, head_dim=64)


def test_whispers_layers_are_its_decoders() -> None:
    assert Model.load(FAMILIES["whisper"]).depth == 2


def test_a_window_beyond_the_context_never_slides() -> None:
    model = Model.load(config("Phi3ForCausalLM", 2, GQA, sliding_window=262144))
    assert isinstance(model.layers[0].spec, FullAttention)


@each([{"use_sliding_window": False}, {"sliding_window": 0}])
def test_a_window_can_be_switched_off(off: dict[str, object]) -> None:
    model = Model.load(config("Qwen2ForCausalLM", 2, GQA) | {"sliding_window": 4096} | off)
    assert isinstance(model.layers[0].spec, FullAttention)


def test_a_listing_without_a_number_of_layers_has_its_length() -> None:
    values = FAMILIES["nemotron_h"] | {
        "num_hidden_layers": None,
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "moe", "attention"],
        "mtp_layers_block_type": ["attention", "moe"],
    }
    model = Model.load(values)
    assert (model.depth, len(model.layers)) == (3, 2)


def test_a_quantised_checkpoint_may_keep_its_cache_whole() -> None:
    weights = {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}
    assert Model.load(FAMILIES["llama"] | weights).cache == "auto"


def test_a_deepseek_without_a_latent_rank_keeps_k_and_v() -> None:
    values = config("DeepseekV2ForCausalLM", 2, MLA, kv_lora_rank=None)
    assert Model.load(values).layers[0].spec == FullAttention(heads=8, head_dim=128)


def test_full_precision_checkpoints_are_served_in_16_bits() -> None:
    assert Model.load(FAMILIES["gpt2"]).dtype == "bf16"
    assert Model.load(FAMILIES["whisper"]).dtype == "fp16"


def test_a_config_without_a_dtype_says_what_was_assumed() -> None:
    model = Model.load(FAMILIES["llama"] | {"dtype": None})
    assert model.warnings == ("dtype is missing: using bf16",)
