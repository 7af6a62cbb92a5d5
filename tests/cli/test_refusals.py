"""Whatever goes wrong ends in a message and an exit code, never in a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvatlas.cli import catalogue_commands
from kvatlas.cli.commands import app
from kvatlas.cli.failures import plain
from kvatlas.errors import Code
from kvatlas.models import catalogue
from tests.cli.helpers import kvatlas, process
from tests.profiles import DEEP

CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 2,
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "sliding_window": 128, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip

REFUSALS: tuple[tuple[str, Code | None], ...] = (
    ("Llama-3.1-8B --memory 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --memory -1", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --memory abc", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --memory 1MiB", Code.NOT_ENOUGH_MEMORY),
    ("Nemotron-H-8B --memory 1MiB", Code.NOT_ENOUGH_MEMORY),
    ("Llama-3.1-8B --max-len 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --max-len many", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --tp 3", Code.BAD_TOPOLOGY),
    ("Llama-3.1-8B --tp 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --tp -2", Code.BAD_SIZE),
    ("Llama-3.1-8B --pp 33", Code.BAD_TOPOLOGY),
    ("Llama-3.1-8B --dcp 2", Code.BAD_TOPOLOGY),
    ("Qwen3.5-397B-A17B --pack 1000", Code.BAD_PACK),
    ("Qwen3.5-397B-A17B --pack 0", Code.BAD_PACK),
    ("Llama-3.1-8B --pack some", None),
    ("Llama-3.1-8B --kv-dtype fp9", Code.UNKNOWN_DTYPE),
    ("Llama-3.1-8B --backend GUESS", Code.UNKNOWN_BACKEND),
    ("Llama-3.1-8B --backend FLASHMLA", Code.UNKNOWN_BACKEND),
    ("Llama-3.1-8B --layout LBNHH", Code.BAD_ORDER),
    ("Llama-3.1-8B --backend CPU_ATTN --layout BLNHC", Code.LAYOUT_REFUSED),
    ("Llama-3.1-8B --policy greedy", Code.UNKNOWN_POLICY),
    ("Llama-3.1-8B --block-size 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --block-size 17", Code.BACKEND_REFUSES),
    ("No-Such-Model", Code.UNKNOWN_MODEL),
    ("no/such.json", Code.UNREADABLE),
    ("Llama-3.1-8B --gpu H1000", Code.UNKNOWN_GPU),
    ("Llama-3.1-8B --dp 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --dp -1", Code.BAD_SIZE),
    ("Llama-3.1-8B --gpu 8xH100 --dp 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --gpu 8xH100 --pp 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --gpu 8xH100 --dcp 0", Code.BAD_SIZE),
    ("Llama-3.1-8B --utilization 1", Code.CONTRADICTORY),
    ("Llama-3.1-8B --gpu H100 --compare memory", Code.CONTRADICTORY),
    ("Llama-3.1-8B --gpu 0xH100", Code.BAD_QUANTITY),
    ("Llama-3.1-70B --gpu L4", Code.WEIGHTS_TOO_LARGE),
    ("Llama-3.1-8B --gpu H100 --memory 5GB", Code.CONTRADICTORY),
    ("Llama-3.1-8B --gpu 8xH100 --tp 3", Code.CONTRADICTORY),
    ("Llama-3.1-8B --gpu 8xH100 --dp 3", Code.CONTRADICTORY),
    ("Llama-3.1-8B --overhead 2GiB", Code.CONTRADICTORY),
    ("Llama-3.1-8B --utilization 0.5", Code.CONTRADICTORY),
    ("Llama-3.1-8B --ep 2", Code.CONTRADICTORY),
    ("Llama-3.1-8B --gpu H100 --ep 2", Code.BAD_TOPOLOGY),
    ("Llama-3.1-8B --gpu H100 --utilization 9", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --gpu H100 --overhead lots", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --in-flight -1", Code.NEGATIVE),
    ("Llama-3.1-8B --max-len -5", Code.BAD_QUANTITY),
    ("Llama-3.1-8B --tp two", None),
    ("Llama-3.1-8B --compare colour", None),
    ("Llama-3.1-8B --compare tp=two", None),
    ("Llama-3.1-8B --compare tp --save x.json", None),
    ("Llama-3.1-8B --save /", None),
    ("Llama-3.1-8B --no-such-option", None),
)


def check(args: list[str], code: Code | None) -> None:
    result = kvatlas(*args)
    assert result.exit_code == 2, (args, result.output, result.exception)
    assert result.stdout == "", args
    assert "Traceback" not in result.stderr, args
    if code is None:
        assert "Usage: kvatlas" in result.stderr, args
    else:
        lines = result.stderr.splitlines()
        assert [line.split(":")[0].strip() for line in lines] == ["error", "got", "hint", "code"]
        assert lines[-1].split() == ["code:", str(code)], args


def test_a_bad_request_is_refused_with_its_code() -> None:
    for line, code in REFUSALS:
        check(["plan", *line.split()], code)
        check(["plan", *line.split(), "--json"], code)


def files(folder: Path) -> dict[str, tuple[Path, Code]]:
    text = json.dumps(CONFIG)
    contents: dict[str, tuple[bytes, Code]] = {
        "cut in half": (text[: len(text) // 2].encode(), Code.UNREADABLE),
        "binary": (bytes(range(256)), Code.UNREADABLE),
        "empty": (b"", Code.UNREADABLE),
        "a list": (b"[1, 2]", Code.UNREADABLE),
        "an empty object": (b"{}", Code.UNKNOWN_ARCHITECTURE),
        "negative window": (json.dumps({**CONFIG, "sliding_window": -1}).encode(), Code.BAD_CONFIG),
        "no layers": (json.dumps({**CONFIG, "num_hidden_layers": 0}).encode(), Code.BAD_CONFIG),
        "words": (json.dumps({**CONFIG, "num_attention_heads": "four"}).encode(), Code.BAD_CONFIG),
    }
    paths = {}
    for name, (content, code) in contents.items():
        path = folder / f"{name.replace(' ', '_')}.json"
        path.write_bytes(content)
        paths[name] = (path, code)
    paths["a folder without a config"] = (folder, Code.UNREADABLE)
    paths["not there"] = (folder / "absent.json", Code.UNREADABLE)
    return paths


@pytest.mark.parametrize("command", ["plan", "explain", "models"])
def test_a_bad_file_is_refused(command: str, tmp_path: Path) -> None:
    for name, (path, _) in files(tmp_path).items():
        result = kvatlas(command, str(path))
        assert result.exit_code == 2, (name, result.output, result.exception)
        assert result.stdout == ""
        assert "error:" in result.stderr
        assert "code:" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_bad_file_has_a_code(tmp_path: Path) -> None:
    for name, (path, code) in files(tmp_path).items():
        assert kvatlas("plan", str(path)).stderr.split()[-1] == code, name


def test_a_good_file_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert kvatlas("plan", str(path)).exit_code == 0


def test_text_from_outside_cannot_steer_the_terminal() -> None:
    result = kvatlas("plan", "\x1b[31m[bold]\nx")
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert r"\x1b[31m[bold]\nx" in result.stderr.replace("\\\\", "\\")
    assert plain("\ud800\u202e") == r"\ud800\u202e"


def test_a_defect_is_one_line_and_exit_70(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("one by none")

    monkeypatch.setattr(catalogue_commands, "layout_facts", broken)
    result = kvatlas("layouts")
    assert result.exit_code == 70
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "ZeroDivisionError: one by none" in result.stderr
    assert "KVATLAS_DEBUG=1" in result.stderr


def test_debug_raises_a_defect_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(catalogue_commands, "layout_facts", broken)
    result = CliRunner(env={"KVATLAS_DEBUG": "1"}).invoke(app, ["layouts"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_refusal_in_a_process() -> None:
    result = process("plan", "Llama-3.1-8B", "--tp", "3")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == "  code: bad_topology"


def test_every_model_plans_or_refuses_at_any_tp() -> None:
    for name in list(catalogue())[:: 1 if DEEP else 3]:
        result = kvatlas("plan", name, "--compare", "tp=1,3,64", "--json")
        assert result.exit_code == 0, (name, result.output)
        assert len(json.loads(result.stdout)["rows"]) == 3


def test_a_pipe_is_no_plan(tmp_path: Path) -> None:
    pipe = tmp_path / "fifo.json"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        result = kvatlas("check", path, path)
        assert result.exit_code == 2
        assert "not a regular file" in result.output
