"""The goals of the kernels, in one table: what is wanted, what is reached, and whether it is right.

A goal is met where every cell of it is right and reaches its bar. Bars stand with the cells; a
goal has one of its own where the bar of a cell is that of earlier kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.gpu import tables
from benchmarks.gpu.cells import Measured
from benchmarks.gpu.host_time import BAR as HOST_BAR
from benchmarks.gpu.host_time import HostTime
from benchmarks.gpu.report import Results, figure_form, span
from benchmarks.gpu.step_times import BAR as STEP_BAR
from benchmarks.gpu.step_times import StepTimes

_MLA = "decode MLA 64 x 4096"
_WRITE = "write 8192 tokens, LBNHC, block 16"


class Goal(NamedTuple):
    """What some cells should reach."""

    what: str
    groups: tuple[str, ...]
    name: str = ""
    """The one cell of the groups that is meant; all where it is empty."""
    least: float | None = None
    """A figure, in place of the bars of the cells."""

    def cells(self, results: Results) -> list[Measured]:
        """What was measured of it."""
        return [one for one in results.of(*self.groups) if self.name in ("", one.cell.name)]


GOALS = (
    Goal("MLA, 128 heads, bf16, every order", (f"{_MLA}, 128 heads, auto, operations",)),
    Goal("MLA, 128 heads, fp8 latents", (f"{_MLA}, 128 heads, fp8, TFLOP/s",)),
    Goal("sparse MLA, every order", ("sparse MLA 64 x 2048 of 65536, 128 heads, records",)),
    Goal("MLA, 16 heads", (f"{_MLA}, 16 heads, auto, GB/s",)),
    Goal("decode, nvfp4", ("decode 64 x 8192, nvfp4",)),
    Goal("decode, turboquant 4 bit", ("decode 64 x 8192, turboquant_4bit_nc",)),
    Goal("decode, int4", ("decode 64 x 8192, int4_per_token_head",)),
    Goal("decode 1 x 32768", ("decode 1 x 32768, block 16", "decode 1 x 32768, block 64")),
    Goal("prefill 8192, bf16", ("prefill of 8192 tokens",), least=500.0),
    *(
        Goal(f"prefill 8192, {cache}", (f"prefill of 8192 tokens, {cache}",))
        for cache in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4")
    ),
    *(
        Goal(f"write, {cache}", (_WRITE,), cache)
        for cache in (
            "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4",
            "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc",
        )
    ),
)  # fmt: skip
BESIDE = ("decode 64 x 8192, block 64", f"{_MLA}, 128 heads, auto, TFLOP/s")
"""Groups that cells with a goal are held against."""
GROUPS = {*BESIDE, *(group for goal in GOALS for group in goal.groups)}


class GoalRow(NamedTuple):
    """A goal as the table shows it."""

    what: str
    wanted: str
    now: str
    met: str
    checked: str


def of_cells(results: Results) -> list[GoalRow]:
    """The goals that are cells, of those that were measured."""
    found = ((goal, goal.cells(results)) for goal in GOALS)
    return [_row(goal, results, cells) for goal, cells in found if cells]


def _row(goal: Goal, results: Results, cells: Sequence[Measured]) -> GoalRow:
    cell = cells[0].cell
    shares = goal.least is None and bool(cell.ceiling)
    reached = [results.share(one) if shares else one.figure for one in cells]
    least = goal.least or cell.bar or 0.0
    have = [figure for figure in reached if figure]
    form = "{:.1%}" if shares else figure_form(have)
    wanted = f"{least:.0%} of {cell.ceiling}" if shares else f"{least:,.0f} {cell.unit}"
    met = len(have) == len(cells) and min(have) >= least and all(one.right for one in cells)
    return GoalRow(
        goal.what, wanted, span(have, form), "yes" if met else "NO", _checked(results, cells)
    )


def _checked(results: Results, cells: Sequence[Measured]) -> str:
    """Right, or how many are not."""
    verdicts = [results.verdict(one) for one in cells]
    bad = [f"{verdicts.count(bad)} {bad}" for bad in ("WRONG", "skipped") if bad in verdicts]
    return ", ".join(bad) or f"{len(cells)} right"


def of_host_times(figures: Iterable[HostTime]) -> list[GoalRow]:
    """What calls cost the host, beyond bare launches of the same kernels."""
    rows = []
    for one in figures:
        wanted, now, met = f"{HOST_BAR:.0f} us beyond launches", f"{one.beyond:.1f}", one.ok
        if one.most_allocations is not None:
            wanted, now = (
                f"{wanted}, {one.most_allocations} allocations",
                f"{now}, {one.allocations}",
            )
        rows.append(GoalRow(f"host time: {one.what}", wanted, now, "yes" if met else "NO", ""))
    return rows


def of_steps(steps: Iterable[StepTimes]) -> list[GoalRow]:
    """Steps of transformers: captured beside the sum of their kernels, gathered beside its own."""
    rows = []
    for one in steps:
        size = f"{one.sequences} x {one.tokens}"
        captured, gathered = one.graph / one.kernels, one.gathered / one.own
        rows += [
            GoalRow(
                f"a step of {size}, captured", f"{STEP_BAR:.2f} x its kernels",
                f"{captured:.2f}", "yes" if one.captured_ok else "NO", "",
            ),
            GoalRow(
                f"a step of {size}, rows gathered", "1.00 x transformers' cache",
                f"{gathered:.2f}", "yes" if one.gathered_ok else "NO", "",
            ),
        ]  # fmt: skip
    return rows


def show(rows: Sequence[GoalRow]) -> None:
    """Print the table."""
    met = sum(row.met == "yes" for row in rows)
    tables.show(
        f"\nGoals: {met} of {len(rows)} are met",
        ("goal", "wanted", "now", "met", "checked"), rows, left="gwnmc",
    )  # fmt: skip
