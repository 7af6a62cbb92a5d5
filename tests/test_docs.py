"""Every Python block in the README and the docs runs, and prints what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPOSITORY = re.compile(r"https://github\.com/kvatlas/kvatlas/(?:blob|tree)/main/")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```", re.MULTILINE | re.DOTALL)


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
