"""Output in a terminal of 80 columns: nothing is cut, broken or repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvatlas.cli.tables import table
from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model, catalogue
from tests.cli.helpers import kvatlas, said, shown

TRACE = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")
COMPARED = ("block", "tokens", "prefill", "decode", "ratio", "padding")
SIMULATED = ("block", "total", "found", "mean", "half", "again", "saved", "evicted")
MODELS = ("DeepSeek-V3.2", "Qwen3.5-397B-A17B", "gpt-oss-20b", "Llama-3.1-70B")


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("axis", ["backend", "kv-dtype", "policy", "max-len"])
def test_compared_plans_keep_their_headers_and_names(model: str, axis: str) -> None:
    text = shown("plan", model, "--compare", axis)
    assert widest(text) <= 80
    (header,) = [line.split() for line in text.splitlines() if line.split()[:1] == [axis]]
    assert tuple(header[1:7]) == COMPARED
    for row in said("plan", model, "--compare", axis)["rows"]:
        (line,) = [x.split() for x in text.splitlines() if x.split()[:1] == [row["value"]]]
        figures = ["-", "refused"] if row["refused"] else [f"{row['block_size']:,}"]
        assert line[1 : 1 + len(figures)] == figures


def test_fit_breaks_no_model_name_and_no_topology() -> None:
    names = ("DeepSeek-V3.2", "Nemotron-3-Ultra-550B-A55B", "Llama-3.1-70B", "Kimi-K3")
    # With tp given, fewer topologies are searched; their names are no shorter.
    asked = (("64xH200", ("--tp", "8")), ("16xH200", ("--tp", "8", "--max-len", "1M")))
    for gpus, options in asked:
        text = shown("fit", *names, "--gpu", gpus, *options)
        assert widest(text) <= 80
        words = text.split()
        assert all(name in words for name in names)
        assert {"topology", "weights", "cache", "prefill", "decode"} <= set(words)
        assert all(words[at + 1].rstrip(",").isdecimal() for at, x in enumerate(words) if x == "dp")


@pytest.mark.parametrize("model", [*MODELS, "DeepSeek-V4-Flash", "Nemotron-3-Ultra-550B-A55B"])
def test_plans_and_simulations_fit(model: str) -> None:
    for options in ((), ("--pp", "2", "--tp", "2"), ("--gpu", "16xH200")):
        text = shown("plan", model, *options)
        assert widest(text) <= 80
        assert "page bytes  padding" in text
        assert "2 x   and" not in text
    text = shown("simulate", model, "--memory", "80GiB", "--trace", TRACE)
    assert widest(text) <= 80
    assert model in text.split()
    (header,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["model"]]
    assert tuple(header[1:]) == SIMULATED


def test_no_two_columns_have_one_name() -> None:
    options = ("Llama-3.1-70B", "--tp", "8", "--trace", TRACE, "--compare", "memory=2GiB,10GiB")
    text = shown("simulate", *options)
    (header,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["memory"]]
    assert len(set(header)) == len(header)
    assert "total: cache memory of all ranks" in " ".join(text.split())
    for axis in ("states", "pack"):
        text = shown("plan", "Qwen3.5-397B-A17B", "--compare", axis)
        (header,) = [line.split() for line in text.splitlines() if line.split()[:1] == [axis]]
        assert len(set(header)) == len(header)


def test_equal_notes_are_printed_once() -> None:
    text = shown("plan", "Whisper-large-v3", "--compare", "max-len,tp")
    assert text.count("Note:") == 1
    assert text.count("[bad_topology]") == 1
    assert "8, 16: " in text
    warned = shown("fit", "Qwen3-8B", "Qwen3-32B", "--gpu", "8xH100", "--max-len", "128K")
    assert warned.count("Note:") == 1
    assert "Qwen3-8B, Qwen3-32B: " in warned or "Qwen3-32B, Qwen3-8B: " in warned
    options = ("--trace", TRACE, "--compare", "memory=1MiB,2MiB,4GiB")
    text = shown("simulate", "Llama-3.1-8B", "gpt-oss-20b", "gpt-oss-120b", *options)
    assert text.count("--active-params") == 1


def test_files_that_are_written_are_reported(tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "plan.json"
    compared = ("--compare", "memory=2GiB,8GiB", "--max-len", "8K")
    text = shown("simulate", "Llama-3.1-8B", "--trace", TRACE, *compared, "-o", str(page))
    assert f"Wrote {page}, " in text
    assert f"Wrote {saved}, " in shown("plan", "Qwen3-8B", "--save", str(saved))
    said("plan", "Qwen3-8B", "--save", str(saved))  # and JSON stays alone on stdout


def test_one_unknown_name_does_not_stop_the_others() -> None:
    result = kvatlas("fit", "Qwen3-8B", "Qwen3-235B", "nonsense", "gpt-oss-20b", "--gpu", "8xH100")
    assert result.exit_code == 2
    assert "2 of 2 models fit" in result.stdout
    assert {"Qwen3-8B", "gpt-oss-20b"} <= set(result.stdout.split())
    assert result.stderr.count("code: unknown_model") == 2
    assert "Did you mean Qwen3-235B-A22B?" in result.stderr
    alone = kvatlas("fit", "nonsense", "--gpu", "8xH100")
    assert (alone.exit_code, alone.stdout) == (2, "")


def test_suggestions_are_of_the_same_family_and_size() -> None:
    near = {
        "Qwen3-235B": ["Qwen3-235B-A22B"],
        "qwen3.5-397b": ["Qwen3.5-397B-A17B"],
        "Llama3.1-70B": ["Llama-3.1-70B"],
        "gptoss-20b": ["gpt-oss-20b"],
        "DeepSeek-V3.3": ["DeepSeek-V3.2"],
    }
    for wrong, (first, *_) in near.items():
        with pytest.raises(AtlasError) as refusal:
            Model.load(wrong)
        assert refusal.value.code is Code.UNKNOWN_MODEL
        assert refusal.value.hint.removeprefix("Did you mean ").split(",")[0].rstrip("?") == first
    assert all(first in catalogue() for first, *_ in near.values())


def test_a_hub_id_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = kvatlas("plan", "some-org/some-model")
    assert result.exit_code == 2
    assert "pip install 'kvatlas[transformers]'" in result.stderr
    assert result.stderr.split()[-1] == Code.NO_HUB


@pytest.mark.parametrize("option", ["tp", "pp", "dp", "dcp", "block-size", "requests"])
def test_a_count_below_one_names_its_option(option: str) -> None:
    result = kvatlas("plan", "Qwen3-8B", f"--{option}", "-1")
    assert result.exit_code == 2
    assert f"--{option} must be at least 1." in result.stderr
    assert "at least 1" in result.stderr
    assert result.stderr.split()[-1] == Code.BAD_SIZE


def test_help_is_wrapped_once() -> None:
    """A line of a docstring that is longer than the terminal leaves no single word behind."""
    for command in ("fit", "check", "doctor", "map", "events"):
        text = shown(command, "--help")
        assert widest(text) <= 80
        described = [line.strip() for line in text.split("Arguments")[0].splitlines()[3:]]
        paragraphs = "\n".join(described).split("\n\n")
        for paragraph in paragraphs:
            assert all(len(line) > 55 for line in paragraph.strip().splitlines()[:-1]), paragraph


def test_a_table_wraps_words_before_it_cuts_numbers() -> None:
    console = Console(width=24, color_system=None)
    made = table("name", "long header", words=(0,), wraps=(0,))
    made.add_row("some words to wrap", "1,234,567")
    with console.capture() as captured:
        console.print(made)
    text = captured.get()
    assert "long header" in text
    assert "1,234,567" in text
    assert widest(text) <= 24
