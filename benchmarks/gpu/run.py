"""`make bench-gpu`: tables, each figure beside a limit measured in the same run.

A row is a group of cells (all orders, say); it shows the lowest and the highest, and how
many are wrong or could not run. `--all` shows every cell, `--json FILE` keeps them, `--only
TEXT...` picks groups. Kernels are compiled on all cores first; then one process measures and
prints each table as soon as it has it, what has a goal before what has been reached long since.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu import attention, ceilings, copies, goals, host_time, pulls, writes
from benchmarks.gpu.cells import Cell, measure
from benchmarks.gpu.compiling import Work, compile_all, compile_cell, compiled_late
from benchmarks.gpu.replays import Player, ready
from benchmarks.gpu.report import Results, in_bf16, key_of, show_cells, show_limits
from benchmarks.gpu.step_times import StepTimes

HOST_TIME, STEPS, PULLS = "host time", "steps of transformers", "pulls"
"""What is measured besides cells, as `--only` takes it."""


class Part(NamedTuple):
    """Cells that are measured one after the other, and shown in one table."""

    title: str
    cells: list[Cell]
    links: bool = False
    """Whether they cross the link to the host."""


def parts() -> list[Part]:
    """Every cell, what has a goal first."""
    compute = [*attention.cells(), *writes.cells()]
    moved = copies.cells()
    return [
        Part("with a goal", [cell for cell in compute if cell.group in goals.GROUPS]),
        Part("attention, writes", [cell for cell in compute if cell.group not in goals.GROUPS]),
        Part("copies", [cell for cell in moved if cell.ceiling == "copy"]),
        Part("the host's link", [cell for cell in moved if cell.ceiling != "copy"], links=True),
    ]


def works(chosen: Sequence[Part]) -> list[Work]:
    """What is compiled for them: what takes longest first."""
    cells = [cell for part in chosen for cell in part.cells]
    cells.sort(key=lambda cell: not cell.group.startswith(("decode MLA", "prefill")))
    return [partial(compile_cell, cell, {}) for cell in cells]


def device_limits(players: dict[str, Player]) -> dict[str, float]:
    """Limits of the chip itself, by name; those that cells take turns with are kept."""
    players["copy"], copy = ceilings.copy_limit(ceilings.GIB, 4 * ceilings.GIB)
    players["dense"], dense = ceilings.dense_limit()
    prefill = ceilings.dense_prefill()
    best = max(prefill, key=prefill.__getitem__)
    return {
        "copy": copy,
        "copy of 32 MiB": ceilings.copy_rate(32 << 20, 6),
        "dense": dense,
        "flash": prefill["flash"],
        f"best prefill, {best}": prefill[best],
        "matrix product": ceilings.matrix_product(),
    }


def links() -> dict[str, float]:
    """One large copy each way."""
    return {"to host": ceilings.link_rate(True), "from host": ceilings.link_rate(False)}


def page_by_page() -> dict[str, float]:
    """What the link gives where every page is a copy of its own."""
    return {
        f"{way} host, one copy for each page of {kib} KiB": ceilings.page_by_page(
            to_host, kib << 10
        )
        for kib in copies.PAGES
        for way, to_host in (("to", True), ("from", False))
    }


def has_transformers() -> bool:
    """Whether its steps can be measured."""
    return importlib.util.find_spec("transformers") is not None


def compile_steps() -> None:
    """Compile the kernels of steps of transformers, which a worker alone imports."""
    from benchmarks.gpu import steps

    steps.compile_steps()


class Run:
    """A run of the benchmark: what is chosen, and what has been measured."""

    def __init__(self, only: Sequence[str], each: bool) -> None:
        self.only, self.each = only, each
        self.results = Results()
        self.players: dict[str, Player] = {}
        """Limits that cells take turns with, by name."""
        self.goals: list[goals.GoalRow] = []
        self.begun = time.monotonic()

    def wants(self, name: str) -> bool:
        """Whether something of this name was asked for."""
        return not self.only or any(text in name for text in self.only)

    def chosen(self) -> list[Part]:
        """What was asked for, and what that is held against, by parts."""
        every = parts()
        wanted = [cell for part in every for cell in part.cells if self.wants(cell.group)]
        keys = {*map(key_of, wanted), *map(in_bf16, wanted)}
        some = (
            part._replace(cells=[cell for cell in part.cells if key_of(cell) in keys])
            for part in every
        )
        return [part for part in some if part.cells]

    def works(self) -> list[Work]:
        """Everything that is compiled first."""
        others: list[Work] = []
        if self.wants(STEPS) and has_transformers():
            others.append(compile_steps)
        if self.wants(HOST_TIME):
            others.append(host_time.compile_calls)
        return [*others, *works(self.chosen())]

    def title(self, what: str) -> str:
        """A table's, with the seconds since the run began."""
        seconds = time.monotonic() - self.begun
        return f"\n{what}, after {seconds:.0f} s"

    def limits(self, what: str, found: dict[str, float]) -> None:
        """Keep limits, and show them."""
        self.results.limits |= found
        show_limits(self.title(what), found)
        torch.cuda.empty_cache()

    def limit_of(self, cell: Cell) -> Player | None:
        """What a cell takes turns with: a limit of the chip, or the same cell in bf16."""
        key = in_bf16(cell)
        if key is None:
            return self.players.get(cell.ceiling)
        plain = next(one for part in parts() for one in part.cells if key_of(one) == key)
        return ready(plain.build({}), graph=plain.graph)

    def measure(self, part: Part) -> None:
        """Measure a part and show its table."""
        if part.links:
            self.limits("Limits of the link", {**links(), **page_by_page()})
        measured = []
        for cell in part.cells:
            measured.append(measure(cell, limit=self.limit_of(cell)))
            self.results.cells.append(measured[-1])
            torch.cuda.empty_cache()
        if part.links:
            # Others use the host's memory too: a link that was disturbed must not flatter copies.
            known = self.results.limits
            known |= {name: max(figure, known[name]) for name, figure in links().items()}
        show_cells(self.title(f"Cells {part.title}, medians"), self.results, measured, self.each)

    def attempt(self, what: str, act: Callable[[], list[goals.GoalRow]]) -> None:
        """Something else than cells, if it was asked for; where it fails, the rest goes on."""
        if not self.wants(what):
            return
        print(self.title(what))
        try:
            self.goals += act()
        except Exception as problem:
            print(f"{what}: not measured, {type(problem).__name__}: {str(problem)[:500]}")


def _host_times() -> list[goals.GoalRow]:
    return goals.of_host_times(host_time.table())


def _steps() -> list[goals.GoalRow]:
    if not has_transformers():
        print("transformers is not installed: its decode steps are not measured.")
        return []
    # In a process of its own, since steps are profiled: what is timed behind that may be slower.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        return goals.of_steps(worker.submit(_table_of_steps).result())


def _table_of_steps() -> list[StepTimes]:
    from benchmarks.gpu import steps

    return steps.table()


def _pulls() -> list[goals.GoalRow]:
    pulls.main([])
    return []


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu")
    parser.add_argument("--all", action="store_true", help="a row for every cell")
    parser.add_argument("--json", type=Path, help="keep every figure in a file")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT",
        help=f"groups that contain one of these, and of: {HOST_TIME}, {STEPS}, {PULLS}",
    )  # fmt: skip
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is measured.")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a table is shown when it is there
    run = Run(given.only, given.all)
    chosen = run.chosen()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    compile_all(run.works())
    if chosen:
        run.limits("Limits", device_limits(run.players))
    with compiled_late() as late:
        _measure(run, chosen)
    if late:
        print(f"\ncompiled between timings: {len(late)}, {', '.join(sorted(set(late)))}")
    if given.json:
        kept = run.results.record() | {"goals": [row._asdict() for row in run.goals]}
        given.json.write_text(json.dumps(kept, indent=1))


def _measure(run: Run, chosen: Sequence[Part]) -> None:
    """Everything in its order: goals first, with their table, then the rest."""
    with_goal = [part for part in chosen if part.cells[0].group in goals.GROUPS]
    for part in with_goal:
        run.measure(part)
    run.goals += goals.of_cells(run.results)
    run.attempt(HOST_TIME, _host_times)
    run.attempt(STEPS, _steps)
    if run.goals:
        goals.show(run.goals)
    for part in chosen:
        if part not in with_goal:
            run.measure(part)
    run.attempt(PULLS, _pulls)
    print(run.title("All is measured"), flush=True)
