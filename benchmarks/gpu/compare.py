"""Two trees beside each other on one GPU: `python -m benchmarks.gpu.compare OLD NEW`.

A process for each tree builds a cell and checks it; then they time it by turns, three times
each, so that both have the same limits: how times compare is how shares of a limit do. Printed
are the medians, and how much faster the new tree is. It ends with 1 if a cell is slower by more
than 3%, wrong, or missing. Of cells that differ in the orders of pages alone one is compared, or
every cell (`--all`); `--only TEXT...` picks groups. Copies, writes, attention and the host's time
of eager calls are cells; pulls between processes and steps of transformers are not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu import tables

ALLOWED = 0.03
"""How much slower a cell may be, as a share."""
ROUNDS = 3
WRONG, MISSING = "WRONG", "missing"
"""Why a cell is not timed, whatever the other tree has."""
Key = tuple[str, str]


class Compared(NamedTuple):
    """One cell in both trees: milliseconds, or why there are none."""

    cell: Key
    old: float | str
    new: float | str

    @property
    def change(self) -> float | None:
        """How much faster the new tree is, as a share of the old one's speed.

        >>> Compared(("decode", "LBNHC"), 1.0, 2.0).change
        -0.5
        """
        if isinstance(self.old, str) or isinstance(self.new, str):
            return None
        return self.old / self.new - 1

    @property
    def slower(self) -> bool:
        """Whether the new tree is slower than is allowed, wrong, or lacks what the old one has.

        >>> [Compared(("decode", "LBNHC"), *both).slower for both in ((1.0, 1.02), (1.0, 1.04),
        ...                       (1.0, "no room"), ("no room", 1.0), ("WRONG", "WRONG"))]
        [False, True, True, False, True]
        """
        if isinstance(self.old, str):
            return self.new in (WRONG, MISSING)
        return self.change is None or self.change < -ALLOWED

    def row(self) -> list[str]:
        """As a row of a table."""
        values = [
            value[:40] if isinstance(value, str) else f"{value:,.4f}"
            for value in (self.old, self.new)
        ]
        change = "" if self.change is None else f"{self.change:+.1%}"
        return [", ".join(self.cell), *values, change, "slower" if self.slower else ""]


class Answers(Protocol):
    """Builds and times the cells of a tree."""

    def ask(self, *request: Any) -> dict[str, Any]:
        """The answer to a request of `turns.Side`: a value, or a problem."""


class Tree:
    """A process that times the cells of a tree."""

    def __init__(self, root: Path) -> None:
        paths = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("turns.py"))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            # Its workers look for modules in the current folder first.
            cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, *request: Any) -> dict[str, Any]:
        """The answer to a request."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            sys.exit(f"A tree's process ended, with {self._process.wait()}, at {request[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(trees: tuple[Answers, Answers], cell: Key, rounds: int = ROUNDS) -> Compared:
    """One cell in both trees, by turns."""
    problems = [_built(tree, cell) for tree in trees]
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(0 if all(problems) else rounds):
        # Who was second is first at the next turn.
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            if problems[which]:
                continue
            answer = trees[which].ask("time")
            problems[which] = answer.get("problem", "")
            taken[which].append(answer.get("value", 0.0))
    old, new = (problem or median(times) for problem, times in zip(problems, taken, strict=True))
    return Compared(cell, old, new)


def _built(tree: Answers, cell: Key) -> str:
    """Why a cell cannot be timed, if so."""
    answer = tree.ask("build", *cell)
    return answer.get("problem", "") or ("" if answer["value"] else WRONG)


def chosen(
    cells: tuple[Sequence[Key], Sequence[Key]], only: Sequence[str], every: bool
) -> tuple[list[Key], list[Key]]:
    """Of cells of two trees those that are compared, and those that the new one lacks.

    They are the first that both have of those that differ in orders alone, or all of them.

    >>> old = ("decode", "BHLNC"), ("decode", "LBNHC"), ("write", "fp8"), ("write", "int8")
    >>> new = ("decode", "LBNHC"), ("decode", "LBHNC"), ("write", "fp8")
    >>> chosen((old, new), [], every=False)
    ([('decode', 'LBNHC'), ('write', 'fp8')], [('write', 'int8')])
    >>> chosen((old, new), ["decode"], every=True)
    ([('decode', 'LBNHC')], [('decode', 'BHLNC')])
    """
    old, new = cells[0], set(cells[1])
    wanted = [key for key in old if not only or any(text in key[0] for text in only)]
    both, lacks = [key for key in wanted if key in new], [key for key in wanted if key not in new]
    if every:
        return both, lacks
    first, gone = ({_alike(key): key for key in reversed(some)} for some in (both, lacks))
    return (
        list(first.values())[::-1],
        [key for kind, key in list(gone.items())[::-1] if kind not in first],
    )


def _alike(cell: Key) -> Key:
    """What cells have in common that differ in orders alone.

    >>> _alike(("copy", "LBNHC to BHLNC, 4 layers"))
    ('copy', ' to , 4 layers')
    """
    return cell[0], re.sub(r"\b[BHLNC]{5}\b", "", cell[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.compare")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="every cell, in every order of pages")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="groups with these")
    given = parser.parse_args()
    begun = time.monotonic()
    trees = Tree(given.old.resolve()), Tree(given.new.resolve())
    old, new = ([(group, name) for group, name in tree.ask("cells")["value"]] for tree in trees)
    both_have, lacking = chosen((old, new), given.only, given.all)
    if not both_have and not lacking:
        sys.exit("The old tree has no such cells: nothing is compared.")
    jobs = max(1, (os.cpu_count() or 1) // 2)
    with ThreadPoolExecutor(2) as both:
        for done in both.map(lambda tree: tree.ask("compile", both_have, jobs), trees):
            print(done.get("problem", f"compiled, {time.monotonic() - begun:.0f} s"), flush=True)
    cells = [Compared(key, "not timed", MISSING) for key in lacking]
    for key in both_have:
        cells.append(compare(trees, key))
        print(*cells[-1].row(), file=sys.stderr, flush=True)
    for tree in trees:
        tree.close()
    columns = ("what", "old ms", "new ms", "faster by", "verdict")
    title = f"medians of {ROUNDS} turns each, {time.monotonic() - begun:.0f} s"
    tables.show(title, columns, (cell.row() for cell in cells), "wv")
    slower = [cell for cell in cells if cell.slower]
    print(
        f"{len(slower)} of {len(cells)} cells are slower by more than {ALLOWED:.0%}, {WRONG}, "
        f"or {MISSING}"
    )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
