"""Count the lines of code of each package: without docstrings, comments and blank lines.

Usage: python tools/code_lines.py [PACKAGE ...]

With package names (`wire`, `copying`), also prints each of their files.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kvatlas"
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    r"""Return the number of lines that contain code. Strings that only document do not count.

    >>> code_lines('def f():\n    "A docstring."\n\n    # A comment.\n    return 1\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main(packages: list[str]) -> None:
    """Print the lines of every package, and of the files of some."""
    totals: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        count = code_lines(path.read_text())
        totals[name] += count
        if name in packages:
            print(f"{count:7,}  {path.relative_to(SOURCE)}")
    for name, count in totals.most_common():
        print(f"{count:7,}  {name}")
    print(f"{totals.total():7,}  in total")


if __name__ == "__main__":
    main(sys.argv[1:])
