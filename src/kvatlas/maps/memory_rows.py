"""Divide blocks and pages into rows of contiguous memory for a drawing.

A block is divided along its outermost axes, so that each row is contiguous. If layers are
outermost, there is one row per layer. If heads are outermost, there is one row per head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvatlas.geometry import Page, Placement
from kvatlas.geometry.address_arrays import Int64s, join_ranges
from kvatlas.planning import Plan, Pool, Region

_FEWEST, _MOST = 4, 64
"""Minimum and maximum number of rows per page, if its axes allow it."""
_ONE_ROW = 1024
"""Fields of at most this many bytes are drawn in one row."""


class BlockStretch(NamedTuple):
    """A byte range that repeats in every block: start in block 0, size, stride between blocks."""

    start: int
    nbytes: int
    block_stride: int
    blocks: int


def block_rows(page: Page, placed: Placement) -> Placement:
    """Return the rows to draw for a block, as a placement with one item per row.

    A row is a contiguous byte range. It includes the padding after a page.

    >>> from kvatlas.specs import FullAttention
    >>> page = FullAttention(heads=8, head_dim=64).page(16)
    >>> block_rows(page, page.place("BHLNC", pages=12, blocks=100))
    Placement(B=100:393216, H=8:49152, offset=0, item=49152)
    >>> block_rows(page, page.place("LBNHC", pages=12, blocks=100))
    Placement(B=100:32768, L=12:3276800, offset=0, item=32768)
    """
    if page.padding:
        rows = _rows(placed, keep=("B", "L"), fewest=1)
        return Placement(rows.axes, rows.sizes, rows.strides, rows.offset, page.nbytes)
    return _rows(placed, keep=("B",))


def field_rows(view: Placement, *, keep: tuple[str, ...]) -> Placement:
    """Return the rows to draw for a field that is stored separately from the page's other fields.

    Axes in `keep` are always divided. To draw blocks, pass B. To draw pages, pass B and L.

    >>> k = Placement.packed([("L", 2), ("B", 9), ("H", 8), ("N", 16), ("C", 64)], item=2)
    >>> field_rows(k, keep=("B",))
    Placement(B=9:16384, L=2:147456, H=8:2048, offset=0, item=2048)
    """
    alone = view
    for axis in keep:
        alone = alone.select(axis, 0)
    small = alone.contiguous and alone.nbytes <= _ONE_ROW
    return _rows(view, keep=keep, fewest=1 if small else _FEWEST)


def page_rows(page: Page, placed: Placement) -> list[Placement]:
    """Return the rows to draw for one page (one layer of a block).

    The rows are the items of the returned placements. Usually one placement contains all rows. If
    fields span a whole contiguous page, there is a placement for each field, or for each set of
    interleaved fields, and a separate placement for padding.

    >>> from kvatlas.specs import FullAttention
    >>> page = FullAttention(heads=8, head_dim=64).page(16)
    >>> page_rows(page, page.place("BHLNC", pages=12, blocks=100))
    [Placement(B=100:393216, L=12:4096, H=8:49152, offset=0, item=4096)]
    """
    alone = placed.select("B", 0).select("L", 0)
    if (page.in_cells and page.heads * page.states > 1) or not alone.contiguous:
        rows = [_rows(placed, keep=("B", "L"))]
    else:
        rows = _sections(page, placed)
    gaps = page.gaps(placed)
    return rows if gaps is None else [*rows, gaps]


def rows_of_blocks(plan: Plan, region: Region) -> list[Placement]:
    """Return the rows to draw for the blocks of a region.

    Usually there is one placement for all fields of the pages. If fields are stored separately,
    there is one placement for each field.
    """
    blocks = plan.pools_by_stage[region.stage, plan.groups[region.group].pool].blocks
    if region.apart:
        views = region.views(plan.tp, blocks).values()
        return [field_rows(view, keep=("B",)) for view in views]
    return [block_rows(region.page(plan.tp), region.placement(plan.tp, blocks))]


def unused(plan: Plan) -> dict[tuple[int, int], list[BlockStretch]]:
    """Return, by (stage, group), the byte ranges of a block that the group does not use."""
    taken: dict[tuple[int, int], list[BlockStretch]] = {}
    for region in plan.regions:
        pool = plan.pools_by_stage[region.stage, plan.groups[region.group].pool]
        taken.setdefault((region.stage, region.group), []).extend(_stretches(plan, region, pool))
    left: dict[tuple[int, int], list[BlockStretch]] = {}
    for (stage, group), own in taken.items():
        index = plan.groups[group].pool
        pool = plan.pools_by_stage[stage, index]
        every = [
            stretch
            for (at, other), stretches in taken.items()
            if at == stage and plan.groups[other].pool == index
            for stretch in stretches
        ]
        if all(stretch.block_stride == pool.block_bytes for stretch in every):
            every = [BlockStretch(0, pool.block_bytes, pool.block_bytes, pool.blocks)]
        left[stage, group] = _without(every, own)
    return left


def _rows(placed: Placement, *, keep: tuple[str, ...], fewest: int = _FEWEST) -> Placement:
    """Divide a block along its outermost axes into at least `fewest` contiguous rows.

    Axes in `keep` are always divided and do not count towards `fewest`. An axis that would give too
    many rows is divided into equal parts: an axis named `N_131` has parts of 131 states.
    """
    names = [axis for axis in placed.axes if axis not in keep and placed.size(axis) > 1]
    names.sort(key=placed.stride, reverse=True)
    outer = [(axis, placed.size(axis), placed.stride(axis)) for axis in keep]
    rest, count = placed, 1
    for axis in keep:
        rest = rest.select(axis, 0)
    while len(names) > 1 or not rest.contiguous:
        if rest.contiguous and count >= fewest:
            break
        axis, size, stride = names[0], rest.size(names[0]), rest.stride(names.pop(0))
        together = _together(size, max(1, _MOST // count)) if rest.contiguous else 1
        if together > 1:
            outer.append((f"{axis}_{together}", size // together, stride * together))
            rest = rest.narrow(axis, 0, together)
            break
        outer.append((axis, size, stride))
        rest, count = rest.select(axis, 0), count * size
    return _placement(outer, placed.offset, rest.nbytes)


def _together(count: int, most: int) -> int:
    """Return the smallest part size that divides `count` items into at most `most` equal parts.

    >>> _together(16, 64), _together(2096, 64)
    (1, 131)
    """
    return next(n for n in range(1, count + 1) if count % n == 0 and count // n <= most)


def _sections(page: Page, placed: Placement) -> list[Placement]:
    """Divide a contiguous page into rows, field by field; interleaved fields share rows."""
    views = [page.view(placed, field.name) for field in page.fields]
    alone = [view.select("B", 0).select("L", 0) for view in views]
    sections: list[list[Placement]] = []
    stop = 0
    for view in sorted(alone, key=lambda view: view.offset):
        if not sections or view.offset >= stop:
            sections.append([])
        sections[-1].append(view)
        stop = max(stop, view.stop)
    kept = [(axis, placed.size(axis), placed.stride(axis)) for axis in ("B", "L")]
    made = []
    for views in sections:
        start = min(view.offset for view in views)
        nbytes = max(view.stop for view in views) - start
        width = _width(max(views, key=lambda view: view.nbytes), nbytes)
        made.append(_placement([*kept, ("row", nbytes // width, width)], start, width))
    return made


def _width(view: Placement, nbytes: int) -> int:
    """Return the size in bytes of the rows into which a section of `nbytes` bytes is divided."""
    steps = sorted((step for step in view.strides if step), reverse=True)
    width = next((step for step in steps if nbytes % step == 0), nbytes)
    return width * _together(nbytes // width, _MOST) if nbytes > _ONE_ROW else nbytes


def _placement(axes: list[tuple[str, int, int]], offset: int, item: int) -> Placement:
    names, sizes, strides = zip(*axes, strict=True)
    return Placement(names, sizes, strides, offset, item)


def _stretches(plan: Plan, region: Region, pool: Pool) -> list[BlockStretch]:
    found: list[BlockStretch] = []
    for rows in rows_of_blocks(plan, region):
        stride = rows.stride("B") if pool.blocks > 1 else region.block_stride
        starts, lengths = rows.select("B", 0).runs()
        every = zip(starts.tolist(), lengths.tolist(), strict=True)
        found += [BlockStretch(start, nbytes, stride, pool.blocks) for start, nbytes in every]
    return found


def _without(every: list[BlockStretch], own: list[BlockStretch]) -> list[BlockStretch]:
    """Return the byte ranges in `every` without the bytes in `own`, and without duplicates."""
    starts, lengths = _joined(own)
    left: list[BlockStretch] = []
    for stretch in sorted(set(every)):
        at = stretch.start
        stop = at + stretch.nbytes
        first = int(np.searchsorted(starts + lengths, at, side="right"))
        while at < stop:
            begin = int(starts[first]) if first < len(starts) else stop
            if begin > at:
                left.append(stretch._replace(start=at, nbytes=min(begin, stop) - at))
            at = int(starts[first] + lengths[first]) if first < len(starts) else stop
            first += 1
    return _disjoint(left)


def _disjoint(stretches: list[BlockStretch]) -> list[BlockStretch]:
    """Cut overlapping byte ranges into ranges that do not overlap.

    Ranges overlap where several groups use the same bytes.
    """
    made: list[BlockStretch] = []
    stop = 0
    for stretch in sorted(stretches):
        start = max(stop, stretch.start)
        if start < stretch.start + stretch.nbytes:
            end = stretch.start + stretch.nbytes
            made.append(stretch._replace(start=start, nbytes=end - start))
            stop = end
    return made


def _joined(stretches: list[BlockStretch]) -> tuple[Int64s, Int64s]:
    starts = np.array([stretch.start for stretch in stretches], dtype=np.int64)
    lengths = np.array([stretch.nbytes for stretch in stretches], dtype=np.int64)
    return join_ranges(starts, lengths)
