"""Which bytes of which source rank fill which bytes of a destination rank.

Every field of every layer is a box of the whole model's coordinates. A destination rank
needs some rows of it; each source rank holds some. Their meetings are cut out here, the
source of each is chosen, and the bytes of both ends become strips. Layers that lie in
the same regions share all of this and differ only in their pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from kvatlas.geometry import Placement, ShardRange, StateBlocks, StridedRuns, merge_runs
from kvatlas.planning import kind_of
from kvatlas.routing.plan_ends import Home, Side, View
from kvatlas.routing.token_ranges import Reach

Family = tuple[str, ...]
"""Layers that lie in the same regions at both ends."""


class Lane(NamedTuple):
    """What strips have in common that bind to the same tables and count states alike."""

    src_group: int
    dst_group: int
    per_state: int | None
    """Tokens that a state stands for; None for recurrent states."""
    reach: Reach
    src: StateBlocks
    dst: StateBlocks


class Holding(NamedTuple):
    """Rows that a source rank holds: which rank, where, from which row there, which states."""

    tp_rank: int
    home: Home
    row: int
    cells: StateBlocks


class Meeting(NamedTuple):
    """Rows of one field that a destination rank needs, and every rank that holds them."""

    field: str
    home: Home
    row: int
    rows: int
    cells: StateBlocks
    held: tuple[Holding, ...]


class Chosen(NamedTuple):
    """A meeting with the one source that it is read from."""

    meeting: Meeting
    source: Holding


class Compiler:
    """Strips between two plans, found for one pair of ranks at a time."""

    def __init__(self, src: Side, dst: Side, reaches: Mapping[str, Reach]) -> None:
        self.src, self.dst = src, dst
        self.reaches = reaches
        self._families = _alike(src, dst, reaches)
        self._views: dict[tuple[object, ...], dict[str, View]] = {}
        self._chosen: dict[int, dict[int, dict[Family, list[Chosen]]]] = {}

    def sources(self, dst_rank: int) -> tuple[int, ...]:
        """The source ranks that a destination rank reads."""
        return tuple(sorted(self._choose(dst_rank)))

    def lanes(
        self, src_rank: int, dst_rank: int, layers: frozenset[str] | None = None
    ) -> dict[Lane, list[StridedRuns]]:
        """The strips between two ranks, as few as possible, by lane."""
        found: dict[Lane, list[StridedRuns]] = defaultdict(list)
        for family, chosen in self._choose(dst_rank).get(src_rank, {}).items():
            names = [name for name in family if layers is None or name in layers]
            for choice in chosen if names else ():
                lane, strip = self._strip(names[0], choice)
                found[lane] += [
                    strip.shift(
                        self.src.shifts[name][choice.source.home],
                        self.dst.shifts[name][choice.meeting.home],
                    )
                    for name in names
                ]
        return {lane: merge_runs(strips) for lane, strips in found.items()}

    # -- who reads whom ---------------------------------------------------------------

    def _choose(self, dst_rank: int) -> dict[int, dict[Family, list[Chosen]]]:
        """For each source rank, the meetings that a destination rank reads from it."""
        if dst_rank in self._chosen:
            return self._chosen[dst_rank]
        stage, tp_rank = divmod(dst_rank, self.dst.plan.tp)
        needs: list[tuple[Family, int, Meeting]] = []
        for family in self._families:
            if self.dst.stages[family[0]] == stage:
                first = self.src.stages[family[0]] * self.src.plan.tp
                needs += [(family, first, m) for m in self._meetings(family[0], tp_rank)]
        must = {
            first + meeting.held[0].tp_rank
            for _, first, meeting in needs
            if len({holding.tp_rank for holding in meeting.held}) == 1
        }
        near = tp_rank * self.src.plan.tp // self.dst.plan.tp
        chosen: dict[int, dict[Family, list[Chosen]]] = {}
        for family, first, meeting in needs:
            # Of replicas, one that is read anyway; else the one that lies as this rank does,
            # so that destination ranks spread over them.
            source = min(
                meeting.held,
                key=lambda held: (
                    first + held.tp_rank not in must,
                    abs(held.tp_rank - near),
                    held.tp_rank,
                ),
            )
            mine = chosen.setdefault(first + source.tp_rank, {})
            mine.setdefault(family, []).append(Chosen(meeting, source))
        self._chosen[dst_rank] = chosen
        return chosen

    def _meetings(self, layer: str, dst_tp_rank: int) -> Iterator[Meeting]:
        """What a rank needs of a layer, in pieces that source ranks hold whole."""
        for home in self.dst.homes[layer]:
            for name, view in self._view(self.dst, layer, home).items():
                cells = _sharded(view.cells, self.dst, layer, dst_tp_rank)
                holders = list(self._holders(layer, name, cells))
                for piece in self.dst.ranges(view.field.sharding, home, dst_tp_rank):
                    yield from _cut_out(name, home, cells, piece, holders)

    def _holders(
        self, layer: str, field: str, needed: StateBlocks
    ) -> Iterator[tuple[Holding, ShardRange]]:
        for home in self.src.homes[layer]:
            view = self._view(self.src, layer, home)[field]
            for rank in range(self.src.plan.tp):
                cells = _sharded(view.cells, self.src, layer, rank)
                if cells.overlaps(needed):
                    for piece in self.src.ranges(view.field.sharding, home, rank):
                        yield Holding(rank, home, piece.local, cells), piece

    # -- bytes ------------------------------------------------------------------------

    def _view(self, side: Side, layer: str, home: Home) -> dict[str, View]:
        key = (id(side), side.specs[layer], home.region)
        if key not in self._views:
            self._views[key] = side.views(layer, home)
        return self._views[key]

    def _strip(self, layer: str, choice: Chosen) -> tuple[Lane, StridedRuns]:
        meeting, source = choice
        src = self._view(self.src, layer, source.home)[meeting.field]
        dst = self._view(self.dst, layer, meeting.home)[meeting.field]
        lane = Lane(
            self.src.region(source.home).group,
            self.dst.region(meeting.home).group,
            self.src.specs[layer].tokens_per_state,
            self.reaches[layer],
            source.cells,
            meeting.cells,
        )
        ends = _aligned(src.placement, dst.placement)
        axis = dst.field.sharding.axis
        if axis is None:
            return lane, StridedRuns.between(*ends)
        narrowed = (
            ends[0].narrow(axis, source.row, meeting.rows),
            ends[1].narrow(axis, meeting.row, meeting.rows),
        )
        return lane, StridedRuns.between(*narrowed)


def _alike(src: Side, dst: Side, reaches: Mapping[str, Reach]) -> list[Family]:
    families: dict[object, list[str]] = defaultdict(list)
    for name, reach in reaches.items():
        ends = [(side.specs[name], side.homes[name]) for side in (src, dst)]
        families[reach, *ends].append(name)
    return [tuple(names) for names in families.values()]


def _sharded(cells: StateBlocks, side: Side, layer: str, tp_rank: int) -> StateBlocks:
    """Context parallelism deals the states of attention out; recurrent states stay whole."""
    dcp = side.plan.dcp
    if dcp == 1 or kind_of(side.specs[layer]) == "mamba":
        return cells
    return cells._replace(every=dcp, residue=tp_rank % dcp)


def _cut_out(
    field: str,
    home: Home,
    cells: StateBlocks,
    piece: ShardRange,
    holders: list[tuple[Holding, ShardRange]],
) -> Iterator[Meeting]:
    """A piece that is needed, in stretches that have the same holders from end to end.

    Holders of unlike states each have their own share of it.
    """
    stop = piece.start + piece.length
    for residue in sorted({holding.cells.residue for holding, _ in holders}):
        mine = [
            (holding, theirs)
            for holding, theirs in holders
            if holding.cells.residue == residue
            and theirs.start < stop
            and piece.start < theirs.start + theirs.length
        ]
        edges = {piece.start, stop}
        for _, theirs in mine:
            edges |= {theirs.start, theirs.start + theirs.length}
        inside = sorted(edge for edge in edges if piece.start <= edge <= stop)
        for first, last in pairwise(inside):
            held = tuple(
                holding._replace(row=holding.row + first - theirs.start)
                for holding, theirs in mine
                if theirs.start <= first and last <= theirs.start + theirs.length
            )
            row = piece.local + first - piece.start
            yield Meeting(field, home, row, last - first, cells, held)


def _aligned(src: Placement, dst: Placement) -> tuple[Placement, Placement]:
    """Both ends with the same element axes: one may keep elements in tiles."""
    if "c" in src.axes and "c" not in dst.axes:
        return src, dst.split("C", into=("C", "c"), inner=src.size("c"))
    if "c" in dst.axes and "c" not in src.axes:
        return src.split("C", into=("C", "c"), inner=dst.size("c")), dst
    return src, dst
