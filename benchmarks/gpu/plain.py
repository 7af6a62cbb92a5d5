"""What the tables need of rich, in plain text, for machines that have no rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Table:
    """Rows of text in aligned columns, which markdown reads too."""

    def __init__(self, title: str) -> None:
        self._title, self._justify = title, list[str]()
        self._rows: list[tuple[str, ...]] = [()]

    def add_column(self, name: str, justify: str) -> None:
        """Add a column, as rich does."""
        self._rows[0] += (name,)
        self._justify.append(justify)

    def add_row(self, *cells: str) -> None:
        """Add a row, as rich does."""
        self._rows.append(cells)

    def add_section(self) -> None:
        """Sections are not shown."""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        rows = [
            " | ".join(
                cell.rjust(width) if justify == "right" else cell.ljust(width)
                for cell, width, justify in zip(row, widths, self._justify, strict=True)
            )
            for row in self._rows
        ]
        rows.insert(1, " | ".join("-" * max(width, 1) for width in widths))
        return "\n".join([self._title, "", *(f"| {row} |" for row in rows)])


class Console:
    """Standard output."""

    def __init__(self, width: int) -> None:
        del width

    def print(self, what: object, highlight: bool = True) -> None:
        """Print text or a table."""
        del highlight
        print(what, flush=True)


def track(items: Iterable[Any], what: str, total: int = 0, console: object = None) -> Iterable[Any]:
    """The items; when they are through, one line says so."""
    del total, console
    yield from items
    print(f"{what}: all", flush=True)
