"""One block as rows of coloured stretches: what the picture and the text are made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from kvatlas.geometry import Int64s
from kvatlas.maps.address_lookup import look_up
from kvatlas.maps.plan_drawing import Box, PageDrawing, PlanDrawing, RegionDrawing

MOST_ROWS = 16
"""Rows of a group that are drawn; more are alike."""


class RowSample(NamedTuple):
    """A row of memory, seen at evenly spaced bytes."""

    start: int
    nbytes: int
    label: str
    field: Int64s
    """Number of the field at each byte, -1 for padding."""
    head: Int64s
    page: PageDrawing | None
    goes_on: bool
    """Whether the row is longer than what is seen of it."""


class GroupRows(NamedTuple):
    """A group's block: its rows in the order of memory."""

    group: int
    times: int
    """Groups that look the same."""
    rows: list[RowSample]
    left_out: int
    each: float
    """Bytes between two of those that are looked up."""


def short_label(name: str) -> str:
    """The number that tells a layer from others, where its name has one.

    >>> short_label("model.layers.5.self_attn.attn"), short_label("head 3")
    ('layer 5', 'head 3')
    """
    number = next((part for part in name.split(".") if part.isdigit()), None)
    return name if number is None else f"layer {number}"


def sampled_groups(
    drawn: PlanDrawing, names: tuple[str, ...], columns: int, *, by_piece: bool = False
) -> list[GroupRows]:
    """Every group of the first stage, alike ones once, its rows looked up at `columns` bytes.

    `by_piece` looks at no more than a piece of a field at once: of long rows, the beginning.
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
        found: list[tuple[int, int, RegionDrawing | None]] = [
            (start, box.item, region) for region in regions for start, box in _starts(drawn, region)
        ]
        found += [(box.offset, box.item, None) for box in drawn.unused[f"0/{number}"]]
        found.sort(key=lambda row: row[0])
        each = max(nbytes for _, nbytes, _ in found) / columns
        if by_piece:
            each = min(each, *(_largest_piece(drawn.pages[region.page]) for region in regions))
        rows = [
            _sample(drawn, region, names, start, nbytes, each, columns)
            for start, nbytes, region in found[:MOST_ROWS]
        ]
        alike[key] = GroupRows(number, 1, rows, len(found) - len(rows), each)
    return list(alike.values())


def _largest_piece(page: PageDrawing) -> int:
    return max(_piece(field.box) for field in page.fields)


def _piece(box: Box) -> int:
    """Bytes of a field that follow each other whatever the head or state."""
    item = box.item
    for axis, size, stride in sorted(box.axes, key=lambda axis: axis[2]):
        if size > 1 and (axis in "LBkHN" or stride != item):
            break
        item *= size if stride == item else 1
    return item


def _starts(drawn: PlanDrawing, region: RegionDrawing) -> Iterator[tuple[int, Box]]:
    """Where the rows of block 0 start."""
    box = drawn.pages[region.page].block_rows
    axes = [(size, stride) for name, size, stride in box.axes if name != "B"]
    for index in product(*(range(size) for size, _ in axes)):
        steps = zip(index, axes, strict=True)
        yield box.offset + sum(n * stride for n, (_, stride) in steps), box


def _sample(
    drawn: PlanDrawing,
    region: RegionDrawing | None,
    names: tuple[str, ...],
    start: int,
    nbytes: int,
    each: float,
    most: int,
) -> RowSample:
    columns = max(1, min(most, round(nbytes / each)))
    goes_on = nbytes > (columns + 1) * each
    nothing = np.full(columns, -1, dtype=np.int64)
    if region is None:
        return RowSample(start, nbytes, "unused", nothing, nothing, None, goes_on)
    page = drawn.pages[region.page]
    at = start + ((np.arange(columns) + 0.5) * min(each, nbytes)).astype(np.int64)
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
    return RowSample(start, nbytes, label, field, head, page, goes_on)
