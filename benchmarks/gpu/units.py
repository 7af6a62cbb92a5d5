"""What bounds kernels: how busy the units of the chip are, by the counters of Nsight Compute.

`python -m benchmarks.gpu.units "16 heads" "prefill of 8192 tokens, int8"` profiles a call of the
first cell whose group and name contain each of these. A kernel is run alone here, on a chip that
is not hot: where it is faster than in `make bench-gpu`, its clock is what differs.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu import attention, copies, tables, writes
from benchmarks.gpu.cells import DEVICE, Cell

_INSIDE = "--inside"
_INSTALLED = Path("/opt/nvidia/nsight-compute")
_SHARE = "pct_of_peak_sustained_elapsed"
_TIME, _CLOCK = "gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second"
_METRICS = (
    _TIME,
    _CLOCK,
    f"breakdown:sm__throughput.avg.{_SHARE}",
    f"breakdown:gpu__compute_memory_throughput.avg.{_SHARE}",
)
_SHOWN = 7
"""Units of a kernel that are shown, the busiest first."""
_BETWEEN = 7
"""Elements of the tensor whose filling stands between cells."""


class Profiled(NamedTuple):
    """One kernel of a call."""

    kernel: str
    microseconds: float
    megahertz: float
    units: dict[str, float]
    """Percent of what a unit can do in the whole kernel's time, by the counter."""

    def row(self, cell: str) -> list[str]:
        """As a row of the table."""
        busy = sorted(self.units.items(), key=lambda unit: -unit[1])[:_SHOWN]
        shares = ", ".join(f"{name} {share:.0f}%" for name, share in busy)
        return [cell, self.kernel, f"{self.microseconds:.1f}", f"{self.megahertz:,.0f}", shares]


def chosen(texts: Iterable[str]) -> list[Cell]:
    """For each of these the first cell whose group and name contain it."""
    every = [*attention.cells(), *writes.cells(), *copies.cells()]
    found = ([cell for cell in every if text in named(cell)][:1] for text in texts)
    return [cell for cells in found for cell in cells]


def named(cell: Cell) -> str:
    """A cell by its group and its name."""
    return f"{cell.group}, {cell.name}"


def call_each(cells: Iterable[Cell]) -> None:
    """A call of each cell where the profiler sees it, with a mark before each."""
    for cell in cells:
        call = cell.build({}).calls[0]
        for _ in range(3):
            call()
        mark = torch.empty(_BETWEEN, device=DEVICE)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        mark.fill_(1.0)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        del call
        torch.cuda.empty_cache()


def kernels(lines: Iterable[str]) -> Iterator[Profiled]:
    """What the profiler prints, a row for each kernel.

    >>> head = '"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_elapsed.avg.per_second",'
    >>> head += '"sm__a.avg.pct_of_peak_sustained_elapsed","b.avg.pct_of_peak_sustained_active"'
    >>> rows = ['"","","us","Ghz","%","%"', '"0","decode","3.5","1.75","61","74"']
    >>> list(kernels(["==PROF== x", head, *rows]))
    [Profiled(kernel='decode', microseconds=3.5, megahertz=1750.0, units={'sm__a': 61.0})]
    """
    table = [line for line in lines if line.startswith('"')]
    rows = csv.DictReader(table)
    units = next(rows, {})
    for row in rows:
        shares = {
            name.partition(".")[0]: _number(value)
            for name, value in row.items()
            if f".avg.{_SHARE}" in name and re.fullmatch(r"[\d.,]+", value or "")
        }
        yield Profiled(
            row["Kernel Name"],
            _number(row[_TIME]) * {"ns": 1e-3, "us": 1.0, "ms": 1e3}[units[_TIME]],
            _number(row[_CLOCK]) * {"hz": 1e-6, "mhz": 1.0, "ghz": 1e3}[units[_CLOCK].lower()],
            shares,
        )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def profiler() -> str:
    """Where Nsight Compute is."""
    found = shutil.which("ncu") or next((str(at) for at in _INSTALLED.glob("*/ncu")), "")
    if not found:
        sys.exit("Nsight Compute (ncu) is not installed: nothing is profiled.")
    return found


def main(texts: list[str]) -> None:
    """Profile this file, and print what was counted."""
    command = [
        profiler(), "--csv", "--page", "raw", "--profile-from-start", "off",
        "--clock-control", "none", "--metrics", ",".join(_METRICS),
        sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.units", _INSIDE, *texts,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    names = iter(named(cell) for cell in chosen(texts))
    rows, cell = [], ""
    for one in kernels(lines):
        if "elementwise" in one.kernel:
            cell = next(names, "")
        else:
            rows.append(one.row(cell))
    if not rows:
        sys.exit("\n".join(["Nothing was profiled:", *lines[-20:]]))
    columns = ("cell", "kernel", "us", "MHz", "busiest units")
    tables.show("How busy units are", columns, rows, left="ckb")


if __name__ == "__main__":
    if _INSIDE in sys.argv:
        call_each(chosen(sys.argv[sys.argv.index(_INSIDE) + 1 :]))
    else:
        main(sys.argv[1:])
