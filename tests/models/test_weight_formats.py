"""Weight formats: what checkpoints of each tool take on disk, and where a format is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from kvatlas import AtlasError, Code
from kvatlas.models import Weights
from kvatlas.models.config import Config
from kvatlas.models.weights.formats import GGUF_BLOCKS, NAMED_FORMATS, format_in_name, named_format
from kvatlas.models.weights.quantisation import quantisation
from kvatlas.models.weights.tensor import Tensor, TensorClass
from tests.cases import each
from tests.models.test_weights import LINEAR, REST, SMALL

ATTENTION = 2 * (256 * 256 * 2 + 64 * 256 * 2)
EMBEDDING = 1000 * 256


def loaded(**section: Any) -> Weights:
    return Weights.load({**SMALL, "quantization_config": section})


def torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_data": data, "_version": 1}


@each(
    [
        # torchao: the current form, and the string of older checkpoints.
        (
            {"quant_type": {"default": torchao("Int4WeightOnlyConfig", group_size=64)}},
            0.5 + 4 / 64,
        ),
        (
            {"quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 128}},
            0.5 + 4 / 128,
        ),
        ({"quant_type": {"default": torchao("Int8WeightOnlyConfig")}}, 1 + 4 / 256),
        ({"quant_type": "float8_dynamic_activation_float8_weight"}, 1 + 4 / 256),
        (
            {"quant_type": {"default": torchao("Int8DynamicActivationInt4WeightConfig")}},
            1 + 2 / 32,
        ),
    ]
)
def test_torchao_is_read(section: dict[str, Any], each_element: float) -> None:
    weights = loaded(quant_method="torchao", **section)
    assert weights.bytes == pytest.approx(LINEAR * each_element + 2 * REST, rel=0.01)
    assert not weights.warnings
    assert weights.source.startswith("config, ")


def test_torchao_by_module_and_its_exceptions() -> None:
    int4, int8 = torchao("Int4WeightOnlyConfig", group_size=64), torchao("Int8WeightOnlyConfig")
    modules = {"_default": int4, "model.layers.0.self_attn": int8, "model.embed_tokens": int8}
    kind = {"default": torchao("FqnToConfig", fqn_to_config=modules)}
    weights = loaded(quant_method="torchao", quant_type=kind, modules_to_not_convert=["mlp"])
    mlp = LINEAR - ATTENTION
    expected = ATTENTION / 2 * (0.5625 + 1) + 2 * mlp + 2 * REST - EMBEDDING
    assert weights.bytes == pytest.approx(expected, rel=0.02)
    everything = loaded(
        quant_method="torchao", quant_type={"default": int8}, include_input_output_embeddings=True
    )
    assert everything.bytes == pytest.approx(LINEAR + REST, rel=0.02)


@each(
    [
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, 1.0),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 32}, 0.5 + 1 / 32),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 128}, 0.5 + 2 / 128),
        ({"dtype": "int8", "qscheme": "per_channel"}, 1 + 4 / 256),
    ]
)
def test_quark_is_read(weight: dict[str, Any], each_element: float) -> None:
    settings = {"global_quant_config": {"weight": weight}, "exclude": ["lm_head", "*.mlp.*"]}
    weights = loaded(quant_method="quark", **settings)
    mlp = LINEAR - ATTENTION
    assert weights.bytes == pytest.approx(ATTENTION * each_element + 2 * mlp + 2 * REST, rel=0.01)
    # A layer's own format comes before the global one; a list has one entry for each level.
    named = {"*.mlp.*": {"weight": [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]}}
    both = loaded(quant_method="quark", **settings | {"exclude": []}, layer_quant_config=named)
    assert weights.bytes - both.bytes == pytest.approx(mlp, rel=0.01)
    assert not both.warnings
    # vLLM quantises no excluded layer, even if the layer has its own format.
    excluded = loaded(quant_method="quark", **settings, layer_quant_config=named)
    assert excluded.bytes == weights.bytes
    plain = {"*.mlp.*": {"weight": None}}
    none = loaded(quant_method="quark", **settings | {"exclude": []}, layer_quant_config=plain)
    assert none.bytes == weights.bytes


def test_hqq_is_read() -> None:
    params = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
    weights = loaded(quant_method="hqq", quant_config=params, skip_modules=["lm_head", "self_attn"])
    mlp = LINEAR - ATTENTION
    assert weights.bytes == mlp * (0.5 + 4 / 64) + 2 * ATTENTION + 2 * REST
    dynamic = {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": 64}}}
    part = loaded(quant_method="hqq", quant_config=dynamic, skip_modules=["lm_head"])
    queries = 2 * 256 * 256
    assert part.bytes == 2 * (LINEAR + REST) - queries * (1 - 4 / 64)


def test_gguf_is_read_from_the_name_of_its_file() -> None:
    weights = loaded(quant_method="gguf", gguf_file="small-Q8_0.gguf")
    matrices = LINEAR + 2 * EMBEDDING
    assert weights.bytes == matrices * 34 / 32 + 2 * 5 * 256
    unknown = loaded(quant_method="gguf")
    assert unknown.source == "estimate, bf16"
    assert "unknown quantisation 'gguf'" in unknown.warnings[0]


def test_blocks_of_gguf_have_the_bytes_of_llama_cpp() -> None:
    """The sizes of ggml's structs: block_q4_0 has 18 bytes for 32 elements, and so on."""
    row = Tensor("mlp", "mlp.up_proj", 1, 256)
    sizes = {name: format_.bytes_of(row) for name, format_ in GGUF_BLOCKS.items()}
    assert sizes == {
        "q4_0": 144, "q4_1": 160, "q5_0": 176, "q5_1": 192, "q8_0": 272, "q2_k": 84, "q3_k": 110,
        "q4_k": 144, "q5_k": 176, "q6_k": 210, "iq4_xs": 136, "iq4_nl": 144,
    }  # fmt: skip


@each(
    [
        ({"quant_method": "quanto", "weights": "int8"}, 1 + 4 / 256),
        ({"quant_method": "eetq"}, 1 + 4 / 256),
        ({"quant_method": "bitnet"}, 0.25),
        ({"quant_method": "fp_quant", "forward_dtype": "mxfp4"}, 0.5 + 1 / 32),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 0.5 + 2 / 128),
        ({"quant_method": "mxfp8"}, 1 + 1 / 32),
        ({"quant_method": "nvfp4"}, 0.5 + 1 / 16),
    ]
)
def test_other_methods_are_read(section: dict[str, Any], each_element: float) -> None:
    weights = loaded(**section)
    assert weights.bytes == pytest.approx(LINEAR * each_element + 2 * REST, rel=0.01)
    assert not weights.estimate


COMPRESSED: dict[str, tuple[dict[str, Any], int]] = {
    # Arguments, and the bytes that compressed-tensors 0.17.0 writes for a matrix of 512 x 1024.
    "W4A16": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, 278_544),
    "W4A16_ASYM": (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
        282_640,
    ),
    "W8A16": ({"num_bits": 8, "type": "int", "strategy": "channel"}, 525_328),
    "FP8": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, 524_290),
    "FP8_ROWS": ({"num_bits": 8, "type": "float", "strategy": "channel"}, 525_312),
    "FP8_BLOCK": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        524_544,
    ),
    "NVFP4": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        294_916,
    ),
    "MXFP4": (
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        278_528,
    ),
    "MXFP8": (
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        540_672,
    ),
}


@each(COMPRESSED)
def test_bytes_are_those_that_compressed_tensors_writes(name: str) -> None:
    arguments, written = COMPRESSED[name]
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    scheme = quantisation(Config({"quantization_config": section}), Config({}), [])
    assert scheme is not None
    matrix = Tensor("mlp", "mlp.up_proj", 512, 1024, linear=True)
    format_ = scheme.format_of("layers.0.mlp.up_proj", matrix)
    assert format_ is not None
    assert format_.bytes_of(matrix) == pytest.approx(written, rel=0.003)


@each([name for name in NAMED_FORMATS if name not in ("bf16", "fp16")])
def test_a_given_format_replaces_that_of_the_config(name: str) -> None:
    given = Weights.load(SMALL, dtype=name)
    assert given.source == f"weights_dtype, {given.label}"
    assert given.bytes != Weights.load(SMALL).bytes
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert Weights.load({**SMALL, "quantization_config": section}, dtype=name).bytes == given.bytes


def test_a_given_format_is_checked() -> None:
    for bad in ("fp7", "", "q9_k"):
        with pytest.raises(AtlasError) as refusal:
            Weights.load(SMALL, dtype=bad)
        assert refusal.value.code is Code.UNKNOWN_DTYPE
        assert "nvfp4" in str(refusal.value)
    assert Weights.load(SMALL, dtype="Float16").bytes == 2 * (LINEAR + REST)
    assert named_format("Q4_K_M") == named_format("q4_k")


def test_a_format_in_the_name_of_a_checkpoint_is_an_estimate(tmp_path: Path) -> None:
    """A checkpoint of ModelOpt without its second file was counted in 16 bits, without a word."""
    folder = tmp_path / "Llama-3.1-70B-Instruct-FP8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    weights = Weights.load(folder)
    assert weights.bytes == pytest.approx(LINEAR + 2 * REST, rel=0.01)
    assert (weights.estimate, weights.source) == (True, "estimate, fp8")
    assert "contains FP8" in weights.warnings[0]
    # Once there is a description, the name does not count.
    section = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    quantised = folder / "hf_quant_config.json"
    quantised.write_text(json.dumps(section))
    assert Weights.load(folder).source == "config, nvfp4, groups of 16"
    assert not Weights.load(folder).warnings
    quantised.unlink()
    index = {"metadata": {"total_size": LINEAR + 2 * REST}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Weights.load(folder).source == "safetensors index"


def test_names_that_contain_a_format() -> None:
    names = {
        "Qwen3-32B-FP8": "fp8", "nvidia--GLM-5-NVFP4": "nvfp4", "Llama-3-8B-GPTQ-Int4": "int4",
        "Qwen2.5-7B-Instruct-AWQ": "awq", "model.w8a8": "w8a8", "x-Q4_K_M.gguf": "q4_k_m",
        "Qwen3-8B": "", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "", "int8ing": "",
    }  # fmt: skip
    assert {name: format_in_name(name) for name in names} == names


def test_a_single_safetensors_file_is_measured(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    held = {"a": numpy.zeros(LINEAR, numpy.int8), "b": numpy.zeros(REST, numpy.float16)}
    file = tmp_path / "model.safetensors"
    safetensors.save_file(held, file)
    weights = Weights.load(tmp_path)
    assert (weights.bytes, weights.source) == (LINEAR + 2 * REST, "safetensors file")
    assert "the config implies" in weights.warnings[0]
    for damaged in (b"", b"weights", b"\xff" * 64, bytes(64)):
        file.write_bytes(damaged)
        assert Weights.load(tmp_path).source == "config, bf16"


def test_a_checkpoint_in_fp32_is_served_in_16_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "dtype": "float32"}))
    index = {"metadata": {"total_size": 4 * (LINEAR + REST)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = Weights.load(tmp_path)
    assert weights.bytes == 2 * (LINEAR + REST)
    assert "stored in fp32" in weights.warnings[0]


MLP = LINEAR - ATTENTION
INT4 = 0.5 + 20 / 8 / 128  # a 16-bit scale and a 4-bit zero point for 128 elements
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}


@each(
    [
        # GPTQModel: modules with other bits, and modules that are skipped.
        ({**GPTQ, "dynamic": {"-:.*mlp.*": {}}}, ATTENTION * INT4 + 2 * MLP, 2 * REST),
        (
            {**GPTQ, "dynamic": {r"+:.*self_attn.*": {"bits": 8}}},
            MLP * INT4 + ATTENTION * (1 + 3 / 128),
            2 * REST,
        ),
        ({**GPTQ, "lm_head": True}, LINEAR * INT4 + EMBEDDING * INT4, 2 * (REST - EMBEDDING)),
        (
            {**GPTQ, "modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"]]},
            2 * ATTENTION + MLP / 3 * (2 * INT4 + 2),
            2 * REST,
        ),
        # AutoRound: modules by name; 16 bits are not quantised.
        (
            {**ROUND, "extra_config": {f"model.layers.{n}.mlp": {"bits": 16} for n in (0, 1)}},
            ATTENTION * INT4 + 2 * MLP,
            2 * REST,
        ),
        ({**ROUND, "data_type": "mx_fp", "group_size": 32}, LINEAR * (0.5 + 1 / 32), 2 * REST),
        # compressed-tensors: the ignore list comes before the targets of a group.
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["re:.*down_proj"],
                "config_groups": {
                    "a": {
                        "targets": ["re:.*mlp.*"],
                        "weights": {"num_bits": 8, "type": "int", "strategy": "tensor"},
                    },
                },
            },
            2 * ATTENTION + MLP / 3 * (2 + 2),
            2 * REST,
        ),
        # Two lists of modules that stay in 16 bits.
        (
            {
                "quant_method": "fp8",
                "modules_to_not_convert": ["mlp"],
                "ignored_layers": ["self_attn.q_proj"],
            },
            2 * MLP + ATTENTION,
            2 * REST,
        ),
        # MLX, which also quantises the embedding: a 16-bit scale and a 16-bit bias per group.
        ({"bits": 4, "group_size": 64}, (LINEAR + 2 * EMBEDDING) * (0.5 + 4 / 64), 0),
        (
            {"bits": 4, "group_size": 64, "model.layers.0.mlp": False, "model.layers.1.mlp": False},
            (ATTENTION + 2 * EMBEDDING) * (0.5 + 4 / 64) + 2 * MLP,
            0,
        ),
    ]
)
def test_modules_with_their_own_format_are_read(
    section: dict[str, Any], matrices: float, rest: float
) -> None:
    weights = loaded(**section)
    assert weights.bytes == pytest.approx(matrices + rest, rel=0.01)
    assert (weights.estimate, weights.warnings) == (False, ())


def test_mlx_describes_its_format_under_another_key() -> None:
    section = {"bits": 4, "group_size": 64}
    weights = Weights.load({**SMALL, "quantization": section})
    assert weights.bytes == loaded(**section).bytes
    assert weights.source == "config, mlx 4 bits, groups of 64"


def test_torchao_leaves_modules_without_a_type_in_16_bits() -> None:
    int4 = torchao("Int4WeightOnlyConfig", group_size=64)
    modules = {"_default": int4, "model.layers.0.mlp": None, "model.layers.1.mlp": None}
    kind = {"default": torchao("ModuleFqnToConfig", module_fqn_to_config=modules)}
    weights = loaded(quant_method="torchao", quant_type=kind)
    assert weights.bytes == pytest.approx(ATTENTION * (0.5 + 4 / 64) + 2 * (MLP + REST), rel=0.01)


@each(
    [
        ({"quant_method": "mxfp4"}, "no matrix of the model is quantised"),
        ({"quant_method": "bitsandbytes"}, "unknown quantisation"),
        ({"quant_method": "fp8", "ignored_layers": ["mlp", "self_attn"]}, "no matrix"),
        ({**ROUND, "block_name_to_quantize": "model.layers.0"}, "block_name_to_quantize"),
        ({**GPTQ, "dynamic": {"+:(a+)+$": {"bits": 8}}}, "1 patterns of modules"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["LlamaMLP"], "weights": {"num_bits": 8, "type": "int"}}
                },
            },
            "modules of class LlamaMLP",
        ),
    ]
)
def test_what_a_section_leaves_open_makes_an_estimate(section: dict[str, Any], words: str) -> None:
    weights = loaded(**section)
    assert weights.estimate
    assert words in " ".join(weights.warnings)


def test_a_section_under_an_unknown_key_makes_an_estimate() -> None:
    weights = Weights.load({**SMALL, "quant_config": {"bits": 4}})
    assert weights.estimate
    assert "quant_config may describe a quantisation" in weights.warnings[0]


FACTS = os.environ.get("KVATLAS_FACTS")


@pytest.mark.skipif(FACTS is None, reason="KVATLAS_FACTS names no folder")
def test_quantised_checkpoints_of_the_facts_are_never_counted_in_16_bits() -> None:
    files = sorted(Path(FACTS or "", "configs").glob("*_config.json"))
    quantised = [file for file in files if format_in_name(file.stem.removesuffix("_config"))]
    assert len(quantised) >= 18
    for file in quantised:
        weights = Weights.load(file)
        assert weights.bytes < 1.45 * weights.parameters, file.name
        described = "quantization_config" in file.read_text()
        assert weights.estimate != described, file.name
        assert bool(weights.warnings) >= weights.estimate


@pytest.mark.parametrize("scheme", ["TENSOR", "NO_SCALES"])
def test_the_quantisation_of_a_params_json_is_read(scheme: str) -> None:
    params = {
        "dim": 512, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64,
        "hidden_dim": 2048, "vocab_size": 1000, "norm_eps": 1e-5,
    }  # fmt: skip
    section = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    weights, plain = Weights.load(params | {"quantization": section}), Weights.load(params)
    assert (weights.source, weights.warnings) == ("config, fp8", ())
    linear = plain.parameters - sum(plain.classes[kind].parameters for kind in NOT_QUANTISED)
    assert weights.bytes == plain.bytes - linear + 8 * 7 * 2  # two scales for each matrix
    unknown = Weights.load(params | {"quantization": {"qformat_weight": "fp6"}})
    assert unknown.estimate
    assert unknown.bytes == plain.bytes


NOT_QUANTISED: tuple[TensorClass, ...] = ("embedding", "lm_head", "norm")
