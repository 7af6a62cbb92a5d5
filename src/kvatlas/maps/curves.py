"""An HTML page with hit rates over memory sizes, as curves and as a table. It works offline."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from importlib import resources
from math import ceil, log2
from typing import NamedTuple

from kvatlas.geometry.byte_sizes import size

COLOURS = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 36, 388, 12, 214
_WIDTH, _HEIGHT = 400, 240


class Curve(NamedTuple):
    """A curve: the hit rate at each memory size."""

    name: str
    points: tuple[tuple[int, float], ...]
    """(memory in bytes, hit rate) pairs, by ascending memory."""


class CurveText(NamedTuple):
    """The texts of the HTML page, and the columns and rows of its table."""

    title: str
    note: str
    foot: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def curves_page(curves: Sequence[Curve], ceiling: float, text: CurveText) -> str:
    """Return the HTML page. `ceiling` is the greatest possible hit rate, drawn as a line.

    >>> curve = Curve("a <model>", ((1 << 30, 0.25), (4 << 30, 0.5)))
    >>> page = curves_page([curve], 0.6, CurveText("Hits", "", "", ["memory"], [["1 GiB"]]))
    >>> "a &lt;model&gt;" in page, "http:" in page, "<td>1 GiB</td>" in page
    (True, False, True)
    """
    folder = resources.files("kvatlas.maps")
    parts = {
        "TITLE": html.escape(text.title),
        "NOTE": html.escape(text.note),
        "FOOT": html.escape(text.foot),
        "STYLE": (folder / "curves.css").read_text("utf-8"),
        "PICTURE": curves_picture(curves, ceiling),
        "LEGEND": "".join(_legend(place, curve) for place, curve in enumerate(curves)),
        "TABLE": _table(text),
    }
    first, *rest = (folder / "curves.html").read_text("utf-8").split("<!--")
    page = [first]
    for part in rest:
        name, _, after = part.partition("-->")
        page.append(parts[name] + after)
    return "".join(page)


def curves_picture(curves: Sequence[Curve], ceiling: float) -> str:
    """Return the curves as SVG, with memory on a logarithmic axis."""
    sizes = sorted({memory for curve in curves for memory, _ in curve.points})
    highest = max([ceiling, *(share for curve in curves for _, share in curve.points)])
    top = max(ceil(highest * 5) / 5 if highest > 0.2 else ceil(highest * 20) / 20, 0.05)
    low, high = log2(sizes[0]), log2(sizes[-1])

    def x(memory: int) -> float:
        part = (log2(memory) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + part * (_RIGHT - _LEFT), 1)

    def y(share: float) -> float:
        return round(_BOTTOM - share / top * (_BOTTOM - _TOP), 1)

    lines = []
    for step in range(5):
        at = y(top * step / 4)
        lines.append(f'<path class="grid" d="M{_LEFT} {at}H{_RIGHT}"/>')
        label = f"{top * step / 4:.0%}" if top >= 0.2 else f"{top * step / 4:.1%}"
        lines.append(f'<text x="{_LEFT - 4}" y="{at + 3}" text-anchor="end">{label}</text>')
    lines += _memory_labels(sizes, x)
    lines.append(f'<path class="ceiling" d="M{_LEFT} {y(ceiling)}H{_RIGHT}"/>')
    lines.append(f'<text x="{_LEFT + 3}" y="{y(ceiling) - 3}">at most {ceiling:.1%}</text>')
    for place, curve in enumerate(curves):
        path = "L".join(f"{x(memory)} {y(share)}" for memory, share in curve.points)
        lines.append(f'<path class="curve {_style(place)}" d="M{path}"/>')
        for memory, share in curve.points:
            said = f"{html.escape(curve.name)}, {size(memory)}: {share:.1%}"
            spot = f'cx="{x(memory)}" cy="{y(share)}"'
            dot = f'<circle class="dot of{place % COLOURS}" {spot} r="2.5">'
            lines.append(f"{dot}<title>{said}</title></circle>")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Hit rates over memory"'
    return f"<svg {box}>{''.join(lines)}</svg>"


def _memory_labels(sizes: list[int], x: Callable[[int], float]) -> list[str]:
    lines, last = [], -100.0
    for memory in sizes:
        if x(memory) - last >= 44:
            last = x(memory)
            place = "start" if last < _LEFT + 20 else "end" if last > _RIGHT - 20 else "middle"
            label = f'y="{_BOTTOM + 15}" text-anchor="{place}">{size(memory)}</text>'
            lines.append(f'<text x="{last}" {label}')
    return lines


def _style(place: int) -> str:
    # Every second curve is dashed, so that curves on top of each other stay visible.
    return f"of{place % COLOURS} dashed{place % 2}"


def _legend(place: int, curve: Curve) -> str:
    line = f'<path class="curve {_style(place)}" d="M0 5H28"/>'
    return f'<li><svg viewBox="0 0 28 10">{line}</svg>{html.escape(curve.name)}</li>'


def _table(text: CurveText) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in text.columns)
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in text.rows
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
