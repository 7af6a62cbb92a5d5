"""One tree's side of a comparison: it builds, checks and times cells as it is told.

`compare` runs this file twice, with the folders of one tree and then of the other in
`PYTHONPATH`: cells and kernels are the tree's, whichever it is. What an older tree may lack is
imported from beside this file. Requests and answers are lines of JSON; whatever else is printed
goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.gpu import attention, copies, writes
from benchmarks.gpu.cells import Cell

Key = tuple[str, str]


class Side:
    """The cells of a tree, one of them built at a time."""

    def __init__(self) -> None:
        every = [*attention.cells(), *writes.cells(), *copies.cells()]
        self._cells: dict[Key, Cell] = {(cell.group, cell.name): cell for cell in every}
        self._host = import_module("host_calls")
        self._replays = import_module("replays")
        self._built: Callable[[], float] | None = None

    def cells(self) -> list[Key]:
        """Groups and names."""
        return [*self._cells, *((self._host.GROUP, name) for name in self._host.NAMES)]

    def compile(self, keys: list[list[str]], jobs: int) -> None:
        """Compile cells, on so many cores."""
        compiling = import_module("compiling")
        works = [
            partial(self._host.compile_call, name)
            if group == self._host.GROUP
            else partial(compiling.compile_cell, self._cells[group, name], {})
            for group, name in keys
        ]
        compiling.compile_all(works, jobs)

    def build(self, group: str, name: str) -> bool:
        """Build a cell in place of the one before; whether it is right."""
        self._built = None
        torch.cuda.empty_cache()
        if group == self._host.GROUP:
            step = self._host.step_of(name)
            step()
            self._built = partial(self._host.milliseconds, step)
            return True  # other cells check the same calls
        cell = self._cells[group, name]
        case = cell.build({})
        self._built = partial(self._milliseconds, cell, case)
        return case.right()

    def _milliseconds(self, cell: Cell, case: Any) -> float:
        """Of a call; both trees are timed by what lies beside this file."""
        taken: float = self._replays.milliseconds(case, graph=cell.graph, long=cell.long)[0]
        return taken

    def time(self) -> float:
        """Milliseconds of a call of the cell that is built."""
        if self._built is None:
            raise RuntimeError("nothing is built")
        return self._built()


def serve(side: Side, answers: Any) -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        name, *given = json.loads(line)
        try:
            answer = {"value": getattr(side, name)(*given)}
        except Exception as problem:
            answer = {"problem": f"{type(problem).__name__}: {str(problem)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    to_caller = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Side(), to_caller)
