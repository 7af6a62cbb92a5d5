"""A table that does not cut headers and numbers in a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_UNLIMITED = 10_000
_NARROWEST = 8
"""Minimum width of a column that may wrap. Longer words are broken."""


class FittedTable(Table):
    """A `rich` table that wraps words and narrows gaps instead of cutting text.

    `rich` cuts text in all columns if a table is too wide. This table first narrows each column
    that may wrap, down to the width of the column's longest word. If the table is still too wide,
    the gap between columns shrinks from two blanks to one. Finally, words are broken in the columns
    that may wrap.
    """

    def __init__(self) -> None:
        super().__init__(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        self.collapse_padding = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose column widths for this terminal, then render the table."""
        self._choose_widths(console, options.max_width)
        yield from super().__rich_console__(console, options)

    def natural_width(self, console: Console, gap: int) -> int:
        """Return the width at which nothing wraps, with `gap` blanks between columns."""
        widest, _ = self._needs(console)
        return sum(widest) + gap * (len(widest) - 1)

    def _needs(self, console: Console) -> tuple[list[int], list[int]]:
        """Return a tuple of two lists, (widths without wrapping, minimum widths), by column."""
        wide = console.options.update(width=_UNLIMITED)
        widest, least = [], []
        for column in self.columns:
            sizes = [console.measure(x, options=wide) for x in (column.header, *column.cells)]
            widest.append(max(size.maximum for size in sizes))
            least.append(
                widest[-1] if column.no_wrap else max(size.minimum for size in sizes),
            )
        return widest, least

    def _choose_widths(self, console: Console, width: int) -> None:
        widest, least = self._needs(console)
        gaps = len(widest) - 1
        for gap in (2, 1):
            widths = shrink(widest, least, width - gap * gaps)
            if sum(widths) + gap * gaps <= width:
                break
        else:
            broken = [
                size if column.no_wrap else min(size, _NARROWEST)
                for column, size in zip(self.columns, least, strict=True)
            ]
            widths = shrink(widths, broken, width - gaps)
        self.padding = (0, gap - 1)
        for column, chosen in zip(self.columns, widths, strict=True):
            column.width = chosen


def shrink(widths: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Return column widths with a sum of at most `total`, if possible.

    The widest columns shrink first, and none becomes narrower than its width in `least`.

    >>> shrink([10, 30, 5], [10, 8, 5], 40), shrink([10, 30], [10, 20], 12)
    ([10, 25, 5], [10, 20])
    """
    made = list(widths)
    while sum(made) > total:
        spare = [n for n, width in enumerate(made) if width > least[n]]
        if not spare:
            break
        made[max(spare, key=lambda n: made[n])] -= 1
    return made
