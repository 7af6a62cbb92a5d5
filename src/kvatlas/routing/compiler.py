"""Which bytes of which source rank fill which bytes of a destination rank.

Every field of every layer is a box of the whole model's coordinates. A destination rank
needs some ranges of it; each source rank holds some. Their intersections are made here, the
source of each is chosen, and the bytes of both ends become strips. Layers that lie in
the same regions share all of this and differ only in their pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from kvatlas.geometry import Ends, ShardRange, StateBlocks, StridedRuns, merge_runs, tile_alike
from kvatlas.planning import kind_of
from kvatlas.routing.plan_ends import FieldView, LayerPart, PlanEnd
from kvatlas.specs import Visibility

Layers = tuple[str, ...]
"""Layers that lie in the same regions at both ends."""


class GroupPair(NamedTuple):
    """A source and a destination group, and how states of one become states of the other.

    Strips with equal pairs bind to the same block tables and count states alike.
    """

    groups: Ends
    per_state: int | None
    """Tokens that a state stands for; None for recurrent states."""
    visibility: Visibility
    cells: tuple[StateBlocks, StateBlocks]


class SourceShard(NamedTuple):
    """A range of a field's sharded axis that one source rank holds, from its own `local` on."""

    tp_rank: int
    part: LayerPart
    local: int
    cells: StateBlocks


class NeededShard(NamedTuple):
    """A range of a field that a destination rank needs, and the source ranks that hold it."""

    field: str
    part: LayerPart
    local: int
    length: int
    cells: StateBlocks
    sources: tuple[SourceShard, ...]
    """All that hold it; the one to read from, once that is chosen."""


class Compiler:
    """Strips between two plans, found for one pair of ranks at a time."""

    def __init__(self, src: PlanEnd, dst: PlanEnd, visibilities: Mapping[str, Visibility]) -> None:
        self.src, self.dst, self.visibilities = src, dst, visibilities
        alike: dict[object, list[str]] = defaultdict(list)
        for name, seen in visibilities.items():
            ends = [(end.specs[name], end.parts[name]) for end in (src, dst)]
            alike[seen, *ends].append(name)
        self._alike = [tuple(names) for names in alike.values()]
        self._chosen: dict[int, dict[int, list[tuple[Layers, NeededShard]]]] = {}
        self._held: dict[object, list[tuple[SourceShard, ShardRange]]] = {}
        """What source ranks hold of a field, whoever needs it."""
        self._runs: dict[object, StridedRuns] = {}
        """Between places that are alike: groups of one pool share them, and many ranks."""

    def sources(self, dst_rank: int) -> tuple[int, ...]:
        """The source ranks that a destination rank reads."""
        return tuple(sorted(self._choose(dst_rank)))

    def strips(
        self, src_rank: int, dst_rank: int, layers: frozenset[str] | None = None
    ) -> dict[GroupPair, list[StridedRuns]]:
        """The strips between two ranks, as few as possible, by pair of groups."""
        strips: dict[GroupPair, list[StridedRuns]] = defaultdict(list)
        for alike, needed in self.choices(src_rank, dst_rank):
            names = [name for name in alike if layers is None or name in layers]
            if names:
                pair, strip = self._strip(names[0], needed)
                parts = needed.sources[0].part, needed.part
                for name in names:
                    src, dst = self.src.page_offsets[name], self.dst.page_offsets[name]
                    strips[pair].append(strip.shift(src[parts[0]], dst[parts[1]]))
        return {pair: merge_runs(own) for pair, own in strips.items()}

    def fields_chosen_by(self, layer: str, part: LayerPart) -> Mapping[str, FieldView]:
        """The fields whose ranges say who reads what from whom: each for itself."""
        return self.dst.views(layer, part)

    def choices(self, src_rank: int, dst_rank: int) -> list[tuple[Layers, NeededShard]]:
        """What a destination rank reads from a source rank."""
        return self._choose(dst_rank).get(src_rank, [])

    # -- who reads whom ---------------------------------------------------------------

    def _choose(self, dst_rank: int) -> dict[int, list[tuple[Layers, NeededShard]]]:
        """For each source rank, what a destination rank reads from it."""
        if dst_rank in self._chosen:
            return self._chosen[dst_rank]
        stage, tp_rank = self.dst.plan.split_rank(dst_rank)
        needs: list[tuple[Layers, int, NeededShard]] = []
        for alike in self._alike:
            if self.dst.plan.region_of(alike[0])[0].stage == stage:
                first = self.src.plan.region_of(alike[0])[0].stage * self.src.plan.tp
                needs += [(alike, first, needed) for needed in self._needed(alike[0], tp_rank)]
        must = {
            first + needed.sources[0].tp_rank
            for _, first, needed in needs
            if len({source.tp_rank for source in needed.sources}) == 1
        }
        near = tp_rank * self.src.plan.tp // self.dst.plan.tp
        chosen: dict[int, list[tuple[Layers, NeededShard]]] = defaultdict(list)
        for alike, first, needed in needs:
            # Of replicas, one that is read anyway; else the one that lies as this rank does,
            # so that destination ranks spread over them.
            rank = min(
                (source.tp_rank for source in needed.sources),
                key=lambda rank: (first + rank not in must, abs(rank - near), rank),
            )
            source = next(source for source in needed.sources if source.tp_rank == rank)
            chosen[first + rank].append((alike, needed._replace(sources=(source,))))
        self._chosen[dst_rank] = dict(chosen)
        return self._chosen[dst_rank]

    def _needed(self, layer: str, dst_tp_rank: int) -> Iterator[NeededShard]:
        """What a rank needs of a layer, in ranges that source ranks hold from end to end."""
        for part in self.dst.parts[layer]:
            for name, view in self.fields_chosen_by(layer, part).items():
                cells = _dealt_out(view.cells, self.dst, layer, dst_tp_rank)
                key = layer, name, cells
                if key not in self._held:
                    self._held[key] = list(self._sources(*key))
                sources = self._held[key]
                for needed in self.dst.ranges(view.field.sharding, part, dst_tp_rank):
                    yield from _intersect(name, part, cells, needed, sources)

    def _sources(
        self, layer: str, field: str, needed: StateBlocks
    ) -> Iterator[tuple[SourceShard, ShardRange]]:
        """Every range of a field that source ranks hold, of the states that are needed."""
        for part in self.src.parts[layer]:
            view = self.src.views(layer, part)[field]
            for rank in range(self.src.plan.tp):
                cells = _dealt_out(view.cells, self.src, layer, rank)
                if cells.overlaps(needed):
                    for held in self.src.ranges(view.field.sharding, part, rank):
                        yield SourceShard(rank, part, held.local, cells), held

    # -- bytes ------------------------------------------------------------------------

    def _strip(self, layer: str, needed: NeededShard) -> tuple[GroupPair, StridedRuns]:
        source = needed.sources[0]
        src = self.src.views(layer, source.part)[needed.field]
        dst = self.dst.views(layer, needed.part)[needed.field]
        pair = GroupPair(
            (self.src.region(source.part).group, self.dst.region(needed.part).group),
            self.src.specs[layer].tokens_per_state,
            self.visibilities[layer],
            (source.cells, needed.cells),
        )
        axis = dst.field.sharding.axis
        ends = src.placement, dst.placement
        key = (*ends, axis, source.local, needed.local, needed.length)
        if key not in self._runs:
            here, there = tile_alike(*ends)
            if axis is not None:
                here = here.narrow(axis, source.local, needed.length)
                there = there.narrow(axis, needed.local, needed.length)
            self._runs[key] = StridedRuns.between(here, there)
        return pair, self._runs[key]


def _dealt_out(cells: StateBlocks, end: PlanEnd, layer: str, tp_rank: int) -> StateBlocks:
    """Context parallelism deals the states of attention out; recurrent states stay whole."""
    dcp = end.plan.dcp
    if dcp == 1 or kind_of(end.specs[layer]) == "recurrent":
        return cells
    return cells._replace(every=dcp, residue=tp_rank % dcp)


def _intersect(
    field: str,
    part: LayerPart,
    cells: StateBlocks,
    needed: ShardRange,
    sources: list[tuple[SourceShard, ShardRange]],
) -> Iterator[NeededShard]:
    """A range that is needed, cut where the ranges of source ranks begin and end.

    Sources of unlike states each have their own share of it.
    """
    stop = needed.start + needed.length
    for residue in sorted({source.cells.residue for source, _ in sources}):
        mine = [
            (source, held)
            for source, held in sources
            if source.cells.residue == residue
            and held.start < stop
            and needed.start < held.start + held.length
        ]
        edges = {needed.start, stop}
        for _, held in mine:
            edges |= {held.start, held.start + held.length}
        for first, last in pairwise(sorted(e for e in edges if needed.start <= e <= stop)):
            holders = tuple(
                source._replace(local=source.local + first - held.start)
                for source, held in mine
                if held.start <= first and last <= held.start + held.length
            )
            local = needed.local + first - needed.start
            yield NeededShard(field, part, local, last - first, cells, holders)
