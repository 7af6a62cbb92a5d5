"""`kvatlas check`: yes with a price, no with reasons, and refusals of what is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvatlas.cli.check import read_plan
from kvatlas.planning import plan
from kvatlas.routing import check
from tests.cli.helpers import kvatlas, said, shown


def test_a_model_between_two_topologies() -> None:
    ends = ("--from", "tp=2,layout=LBHNC", "--to", "tp=4,layout=BHLNC")
    answer = said("check", "Qwen3-8B", *ends, "--tokens", "1024")
    assert answer["ok"]
    assert answer["tokens"] == 1024
    assert [(pair["src_rank"], pair["dst_rank"]) for pair in answer["pairs"]] == [
        (0, 0), (0, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    assert answer["bytes"] == 1024 * 36 * 8 * 512
    src = plan("Qwen3-8B", memory="80GiB", tp=2, layout="LBHNC")
    dst = plan("Qwen3-8B", memory="80GiB", tp=4, layout="BHLNC")
    assert answer["descriptors"] == check(src, dst, tokens=1024).descriptors
    text = shown("check", "Qwen3-8B", *ends, "--tokens", "1024")
    assert "Yes: 1,024 tokens take 144 MiB" in text
    assert said("check", "Qwen3-8B", *ends, "--tokens", "1K") == answer
    assert max(map(len, text.splitlines())) <= 80


def test_two_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    shown("plan", "gpt-oss-20b", "--tp", "2", "--save", paths[0])
    shown("plan", "gpt-oss-20b", "--layout", "BLHNC", "--save", paths[1])
    answer = said("check", *paths)
    assert answer["ok"]
    assert answer["fingerprints"][0] == answer["fingerprints"][1]


@pytest.mark.parametrize(
    ("change", "code"),
    [("kv-dtype=fp8", "unlike_dtypes"), ("kv-dtype=nvfp4", "unlike_dtypes")],
)
def test_no_says_why_and_exits_with_one(change: str, code: str) -> None:
    result = kvatlas("check", "Qwen3-8B", "--to", change)
    assert result.exit_code == 1
    assert "No." in result.stdout
    assert code in result.stdout
    result = kvatlas("check", "Qwen3-8B", "--to", change, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["reasons"][0]["code"] == code


def test_unlike_models(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    shown("plan", "Llama-3.1-8B", "--save", paths[0])
    shown("plan", "Qwen3-8B", "--save", paths[1])
    result = kvatlas("check", *paths, "--json")
    codes = [reason["code"] for reason in json.loads(result.stdout)["reasons"]]
    assert codes == ["missing_layers"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen3-8B", "--from", "tq=3"), "'tq=3' must be name=value"),
        (("Qwen3-8B", "--from", "tp=two"), "tp must be an integer"),
        (("Qwen3-8B", "--to", "tp=3"), "bad_topology"),
        (("Qwen3-8B", "--tokens", "0"), "bad_size"),
        (("Qwen3-8B", "--tokens", "999999"), "bad_tokens"),
        (("nothing.json", "nowhere.json"), "unreadable"),
        (("a.json", "b.json", "--from", "tp=1"), "pass a model"),
        (("no-such-model",), "unknown_model"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    result = kvatlas("check", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": 3}', "\x00\xff", "{" * 1000])
def test_files_that_are_no_plans(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="latin-1")
    result = kvatlas("check", str(path), str(path))
    assert result.exit_code == 2
    assert "bad_plan" in result.output


def test_a_plan_that_was_tampered_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    shown("plan", "Qwen3-8B", "--save", str(path))
    made = json.loads(path.read_text())
    made["regions"][0]["block_stride"] -= 1
    path.write_text(json.dumps(made))
    assert kvatlas("check", str(path), str(path)).exit_code == 2


def test_reading_a_plan_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan("DeepSeek-V3.2", memory="20GiB", tp=2)
    path.write_bytes(made.to_json())
    assert read_plan(str(path)) == made


def test_a_conversion_is_shown_with_its_price() -> None:
    ends = ("check", "Qwen3-8B", "--from", "kv-dtype=fp8", "--tokens", "64")
    assert "convert='fp8->bf16'" in " ".join(kvatlas(*ends).stdout.split())
    text = shown(*ends, "--convert", "fp8->bf16")
    assert "fp8->bf16" in text
    assert "destination" in text
    answer = said(*ends, "--convert", "fp8_e4m3 -> bfloat16")
    assert [change["way"] for change in answer["conversion"]] == ["elements"]
    assert all(pair["stage"] for pair in answer["pairs"])
    wrong = kvatlas(*ends, "--convert", "fp8->fp32")
    assert wrong.exit_code == 1
    assert "bad_conversion" in wrong.stdout
