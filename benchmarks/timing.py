"""Medians of repeated runs, and the table they are printed in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def median_ms(
    act: Callable[[], Any], repeat: int = 15, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median milliseconds of `repeat` runs, after one to warm up."""
    act()
    taken = []
    for _ in range(repeat):
        start = clock()
        result = act()
        taken.append((clock() - start) * 1e3)
        # Freed outside the clock: returning 30 MB to the system is not the work measured.
        del result
    return statistics.median(taken)


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one table."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=110)
    console.print(f"[bold]{title}[/]")
    console.print(table)
