"""Bytes of a block that nothing uses, and that are copied because skipping them splits runs.

Pages may end in padding, blocks may be aligned, and a group may have fewer pages than the largest
group of its pool. If both ends place the pages of a group alike, these bytes are at the same
offsets of the block at both ends, and no other block uses them. A block that is copied whole then
moves as one run, together with its neighbours.

Bytes are copied only if they provably belong to the block: the plan must have divided its pool
among the blocks. A plan of foreign memory does not determine who uses the bytes between its pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kvatlas.geometry import Placement, StridedRuns
from kvatlas.geometry.block_images import BlockImage
from kvatlas.geometry.strided_runs import Ends
from kvatlas.planning import Region
from kvatlas.routing.compiler import Compiler, GroupPair
from kvatlas.routing.plan_ends import PlanEnd

_MOST_UNUSED = 2
"""Unused bytes are copied if they are at most this many times the bytes in use."""

Page = tuple[str, int]
"""A layer, and the index of a part of its state."""


def _gap_runs(block_strides: Ends, offsets: Ends, length: int) -> StridedRuns:
    """Return the runs that copy `length` bytes of each block; `offsets` are those of block 0."""
    return StridedRuns(block_strides, (0, 0), (0, 0), (), ((), ()), offsets, length)


def _arriving(gap: StridedRuns) -> StridedRuns:
    """Return the runs of a gap as a copy from the destination to itself."""
    (_, stride), (_, offset) = gap.block_strides, gap.offsets
    return _gap_runs((stride, stride), (offset, offset), gap.item)


UnusedRuns = Callable[
    [int, int, frozenset[str] | None], Mapping[GroupPair, tuple[StridedRuns, ...]]
]
"""Returns runs of unused bytes for a source rank, a destination rank and some layers."""


def no_unused_runs(*_: object) -> dict[GroupPair, tuple[StridedRuns, ...]]:
    """Return no runs; the `UnusedRuns` of a route that copies no unused bytes."""
    return {}


Gaps = Mapping[Page, tuple[StridedRuns, ...]]
"""The runs of the gaps that are copied with a page, whenever the page is copied whole.

A gap is a range of bytes of a block that nothing uses at either end."""


class UnusedBytesOfBlocks:
    """Finds the unused bytes that a route copies, for one pair of ranks at a time."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._ends = compiler.source, compiler.destination
        self._images: dict[tuple[int, int, int], _GroupImage | None] = {}
        self._alike: dict[tuple[Ends, Ends], Gaps] = {}
        self._found: dict[int, dict[int, Gaps]] = {}

    def copied(
        self, source_rank: int, destination_rank: int, layers: frozenset[str] | None = None
    ) -> dict[GroupPair, tuple[StridedRuns, ...]]:
        """Return the runs of unused bytes that one rank reads from another, by pair of groups."""
        gaps = self._by_source(destination_rank).get(source_rank, {})
        return _by_pair(self._compiler, source_rank, destination_rank, gaps, layers)

    def arriving(
        self,
        arrivals: Compiler,
        source_rank: int,
        destination_rank: int,
        layers: frozenset[str] | None = None,
    ) -> dict[GroupPair, tuple[StridedRuns, ...]]:
        """Return the unused bytes that a rank reads from all ranks, as a copy within that rank.

        `arrivals` compiles copies from the destination plan to the same plan, and `source_rank` and
        `destination_rank` are the same rank.
        """
        gaps = {
            page: tuple(map(_arriving, found))
            for by_page in self._by_source(destination_rank).values()
            for page, found in by_page.items()
        }
        return _by_pair(arrivals, source_rank, destination_rank, gaps, layers)

    def _by_source(self, destination_rank: int) -> dict[int, Gaps]:
        """Return the gaps that a rank copies, by source rank; each page's gaps have one source."""
        if destination_rank not in self._found:
            found: dict[int, dict[Page, tuple[StridedRuns, ...]]] = defaultdict(dict)
            stage, _ = self._ends[1].plan.split_rank(destination_rank)
            for group, suppliers in self._suppliers(destination_rank).items():
                if len(suppliers) == 1:
                    ((rank, from_group),) = suppliers
                    from_stage, _ = self._ends[0].plan.split_rank(rank)
                    found[rank].update(self._gaps((from_stage, from_group), (stage, group)))
            self._found[destination_rank] = dict(found)
        return self._found[destination_rank]

    def _suppliers(self, destination_rank: int) -> dict[int, set[Ends]]:
        """Return the (rank, group) pairs from which a rank reads, by destination group.

        Groups are omitted if kernel blocks differ between the ends, or are not contiguous.
        """
        found: dict[int, set[Ends]] = defaultdict(set)
        unlike = set()
        for rank in self._compiler.sources(destination_rank):
            for layers, needed in self._compiler.choices(rank, destination_rank):
                pair = self._compiler.group_pair(layers[0], needed)
                cells = pair.cells[0]
                found[pair.groups[1]].add((rank, pair.groups[0]))
                if cells != pair.cells[1] or cells.split > 1 or cells.ring:
                    unlike.add(pair.groups[1])
        return {group: own for group, own in found.items() if group not in unlike}

    def _gaps(self, source: Ends, destination: Ends) -> Gaps:
        """Return the gaps of a group; source and destination are (stage, group)."""
        key = source, destination
        if key not in self._alike:
            self._alike[key] = self._compare(source, destination)
        return self._alike[key]

    def _compare(self, source: Ends, destination: Ends) -> Gaps:
        # Most groups differ in something that is cheap to compare.
        outlines = [
            _outline(end, *home)
            for end, home in zip(self._ends, (source, destination), strict=True)
        ]
        if outlines[0] != outlines[1]:
            return {}
        here, there = self._image(0, *source), self._image(1, *destination)
        if here is None or there is None or here.pages != there.pages:
            return {}
        if not here.image.equals(there.image):
            return {}
        if any(layer not in self._compiler.visibilities for layer, _ in there.pages):
            return {}
        image, single = there.image, self._ends[1].plan.groups[destination[1]].kind == "recurrent"
        # A request has one block of a recurrent group, which has no neighbour.
        gaps = [gap for gap in image.unused() if gap.inside or not single]
        if sum(gap.length for gap in gaps) > _MOST_UNUSED * image.nbytes:
            return {}
        found: dict[Page, list[StridedRuns]] = defaultdict(list)
        for gap in gaps:
            offsets = image.offset(gap, here.blocks), image.offset(gap, there.blocks)
            copied = _gap_runs((image.size, image.size), offsets, gap.length)
            found[there.pages[gap.page]].append(copied)
        return {page: tuple(own) for page, own in found.items()}

    def _image(self, end: int, stage: int, group: int) -> _GroupImage | None:
        key = (end, stage, group)
        if key not in self._images:
            self._images[key] = _group_image(self._ends[end], stage, group)
        return self._images[key]


class _GroupImage(NamedTuple):
    image: BlockImage
    pages: tuple[Page, ...]
    """The pages of the image, in the order of its page indices."""
    blocks: int


def _regions(end: PlanEnd, stage: int, group: int) -> list[Region]:
    return [r for r in end.plan.regions if (r.stage, r.group) == (stage, group)]


def _outline(end: PlanEnd, stage: int, group: int) -> object:
    """Return properties of a group's pages, for a fast comparison of two groups.

    If the properties of two groups differ, their pages are at different positions in a block.
    """
    return [
        (region.page_bytes, region.block, region.block_stride, region.parts, len(region.layers))
        for region in _regions(end, stage, group)
    ]


def _group_image(end: PlanEnd, stage: int, group: int) -> _GroupImage | None:
    """Return the positions of a group's pages in a block (`BlockImage`).

    Returns None if other blocks or an engine may use the bytes between the pages.
    """
    plan = end.plan
    index = plan.groups[group].pool
    pool = plan.pools_by_stage[stage, index]
    homes = [r for r in plan.regions if r.stage == stage and plan.groups[r.group].pool == index]
    size = homes[0].block_stride
    divided = all(region.block_stride == size and not region.apart for region in homes)
    if plan.policy == "foreign" or pool.segments is not msgspec.UNSET or not divided:
        return None
    own = _regions(end, stage, group)
    image = _image_of(tuple(r.placement(plan.tp, pool.blocks) for r in own), size, pool.blocks)
    pages = tuple(
        (layer.name, region.part(number))
        for region in own
        for number, layer in enumerate(region.layers)
    )
    return None if image is None else _GroupImage(image, pages, pool.blocks)


@lru_cache(maxsize=16)
def _image_of(regions: tuple[Placement, ...], size: int, blocks: int) -> BlockImage | None:
    """Return `BlockImage.of(...)`; cached, because many routes need the same image."""
    return BlockImage.of(regions, size, blocks)


def _by_pair(
    compiler: Compiler,
    source_rank: int,
    destination_rank: int,
    gaps: Gaps,
    layers: frozenset[str] | None,
) -> dict[GroupPair, tuple[StridedRuns, ...]]:
    """Return the runs that copy the gaps of the chosen layers, by pair of groups."""
    if not gaps:
        return {}
    found: dict[GroupPair, list[StridedRuns]] = defaultdict(list)
    for page, pair in _pairs_of(compiler, source_rank, destination_rank, gaps):
        if layers is None or page[0] in layers:
            found[pair] += gaps[page]
    return {pair: tuple(runs) for pair, runs in found.items()}


def _pairs_of(
    compiler: Compiler, source_rank: int, destination_rank: int, gaps: Gaps
) -> Iterator[tuple[Page, GroupPair]]:
    """Yield each page that has gaps, with the pair of groups that copies its states."""
    seen: set[Page] = set()
    for names, needed in compiler.choices(source_rank, destination_rank):
        pages = {(name, needed.part) for name in names} & gaps.keys() - seen
        if pages:
            pair = compiler.group_pair(names[0], needed)
            seen |= pages
            yield from ((page, pair) for page in sorted(pages))
