"""Every command says what the rooms below say, to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.cli.hybrids_page import hybrids
from kvatlas.cli.model_facts import fixed, grows
from kvatlas.cli.options import POLICIES
from kvatlas.models import Model, catalogue
from kvatlas.planning import BACKENDS, Plan, plan
from tests.cli.helpers import kvatlas, said, shown
from tests.profiles import DEEP

TOP = {
    "model", "policy", "layout", "tp", "block_size", "num_blocks", "bytes_per_block", "tokens",
    "groups",
}  # fmt: skip
GROUP = {
    "kind", "num_layers", "first_layer", "last_layer", "block_size", "page_bytes",
    "unpadded_page_bytes", "heads", "states", "content_bytes",
}  # fmt: skip

CASES = (
    ("Llama-3.1-8B",),
    ("gpt-oss-20b", "--tp", "2", "--layout", "BHLNC"),
    ("Qwen3.5-397B-A17B", "--tp", "2", "--policy", "vllm"),
    ("Qwen3.5-397B-A17B", "--pack", "4"),
    ("DeepSeek-V3", "--backend", "FLASHMLA", "--kv-dtype", "fp8"),
    ("DeepSeek-V4-Flash", "--policy", "vllm"),
    ("Qwen3-8B", "--pp", "2"),
    ("Mamba2-2.7B", "--no-prefix-caching"),
    ("Nemotron-H-8B", "--requests", "64"),
    ("Whisper-large-v3",),
)


@pytest.mark.parametrize("args", CASES, ids=" ".join)
def test_plan_prints_a_table_and_one_object(args: tuple[str, ...]) -> None:
    summary = said("plan", *args)
    assert set(summary) >= TOP
    assert all(set(group) >= GROUP for group in summary["groups"])
    table = shown("plan", *args)
    assert summary["model"] in table
    for figure in (summary["num_blocks"], summary["bytes_per_block"], summary["tokens"]):
        assert f"{figure:,}" in table


@pytest.mark.parametrize("args", CASES, ids=" ".join)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_output_fits_80_columns_without_trailing_blanks(
    command: str, args: tuple[str, ...]
) -> None:
    for line in shown(command, *args).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()
        assert "\x1b" not in line


def test_options_reach_the_plan() -> None:
    options = "--memory 40GB --tp 2 --max-len 16Ki --kv-dtype fp8 --layout BLHNC --block-size 32"
    made = plan(
        "gpt-oss-20b", memory="40GB", tp=2, max_len=16384, kv_dtype="fp8", layout="BLHNC",
        block_size=32, policy="vllm",
    )  # fmt: skip
    answer = said("plan", "gpt-oss-20b", *options.split(), "--policy", "vllm")
    assert answer == json.loads(json.dumps(made.summary()))


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shown("plan", "gpt-oss-20b", "--memory", "10GiB", "--save", str(file))
    assert Plan.from_json(file.read_bytes()) == plan("gpt-oss-20b", memory="10GiB")


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path: Path) -> None:
    config = tmp_path / "my-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(catalogue()["Llama-3.1-8B"].expanded()))
    blocks = said("plan", "Llama-3.1-8B")["num_blocks"]
    for source in (config, config.parent):
        summary = said("plan", str(source))
        assert (summary["model"], summary["num_blocks"]) == ("my-model", blocks)
        assert said("models", str(source))["layers"] == {"full_attention": 32}


def test_explain_counts_all_replicas() -> None:
    args = ("Qwen3-8B", "--gpu", "8xH100", "--tp", "2")
    first = "4 replicas fit 104 requests of 32,768 tokens. Each fits 26.9 requests"
    assert all(first in " ".join(shown(name, *args).split()) for name in ("explain", "plan"))


def test_explain_gives_every_reason() -> None:
    args = ("Qwen3.5-397B-A17B", "--tp", "2", "--policy", "vllm", "--memory", "60GiB")
    text = " ".join(shown("explain", *args).split())
    made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm")
    assert "2,096 tokens" in text
    for line in made.explain().splitlines()[2:]:
        assert " ".join(line.split()) in text
    assert said("explain", *args)["explain"][1:] == [
        line.strip() for line in made.explain().splitlines()[1:]
    ]


@pytest.mark.parametrize(
    "axis", ["policy", "kv-dtype", "tp", "dcp", "pack", "memory", "max-len", "layout", "states"]
)
def test_compare_varies_one_thing(axis: str) -> None:
    rows = said("plan", "Qwen3.5-397B-A17B", "--compare", axis)["rows"]
    table = shown("plan", "Qwen3.5-397B-A17B", "--compare", axis)
    assert len({row["value"] for row in rows}) == len(rows) >= 2
    assert max(len(line) for line in table.splitlines()) <= 80
    assert table.startswith("Qwen3.5-397B-A17B")
    assert axis == "max-len" or "requests of 32,768 tokens" in table
    assert axis == "memory" or "80GiB per rank" in table
    decoding = [row["requests_decoding"] for row in rows if not row["refused"]]
    for row in rows:
        assert str(row["value"]) in table
        figure = row["refused"]["code"] if row["refused"] else f"{row['tokens']:,}"
        assert figure in table
        if not row["refused"]:
            alone = said("plan", "Qwen3.5-397B-A17B", f"--{axis}", str(row["value"]))
            assert all(row[key] == alone[key] for key in row if key in alone)
            assert row["ratio"] == round(row["requests_decoding"] / decoding[0], 4)


def test_compare_takes_several_axes_and_values() -> None:
    rows = said("plan", "gpt-oss-20b", "--compare", "policy,tp", "--compare", "pack=1,7")["rows"]
    answer = [(row["compare"], row["value"]) for row in rows]
    assert answer[:3] == [("policy", policy) for policy in POLICIES]
    assert answer[-2:] == [("pack", "1"), ("pack", "7")]
    assert rows[-1]["refused"]["code"] == "bad_pack"
    assert rows[0]["refused"] is None


def test_models_lists_the_whole_catalogue() -> None:
    table = shown("models")
    assert max(len(line) for line in table.splitlines()) <= 80
    models = {model["name"]: model for model in said("models")["models"]}
    assert set(models) == set(catalogue())
    assert all(name in table for name in catalogue())
    assert models["Llama-3.1-8B"]["bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert models["gpt-oss-20b"]["fixed_bytes_per_request"] == 12 * 128 * 2 * 8 * 64 * 2


def test_one_model_accounts_for_all_its_layers() -> None:
    for number, name in enumerate(catalogue()):
        model, answer = Model.load(name), said("models", name)
        assert sum(row["num_layers"] for row in answer["caches"]) == len(model.layers), name
        assert answer["bytes_per_token"] == sum(grows(x.spec) for x in model.layers), name
        assert answer["fixed_bytes_per_request"] == sum(fixed(x.spec) for x in model.layers), name
        if DEEP or number % 4 == 0:
            assert max(len(line) for line in shown("models", name).splitlines()) <= 80, name


def test_layouts_knows_six_orders_and_every_backend() -> None:
    orders = {fact["order"]: fact for fact in said("layouts")["layouts"]}
    assert len(orders) == 6
    assert orders["LBNHC"]["alias"] == "NHD"
    assert orders["BHLNC"]["block_outermost"]
    assert orders["BHLNC"]["heads_outside_pages"]
    assert not orders["BHLNC"]["page_contiguous"]
    assert {name for fact in orders.values() for name in fact["backends"]} == set(BACKENDS)
    assert "CPU_ATTN" not in orders["BLHNC"]["backends"]
    table = shown("layouts")
    assert all(order in table for order in orders)
    assert max(len(line) for line in table.splitlines()) <= 80


def test_the_page_on_hybrids_is_what_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs/reference/data/hybrids.md"
    printed = shown("hybrids")
    assert printed == page.read_text(), f"stale; run: kvatlas hybrids > {page}"
    table = printed.partition("| model |")[2].splitlines()
    rows = [line for line in table if line.startswith("| ")]
    assert len(rows) == 3 * len(hybrids()) > 50


@pytest.mark.parametrize("command", ["plan", "explain", "models", "layouts", "hybrids"])
def test_help_has_examples(command: str) -> None:
    assert f"kvatlas {command}" in shown(command, "--help").split("Example")[1]


def test_no_command_is_help() -> None:
    assert "Usage" in kvatlas().output


def test_a_config_is_verified_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97,
        "max_position_embeddings": 512,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert said("models", str(file), "--verify") == said("models", str(file))
    file.write_text(json.dumps(config | {"model_type": "llama9"}))
    result = kvatlas("models", str(file), "--verify")
    assert result.exit_code == 2
    assert "no model type 'llama9'" in result.stderr.replace("\n", " ")
