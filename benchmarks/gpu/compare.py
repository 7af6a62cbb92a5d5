"""Two trees beside each other, from alternating runs of the benchmark on one GPU.

`python -m benchmarks.gpu.compare old1.json old2.json -- new1.json new2.json` takes what
`python -m benchmarks.gpu --json FILE` wrote in each tree. It prints each cell's median share
of its limit (or its median figure, where it has none) in both, and ends with 1 if a cell is
slower by more than 3%, wrong, or missing.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu import tables

ALLOWED = 0.03
"""How much slower a cell may be, as a share."""
_BAD = ("WRONG", "skipped")
Key = tuple[str, str]


class Compared(NamedTuple):
    """One cell in both trees; None where a run has no right figure of it."""

    cell: Key
    old: float | None
    new: float | None

    @property
    def change(self) -> float | None:
        """How much faster the new tree is, as a share of the old one."""
        return self.new / self.old - 1 if self.new and self.old else None

    @property
    def slower(self) -> bool:
        """Whether the new tree is slower than is allowed, or lacks what the old one has."""
        return self.old is not None and (self.change is None or self.change < -ALLOWED)

    def row(self) -> list[str]:
        """As a row of a table."""
        values = ["" if value is None else f"{value:,.3f}" for value in (self.old, self.new)]
        change = "missing" if self.change is None else f"{self.change:+.1%}"
        return [", ".join(self.cell), *values, change, "slower" if self.slower else ""]


def figures(runs: Iterable[dict[str, Any]]) -> dict[Key, float]:
    """The median of each cell over runs; cells that are wrong in one of them are left out."""
    values: dict[Key, list[float]] = defaultdict(list)
    bad: set[Key] = set()
    for run in runs:
        for cell in run["cells"]:
            key = cell["group"], cell["cell"]
            value = cell["share"] or cell["figure"]
            if value is None or cell["verdict"] in _BAD:
                bad.add(key)
            else:
                values[key].append(value)
    return {key: median(several) for key, several in values.items() if key not in bad}


def compare(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[Compared]:
    """Every cell of either tree, in the order in which they were measured.

    >>> run = lambda share: {"cells": [{"group": "decode", "cell": "LBNHC", "figure": 9.0,
    ...                                 "share": share, "verdict": "ok"}]}
    >>> (cell,) = compare([run(0.90), run(0.92), run(0.70)], [run(0.86), run(0.84)])
    >>> f"{cell.change:.1%}", cell.slower
    ('-5.6%', True)
    """
    before, after = figures(old), figures(new)
    return [Compared(key, before.get(key), after.get(key)) for key in {**before, **after}]


def main(arguments: Sequence[str]) -> int:
    if "--" not in arguments:
        sys.exit("usage: python -m benchmarks.gpu.compare OLD.json... -- NEW.json...")
    middle = arguments.index("--")
    old, new = (
        [json.loads(Path(name).read_text()) for name in some]
        for some in (arguments[:middle], arguments[middle + 1 :])
    )
    cells = compare(old, new)
    columns = ("what", "old", "new", "change", "verdict")
    tables.show(
        f"medians of {len(old)} and {len(new)} runs", columns, (c.row() for c in cells), "wv"
    )
    slower = [cell for cell in cells if cell.slower]
    print(f"{len(slower)} of {len(cells)} cells are slower by more than {ALLOWED:.0%}, or missing")
    for cell in slower:
        print(" ", ", ".join(cell.cell), cell.row()[3])
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
