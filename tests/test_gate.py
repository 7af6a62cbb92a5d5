"""The gate: `.ci/run` and the workflow run the same make targets, listed in `.ci/steps`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
STEPS = (ROOT / ".ci" / "steps").read_text().split()
FAKE_MAKE = """#!/bin/sh
echo "make $1"
test "$1" != "$FAILS"
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A folder with `.ci` and a `make` that prints its target, and fails for the one of FAILS."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(FAKE_MAKE)
    make.chmod(0o755)
    return tmp_path


def run_gate(gate: Path, fails: str = "") -> subprocess.CompletedProcess[str]:
    path = f"{gate / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [gate / ".ci" / "run"],
        capture_output=True,
        text=True,
        env={"PATH": path, "FAILS": fails},
    )


def test_each_step_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", MAKEFILE, flags=re.MULTILINE))
    assert [step for step in STEPS if step not in targets] == []
    assert len(STEPS) == len(set(STEPS)) > 5


def test_the_gate_runs_all_steps_in_order_and_prints_the_minutes_of_each(gate: Path) -> None:
    done = run_gate(gate)
    assert done.returncode == 0
    assert re.findall(r"^make (.+)$", done.stdout, flags=re.MULTILINE) == STEPS
    minutes = re.findall(r"^ +\d+\.\d  (\S+) (\w+)$", done.stdout, flags=re.MULTILINE)
    assert minutes == [(step, "passed") for step in STEPS]


def test_the_gate_fails_at_the_first_step_that_fails(gate: Path) -> None:
    done = run_gate(gate, fails=STEPS[2])
    assert done.returncode != 0
    assert re.findall(r"^make (.+)$", done.stdout, flags=re.MULTILINE) == STEPS[:3]
    assert f"{STEPS[2]} failed" in done.stdout


def test_the_workflow_reads_the_same_list(tmp_path: Path) -> None:
    (read,) = re.findall(r"^ +- id: read\n +run: (.+)$", WORKFLOW, flags=re.MULTILINE)
    output = tmp_path / "output"
    environment = os.environ | {"GITHUB_OUTPUT": str(output)}
    subprocess.run(["bash", "-ec", read], cwd=ROOT, env=environment, check=True)  # noqa: S607
    name, _, steps = output.read_text().partition("=")
    assert (name, json.loads(steps)) == ("steps", STEPS)


def test_the_workflow_runs_the_list_and_the_tests_on_other_machines_and_versions() -> None:
    assert "step: ${{ fromJSON(needs.list.outputs.steps) }}" in WORKFLOW
    assert "STEP: ${{ matrix.step }}" in WORKFLOW
    made = re.findall(r"^ +- run: make (.+)$", WORKFLOW, flags=re.MULTILINE)
    assert sorted(made) == ['"$STEP"', "test", "test-lowest"]


def test_clean_removes_every_environment_that_a_target_makes() -> None:
    (removed,) = re.findall(r"^clean:\n((?:\t.*\n?)+)", MAKEFILE, flags=re.MULTILINE)
    patterns = removed.split()
    made = set(re.findall(r"\.venv-[\w-]+", MAKEFILE)) - {".venv-"}
    assert {".venv-lowest", ".venv-tools", ".venv-vllm", ".venv-wheel"} <= made
    assert [one for one in made if not any(fnmatch(one, each) for each in patterns)] == []
