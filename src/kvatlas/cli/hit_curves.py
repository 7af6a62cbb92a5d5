"""`kvatlas simulate -o`: an HTML page with curves of hit rates over memory sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvatlas.cli.failures import plain
from kvatlas.geometry.byte_sizes import size
from kvatlas.maps import Curve, CurveText, curves_page
from kvatlas.planning.request import quantity

Row = dict[str, Any]

_COLUMNS = (
    "curve", "memory", "block", "found", "mean", "last half", "computed again", "saved", "evicted",
)  # fmt: skip
_FOOT = (
    "found: share of the prompt tokens that the cache serves. mean: average of this share over "
    "requests. last half: the share in the last half of the requests. computed again: tokens "
    "that an earlier request had computed. saved: seconds of prefill, by the cost model of "
    "kvatlas simulate. evicted: evicted blocks."
)


def curve_name(row: Row) -> str:
    """Return the name of a row's curve: its model, and the value of the compared option."""
    return " ".join(filter(None, (row["model"], row["curve"])))


def hits_page(name: str, facts: str, rows: list[Row]) -> str:
    """Return an HTML page with curves of hit rates over memory sizes. Each row is one point.

    The page has the title `name` and the description `facts`.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        point = quantity(row["value"]), row["hit_rate"]
        lines.setdefault(curve_name(row), []).append(point)
    curves = [Curve(line, tuple(sorted(points))) for line, points in lines.items()]
    order = list(lines)
    cells = [_cells(row) for row in sorted(rows, key=lambda row: order.index(curve_name(row)))]
    ceiling = max(row["ceiling"] for row in rows)
    return curves_page(curves, ceiling, CurveText(name, facts, _FOOT, _COLUMNS, cells))


def _cells(row: Row) -> tuple[str, ...]:
    saved = row["seconds_saved"]
    return (
        curve_name(row),
        size(quantity(row["value"])),
        f"{row['block']:,}",
        f"{row['hit_rate']:.1%}",
        f"{row['hit_rate_by_request']:.1%}",
        f"{row['hit_rate_last_half']:.1%}",
        f"{row['computed_again']:,}",
        "-" if saved is None else f"{saved:,.0f} s",
        f"{row['evictions']:,}",
    )


def save_page(path: Path, page: str) -> None:
    """Write the HTML page; raise `typer.BadParameter` if the file cannot be written."""
    try:
        path.write_text(page, "utf-8")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        where = f"cannot write {plain(path)}: {reason}."
        raise typer.BadParameter(where, param_hint="'--output'") from None
