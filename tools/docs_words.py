"""Count the words of prose of each page, and hold the documentation to its limits.

    python tools/docs_words.py

Code blocks, tables, HTML and link targets are not prose. Specifications and generated tables
under `docs/reference/` are listed, but not limited. The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS_LIMIT = 16_000
"""Words of prose of all pages in `docs/` but the exempt ones."""
EXEMPT = re.compile(r"docs/reference/(data/.+|\w+_(format|protocol)|exchange)\.md")
"""Specifications, and pages that a command generates."""
README_LIMIT = 500
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_TABLE_ROW = re.compile(r"^[ \t]*\|.*$", re.MULTILINE)
_LINK_DEFINITION = re.compile(r"^\[[^\]]+\]:.*$", re.MULTILINE)
_HTML = re.compile(r"<!--.*?-->|</?\w[^>]*>", re.DOTALL)
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_WORD = re.compile(r"\S*\w\S*")


def prose_words(markdown: str) -> int:
    r"""Return the number of words of prose in a page.

    >>> prose_words("# Title\n\nThree words [linked](here.md).\n\n| a | b |\n|---|---|\n")
    4
    >>> prose_words("```sh\nkvatlas models\n```\nA `code span` counts.")
    4
    """
    for pattern in (_FENCE, _TABLE_ROW, _LINK_DEFINITION, _HTML):
        markdown = pattern.sub("", markdown)
    markdown = _LINK.sub(r"\1", _IMAGE.sub(r"\1", markdown))
    return len(_WORD.findall(markdown))


def report(root: Path) -> tuple[list[str], bool]:
    """Return the lines to print for a checkout, and whether both limits are kept."""
    docs = root / "docs"
    words = {
        page.relative_to(root).as_posix(): prose_words(page.read_text())
        for page in sorted(docs.rglob("*.md"))
    }
    limited = {page: count for page, count in words.items() if not EXEMPT.fullmatch(page)}
    lines = [
        f"{count:6,}  {page}{'' if page in limited else ' (exempt)'}"
        for page, count in words.items()
    ]
    readme = prose_words((root / "README.md").read_text())
    totals = {
        "docs/": (sum(limited.values()), DOCS_LIMIT),
        "README.md": (readme, README_LIMIT),
    }
    for name, (count, limit) in totals.items():
        over = f", {count - limit:,} too many" if count > limit else ""
        lines.append(f"{count:6,}  {name}: limit {limit:,}{over}")
    return lines, all(count <= limit for count, limit in totals.values())


if __name__ == "__main__":
    printed, kept = report(Path(__file__).parents[1])
    print("\n".join(printed))
    sys.exit(0 if kept else 1)
