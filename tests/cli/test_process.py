"""The command line as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import kvatlas
from tests.cli.helpers import kvatlas as kvatlas_here
from tests.cli.helpers import process


def test_version() -> None:
    result = process("--version")
    assert (result.returncode, result.stdout) == (0, f"kvatlas {kvatlas.__version__}\n")


def test_json_in_a_terminal_that_knows_only_ascii() -> None:
    result = process("plan", "gpt-oss-20b", "--json", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.returncode == 0
    assert json.loads(result.stdout)["model"] == "gpt-oss-20b"
    table = process("plan", "gpt-oss-20b", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert table.returncode == 0
    assert table.stdout.isascii()


def test_piped_output_has_no_colours() -> None:
    result = process("plan", "Qwen3.5-397B-A17B", "--compare", "policy", TERM="xterm-256color")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.parametrize("args", [("models",), ("layouts",), ("plan", "Qwen3-8B", "--json")])
def test_a_closed_pipe_is_no_error_message(args: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "kvatlas.cli", *args],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(write)
    assert result.stderr == ""
    assert result.returncode == 1


def test_interrupt_is_quiet() -> None:
    child = subprocess.Popen(
        # Fires while the command runs, however fast the machine is; another thread may be
        # the one that is told, so the command waits until it is interrupted.
        [
            sys.executable,
            "-c",
            "import os, signal, time; from kvatlas.cli import catalogue_commands, commands;"
            # A shell that runs this in the background has interrupts ignored.
            "signal.signal(signal.SIGINT, signal.default_int_handler);"
            "catalogue_commands.layout_facts = "
            "lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(50));"
            "import sys; sys.argv = ['kvatlas', 'layouts']; commands.run()",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = kvatlas_here(_KVATLAS_COMPLETE=f"source_{shell}")
    assert result.exit_code == 0
    assert "_KVATLAS_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("kvatlas pl", "plan"),
        ("kvatlas plan Qwen3.5-3", "Qwen3.5-397B-A17B"),
        ("kvatlas models gpt", "gpt-oss-20b"),
        ("kvatlas plan Qwen3-8B --layout BH", "BHLNC"),
        ("kvatlas plan Qwen3-8B --policy at", "atlas"),
        ("kvatlas explain Qwen3-8B --backend FLASHM", "FLASHMLA"),
        ("kvatlas plan Qwen3-8B --kv-dtype nv", "nvfp4"),
        ("kvatlas plan Qwen3-8B --compare kv", "kv-dtype"),
    ],
)
def test_completion_knows_names(words: str, expected: str) -> None:
    assert expected in completions(kvatlas_here, words).split()


def test_completion_in_a_process() -> None:
    assert "plan" in completions(process, "kvatlas pl").split()


def completions(run: Callable[..., Any], words: str) -> str:
    last = str(len(words.split()) - 1)
    result = run(_KVATLAS_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    return str(result.stdout)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_there_is_one_clear_line(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from kvatlas.cli import main;"
        "sys.argv = ['kvatlas', 'layouts']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 69
    assert len(result.stderr.splitlines()) == 1
    assert "pip install 'kvatlas[cli]'" in result.stderr
