"""Print a random sample of docstrings and error messages, for a reader who does not know the code.

    .venv/bin/python tools/prose_sample.py SEED [COUNT]

COUNT docstrings and COUNT error messages (40 by default) are drawn from `src`. A docstring is
printed after the signature, as in `help()`. An error is printed as its source: the code, and the
expressions of the problem, the value received and the hint. A reader marks each text that needs a
second reading.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from kvatlas.errors import Code

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvatlas"
_ERROR = "AtlasError"
Text = tuple[str, str]
"""Where a text is, and the text."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    r"""Yield the line, the signature and the text of each docstring of a module.

    >>> list(docstrings(ast.parse('"A module."\ndef f(a: int):\n    "Return one."\n')))
    [(1, 'module', 'A module.'), (3, 'def f(a: int)', 'Return one.')]
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, _signature(node), text


def _signature(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returned}"


def errors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    r"""Yield the line and the source of each call that makes an error with a text.

    Variables are replaced by the text that the function assigned to them last before the call.

    >>> made = "def f():\n hint = 'Name it.'\n raise AtlasError(Code.HOLE, 'A gap', hint=hint)\n"
    >>> list(errors(ast.parse(made)))
    [(3, "AtlasError(Code.HOLE, 'A gap', hint='Name it.')")]
    """
    found: dict[ast.Call, list[tuple[int, str, ast.expr]]] = {}
    for function in ast.walk(tree):  # outer functions come first, so the innermost one decides
        if isinstance(function, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            texts = _assigned_texts(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == _ERROR:
                    found[node] = texts
    for call, texts in sorted(found.items(), key=lambda item: item[0].lineno):
        before = {name: text for line, name, text in texts if line <= call.lineno}
        source = ast.unparse(_Replaced(before).visit(call))
        if any(_is_text(part) for part in ast.walk(call) if isinstance(part, ast.expr)):
            yield call.lineno, source + _default_problem(call)


def _default_problem(call: ast.Call) -> str:
    """Return the problem that the code of an error implies, if the call states none."""
    code = call.args[0] if call.args else None
    if len(call.args) != 1 or not isinstance(code, ast.Attribute):
        return ""
    problem = Code.__members__[code.attr].problem if code.attr in Code.__members__ else ""
    return f"\nThe default problem of this code: {problem!r}" if problem else ""


def _is_text(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def _assigned_texts(function: ast.AST) -> list[tuple[int, str, ast.expr]]:
    """Return (line, variable, text) of all assignments of texts, in the order of lines."""
    found: list[tuple[int, str, ast.expr]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            (target, *_), value = node.targets, node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, text in pairs:
                if isinstance(name, ast.Name) and _is_text(text):
                    found.append((node.lineno, name.id, text))
    return sorted(found, key=lambda one: one[0])


class _Replaced(ast.NodeTransformer):
    """Replaces names by the texts that were assigned to them."""

    def __init__(self, texts: dict[str, ast.expr]) -> None:
        self._texts = texts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._texts.get(node.id, node)


def sample(seed: int, count: int) -> tuple[list[Text], list[Text]]:
    """Return `count` docstrings and `count` errors, drawn with a seed."""
    found: tuple[list[Text], list[Text]] = ([], [])
    for path in sorted(SOURCE.rglob("*.py")):
        tree, place = ast.parse(path.read_text()), path.relative_to(ROOT)
        found[0].extend((f"{place}:{line} {name}", text) for line, name, text in docstrings(tree))
        found[1].extend((f"{place}:{line}", text) for line, text in errors(tree))
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    return draw.sample(found[0], count), draw.sample(found[1], count)


def main() -> int:
    """Print the sample of the seed in the first argument."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    drawn = sample(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 40)
    for kind, texts in zip(("docstring", "error"), drawn, strict=True):
        for number, (place, text) in enumerate(texts, 1):
            print(f"--- {kind} {number}: {place}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
