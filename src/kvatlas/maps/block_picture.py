"""Sample the fields of one block, row by row, for the SVG picture and the text picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.maps.address_lookup import look_up
from kvatlas.maps.plan_drawing import Box, PageDrawing, PlanDrawing, RegionDrawing

MOST_ROWS = 16
"""Maximum number of rows drawn for a group, divided among its regions. The rows of a region that
are not drawn look like the drawn ones."""
_WORDS = {
    "L": "layers",
    "packs": "packs of layers",
    "regions": "regions of layers",
    "B": "blocks",
    "H": "heads",
    "N": "states",
    "k": "parts",
}
_PLAIN = ("attn", "self_attn", "mixer", "linear_attn")
"""Last components of layer names that labels omit. `rows.js` has the same list."""


class RowSample(NamedTuple):
    """A contiguous row of a drawn block, with the field and head at each sampled byte."""

    start: int
    nbytes: int
    label: str
    field: Int64s
    """Index of the field at each sampled byte; -1 for padding and unused bytes."""
    head: Int64s
    page: PageDrawing | None
    goes_on: bool
    """Whether the row is longer than the part that is drawn."""
    more: int
    """Number of rows of the region that follow and are not drawn."""


class GroupRows(NamedTuple):
    """The sampled rows of one block of a group, in order of address."""

    group: int
    times: int
    """Number of groups that look the same."""
    rows: list[RowSample]
    each: float
    """Bytes between two consecutive samples."""
    field: Box
    """Placement of the first field of the largest region, with an axis over similar regions."""

    @property
    def heads(self) -> int:
        """Number of heads in the drawn rows."""
        return max((int(row.head.max()) + 1 for row in self.rows if row.page), default=1)


def short_label(name: str) -> str:
    """Return a short label: the layer's number and the last component of `name`.

    The last component is omitted if it is a usual one, such as "attn" (see `_PLAIN`).

    >>> short_label("model.layers.5.self_attn.attn"), short_label("head 3")
    ('layer 5', 'head 3')
    >>> short_label("model.layers.2.attn.indexer.k_cache")
    'layer 2 k_cache'
    """
    parts = name.split(".")
    number = next((part for part in parts if part.isdigit()), None)
    if number is None:
        return name
    return f"layer {number}" if parts[-1] in _PLAIN else f"layer {number} {parts[-1]}"


def nesting(box: Box) -> str:
    """Return a text that lists the axes of a field in memory, outermost first.

    >>> axes = (("L", 36, 4096), ("B", 100, 147456), ("H", 1, 512), ("N", 8, 512), ("C", 128, 2))
    >>> nesting(Box(0, 2, axes))
    'B 100 blocks > L 36 layers > N 8 states > C 512 bytes'
    >>> nesting(Box(0, 2, (("packs", 5, 4096), ("L", 3, 512), ("C", 256, 2))))
    'L 5 packs of layers > L 3 layers > C 512 bytes'
    """
    several = [axis for axis in box.axes if axis[1] > 1 and axis[0] in _WORDS]
    several.sort(key=lambda axis: -axis[2])
    outer = [f"{axis if len(axis) == 1 else 'L'} {n:,} {_WORDS[axis]}" for axis, n, _ in several]
    content = several[-1][2] if several else box.item
    return " > ".join([*outer, f"C {content:,} bytes"])


def sampled_groups(
    drawn: PlanDrawing, names: tuple[str, ...], columns: int, *, piece_columns: int
) -> list[GroupRows]:
    """Return sampled rows of all groups of the first stage; identical groups are sampled once.

    A row has at most `columns` samples. The largest contiguous piece of a field gets at least
    `piece_columns` samples. If a row would need more than `columns` samples for this, only the
    row's beginning is sampled.
    """
    alike: dict[object, GroupRows] = {}
    for number in range(len(drawn.groups)):
        regions = [r for r in drawn.regions if (r.stage, r.group) == (0, number)]
        if not regions:
            continue
        kind = drawn.groups[number]["kind"]
        key = (kind, *((region.page, len(region.layers)) for region in regions))
        if key in alike:
            alike[key] = alike[key]._replace(times=alike[key].times + 1)
            continue
        rows = _rows(drawn, regions, drawn.unused[f"0/{number}"])
        each = max(row.nbytes for row in rows) / columns
        largest = max(_largest_piece(drawn.pages[region.page]) for region in regions)
        each = min(each, largest / piece_columns)
        seen = [_sample(drawn, row, names, each, columns) for row in rows]
        largest_region = max(regions, key=lambda region: region.page_bytes * len(region.layers))
        field = _with_regions(drawn, regions, largest_region)
        alike[key] = GroupRows(number, 1, seen, each, field)
    return list(alike.values())


def _with_regions(drawn: PlanDrawing, regions: list[RegionDrawing], one: RegionDrawing) -> Box:
    """Return the placement of the first field in region `one` and in similar regions.

    Similar regions have the same number of layers and equal axes, and differ only in their offset.
    If there are similar regions, the result has an additional axis over all these regions.
    """

    def first_field(region: RegionDrawing) -> Box:
        return drawn.pages[region.page].fields[0].box

    box = first_field(one)
    offsets = sorted(
        first_field(region).offset
        for region in regions
        if len(region.layers) == len(one.layers) and first_field(region).axes == box.axes
    )
    if len(offsets) == 1:
        return box
    packed = one.tokens_per_state and drawn.knobs["pack"] != 1
    name = "L" if len(one.layers) == 1 else "packs" if packed else "regions"
    return Box(box.offset, box.item, ((name, len(offsets), offsets[1] - offsets[0]), *box.axes))


class _Row(NamedTuple):
    start: int
    nbytes: int
    region: RegionDrawing | None
    more: int


def _rows(drawn: PlanDrawing, regions: list[RegionDrawing], unused: tuple[Box, ...]) -> list[_Row]:
    """Return the rows to draw for block 0, sorted by address.

    A row is a contiguous byte range, either of one region or of bytes that the group does not use.
    If a region has very many rows, only the first ones are returned.
    """
    rows: list[_Row] = []
    boxes = [(region, box) for region in regions for box in drawn.pages[region.page].block_rows]
    most = max(2, MOST_ROWS // len(boxes))
    for region, box in boxes:
        starts = [_Row(at, box.item, region, 0) for at in sorted(_starts(box))]
        left_out = max(0, len(starts) - most)
        rows += starts[: most - 1] + [
            row._replace(more=left_out) for row in starts[most - 1 : most]
        ]
    widest = max(row.nbytes for row in rows)
    for box in unused:
        step = max(widest, -(-box.item // 12))
        for at in range(0, box.item, step):
            rows.append(_Row(box.offset + at, min(step, box.item - at), None, 0))
    return sorted(rows, key=lambda row: row.start)


def _largest_piece(page: PageDrawing) -> int:
    return max(_piece(field.box) for field in page.fields)


def _piece(box: Box) -> int:
    """Return how many contiguous bytes a field has for one attention head of one token or state."""
    item = box.item
    for axis, size, stride in sorted(box.axes, key=lambda axis: axis[2]):
        if size > 1 and (axis in "LBkHN" or stride != item):
            break
        item *= size if stride == item else 1
    return item


def _starts(box: Box) -> Iterator[int]:
    """Yield the byte offset of each row of `box` in block 0."""
    axes = [(size, stride) for name, size, stride in box.axes if name != "B"]
    for index in product(*(range(size) for size, _ in axes)):
        steps = zip(index, axes, strict=True)
        yield box.offset + sum(n * stride for n, (_, stride) in steps)


def _sample(
    drawn: PlanDrawing, row: _Row, names: tuple[str, ...], each: float, most: int
) -> RowSample:
    start, nbytes, region, more = row
    columns = max(1, min(most, round(nbytes / each)))
    goes_on = nbytes > (columns + 1) * each
    nothing = np.full(columns, -1, dtype=np.int64)
    if region is None:
        return RowSample(start, nbytes, "unused", nothing, nothing, None, goes_on, more)
    page = drawn.pages[region.page]
    step = min(each, nbytes / columns)
    at = start + ((np.arange(columns) + 0.5) * step).astype(np.int64)
    found = look_up(page, at)
    named = np.array([not field.padding for field in page.fields])
    field = np.where((found.field >= 0) & named[found.field], found.field, -1)
    head = found.coordinates.get("H", np.zeros(columns, dtype=np.int64))
    layers, heads = found.coordinates["L"][field >= 0], head[field >= 0]
    label = ""
    if len(layers) and layers[0] == layers[-1] and len(set(layers.tolist())) == 1:
        label = names[region.layers[layers[0]]] if layers[0] < len(region.layers) else ""
    elif len(heads) and len(set(heads.tolist())) == 1:
        label = f"head {heads[0]}"
    return RowSample(start, nbytes, label, field, head, page, goes_on, more)
