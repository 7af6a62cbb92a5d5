"""`make bench-gpu`: one table, each figure beside a limit measured in the same run.

A row is a group of cells (all orders, say); it shows the lowest and the highest, and how
many are wrong or could not run. `--all` shows every cell, `--json FILE` keeps them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import attention, ceilings, copies, host_time, pulls, tables, writes
from benchmarks.gpu.cells import Cell, Measured, measure

JOBS = 12


def every_cell() -> list[Cell]:
    return [*copies.cells(), *attention.cells(), *writes.cells()]


OPERATIONS = ("flash", "best prefill", "matrix product")
"""Limits in TFLOP/s, by how they begin; the others are in GB/s."""


class Apart(NamedTuple):
    """How far the cells of a group lie apart: orders that should make no difference."""

    group: str
    cells: int
    share: float | None
    """The lowest figure lacks this much of the highest; None where a figure is missing or wrong."""
    bar: float

    @property
    def verdict(self) -> str:
        """As that of a cell."""
        if self.share is None:
            return "skipped"
        return "ok" if self.share <= self.bar else "below"

    def row(self) -> list[str]:
        """As a row of the table."""
        share = "" if self.share is None else f"{self.share:.1%}"
        what = f"{self.group}: how far apart"
        return [what, str(self.cells), share, "", "", "", f"{self.bar:.0%}", self.verdict]


def limits() -> dict[str, float]:
    """Name to figure."""
    dense, prefill = ceilings.dense_decode(), ceilings.dense_prefill()
    best = max(prefill, key=prefill.__getitem__)
    rates = {
        "copy": max(ceilings.copy_rate(), ceilings.copy_rate(4 * ceilings.GIB)),
        "copy of 32 MiB": ceilings.copy_rate(32 << 20, 6),
        **links(),
        "dense": max(dense.values()),
        "flash": prefill["flash"],
        f"best prefill, {best}": prefill[best],
        "matrix product": ceilings.matrix_product(),
    }
    for kib in copies.PAGES:
        for way, to_host in (("to", True), ("from", False)):
            name = f"{way} host, one copy for each page of {kib} KiB"
            rates[name] = ceilings.page_by_page(to_host, kib << 10)
    torch.cuda.empty_cache()
    return rates


def links() -> dict[str, float]:
    return {"to host": ceilings.link_rate(True), "from host": ceilings.link_rate(False)}


def _compile(index: int) -> None:
    measure(every_cell()[index], repeat=0)
    torch.cuda.empty_cache()


def compile_all(chosen: list[int]) -> None:
    """Run every cell small, side by side, so that nothing is compiled between timings."""
    os.environ["KVATLAS_BENCH_SMALL"] = "1"
    with multiprocessing.get_context("spawn").Pool(JOBS) as pool:
        for _ in pool.imap_unordered(_compile, chosen, chunksize=1):
            pass
    del os.environ["KVATLAS_BENCH_SMALL"]


def share_of(one: Measured, known: dict[str, float], results: list[Measured]) -> float | None:
    """A figure as a share of its ceiling."""
    if not one.figure:
        return None
    if one.cell.ceiling == "bf16 tokens":
        plain = [r for r in results if _beside(one.cell, r.cell) and r.milliseconds]
        return plain[0].milliseconds / one.milliseconds if plain else None
    return one.figure / known[one.cell.ceiling] if one.cell.ceiling else None


def _beside(cell: Cell, plain: Cell) -> bool:
    order, block = cell.name.split(", block ")
    return plain.group == f"decode 64 x 8192, block {block}" and plain.name == order


def verdict(one: Measured, share: float | None) -> str:
    if one.note:
        return "skipped"
    if not one.right:
        return "WRONG"
    if one.cell.bar is None or one.figure is None:
        return "right"
    reached = one.figure if share is None else share
    return "ok" if reached >= one.cell.bar else "below"


def apart(results: list[Measured]) -> list[Apart]:
    """Groups whose cells are to be alike."""
    groups = []
    wanted = [r for r in results if r.cell.apart is not None]
    for group, some in groupby(wanted, key=lambda r: r.cell.group):
        cells = list(some)
        figures = [r.figure for r in cells if r.figure and r.right]
        share = 1 - min(figures) / max(figures) if len(figures) == len(cells) else None
        groups.append(Apart(group, len(cells), share, cells[0].cell.apart or 0.0))
    return groups


def rows_of(results: list[Measured], known: dict[str, float], each: bool) -> Iterator[list[str]]:
    for group, some in groupby(results, key=lambda r: (r.cell.group, r.cell.name if each else "")):
        cells = list(some)
        shares = [share_of(r, known, results) for r in cells]
        verdicts = [verdict(r, share) for r, share in zip(cells, shares, strict=True)]
        figures = [r.figure for r in cells if r.figure]
        have = [share for share in shares if share]
        cell = cells[0].cell
        bar = (
            "" if cell.bar is None else (f"{cell.bar:.0%}" if cell.ceiling else f"{cell.bar:,.0f}")
        )
        counted = {v: verdicts.count(v) for v in dict.fromkeys(verdicts)}
        yield [
            ", ".join(filter(None, group)),
            str(len(cells)),
            _span(figures, "{:,.0f}" if max(figures, default=0) > 99 else "{:.1f}"),
            cell.unit,
            _span(have, "{:.0%}"),
            cell.ceiling,
            bar,
            ", ".join(v if n == len(cells) else f"{n} {v}" for v, n in counted.items()),
        ]


def _span(numbers: list[Any], form: str) -> str:
    if not numbers:
        return ""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return low if low == high else f"{low} - {high}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu")
    parser.add_argument("--all", action="store_true", help="a row for every cell")
    parser.add_argument("--json", type=Path, help="keep every figure in a file")
    parser.add_argument("--only", default="", help="groups that contain this")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is measured.")
        return
    chosen = [i for i, cell in enumerate(every_cell()) if given.only in cell.group]
    compile_all(chosen)
    print(f"compiled {len(chosen)} cells", flush=True)
    known = limits()
    cells = every_cell()
    results = []
    for index in chosen:
        results.append(measure(cells[index]))
        torch.cuda.empty_cache()
    # Others use the host's memory too: a link that was disturbed must not flatter copies.
    known |= {name: max(figure, known[name]) for name, figure in links().items()}
    unlike = apart(results)
    _show(results, known, unlike, given.all)
    if not given.only:
        host_time.main()
        pulls.main([])
        _steps()
    if given.json:
        given.json.write_text(json.dumps(_record(results, known, unlike), indent=1))


def _steps() -> None:
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: its decode steps are not measured.")
        return
    from benchmarks.gpu import steps

    steps.table()


def _unit(ceiling: str) -> str:
    return "TFLOP/s" if ceiling.startswith(OPERATIONS) else "GB/s"


def _show(
    results: list[Measured], known: dict[str, float], unlike: list[Apart], each: bool
) -> None:
    columns = (
        "what",
        "cells",
        "lowest - highest",
        "",
        "of the ceiling",
        "ceiling",
        "bar",
        "verdict",
    )
    rows = [
        [f"ceiling: {name}", "", f"{figure:,.1f}", _unit(name), "", "", "", ""]
        for name, figure in known.items()
    ]
    rows += [*rows_of(results, known, each), *(one.row() for one in unlike)]
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians"
    tables.show(title, columns, rows, left="wv")
    for one in results:
        share = share_of(one, known, results)
        if verdict(one, share) in ("WRONG", "skipped", "below"):
            at = "" if share is None else f"{share:.1%}"
            print(f"{verdict(one, share)}: {one.cell.group}, {one.cell.name} {at} {one.note}")
    for group in unlike:
        if group.verdict != "ok":
            print(f"{group.verdict}: {group.row()[0]} {group.row()[2]}")


def _record(
    results: list[Measured], known: dict[str, float], unlike: list[Apart]
) -> dict[str, Any]:
    """Everything, as `--json` keeps it."""
    cells = [
        {
            "group": r.cell.group, "cell": r.cell.name, "figure": r.figure,
            "unit": r.cell.unit, "ms": r.milliseconds, "spread": r.spread,
            "share": share_of(r, known, results), "ceiling": r.cell.ceiling,
            "bar": r.cell.bar, "verdict": verdict(r, share_of(r, known, results)),
        }
        for r in results
    ]  # fmt: skip
    spreads = [{**one._asdict(), "verdict": one.verdict} for one in unlike]
    return {"ceilings": known, "cells": cells, "apart": spreads}
