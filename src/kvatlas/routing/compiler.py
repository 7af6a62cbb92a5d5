"""Which bytes of which source rank fill which bytes of a destination rank.

Every field of every layer is a box of the whole model's coordinates. A destination rank
needs some ranges of it; each source rank holds some. Their intersections are made here, the
source of each is chosen, and the bytes of both ends become strips. Layers that lie in
the same regions share all of this and differ only in their pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
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
    part: int
    """Which of its layer's parts there it is in."""
    local: int
    cells: StateBlocks


class NeededShard(NamedTuple):
    """A range of a field that a destination rank needs, and the source ranks that hold it."""

    field: str
    part: int
    """Which of its layer's parts there it is in."""
    local: int
    length: int
    cells: StateBlocks
    sources: tuple[SourceShard, ...]
    """All that hold it; the one to read from, once that is chosen."""


class StripPages(NamedTuple):
    """A strip at page 0 of two regions, and how far from there it lies again for each layer."""

    strip: StridedRuns
    pages: tuple[Ends, ...]


class Compiler:
    """Strips between two plans, found for one pair of ranks at a time."""

    def __init__(self, src: PlanEnd, dst: PlanEnd, visibilities: Mapping[str, Visibility]) -> None:
        self.src, self.dst, self.visibilities = src, dst, visibilities
        self._chosen: dict[int, dict[int, dict[str, list[NeededShard]]]] = {}
        self._held: dict[object, list[tuple[SourceShard, ShardRange]]] = {}
        """What source ranks hold of a field, whoever needs it."""
        self._runs: dict[object, StridedRuns] = {}
        """Between places that are alike: groups of one pool share them, and many ranks."""
        self._merged: dict[tuple[StripPages, ...], tuple[StridedRuns, ...]] = {}
        """Of all layers between two groups: those of many groups and ranks are the same."""

    def sources(self, dst_rank: int) -> tuple[int, ...]:
        """The source ranks that a destination rank reads."""
        return tuple(sorted(self._choose(dst_rank)))

    def strips(
        self, src_rank: int, dst_rank: int, layers: frozenset[str] | None = None
    ) -> dict[GroupPair, tuple[StridedRuns, ...]]:
        """The strips between two ranks, as few as possible, by pair of groups."""
        strips: dict[GroupPair, list[StripPages]] = defaultdict(list)
        for alike, needed in self.choices(src_rank, dst_rank):
            names = [name for name in alike if layers is None or name in layers]
            if names:
                pair = self.group_pair(names[0], needed)
                pages = self._pages(names, needed.sources[0].part, needed.part)
                strips[pair].append(StripPages(self._strip(names[0], needed), pages))
        if layers is not None:  # any choice of them: not to be kept
            return {pair: _merged(own) for pair, own in strips.items()}
        merged: dict[GroupPair, tuple[StridedRuns, ...]] = {}
        for pair, own in strips.items():
            key = tuple(own)
            if key not in self._merged:
                self._merged[key] = _merged(key)
            merged[pair] = self._merged[key]
        return merged

    def group_pair(self, layer: str, needed: NeededShard) -> GroupPair:
        """The groups between which a layer's shard goes."""
        source = needed.sources[0]
        src, dst = self.src.parts[layer][source.part], self.dst.parts[layer][needed.part]
        return GroupPair(
            (self.src.region(src).group, self.dst.region(dst).group),
            self.src.specs[layer].tokens_per_state,
            self.visibilities[layer],
            (source.cells, needed.cells),
        )

    def fields_chosen_by(self, layer: str, part: LayerPart) -> Mapping[str, FieldView]:
        """The fields whose ranges say who reads what from whom: each for itself."""
        return self.dst.views(layer, part)

    def choices(self, src_rank: int, dst_rank: int) -> list[tuple[Layers, NeededShard]]:
        """What a destination rank reads from a source rank."""
        chosen = self._choose(dst_rank).get(src_rank, {})
        return [
            (alike, needed)
            for alike, first in self._alike.items()
            for needed in chosen.get(first, ())
        ]

    # -- who reads whom ---------------------------------------------------------------

    @cached_property
    def _alike(self) -> dict[Layers, str]:
        """Layers that lie in the same regions, and a layer that lies alike in its own."""
        alike: dict[object, list[str]] = defaultdict(list)
        for name, seen in self.visibilities.items():
            ends = [(end.specs[name], end.parts[name]) for end in (self.src, self.dst)]
            alike[seen, *ends].append(name)
        first: dict[object, str] = {}
        return {
            tuple(names): first.setdefault(self._form(names[0]), names[0])
            for names in alike.values()
        }

    def _form(self, layer: str) -> object:
        """Equal for layers of which ranks read the same ranges, at the same places of a page."""
        ends = [
            (end.specs[layer], tuple(map(end.form, end.parts[layer])))
            for end in (self.src, self.dst)
        ]
        return (self.visibilities[layer], *ends)

    def _choose(self, dst_rank: int) -> dict[int, dict[str, list[NeededShard]]]:
        """For each source rank, what a destination rank reads from it, by layers that lie alike."""
        if dst_rank in self._chosen:
            return self._chosen[dst_rank]
        stage, tp_rank = self.dst.plan.split_rank(dst_rank)
        needs: list[tuple[str, int, NeededShard]] = []
        for layer in dict.fromkeys(self._alike.values()):
            if self.dst.plan.region_of(layer)[0].stage == stage:
                first = self.src.plan.region_of(layer)[0].stage * self.src.plan.tp
                needs += [(layer, first, needed) for needed in self._needed(layer, tp_rank)]
        must = {
            first + needed.sources[0].tp_rank
            for _, first, needed in needs
            if len({source.tp_rank for source in needed.sources}) == 1
        }
        near = tp_rank * self.src.plan.tp // self.dst.plan.tp
        chosen: dict[int, dict[str, list[NeededShard]]] = defaultdict(lambda: defaultdict(list))
        for layer, first, needed in needs:
            # Of replicas, one that is read anyway; else the one that lies as this rank does,
            # so that destination ranks spread over them.
            rank = min(
                (source.tp_rank for source in needed.sources),
                key=lambda rank: (first + rank not in must, abs(rank - near), rank),
            )
            source = next(source for source in needed.sources if source.tp_rank == rank)
            chosen[first + rank][layer].append(needed._replace(sources=(source,)))
        self._chosen[dst_rank] = dict(chosen)
        return self._chosen[dst_rank]

    def _needed(self, layer: str, dst_tp_rank: int) -> Iterator[NeededShard]:
        """What a rank needs of a layer, in ranges that source ranks hold from end to end."""
        for index, part in enumerate(self.dst.parts[layer]):
            for name, view in self.fields_chosen_by(layer, part).items():
                cells = _dealt_out(view.cells, self.dst, layer, dst_tp_rank)
                key = layer, name, cells
                if key not in self._held:
                    self._held[key] = list(self._sources(*key))
                sources = self._held[key]
                for needed in self.dst.ranges(view.field.sharding, part, dst_tp_rank):
                    yield from _intersect(name, index, cells, needed, sources)

    def _sources(
        self, layer: str, field: str, needed: StateBlocks
    ) -> Iterator[tuple[SourceShard, ShardRange]]:
        """Every range of a field that source ranks hold, of the states that are needed."""
        for index, part in enumerate(self.src.parts[layer]):
            view = self.src.views(layer, part)[field]
            for rank in range(self.src.plan.tp):
                cells = _dealt_out(view.cells, self.src, layer, rank)
                if cells.overlaps(needed):
                    for held in self.src.ranges(view.field.sharding, part, rank):
                        yield SourceShard(rank, index, held.local, cells), held

    # -- bytes ------------------------------------------------------------------------

    def _strip(self, layer: str, needed: NeededShard) -> StridedRuns:
        """A shard's runs at page 0 of the regions that a layer is in."""
        source = needed.sources[0]
        src = self.src.views(layer, self.src.parts[layer][source.part])[needed.field]
        dst = self.dst.views(layer, self.dst.parts[layer][needed.part])[needed.field]
        axis = dst.field.sharding.axis
        ends = src.placement, dst.placement
        key = (*ends, axis, source.local, needed.local, needed.length)
        if key not in self._runs:
            here, there = tile_alike(*ends)
            if axis is not None:
                here = here.narrow(axis, source.local, needed.length)
                there = there.narrow(axis, needed.local, needed.length)
            self._runs[key] = StridedRuns.between(here, there)
        return self._runs[key]

    def _pages(self, layers: Sequence[str], src_part: int, dst_part: int) -> tuple[Ends, ...]:
        """Bytes from page 0 to the page of each layer, at either end."""
        src, dst = self.src, self.dst
        here, there = src.parts[layers[0]][src_part], dst.parts[layers[0]][dst_part]
        return tuple(
            (src.page_offsets[name][here], dst.page_offsets[name][there]) for name in layers
        )


def _merged(strips: Iterable[StripPages]) -> tuple[StridedRuns, ...]:
    """Strips at all of their pages, as few as possible."""
    return tuple(merge_runs(strip.shift(*page) for strip, pages in strips for page in pages))


def _dealt_out(cells: StateBlocks, end: PlanEnd, layer: str, tp_rank: int) -> StateBlocks:
    """Context parallelism deals the states of attention out; recurrent states stay whole."""
    dcp = end.plan.dcp
    if dcp == 1 or kind_of(end.specs[layer]) == "recurrent":
        return cells
    return cells._replace(every=dcp, residue=tp_rank % dcp)


def _intersect(
    field: str,
    part: int,
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
