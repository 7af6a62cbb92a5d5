"""The tools that hold the documentation to its limits, and the built site to its menu."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.docs_site import problems
from tools.docs_words import prose_words, report

MENU = """<nav class="md-nav md-nav--primary"><ul>{}</ul></nav>"""
GROUP = """
<li class="md-nav__item md-nav__item--section">
  <label class="md-nav__link"><span class="md-ellipsis">{}</span></label>
  <ul><li><a class="md-nav__link" href="{}">A page</a></li></ul>
</li>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages, whose menu has all groups."""
    groups = ("Tutorials", "How-to", "Reference", "Explanation")
    menu = "".join(GROUP.format(group, "page/") for group in groups)
    home = '<a href="index.html">Home</a>' + menu
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text('<h2 id="part">Part</h2><img src="../dot.png">')
    (tmp_path / "dot.png").touch()
    (tmp_path / "index.html").write_text(MENU.format(home) + '<a href="page/#part">Part</a>')
    return tmp_path


def test_a_sound_site_has_no_problems(site: Path) -> None:
    assert problems(site) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("How-to", "Concepts", "The menu's groups must be"),
        ("page/#part", "page/#gone", "names no element"),
        ("page/#part", "gone/", "leads nowhere"),
        ("page/#part", "https://example.org", ""),
        ("<a ", '<img src="https://example.org/a.png"><a ', "from another host"),
        ("<a ", '<script src="//example.org/a.js"></script><a ', "from another host"),
    ],
)
def test_a_broken_site_is_reported(site: Path, old: str, new: str, problem: str) -> None:
    home = site / "index.html"
    home.write_text(home.read_text().replace(old, new))
    found = problems(site)
    assert problem in "\n".join(found)
    assert bool(found) == bool(problem)


def test_a_page_outside_the_menu_is_reported(site: Path) -> None:
    (site / "lost.html").touch()
    assert problems(site) == ["lost.html: not in the menu."]


def test_words_are_counted_outside_code_and_tables() -> None:
    page = """\
# A title

Four words, [two](of.md) linked.

```sh
kvatlas models
```

| a | table |
|---|---|

![An image](of.png)

[of]: https://example.org
"""
    assert prose_words(page) == 2 + 4 + 2


def test_too_many_words_are_reported(tmp_path: Path) -> None:
    pages = {"docs/a.md": 15_999, "docs/reference/data/b.md": 9_999, "README.md": 501}
    for name, words in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("word " * words)
    lines, kept = report(tmp_path)
    assert not kept
    assert lines[-2:] == ["15,999  docs/: limit 16,000", "   501  README.md: limit 500, 1 too many"]
    (tmp_path / "README.md").write_text("word")
    assert report(tmp_path)[1]
