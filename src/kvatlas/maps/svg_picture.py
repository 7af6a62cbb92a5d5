"""Draw a block as SVG. Each drawn row is a contiguous byte range, to scale."""

from __future__ import annotations

import html
from collections.abc import Iterator

from kvatlas.maps.block_picture import GroupRows, RowSample, nesting, sampled_groups, short_label
from kvatlas.maps.map_data import MapData
from kvatlas.maps.plan_drawing import FieldDrawing

_WIDTH, _MARGIN, _ROW, _GAP, _LINE = 960, 20, 22, 4, 20
_FINE = 4
"""Samples per pixel: edges are accurate to a quarter of a pixel."""
_PIECE = 3
"""Minimum width of a contiguous piece in pixels. If a row is too long for that, only its beginning
is drawn."""
_LETTER = 6.6
"""Approximate width of a letter in pixels."""
_RAMP = ("#2b2a6b", "#2b5c8f", "#2a8a8f", "#4bb07a", "#a3cc52", "#f5dd3c")
"""Colours of heads, from dark to light; also distinct in print and for colour-blind readers."""
_WORDS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8d00", "#555555")
"""Colours of fields, from the palette of Okabe and Ito. `rows.js` has the same list."""
_NO_HEAD = "#b4b8c0"
_PADDING = "url(#padding)"
_HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f1f1ee"/>'
    '<path d="M0 0v6" stroke="#a9a9a2" stroke-width="2"/></pattern></defs>'
)


def svg_picture(data: MapData, plan: int) -> str:
    """Return an SVG picture of one block of each group, one below the other."""
    drawn = data.plans[plan]
    longest = max(len(short_label(name)) for name in (*data.names, "unused"))
    left = round(_MARGIN + longest * _LETTER + 8)
    body: list[str] = []
    y = 64
    columns = (_WIDTH - left - _MARGIN) * _FINE
    for group in sampled_groups(drawn, data.names, columns, piece_columns=_PIECE * _FINE):
        made, y = _group(drawn.groups[group.group], group, left, y)
        body += made
    title = html.escape(f"{data.title} in {drawn.knobs['order']}")
    subtitle = html.escape(f"tp {drawn.tp}. {drawn.answer}")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" role="img">'
        f'<title>{title}, {subtitle}</title>{_HATCH}<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_MARGIN}" y="26" font-size="16" font-weight="600" fill="#1a1a1a">{title}</text>'
        f'<text x="{_MARGIN}" y="44" fill="#555">{subtitle}</text>'
    )
    return "\n".join([head, *body, "</svg>\n"])


def _group(
    summary: dict[str, object], group: GroupRows, left: int, y: int
) -> tuple[list[str], int]:
    times = f"{group.times} x " if group.times > 1 else ""
    kind = str(summary["kind"]).replace("_", " ")
    told = f"{times}{kind}, a block of {summary['block_size']} tokens: {nesting(group.field)}"
    fields = {f.name: f for row in group.rows if row.page for f in row.page.fields if not f.padding}
    colours = {name: number for number, name in enumerate(fields)}
    body = [_text(_MARGIN, y + 12, told, "#333", "600"), *_legend(group, fields, left, y + _LINE)]
    y += 2 * _LINE + 2
    drawn: dict[int, int] = {}
    for line, row in _with_alike(group.rows):
        body.append(_text(left - 8, y + 15, short_label(row.label), "#555", anchor="end"))
        name = f"{group.group}-{line}"
        if line not in drawn:
            drawn[line] = y
            paths = "".join(_paths(row, group.heads, colours))
            body.append(f'<g id="{name}" transform="translate({left} {y})">{paths}</g>')
        else:
            body.append(f'<use href="#{name}" y="{y - drawn[line]}"/>')
        if row.goes_on:
            body.append(_text(_WIDTH - _MARGIN + 4, y + 15, "…", "#555"))
        y += _ROW + _GAP
        if row.more:
            body.append(_text(left, y + 12, f"and {row.more} more rows like this", "#666"))
            y += _LINE
    return body, y + 16


def _with_alike(rows: list[RowSample]) -> Iterator[tuple[int, RowSample]]:
    """Yield (index of the first row that looks the same, row) for each row."""
    looks = [(row.field.tobytes(), row.head.tobytes(), id(row.page)) for row in rows]
    for row, look in zip(rows, looks, strict=True):
        yield looks.index(look), row


def _legend(group: GroupRows, fields: dict[str, FieldDrawing], x: int, y: int) -> list[str]:
    """Return the legend of colours. If there are few heads, it lists each of them."""
    heads = group.heads
    if heads == 1:
        entries = [(_WORDS[n % len(_WORDS)], name) for n, name in enumerate(fields)]
    else:
        shown = range(heads) if heads <= 16 else (0, heads // 2, heads - 1)
        entries = [(_mixed(head / (heads - 1)), f"head {head}") for head in shown]
        entries += [(_NO_HEAD, name) for name, field in fields.items() if not _has_heads(field)]
    if any((row.field < 0).any() for row in group.rows):
        entries.append((_PADDING, "padding or unused"))
    made: list[str] = []
    for fill, name in entries:
        made.append(f'<rect x="{x}" y="{y + 1}" width="14" height="10" rx="2" fill="{fill}"/>')
        made.append(_text(x + 19, y + 10, name, "#555"))
        x += round(33 + len(name) * _LETTER)
    pale = [name for name in fields if _paleness(name)]
    return (
        [*made, _text(x, y + 10, f"{', '.join(pale)} fainter", "#555")]
        if pale and heads > 1
        else made
    )


def _text(x: int, y: int, words: str, fill: str, weight: str = "", anchor: str = "") -> str:
    more = f' font-weight="{weight}"' * bool(weight) + f' text-anchor="{anchor}"' * bool(anchor)
    return f'<text x="{x}" y="{y}" fill="{fill}"{more}>{html.escape(words)}</text>'


def _paths(row: RowSample, heads: int, colours: dict[str, int]) -> list[str]:
    """Return the SVG paths of a row, one for each colour."""
    shapes: dict[str, list[str]] = {}
    keys = list(zip(row.field.tolist(), row.head.tolist(), strict=True))
    begin = 0
    for at in range(1, len(keys) + 1):
        if at < len(keys) and keys[at] == keys[begin]:
            continue
        fill = _colour(row, heads, colours, *keys[begin])
        wide = (at - begin) / _FINE
        drawn = wide - (0.75 if wide > 3 else 0)
        shape = f"M{begin / _FINE:g} 0h{drawn:g}v{_ROW}h{-drawn:g}z"
        shapes.setdefault(fill, []).append(shape)
        begin = at
    return [f'<path fill="{fill}" d="{"".join(d)}"/>' for fill, d in shapes.items()]


def _colour(row: RowSample, heads: int, colours: dict[str, int], field: int, head: int) -> str:
    if field < 0 or row.page is None:
        return _PADDING
    drawn = row.page.fields[field]
    if heads == 1:
        return _WORDS[colours[drawn.name] % len(_WORDS)]
    if not _has_heads(drawn):
        return _NO_HEAD
    return _lighter(_mixed(head / (heads - 1)), _paleness(drawn.name))


def _has_heads(field: FieldDrawing) -> bool:
    return any(axis == "H" for axis, *_ in field.box.axes)


def _paleness(name: str) -> float:
    """Return how much to lighten a field's colour, from 0 (not at all) to 1 (white)."""
    return 0.58 if "scale" in name else 0.32 if name.startswith("v") else 0.0


def _mixed(share: float) -> str:
    place = share * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    one, two = (_rgb(_RAMP[first + n]) for n in (0, 1))
    weight = place - first
    return _hex([a + (b - a) * weight for a, b in zip(one, two, strict=True)])


def _lighter(colour: str, by: float) -> str:
    return _hex([part + (255 - part) * by for part in _rgb(colour)])


def _rgb(colour: str) -> list[float]:
    return [float(int(colour[at : at + 2], 16)) for at in (1, 3, 5)]


def _hex(parts: list[float]) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in parts)
