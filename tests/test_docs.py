"""Every Python block in the README and the docs runs, and prints what it says."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import kvatlas

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPOSITORY = re.compile(r"https://github\.com/kvatlas/kvatlas/(?:blob|tree)/main/")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ |```).*\n)+)", re.MULTILINE)
CUT = "..."
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_in_docs_runs(page: Path) -> None:
    scope: dict[str, object] = {}
    for kind, code in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(compile(code, str(page), "exec"), scope)  # noqa: S102
            continue
        test = doctest.DocTestParser().get_doctest(code, scope, page.name, str(page), 0)
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
        assert result.failed == 0
        assert result.attempted > 0
        scope = test.globs


def _printed(command: str, folder: Path) -> list[str]:
    """The lines that commands print on a terminal of 80 columns, without repeated blanks."""
    program, *words = shlex.split(command)
    printed = (
        kvatlas(*words).stdout if program == "kvatlas" else _printed_by_processes(command, folder)
    )
    return [" ".join(line.split()) for line in printed.splitlines()]


def _printed_by_processes(command: str, folder: Path) -> str:
    paths = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    started = []
    for one in command.split(" & "):
        program, *words = shlex.split(one)
        assert program == "python", command
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    return "".join(process.communicate(timeout=120)[0] for process in started)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if CONSOLE.search(page.read_text())], ids=lambda p: p.name
)
def test_commands_in_docs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """Every line of a `console` block is printed, and `...` marks each place of omitted lines.

    Code blocks with a title are files in the folder where the commands run. The lines of several
    processes have no order.
    """
    for name, code in FILE.findall(page.read_text()):
        (tmp_path / name).write_text(code)
    for block in CONSOLE.findall(page.read_text()):
        commands = COMMAND.findall(block)
        assert commands, block
        for command, shown in commands:
            printed = [line for line in _printed(command, tmp_path) if line.strip("─ ")]
            lines = [" ".join(line.split()) for line in shown.splitlines()]
            assert set(lines) - {CUT} <= set(printed), f"{command}: {set(lines) - set(printed)}"
            assert " & " in command or lines == _cut(printed, lines), command


def _cut(printed: list[str], shown: list[str]) -> list[str]:
    """The printed lines that are shown, with a mark for each sequence of others."""
    cut: list[str] = []
    for line in printed:
        if line in shown:
            cut.append(line)
        elif cut[-1:] != [CUT]:
            cut.append(CUT)
    return cut


def test_the_tutorial_on_connectors_leaves_no_offer(tmp_path: Path) -> None:
    """A second run would read it, and find that its nodes are gone."""
    page = (ROOT / "docs/tutorials/connector.md").read_text()
    files = dict(FILE.findall(page))
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    command = COMMAND.findall(page)[0][0]
    for _ in range(2):
        assert "decode: 5898240 of 5898240 bytes" in _printed(command, tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - set(files) - {"__pycache__"}
    assert not left


def test_tests_that_docs_name_exist() -> None:
    """A page that says what a test proves must not outlive the test."""
    named = {found for page in PAGES for found in TEST.findall(page.read_text())}
    assert len(named) > 50
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_readme_has_a_tour() -> None:
    assert BLOCK.search((ROOT / "README.md").read_text())


def test_links_of_the_readme_work_outside_the_repository() -> None:
    """PyPI shows the README, and beside it there is nothing."""
    for link in LINK.findall((ROOT / "README.md").read_text()):
        assert link.startswith("https://"), f"{link} is relative"
        if REPOSITORY.match(link):
            assert (ROOT / REPOSITORY.sub("", link)).exists(), f"{link} leads nowhere"
