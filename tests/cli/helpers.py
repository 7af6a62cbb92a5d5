"""Running the command line in this process and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from typer import testing
from typer.testing import CliRunner, Result

from kvatlas.cli.commands import app

# Typer builds all commands again for each call, which takes longer than most commands run.
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]

# Terminals and CI services set these; the tests want what a pipe gets.
PLAIN: dict[str, str | None] = {
    "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": None, "KVATLAS_DEBUG": None,
    "GITHUB_ACTIONS": None,
}  # fmt: skip


def kvatlas(*args: str, **environment: str) -> Result:
    return CliRunner(env=PLAIN | environment).invoke(app, list(args), prog_name="kvatlas")


def shown(*args: str) -> str:
    """What a command prints, having checked that it succeeds and says nothing else."""
    result = kvatlas(*args)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def said(*args: str) -> dict[str, Any]:
    """The one object that a command prints with --json."""
    answer = json.loads(shown(*args, "--json"))
    assert isinstance(answer, dict)
    return answer


def process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in PLAIN}
    return subprocess.run(
        [sys.executable, "-m", "kvatlas.cli", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | environment,
    )
