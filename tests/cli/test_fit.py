"""`kvatlas fit`, and `kvatlas plan` on GPUs: what an operator asks before a purchase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.geometry.byte_sizes import size
from kvatlas.models import Model, Weights, catalogue, find_gpu
from kvatlas.planning import plan
from tests.cli.helpers import kvatlas, process, said, shown
from tests.profiles import DEEP

SIX = (
    "Llama-3.1-70B", "gpt-oss-120b", "DeepSeek-V3.2", "Qwen3.5-397B-A17B", "Qwen3-8B",
    "Gemma-3-27B",
)  # fmt: skip


def test_which_models_fit_and_for_how_many_users() -> None:
    fits = said("fit", *SIX, "--gpu", "8xH100", "--max-len", "128K")["fits"]
    assert {fit["model"] for fit in fits} == set(SIX)
    users = [fit["users_decoding"] for fit in fits]
    assert users == sorted(users, reverse=True)
    for fit in fits:
        if fit["refused"]:
            assert fit["refused"]["code"] == "weights_too_large"
            continue
        weights = Weights.load(fit["model"]).per_rank(tp=fit["tp"], ep=fit["ep"])
        memory = int(find_gpu("H100").memory * 0.9) - weights - fit["overhead"]
        sizes = {"tp": fit["tp"], "dcp": fit["dcp"]}
        made = plan(fit["model"], memory=memory, **sizes, max_len="128K")
        assert (fit["weights_per_rank"], fit["memory"]) == (weights, memory)
        assert fit["users_decoding"] == int(made.requests(in_flight=1)) * fit["dp"]
        assert fit["users_prefilling"] == int(made.requests()) * fit["dp"]
        assert fit["tp"] * fit["pp"] * fit["dp"] == 8
    text = " ".join(shown("fit", *SIX, "--gpu", "8xH100", "--max-len", "128K").split())
    fitting = sum(fit["refused"] is None for fit in fits)
    assert text.startswith(f"{fitting} of 6 models fit 8 x H100 at 131,072 tokens.")
    assert "but the model supports only 40,960" in text  # Qwen3-8B


def test_any_model_of_the_catalogue_can_be_asked() -> None:
    for name in list(catalogue())[:: 1 if DEEP else 12]:
        (fit,) = said("fit", name, "--gpu", "8xMI355X")["fits"]
        assert fit["users_decoding"] > 0 or fit["refused"], name


def test_a_plan_on_gpus_says_where_its_memory_comes_from() -> None:
    answer = said("plan", "Qwen3-8B", "--gpu", "H100", "--tp", "2", "--dp", "4")
    assert (answer["gpu"]["gpus"], answer["dp"]) == (8, 4)
    assert answer["memory"] == answer["gpu"]["memory"]
    text = " ".join(shown("plan", "Qwen3-8B", "--gpu", "H100", "--tp", "2", "--dp", "4").split())
    assert "for caches on each of 8 H100: 90% of its memory, minus" in text
    assert "of weights (config, bf16) and 3 GiB of overhead" in text
    assert f"4 replicas fit {answer['gpu']['users_prefilling']} requests of 32,768 tokens." in text


def test_copies_of_a_cache_are_pointed_out_with_what_would_avoid_them() -> None:
    answer = said("plan", "DeepSeek-V3.2", "--gpu", "8xH200")
    better = {(one["dcp"], one["dp"]): one["users_decoding"] for one in answer["suggestions"]}
    assert set(better) == {(8, 1), (1, 8)}
    assert min(better.values()) > answer["gpu"]["users_decoding"]
    assert "Ranks hold copies" in shown("plan", "DeepSeek-V3.2", "--gpu", "8xH200")
    rows = said("plan", "DeepSeek-V3.2", "--gpu", "8xH200", "--compare", "dcp")["rows"]
    assert [row["ratio"] for row in rows if not row["refused"]] == pytest.approx([1, 2, 4, 8])
    assert not said("plan", "Qwen3-8B", "--gpu", "8xH200")["suggestions"]


def test_a_config_beside_its_checkpoint_is_taken_at_its_word(tmp_path: Path) -> None:
    """The index of a checkpoint says what weights take."""
    config = catalogue()["Llama-3.1-8B"].expanded()
    (tmp_path / "config.json").write_text(json.dumps(config))
    total = 9_000_000_000
    index = {"metadata": {"total_size": total}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    answer = said("plan", str(tmp_path), "--gpu", "H100")["gpu"]
    assert answer["weights_source"] == "safetensors index"
    # A rank pads its vocabulary.
    assert answer["weights_per_rank"] == pytest.approx(total, rel=0.01)


STARCODER2_15B = {
    "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "dtype": "bfloat16",
    "num_hidden_layers": 40, "hidden_size": 6144, "num_attention_heads": 48,
    "num_key_value_heads": 4, "intermediate_size": 24576, "vocab_size": 49152, "use_bias": True,
    "max_position_embeddings": 16384, "tie_word_embeddings": False,
}  # fmt: skip


def config_file(folder: Path, **changed: object) -> str:
    (folder / "config.json").write_text(json.dumps(STARCODER2_15B | changed))
    return str(folder)


def test_starcoder2_fits_a_gpu_of_48_gb(tmp_path: Path) -> None:
    """It has 16 billion parameters; its MLP without a gate was counted like Llama's, with one."""
    (fit,) = said("fit", config_file(tmp_path), "--gpu", "L40S")["fits"]
    assert fit["refused"] is None
    assert fit["weights_per_rank"] == pytest.approx(2 * 15_957_889_024, rel=0.001)
    assert (fit["weights_source"], fit["weights_estimate"]) == ("config, bf16", False)


def test_every_output_labels_an_estimate_of_the_weights(tmp_path: Path) -> None:
    model = config_file(tmp_path, model_type="newcomer", architectures=["NewForCausalLM"])
    (fit,) = said("fit", model, "--gpu", "H100")["fits"]
    assert (fit["weights_source"], fit["weights_estimate"]) == ("estimate, bf16", True)
    reason = "weights: unknown family newcomer: counted like Llama"
    assert reason in fit["warnings"]
    text = " ".join(shown("fit", model, "--gpu", "H100").split())
    assert f"~{size(fit['weights_per_rank'])}" in text
    assert reason in text
    assert "~: an estimate" in text
    for command in ("plan", "explain"):
        text = " ".join(shown(command, model, "--gpu", "H100").split())
        assert "of weights (estimate, bf16)" in text
        assert reason in text
        assert reason in said(command, model, "--gpu", "H100")["warnings"]
    rows = said("plan", model, "--gpu", "H100", "--compare", "kv-dtype=auto")["rows"]
    assert reason in rows[0]["warnings"]
    page = tmp_path / "map.html"
    assert reason in " ".join(shown("map", model, "--gpu", "H100", "-o", str(page)).split())
    assert '"weights_source":"estimate, bf16"' in page.read_text()
    assert "unknown family newcomer" in page.read_text()
    for form in ("--svg", "--text"):
        assert reason in kvatlas("map", model, "--gpu", "H100", form).stderr
    trace = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")
    replay = ("simulate", model, "--gpu", "H100", "--trace", trace, "--max-len", "8K")
    assert reason in " ".join(shown(*replay).split())
    assert reason in said(*replay)["rows"][0]["warnings"]


def test_weights_that_do_not_fit_are_reported_with_their_source(tmp_path: Path) -> None:
    model = config_file(tmp_path, model_type="newcomer", architectures=["NewForCausalLM"])
    (fit,) = said("fit", model, "--gpu", "L40S")["fits"]
    assert "(estimate, bf16; unknown family newcomer" in fit["refused"]["message"]
    assert any("unknown family" in warning for warning in fit["warnings"])
    assert "unknown family newcomer" in " ".join(shown("fit", model, "--gpu", "L40S").split())
    refused = kvatlas("plan", model, "--gpu", "L40S")
    assert refused.exit_code == 2
    assert "unknown family newcomer" in " ".join(refused.stderr.split())


def test_the_format_of_the_weights_can_be_set() -> None:
    for command in ("plan", "fit"):
        answer = said(command, "Qwen3-8B", "--gpu", "H100", "--weights-dtype", "nvfp4")
        fit = answer["gpu"] if command == "plan" else answer["fits"][0]
        weights = Weights.load("Qwen3-8B", dtype="nvfp4")
        assert fit["weights_per_rank"] == weights.per_rank()
        assert fit["weights_source"] == "weights_dtype, nvfp4, groups of 16"
    for args in (("--weights-dtype", "fp8"), ("--gpu", "H100", "--weights-dtype", "fp7")):
        assert kvatlas("plan", "Qwen3-8B", *args).exit_code == 2


def test_one_unknown_model_or_gpu_is_a_refusal() -> None:
    for args in (("Qwen3-8B", "nonsense", "--gpu", "H100"), ("Qwen3-8B", "--gpu", "H1000")):
        result = kvatlas("fit", *args)
        assert result.exit_code == 2
        assert "hint:" in result.stderr


def test_answers_come_first_and_layers_are_layers() -> None:
    text = shown("plan", "DeepSeek-V4-Flash", "--tp", "8", "--memory", "56GB")
    assert text.splitlines()[1].startswith("Fits 8.2 requests of 32,768 tokens while they prefill")
    nano = said("models", "Nemotron-3-Nano-30B-A3B")
    assert sum(nano["layers"].values()) == 29
    assert said("models", "DeepSeek-V3.2")["layers"] == {"mla_attention": 61}
    told = " ".join(shown("explain", "DeepSeek-V3.2").split())
    assert "61 mla_attention layers with 122 caches" in told
    assert "Memory left over after whole blocks:" in told
    table = shown("plan", "Nemotron-3-Nano-30B-A3B", "--memory", "60GiB").splitlines()
    (states,) = [line for line in table if "x recurrent" in line]
    assert " 23 " in states


def test_a_length_past_the_models_own_is_noted_everywhere() -> None:
    longest = Model.load("Gemma-2-2b").max_len
    assert longest == 8192
    args = ("Gemma-2-2b", "--max-len", "32K")
    note = "max_len is 32,768 tokens, but the model supports only 8,192."
    for command in ("plan", "explain"):
        assert note in " ".join(shown(command, *args).split())
        assert note in said(command, *args)["warnings"]
    assert note in " ".join(shown("plan", *args, "--compare", "tp").split())
    assert note in " ".join(shown("fit", *args, "--gpu", "H100").split())


def test_help_alone_leads_there() -> None:
    found = process("fit", "--help")
    assert found.returncode == 0
    assert "8xH100" in found.stdout


def test_no_overhead_at_all_can_be_asked_for() -> None:
    some, none = (said("plan", "Qwen3-8B", "--gpu", "H100", "--overhead", n) for n in ("1GiB", "0"))
    assert none["memory"] - some["memory"] == 2**30


def test_compared_plans_that_are_refused_claim_no_ranks() -> None:
    for row in said("plan", "DeepSeek-V3.2", "--gpu", "8xH200", "--compare", "dcp")["rows"]:
        assert row["tp"] == (None if row["refused"] else 8)


def test_memory_that_is_too_small_is_told_in_units() -> None:
    text = " ".join(shown("fit", "Qwen3-8B", "--gpu", "H100", "--max-len", "1M").split())
    assert "one request of 1,048,576 tokens needs 144 GiB per rank. Got 52.9 GiB." in text


def test_compared_topologies_use_all_gpus() -> None:
    rows = said("plan", "Qwen3-8B", "--gpu", "8xH100", "--compare", "tp=1,2,8")["rows"]
    assert [row["topology"] for row in rows] == ["tp 1, dp 8", "tp 2, dp 4", "tp 8"]
    for row in rows:
        users = said("plan", "Qwen3-8B", "--gpu", "8xH100", "--tp", str(row["value"]))["gpu"]
        if row["value"] < 8:
            assert row["requests_decoding"] == users["users_decoding"]
    text = shown("plan", "Qwen3-8B", "--gpu", "8xH100", "--compare", "tp=1,2,8")
    assert "tp 1, dp 8" in text
    assert "refused" not in text
    (row,) = said("plan", "Qwen3-235B-A22B", "--gpu", "8xH200", "--compare", "dp=2")["rows"]
    assert row["topology"] == "tp 4, dp 2, ep 8"
