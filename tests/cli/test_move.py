"""`kvatlas move` and `bench wire`: real processes, every byte compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import kvatlas, process


def shadowed(folder: Path, module: str, text: str) -> dict[str, str]:
    """An environment in which another module of that name comes first."""
    (folder / f"{module}.py").write_text(text)
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), inherited)))}


MISSING = 'raise ModuleNotFoundError("No module named \'cryptography\'", name="cryptography")'


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [("tp=2,layout=LBNHC", "layout=BHLNC,block-size=32", "auto"), ("", "tp=2,pp=2", "direct")],
)
def test_every_byte_arrives_on_one_host_without_any_extra(
    source: str, target: str, how: str, tmp_path: Path
) -> None:
    ends = ("--from", source, "--to", target, "--tokens", "48", "--how", how)
    missing = shadowed(tmp_path, "cryptography", MISSING)
    result = process("move", "Qwen3-8B", *ends, "--transport", "shm", "--json", **missing)
    assert (result.returncode, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["transport"] == "shm"
    assert sum(rank["nbytes"] for rank in answer["ranks"]) == 48 * 36 * 8 * 2 * 128 * 2
    assert all(rank["wrong"] == 0 for rank in answer["ranks"])


def test_content_is_converted_on_the_way_and_people_get_a_table() -> None:
    ends = ("--from", "kv-dtype=fp8", "--to", "kv-dtype=bf16,tp=2", "--convert", "fp8->bf16")
    result = kvatlas("move", "Qwen3-8B", *ends, "--tokens", "0.016k", "--transport", "shm")
    assert result.exit_code == 0, result.stderr
    assert "All bytes arrived correctly over shm; no other byte changed." in result.stdout
    assert result.stdout.count("staged") == 2, "cells are converted in buffers"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("move", "Qwen3-8B", "--how", "sideways"), "auto, direct, staged or coalesced"),
        (
            ("move", "Qwen3-8B", "--transport", "pigeon"),
            "'pigeon' is not one of nixl, mooncake, tcp, shm",
        ),
        (
            ("move", "Qwen3-8B", "--transport", "memory"),
            "'memory' is not one of nixl, mooncake, tcp, shm",
        ),
        (("move", "Qwen3-8B", "--to", "kv-dtype=fp8", "--tokens", "16"), "unlike_dtypes"),
        (
            ("move", "Qwen3-8B", "--to", "kv-dtype=fp8", "--tokens", "16", "--convert", "up->down"),
            "unknown_dtype",
        ),
        (("move", "no-such-model"), "unknown_model"),
        (("bench", "nothing"), "there is no benchmark"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    result = kvatlas(*arguments)
    assert result.exit_code == 2
    # Usage errors come in a box.
    assert words in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


MOVE = ("move", "Qwen3-8B", "--tokens", "16", "--transport", "shm")


def test_a_helper_process_that_fails_is_no_traceback(tmp_path: Path) -> None:
    """It dies where it imports a module that works here; what it said last is in the message."""
    dies = (
        "import os, sys\n"
        "if 'kvatlas.wire.sample_server' in sys.orig_argv:\n"
        "    raise RuntimeError('nothing works today')\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['resource']\n"
        "import resource\n"
    )
    result = process(*MOVE, **shadowed(tmp_path, "resource", dies))
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "got", "hint", "code"]
    assert "The sample server process did not start" in lines[0]
    assert lines[1].endswith("'RuntimeError: nothing works today'")


def test_python_m_kvatlas() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvatlas", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("kvatlas ")
