"""Find the field and the coordinates at many addresses of a pool at once.

`geometry.js` implements the same lookup for the HTML page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.maps.plan_drawing import Box, PageDrawing


@dataclass(frozen=True)
class Found:
    """The cache field (such as k or v) at each address, and the coordinates of each address."""

    field: Int64s
    """Index of the field in `PageDrawing.fields`; -1 for an address outside all fields."""
    coordinates: dict[str, Int64s]


def look_up(page: PageDrawing, addresses: Int64s) -> Found:
    """Find, for each address, the field that contains it and the coordinates in this field.

    >>> from kvatlas.maps.plan_drawing import draw_plan
    >>> from kvatlas.planning import plan
    >>> drawn = draw_plan(plan("gpt-oss-20b", memory="40GiB", layout="BLHNC"), {})
    >>> found = look_up(drawn.pages[0], np.array([65664 + 256]))  # token 1 of v in layer 2
    >>> page = drawn.pages[0]
    >>> page.fields[found.field[0]].name, {axis: int(n[0]) for axis, n in found.coordinates.items()}
    ('v', {'L': 2, 'B': 0, 'H': 0, 'N': 1, 'C': 0})
    """
    field = np.full(len(addresses), -1, dtype=np.int64)
    coordinates: dict[str, Int64s] = {}
    for number, drawn in enumerate(page.fields):
        inside, found = _divide(drawn.box, addresses)
        field[inside] = number
        for axis, index in found.items():
            known = coordinates.setdefault(axis, np.zeros(len(addresses), dtype=np.int64))
            known[inside] = index[inside]
    return Found(field, coordinates)


def _divide(box: Box, addresses: Int64s) -> tuple[np.ndarray, dict[str, Int64s]]:
    """Return (mask of the addresses in a field's box, coordinates of all addresses by axis).

    An address is divided by the largest stride, the remainder by the next stride, and so on. The
    quotients are the coordinates. An address is inside the box if the last remainder is less than
    the item size.
    """
    rest = addresses - box.offset
    found: dict[str, Int64s] = {}
    for axis, size, stride in sorted(box.axes, key=lambda axis: -axis[2]):
        index = np.clip(rest // stride, 0, size - 1) if stride else rest * 0
        found[axis] = index
        rest = rest - index * stride
    return (rest >= 0) & (rest < box.item), {axis: found[axis] for axis, *_ in box.axes}
