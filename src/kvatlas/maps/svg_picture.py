"""A block as SVG, for documents: each row is contiguous memory, drawn to scale."""

from __future__ import annotations

import html

from kvatlas.maps.block_picture import GroupRows, RowSample, sampled_groups, short_label
from kvatlas.maps.map_data import MapData

_WIDTH, _LEFT, _TOP, _ROW, _GAP = 960, 170, 64, 22, 4
_RAMP = ("#2b2a6b", "#2b5c8f", "#2a8a8f", "#4bb07a", "#a3cc52", "#f5dd3c")
"""From dark to light: told apart by colour-blind readers, and in grey."""
_PADDING = "url(#padding)"
_HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f1f1ee"/>'
    '<path d="M0 0v6" stroke="#b9b9b2" stroke-width="2"/></pattern></defs>'
)


def svg_picture(data: MapData, plan: int) -> str:
    """The blocks of a plan's groups, one below the other."""
    drawn = data.plans[plan]
    columns = _WIDTH - _LEFT - 20
    body, y = [], _TOP
    for group in sampled_groups(drawn, data.names, columns):
        made, y = _group(drawn.groups[group.group], group, y)
        body += made
    title = html.escape(data.title)
    subtitle = html.escape(f"order {drawn.knobs['order']}, tp {drawn.tp}. {drawn.answer}")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" role="img">'
        f'<title>{title}, {subtitle}</title>{_HATCH}<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="20" y="26" font-size="16" font-weight="600" fill="#1a1a1a">{title}</text>'
        f'<text x="20" y="44" fill="#666">{subtitle}</text>'
    )
    return "\n".join([head, *body, "</svg>\n"])


def _group(summary: dict[str, object], group: GroupRows, y: int) -> tuple[list[str], int]:
    times = f"{group.times} x " if group.times > 1 else ""
    heads = max((int(row.head.max()) + 1 for row in group.rows if row.page), default=1)
    what = f"coloured by head, {heads} of them" if heads > 1 else "coloured by field"
    told = f"{times}{summary['kind']}, a block of {summary['block_size']} tokens; {what}"
    body = [f'<text x="20" y="{y + 12}" fill="#333" font-weight="600">{html.escape(told)}</text>']
    y += 20
    for row in group.rows:
        label = html.escape(short_label(row.label))
        body.append(
            f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#555">{label}</text>'
        )
        body += _paths(row, heads, y)
        y += _ROW + _GAP
    if group.left_out:
        more = f"and {group.left_out} more rows alike"
        body.append(f'<text x="{_LEFT}" y="{y + 12}" fill="#888">{more}</text>')
        y += 20
    return body, y + 12


def _paths(row: RowSample, heads: int, y: int) -> list[str]:
    """One path for each colour."""
    shapes: dict[str, list[str]] = {}
    keys = list(zip(row.field.tolist(), row.head.tolist(), strict=True))
    begin = 0
    for at in range(1, len(keys) + 1):
        if at < len(keys) and keys[at] == keys[begin]:
            continue
        colour = _colour(row, heads, *keys[begin])
        width = at - begin
        drawn = width - (0.7 if width > 3 else 0)
        shapes.setdefault(colour, []).append(f"M{_LEFT + begin} {y}h{drawn}v{_ROW}h-{drawn}z")
        begin = at
    return [f'<path fill="{fill}" d="{"".join(d)}"/>' for fill, d in shapes.items()]


def _colour(row: RowSample, heads: int, field: int, head: int) -> str:
    if field < 0 or row.page is None:
        return _PADDING
    fields = len(row.page.fields)
    if heads == 1:
        return _RAMP[round(field * (len(_RAMP) - 1) / max(1, fields - 1))]
    base = _mixed(head / (heads - 1))
    return base if field == 0 else _lighter(base, 0.35)


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
