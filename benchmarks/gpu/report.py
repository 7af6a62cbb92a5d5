"""Figures beside their limits and bars: rows of the table, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from benchmarks.gpu import tables
from benchmarks.gpu.cells import Cell, Measured

OPERATIONS = ("flash", "best prefill", "matrix product")
"""Limits in TFLOP/s, by how they begin; the others are in GB/s."""
BF16_TOKENS, BF16_LATENTS = "bf16 tokens", "bf16 latents"
"""Limits that are other cells: the same batch in bf16."""
_COLUMNS = ("what", "cells", "lowest - highest", "", "of the ceiling", "ceiling", "bar", "verdict")
_BF16_LATENTS = "decode MLA 64 x 4096, 128 heads, auto, TFLOP/s"


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


def apart(results: Sequence[Measured]) -> list[Apart]:
    """Groups whose cells are to be alike."""
    groups = []
    wanted = [r for r in results if r.cell.apart is not None]
    for group, some in groupby(wanted, key=lambda r: r.cell.group):
        cells = list(some)
        figures = [r.figure for r in cells if r.figure and r.right]
        share = 1 - min(figures) / max(figures) if len(figures) == len(cells) else None
        groups.append(Apart(group, len(cells), share, cells[0].cell.apart or 0.0))
    return groups


class Results:
    """All that has been measured so far: limits by name, and cells."""

    def __init__(self) -> None:
        self.limits: dict[str, float] = {}
        self.cells: list[Measured] = []

    def of(self, *groups: str) -> list[Measured]:
        """The cells of some groups."""
        return [one for one in self.cells if one.cell.group in groups]

    def share(self, one: Measured) -> float | None:
        """A figure as a share of its ceiling."""
        if not one.figure:
            return None
        if one.beside is not None:
            if in_bf16(one.cell):
                return one.beside.milliseconds / one.milliseconds
            return one.figure * one.beside.milliseconds * 1e6 / one.beside.work
        if beside := in_bf16(one.cell):
            plain = [r for r in self.cells if key_of(r.cell) == beside and r.milliseconds]
            return plain[0].milliseconds / one.milliseconds if plain else None
        return one.figure / self.limits[one.cell.ceiling] if one.cell.ceiling else None

    def verdict(self, one: Measured) -> str:
        """Whether a cell is right, and as fast as it should be."""
        if one.note:
            return "skipped"
        if not one.right:
            return "WRONG"
        if one.cell.bar is None or one.figure is None:
            return "right"
        if one.cell.ceiling and self.share(one) is None:
            return "nothing beside it"
        reached = self.share(one) if one.cell.ceiling else one.figure
        return "ok" if (reached or 0.0) >= one.cell.bar else "below"

    def record(self) -> dict[str, Any]:
        """Everything, as `--json` keeps it."""
        cells = [
            {
                "group": r.cell.group, "cell": r.cell.name, "figure": r.figure,
                "unit": r.cell.unit, "ms": r.milliseconds, "spread": r.spread,
                "share": self.share(r), "ceiling": r.cell.ceiling,
                "bar": r.cell.bar, "verdict": self.verdict(r),
            }
            for r in self.cells
        ]  # fmt: skip
        spreads = [{**one._asdict(), "verdict": one.verdict} for one in apart(self.cells)]
        return {"ceilings": self.limits, "cells": cells, "apart": spreads}


def key_of(cell: Cell) -> tuple[str, str]:
    """What tells cells apart."""
    return cell.group, cell.name


def in_bf16(cell: Cell) -> tuple[str, str] | None:
    """The same in bf16, where that is what a cell is held against."""
    if cell.ceiling == BF16_LATENTS:
        return _BF16_LATENTS, cell.name
    if cell.ceiling != BF16_TOKENS:
        return None
    order, block = cell.name.split(", block ")
    return f"decode 64 x 8192, block {block}", order


def span(numbers: Sequence[float], form: str) -> str:
    """The lowest and the highest.

    >>> span([3.0, 1.0], "{:.0f}"), span([2.0, 2.0], "{:.0f}"), span([], "{}")
    ('1 - 3', '2', '')
    """
    if not numbers:
        return ""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return low if low == high else f"{low} - {high}"


def figure_form(figures: Sequence[float]) -> str:
    """How figures are written: those below 100 with a digit more."""
    return "{:,.0f}" if max(figures, default=0) > 99 else "{:.1f}"


def rows_of(results: Results, some: Sequence[Measured], each: bool) -> Iterator[list[str]]:
    """A row for each group of some cells, or for each cell."""
    for name, members in groupby(some, key=lambda r: (r.cell.group, r.cell.name if each else "")):
        cells = list(members)
        verdicts = [results.verdict(one) for one in cells]
        figures = [one.figure for one in cells if one.figure]
        shares = [share for one in cells if (share := results.share(one))]
        cell = cells[0].cell
        bar = ""
        if cell.bar is not None:
            bar = f"{cell.bar:.0%}" if cell.ceiling else f"{cell.bar:,.0f}"
        counted = {v: verdicts.count(v) for v in dict.fromkeys(verdicts)}
        yield [
            ", ".join(filter(None, name)),
            str(len(cells)),
            span(figures, figure_form(figures)),
            cell.unit,
            span(shares, "{:.0%}"),
            cell.ceiling,
            bar,
            ", ".join(v if n == len(cells) else f"{n} {v}" for v, n in counted.items()),
        ]


def show_cells(title: str, results: Results, some: Sequence[Measured], each: bool) -> None:
    """The table of some cells, and a line for each that is not as it should be."""
    unlike = apart(some)
    rows = [*rows_of(results, some, each), *(one.row() for one in unlike)]
    tables.show(title, _COLUMNS, rows, left="wv")
    for one in some:
        if (verdict := results.verdict(one)) not in ("ok", "right"):
            share = results.share(one)
            at = "" if share is None else f"{share:.1%}"
            print(f"{verdict}: {one.cell.group}, {one.cell.name} {at} {one.note}")
    for group in unlike:
        if group.verdict != "ok":
            print(f"{group.verdict}: {group.row()[0]} {group.row()[2]}")


def show_limits(title: str, limits: dict[str, float]) -> None:
    """Limits that were measured."""
    rows = [
        [name, f"{figure:,.1f}", "TFLOP/s" if name.startswith(OPERATIONS) else "GB/s"]
        for name, figure in limits.items()
    ]
    tables.show(title, ("limit", "figure", "unit"), rows, left="lu")
