"""Each family's config: how its caches are called, in which order, and what they keep."""

from __future__ import annotations

import msgspec

from kvatlas.models import Model
from kvatlas.models.architectures import FAMILIES as KNOWN
from kvatlas.specs import FullAttention, Indexer, SlidingAttention, Spec
from tests.architectures.recording import recorded
from tests.cases import each
from tests.models.configs import FAMILIES, GQA, config, nested

# family: (name, kind, bytes of a page of 256 tokens) of each cache, in order
TABLE: dict[str, list[tuple[str, str, int]]] = {
    "llama": [(f"model.layers.{i}.self_attn.attn", "full_attention", 256 * 1024) for i in (0, 1)],
    "mistral": [(f"model.layers.{i}.self_attn.attn", "sliding_window", 256 * 1024) for i in (0, 1)],
    "gpt_oss": [
        ("model.layers.0.attn.attn", "sliding_window", 256 * 512),
        ("model.layers.1.attn.attn", "full_attention", 256 * 512),
        ("model.layers.2.attn.attn", "sliding_window", 256 * 512),
        ("model.layers.3.attn.attn", "full_attention", 256 * 512),
    ],
    "minimax_m3": [
        ("model.layers.0.self_attn.attn", "full_attention", 256 * 1024),
        ("model.layers.1.self_attn.attn.index_cache", "indexer", 256 * 256),
        ("model.layers.1.self_attn.attn", "full_attention", 256 * 1024),
        ("model.layers.2.self_attn.attn.index_cache", "indexer", 256 * 256),
        ("model.layers.2.self_attn.attn", "full_attention", 256 * 1024),
    ],
    "falcon": [
        (f"transformer.h.{i}.self_attention.attn", "full_attention", 256 * 512) for i in (0, 1)
    ],
    "gpt2": [(f"transformer.h.{i}.attn.attn", "full_attention", 256 * 12 * 256) for i in (0, 1)],
    "dbrx": [
        (f"transformer.blocks.{i}.norm_attn_norm.attn.attn", "full_attention", 256 * 1024)
        for i in (0, 1)
    ],
    "qwen2_5_vl": [
        (f"language_model.model.layers.{i}.self_attn.attn", "full_attention", 256 * 1024)
        for i in (0, 1)
    ],
    "deepseek_v3": [
        (f"model.layers.{i}.self_attn.attn", "latent_attention", 256 * 1152) for i in (0, 1)
    ],
    "deepseek_v32": [
        ("model.layers.0.self_attn.indexer.k_cache", "indexer", 256 * 132),
        ("model.layers.0.self_attn.attn", "latent_attention", 256 * 1152),
        ("model.layers.1.self_attn.indexer.k_cache", "indexer", 256 * 132),
        ("model.layers.1.self_attn.attn", "latent_attention", 256 * 1152),
    ],
    "deepseek_v4": [
        ("model.layers.0.attn.swa_cache", "sliding_latent", 149760),
        ("model.layers.1.attn.indexer.k_cache", "indexer", 8640),
        ("model.layers.1.attn.indexer.compressor.state_cache", "compressor_state", 524736),
        ("model.layers.1.attn.swa_cache", "sliding_latent", 149760),
        ("model.layers.1.attn", "latent_attention", 37440),
        ("model.layers.1.attn.compressor.state_cache", "compressor_state", 2097216),
        ("model.layers.2.attn.swa_cache", "sliding_latent", 149760),
        ("model.layers.2.attn", "latent_attention", 1728),
        ("model.layers.2.attn.compressor.state_cache", "compressor_state", 1048896),
    ],
    "qwen3_next": [
        *[(f"model.layers.{i}.linear_attn", "gated_delta_net", 274432) for i in range(3)],
        ("model.layers.3.self_attn.attn", "full_attention", 256 * 2048),
    ],
    "qwen3_5": [
        *[
            (f"language_model.model.layers.{i}.linear_attn", "gated_delta_net", 536576)
            for i in range(3)
        ],
        ("language_model.model.layers.3.self_attn.attn", "full_attention", 256 * 2048),
    ],
    "kimi_linear": [
        *[(f"model.layers.{i}.self_attn", "kimi_delta", 542720) for i in range(3)],
        ("model.layers.3.self_attn", "latent_attention", 256 * 1152),
    ],
    "minimax_text": [
        *[(f"model.layers.{i}.self_attn", "lightning_attention", 262144) for i in range(7)],
        ("model.layers.7.self_attn.attn", "full_attention", 256 * 1024),
    ],
    "lfm2": [
        ("model.layers.0.short_conv", "short_conv", 4096),
        ("model.layers.1.short_conv", "short_conv", 4096),
        ("model.layers.2.self_attn.attn", "full_attention", 256 * 1024),
        ("model.layers.3.short_conv", "short_conv", 4096),
    ],
    "rwkv7": [(f"model.layers.{i}.attn", "rwkv7", 135168) for i in (0, 1)],
    "whisper": [
        (".decoder.layers.0.layers.self_attn.attn", "full_attention", 256 * 5120),
        (".decoder.layers.0.layers.encoder_attn.attn", "cross_attention", 256 * 5120),
        (".decoder.layers.1.layers.self_attn.attn", "full_attention", 256 * 5120),
        (".decoder.layers.1.layers.encoder_attn.attn", "cross_attention", 256 * 5120),
    ],
    "nemotron_h": [
        ("model.layers.0.mixer", "mamba2", 542720),
        ("model.layers.2.mixer", "mamba2", 542720),
        ("model.layers.3.mixer.attn", "full_attention", 256 * 1024),
    ],
    "granite4": [
        ("model.layers.0.mixer", "mamba2", 269824),
        ("model.layers.1.self_attn.attn", "full_attention", 256 * 1024),
        ("model.layers.2.mixer", "mamba2", 269824),
    ],
    "bamba": [
        ("model.layers.0.mixer", "mamba2", 269824),
        ("model.layers.1.attn", "full_attention", 256 * 1024),
        ("model.layers.2.mixer", "mamba2", 269824),
    ],
    "jamba": [
        *[(f"model.layers.{i}.mixer", "mamba1", 77824) for i in range(4)],
        ("model.layers.4.attn", "full_attention", 256 * 1024),
        *[(f"model.layers.{i}.mixer", "mamba1", 77824) for i in range(5, 8)],
    ],
    "falcon_h1": [
        ("model.layers.0.attn", "full_attention", 256 * 1024),
        ("model.2.mixer", "mamba2", 269824),
        ("model.layers.1.attn", "full_attention", 256 * 1024),
        ("model.3.mixer", "mamba2", 269824),
    ],
    "zamba2": [
        ("model.attn.0", "full_attention", 256 * 8192),
        ("model.attn.1", "full_attention", 256 * 8192),
        ("model.attn.2", "full_attention", 256 * 8192),
        *[(f"{3 + i}.mixer", "mamba2", 275200) for i in range(6)],
    ],
    "mamba": [(f"backbone.layers.{i}.mixer", "mamba1", 58368) for i in (0, 1)],
    "mamba2": [(f"backbone.layers.{i}.mixer", "mamba2", 403968) for i in (0, 1)],
}


def kind(spec: Spec) -> str:
    return str(msgspec.to_builtins(spec)["kind"])


def kinds(model: Model) -> list[str]:
    return [kind(layer.spec).split("_")[0] for layer in model.layers]


@each(TABLE)
def test_caches_are_named_ordered_and_sized_as_in_vllm(family: str) -> None:
    model = Model.load(FAMILIES[family])
    caches = [(layer.name, kind(layer.spec), layer.spec.page_bytes(256)) for layer in model.layers]
    assert caches == TABLE[family]
    assert model.warnings == ()


@each(FAMILIES)
def test_every_family_loads_travels_and_owns_distinct_caches(family: str) -> None:
    model = Model.load(FAMILIES[family])
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model
    names = [layer.name for layer in model.layers]
    assert len(set(names)) == len(names) > 0
    assert all(0 <= layer.index < model.depth for layer in model.layers)


@each(
    [
        ("gemma2", "sliding full sliding full"),
        ("gemma3", "sliding sliding sliding sliding sliding full sliding sliding"),
        ("gemma3n", "sliding sliding sliding"),
        ("gemma4", "sliding sliding sliding sliding sliding full"),
        ("olmo3", "sliding sliding sliding full sliding sliding sliding full"),
        ("exaone4", "sliding sliding sliding full sliding sliding sliding full"),
        ("llama4", "chunked chunked chunked full chunked chunked chunked full"),
        ("qwen2", "full full sliding"),
        ("mimo_v2", "full sliding sliding"),
        ("step", "full sliding sliding sliding"),
    ],
)
def test_patterns_of_full_and_local_layers(family: str, pattern: str) -> None:
    assert kinds(Model.load(FAMILIES[family])) == pattern.split()


def test_kinds_of_layers_have_sizes_of_their_own() -> None:
    gemma, step, mimo = (
        Model.load(FAMILIES[name]).layers for name in ("gemma4", "step", "mimo_v2")
    )
    assert gemma[0].spec == SlidingAttention(heads=2, head_dim=128, window=1024)
    assert gemma[5].spec == FullAttention(heads=1, head_dim=256)
    assert step[0].spec == FullAttention(heads=2, head_dim=128)
    assert step[1].spec == SlidingAttention(heads=4, head_dim=64, window=512)
    assert mimo[0].spec == FullAttention(heads=2, head_dim=192, v_dim=128)
    assert mimo[1].spec == SlidingAttention(heads=4, head_dim=192, v_dim=128, window=128)


def test_cohere_counts_the_tokens_before_the_current_one() -> None:
    assert Model.load(FAMILIES["cohere2"]).layers[0].spec == SlidingAttention(
        heads=2, head_dim=128, window=4097
    )


def test_pruned_layers_keep_fewer_heads_or_nothing() -> None:
    model = Model.load(FAMILIES["deci"])
    assert [(layer.index, layer.spec) for layer in model.layers] == [
        (0, FullAttention(heads=2, head_dim=128)),
        (2, FullAttention(heads=1, head_dim=128)),
    ]
    assert model.depth == 3


@each(
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": None, "index_topk_pattern": "FFFSSSFS"},
        {
            "index_topk_freq": None,
            "indexer_types": [*["full"] * 3, *["shared"] * 3, "full", "shared"],
        },
    ],
)
def test_only_layers_that_choose_anew_keep_an_indexer(change: dict[str, object]) -> None:
    model = Model.load(FAMILIES["glm5_2"] | change)
    chosen = [layer.index for layer in model.layers if isinstance(layer.spec, Indexer)]
    assert chosen == [0, 1, 2, 6]
    assert len(model.layers) == 8 + 4


def test_a_deepseek_with_an_indexer_is_sparse_whatever_it_calls_itself() -> None:
    model = Model.load(FAMILIES["deepseek_v32"] | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert model.layers[0].name.endswith("indexer.k_cache")


def test_zamba_registers_attention_block_by_block() -> None:
    assert [layer.index for layer in Model.load(FAMILIES["zamba2"]).layers[:3]] == [1, 5, 3]


@each(["text_config", "llm_config", "language_config"])
def test_text_models_are_found_inside_multimodal_ones(key: str) -> None:
    inner = config("LlamaForCausalLM", 2, GQA)
    model = Model.load({"architectures": ["SomeVisionModel"], key: inner, "vision_config": {}})
    assert model.layers[1].name == "language_model.model.layers.1.self_attn.attn"
    assert model.attention_heads == 8
    assert Model.load({"thinker_config": {"text_config": inner}}).layers == model.layers


def test_a_wrapper_leaves_out_its_text_models_defaults() -> None:
    inner = {"num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    model = Model.load(nested("Gemma3ForConditionalGeneration", "gemma3_text", inner))
    assert model.layers[5].spec == FullAttention(heads=4, head_dim=256)
    assert "num_key_value_heads is missing: using the default, 4" in model.warnings


def test_a_plain_decoder_nobody_knows_is_read_with_its_assumptions() -> None:
    model = Model.load(config("BrandNewForCausalLM", 2, GQA, num_key_value_heads=None))
    assert [layer.spec for layer in model.layers] == [FullAttention(heads=8, head_dim=128)] * 2
    assert model.warnings == (
        "unknown architecture BrandNewForCausalLM: read as a plain decoder",
        "num_key_value_heads is missing: using the number of query heads",
        "head_dim is missing: using hidden size / query heads",
        "layer_types and sliding_window are missing: assuming full attention",
        "assuming one cache per layer, named as in Llama",
    )


def test_every_family_that_is_listed_has_a_test() -> None:
    readers = {family.reader for family in KNOWN.values()}
    read = {KNOWN[key].reader for c in FAMILIES.values() for key in names_in(c)}
    compared = {entry.architecture for entry in recorded().values()}
    assert read | {KNOWN[name].reader for name in compared & KNOWN.keys()} == readers


def names_in(values: dict[str, object]) -> list[str]:
    text = values.get("text_config", {})
    assert isinstance(text, dict)
    names = [*values["architectures"], text.get("model_type")]  # type: ignore[misc]
    return [name for name in names if name in KNOWN]
