"""Weights: exact parameters, bytes with their source, and what a rank holds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from benchmarks.weights import exact_parameters

from kvatlas import AtlasError, Code
from kvatlas.models import Model, Weights, catalogue
from kvatlas.models.known_models import CatalogueEntry
from tests.cases import each
from tests.profiles import DEEP

UNKNOWN_TO_TRANSFORMERS = {"RWKV7-World-2.9B", "Kimi-K3"}
PUBLISHED = {
    # As the safetensors index of the checkpoint, or the publisher, gives it.
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-4-Scout": 108_641_793_536,
    "RWKV7-World-2.9B": 2_947_735_040,
}


def families() -> list[CatalogueEntry]:
    """Every entry in the deep profile, else the smallest of each model type."""
    if DEEP:
        return list(catalogue().values())
    chosen: dict[str, CatalogueEntry] = {}
    for entry in catalogue().values():
        text = entry.config.get("text_config", entry.config)
        chosen.setdefault(text["model_type"], entry)
    return list(chosen.values())


def shallow(values: dict[str, Any], layers: int = 9) -> dict[str, Any]:
    """A config with its first layers alone: counting is linear in them, and transformers slow."""
    text = values.get("text_config")
    if text is not None:
        return values | {"text_config": shallow(text, layers)}
    depth = values.get("decoder_layers") or values["num_hidden_layers"]
    cut = {"num_hidden_layers": layers, "decoder_layers": layers, "encoder_layers": layers}
    made = {key: cut.get(key, value) for key, value in values.items()}
    for key, value in values.items():
        if isinstance(value, list | str) and depth <= len(value) <= depth + 1:
            made[key] = value[:layers]
        elif key in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
            made[key] = [index for index in value if index < layers]
        elif key in (
            "linear_attn_config",
            "sparse_attention_config",
        ):  # lists of layers that count from 1, and lists by layer
            made[key] = {
                name: [x for x in inner if x <= layers][:layers]
                if isinstance(inner, list)
                else inner
                for name, inner in value.items()
            }
    return made


@pytest.mark.slow
def test_parameters_are_exactly_those_of_transformers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    counted = 0
    for entry in families():
        config = entry.expanded() if DEEP else shallow(entry.expanded())
        weights = Weights.load(config)
        nested = "text_config" in config
        exact = exact_parameters(config)
        if exact is None:
            assert entry.name in UNKNOWN_TO_TRANSFORMERS
            assert "not checked" in weights.warnings[0]
            continue
        ours = weights.text_parameters if nested else weights.parameters
        assert ours == exact, f"{entry.name}: {ours - exact:,} parameters too many"
        counted += 1
        if DEEP and weights.parameters != ours:
            assert weights.parameters == exact_parameters(config, whole=True), entry.name
    assert counted >= 30


@pytest.mark.slow
def test_towers_are_exactly_those_of_transformers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for name in ("Llama-4-Scout", "Gemma-3-27B", "Gemma-4-31B", "Qwen3.6-27B", "Kimi-K2.5"):
        whole = exact_parameters(catalogue()[name].expanded(), whole=True)
        assert Weights.load(name).parameters == whole, name


@each(PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert Weights.load(name).parameters == PUBLISHED[name]


V41 = Path(__file__).parents[1] / "planning" / "ring_configs" / "DeepSeek-V4.1-Flash.json"


def test_parameters_of_deepseek_v41_are_those_that_were_published() -> None:
    """552 billion, without the tables of n-grams, which are no weights of a layer."""
    weights = Weights.load(V41)
    assert weights.parameters == pytest.approx(552e9, rel=0.002)
    assert weights.estimate
    assert "tables of n-grams are not counted" in weights.warnings[0]
    section = {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}
    fp4 = Weights.load({**json.loads(V41.read_text()), "quantization_config": section})
    experts = fp4.classes["experts"]
    assert experts.bytes == pytest.approx(experts.parameters * (0.5 + 1 / 32), rel=1e-6)


@each(catalogue().values())
def test_classes_add_up_to_the_whole(entry: CatalogueEntry) -> None:
    weights = Weights.load(entry)
    kept = [total for kind, total in weights.classes.items() if kind != "mtp"]
    assert sum(total.parameters for total in kept) == weights.parameters
    assert sum(total.bytes for total in weights.classes.values()) == weights.bytes
    assert weights.name == entry.name


@each(
    [
        # Totals of published indexes: gpt-oss in mxfp4, Llama in bf16.
        ("gpt-oss-20b", 13_761_264_768),
        ("Llama-3.1-8B", 16_060_522_496),
        ("Llama-4-Scout", 217_283_587_072),
    ]
)
def test_bytes_are_within_a_percent_of_a_published_index(name: str, total: int) -> None:
    assert Weights.load(name).bytes == pytest.approx(total, rel=0.01)


SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
    "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = 2 * (256 * 256 * 2 + 64 * 256 * 2 + 3 * 256 * 512)
REST = 2 * 1000 * 256 + 5 * 256


def sized(**section: Any) -> tuple[int, str]:
    weights = Weights.load({**SMALL, "quantization_config": section})
    return weights.bytes, weights.source


@each(
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1, 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5, 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, 1, 3 / 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5, 1 / 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5, 1 / 64),
    ]
)
def test_elements_and_scales_are_counted(
    section: dict[str, Any], element: float, scale: float
) -> None:
    size, source = sized(**section)
    # Blocks are cut short at the edge of a matrix of 64 rows.
    assert size == pytest.approx(LINEAR * (element + scale) + 2 * REST, rel=1e-3)
    assert source.startswith("config, ")


def test_groups_of_compressed_tensors_are_read() -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    size, source = sized(
        quant_method="compressed-tensors", config_groups=groups, ignore=["re:.*self_attn.*"]
    )
    attention = 2 * (256 * 256 * 2 + 64 * 256 * 2)
    packed = (LINEAR - attention) * (4 + 16 / 32) / 8
    assert size == packed + 2 * attention + 2 * REST
    assert source == "config, int4, groups of 32"


def test_what_a_checkpoint_leaves_out_stays_in_16_bits() -> None:
    """By a word, a glob, an expression, and of one layer alone."""
    everything, _ = sized(quant_method="modelopt", quant_algo="FP8")
    without, _ = sized(
        quant_method="modelopt", quant_algo="FP8", ignore=["model.layers.0.mlp*", "lm_head"]
    )
    assert without - everything == 3 * 256 * 512 - 3 * 8
    half, _ = sized(
        quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["mlp"]
    )
    assert half > everything


def test_an_expression_that_could_take_for_ever_matches_nothing() -> None:
    section = {"quant_method": "modelopt", "quant_algo": "FP8"}
    ignore = ["re:(a+)+$", "re:((", "*" * 50, 7]
    weights = Weights.load({**SMALL, "quantization_config": {**section, "ignore": ignore}})
    assert weights.bytes == sized(**section)[0]
    assert weights.source == "estimate, fp8"
    assert "3 patterns" in weights.warnings[0]


def test_a_quantisation_nobody_knows_is_said() -> None:
    weights = Weights.load({**SMALL, "quantization_config": {"quant_method": "mystery"}})
    assert weights.bytes == 2 * (LINEAR + REST)
    assert "mystery" in weights.warnings[0]


def test_an_index_beside_a_config_is_the_truth(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    derived = Weights.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 2 * derived.bytes}, "weight_map": {}}))
    weights = Weights.load(tmp_path)
    assert (weights.bytes, weights.source) == (2 * derived.bytes, "safetensors index")
    assert weights.per_rank() == pytest.approx(2 * derived.per_rank())
    for nothing in (0, -1, True, "12", None, float("inf")):
        index.write_text(json.dumps({"metadata": {"total_size": nothing}}))
        assert Weights.load(tmp_path).source == "config, bf16"
    index.write_text("[]")
    with pytest.raises(AtlasError) as refusal:
        Weights.load(tmp_path)
    assert refusal.value.code is Code.UNREADABLE


def test_modelopts_own_file_beside_a_config_is_read(tmp_path: Path) -> None:
    """Its weights' format, and the fp8 cache that it asks for."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert Model.load(tmp_path).cache == "auto"
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert Model.load(tmp_path).cache == "fp8_e4m3"
    assert Weights.load(tmp_path).source == "config, fp8"
    # What the config itself says goes first.
    own = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "quantization_config": own}))
    assert Model.load(tmp_path).cache == "auto"


def test_a_dtype_nobody_states_is_said_to_be_assumed() -> None:
    values = {key: value for key, value in SMALL.items() if key != "dtype"}
    assert Weights.load(values).source == "assumed bf16"


def test_a_family_nobody_described_is_counted_like_llama_and_says_so() -> None:
    weights = Weights.load({**SMALL, "model_type": "newcomer", "architectures": ["NewForCausalLM"]})
    assert weights.parameters == Weights.load(SMALL).parameters
    assert weights.source == "estimate, bf16"
    assert weights.estimate
    assert "newcomer" in weights.warnings[0]


def test_a_loaded_model_has_no_weights() -> None:
    with pytest.raises(AtlasError) as refusal:
        Weights.load(Model.load(SMALL))
    assert refusal.value.code is Code.UNREADABLE


def test_a_rank_holds_its_heads_its_rows_and_all_that_repeats() -> None:
    weights = Weights.load(SMALL)
    query, out, keys, mlp = 256 * 256, 256 * 256, 2 * 64 * 256, 3 * 256 * 512
    for tp, kv_share in ((1, 1), (2, 2), (8, 2)):  # two kv heads are repeated past tp 2
        rows = -(-1000 // (64 * tp)) * 64  # the vocabulary is padded where it is cut
        layer = (query + out + mlp) / tp + keys / kv_share + 2 * 256
        assert weights.per_rank(tp=tp) == 2 * (2 * layer + 2 * rows * 256 + 256)


def test_stages_hold_their_layers_and_their_end_of_the_vocabulary() -> None:
    for tied in (False, True):
        weights = Weights.load({**SMALL, "tie_word_embeddings": tied})
        whole = weights.per_rank()
        first = weights.per_rank(stage_layers=[2, 0])
        last = weights.per_rank(stage_layers=[0, 2])
        vocabulary = 2 * 1024 * 256
        # Tied or not, the last stage has a copy to compute logits with.
        assert last == first + 2 * 256
        assert first == whole - (0 if tied else vocabulary) - 2 * 256
    with pytest.raises(AtlasError) as refusal:
        weights.per_rank(stage_layers=[1, 2])
    assert refusal.value.code is Code.BAD_TOPOLOGY


def test_experts_are_cut_over_tp_or_dealt_out_over_ep() -> None:
    weights = Weights.load("DeepSeek-V3")
    experts = weights.classes["experts"].bytes
    rest = weights.per_rank(tp=8, ep=256) - experts / 256
    assert weights.per_rank(tp=8) == pytest.approx(rest + experts / 8, rel=1e-6)
    assert weights.per_rank(tp=8, ep=16) == pytest.approx(rest + experts / 16, rel=1e-6)
    # 256 experts over 96 ranks: three on the fullest.
    assert weights.per_rank(tp=8, ep=96) == pytest.approx(rest + experts * 3 / 256, rel=1e-6)


def test_latent_down_projections_routers_and_norms_are_on_every_rank() -> None:
    weights = Weights.load("DeepSeek-V3")
    repeated = sum(
        format_.bytes_of(tensor)
        for layer in weights.layers
        for tensor, format_ in layer
        if tensor.kind in ("router", "norm")
        or tensor.name.endswith(("q_a_proj", "kv_a_proj_with_mqa"))
    )
    cut = weights.per_rank(tp=1) - repeated
    assert weights.per_rank(tp=128) == pytest.approx(repeated + cut / 128, rel=1e-3)


def test_layers_that_predict_further_are_counted_apart() -> None:
    weights = Weights.load("DeepSeek-V3")
    # The checkpoint has 684.5 billion in all.
    total = weights.parameters + weights.classes["mtp"].parameters
    assert total == pytest.approx(684.5e9, rel=1e-4)
    assert weights.per_rank(mtp=True) > weights.per_rank()
    assert "mtp" not in Weights.load("MiniMax-M3").classes
