"""Tables as plain text: GPU machines have torch and Triton, and often nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: str = "") -> None:
    """Print rows under columns, those whose first letters are in `left` to the left.

    >>> show("copies", ("what", "GB/s"), [("to host", "55.1"), ("on device", "4,100")], left="w")
    copies
    what        GB/s
    to host     55.1
    on device  4,100
    """
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = [
            text.ljust(width) if name[:1] in left else text.rjust(width)
            for text, width, name in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())
