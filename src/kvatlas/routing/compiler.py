"""Compile which bytes of each source rank fill which bytes of a destination rank.

Tensor parallelism shards each field along one axis. A destination rank needs certain ranges of
that axis, and each source rank holds certain ranges. This module intersects the ranges, chooses
a source rank for each intersection, and expresses the source and destination bytes as strips
(`StridedRuns`). The work is done once for all layers that are in the same regions, both in the
source plan and in the destination plan. These layers differ only in their page offsets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from kvatlas.geometry import ShardRange, StateBlocks, StridedRuns, merge_runs
from kvatlas.geometry.combine import tile_alike
from kvatlas.geometry.strided_runs import Ends
from kvatlas.planning.sized_layers import FIXED_KINDS, kind_of
from kvatlas.routing.plan_ends import FieldView, LayerPart, PlanEnd
from kvatlas.specs import Visibility

Layers = tuple[str, ...]
"""Names of layers that are in one region of the source and in one region of the destination."""


class GroupPair(NamedTuple):
    """A source group, a destination group, and the mapping between their states.

    All strips of a pair use the same block tables and number their states in the same way.
    """

    groups: Ends
    per_state: int | None
    """Tokens per state; None for recurrent states."""
    visibility: Visibility
    cells: tuple[StateBlocks, StateBlocks]


class SourceShard(NamedTuple):
    """A range of rows of a sharded field that one source rank holds.

    The range starts at row `local` of the rank's shard.
    """

    tp_rank: int
    part: int
    """Index of the layer part, at the source, that contains the range."""
    local: int
    cells: StateBlocks


class NeededShard(NamedTuple):
    """A range of `length` rows of a field that a destination rank needs.

    The range starts at row `local` of the rank's shard.
    """

    field: str
    part: int
    """Index of the layer part, at the destination, that contains the range."""
    local: int
    length: int
    cells: StateBlocks
    sources: tuple[SourceShard, ...]
    """Shards of all source ranks that hold the range; only one, once a rank has been chosen."""


class StripPages(NamedTuple):
    """A strip that copies page 0 of a source region to page 0 of a destination region.

    A region contains the pages of several layers; its first page is page 0. `pages` contains the
    byte offsets of each layer's page from page 0, as (source, destination).
    """

    strip: StridedRuns
    pages: tuple[Ends, ...]


class Compiler:
    """Compiles the runs that copy caches between two plans, for one pair of ranks at a time.

    Runs are returned as strips (`StridedRuns`): families of runs with constant strides.
    """

    def __init__(
        self,
        source: PlanEnd,
        destination: PlanEnd,
        visibilities: Mapping[str, Visibility],
        padding: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Set up the compilation of a copy from one plan to another.

        `visibilities` contains the attention window of each layer. `padding` lists, for each
        layer, the fields that are copied together with the padding after them.
        """
        self.source, self.destination, self.visibilities = source, destination, visibilities
        self._padding = padding or {}
        self._chosen: dict[int, dict[int, dict[str, list[NeededShard]]]] = {}
        self._held: dict[object, list[tuple[SourceShard, ShardRange]]] = {}
        """Cache of the ranges of a field that source ranks hold, for all destination ranks."""
        self._runs: dict[object, StridedRuns] = {}
        """Cache of the runs between two placements; many groups and ranks share them."""
        self._merged: dict[tuple[StripPages, ...], tuple[StridedRuns, ...]] = {}
        """Cache of the merged strips between two groups; many groups and ranks share them."""
        self._group_pairs: dict[tuple[object, ...], GroupPair] = {}
        self._offsets: dict[tuple[str, int, int, str], tuple[Ends, ...]] = {}
        """Cache of the page offsets of layers, by the first of them; all ranks share them."""

    def sources(self, destination_rank: int) -> tuple[int, ...]:
        """Return the source ranks from which a destination rank reads."""
        return tuple(sorted(self._choose(destination_rank)))

    def strips(
        self, source_rank: int, destination_rank: int, layers: frozenset[str] | None = None
    ) -> dict[GroupPair, tuple[StridedRuns, ...]]:
        """Return the runs between two ranks as strips (`StridedRuns`), by pair of groups."""
        strips: dict[GroupPair, list[StripPages]] = defaultdict(list)
        runs: dict[int, StridedRuns] = {}
        for alike, needed in self.choices(source_rank, destination_rank):
            pages = self._pages(alike, needed)
            if layers is not None:
                named = zip(alike, pages, strict=True)
                pages = tuple(page for name, page in named if name in layers)
            if pages:
                # Layers of one form share the shard object and its strip.
                if id(needed) not in runs:
                    runs[id(needed)] = self._strip(alike[0], needed)
                pair = self.group_pair(alike[0], needed)
                strips[pair].append(StripPages(runs[id(needed)], pages))
        if layers is not None:  # Not cached: callers may pass any subset.
            return {pair: _merged(own) for pair, own in strips.items()}
        merged: dict[GroupPair, tuple[StridedRuns, ...]] = {}
        for pair, own in strips.items():
            key = tuple(own)
            if key not in self._merged:
                self._merged[key] = _merged(key)
            merged[pair] = self._merged[key]
        return merged

    def group_pair(self, layer: str, needed: NeededShard) -> GroupPair:
        """Return the source and destination groups between which a layer's shard is copied."""
        chosen = needed.sources[0]
        key = (layer, chosen.part, needed.part, chosen.cells, needed.cells)
        if key not in self._group_pairs:
            source, destination = (
                self.source.parts[layer][chosen.part],
                self.destination.parts[layer][needed.part],
            )
            self._group_pairs[key] = GroupPair(
                (self.source.region(source).group, self.destination.region(destination).group),
                self.source.specs[layer].tokens_per_state,
                self.visibilities[layer],
                (chosen.cells, needed.cells),
            )
        return self._group_pairs[key]

    def fields_chosen_by(self, layer: str, part: LayerPart) -> Mapping[str, FieldView]:
        """Return the fields for which source ranks are chosen: all fields of the layer part."""
        return self.destination.views(layer, part)

    def choices(self, source_rank: int, destination_rank: int) -> list[tuple[Layers, NeededShard]]:
        """Return (layers, shard) for every shard that a rank reads from a given source rank."""
        chosen = self._choose(destination_rank).get(source_rank, {})
        return [
            (alike, needed)
            for alike, first in self._alike.items()
            for needed in chosen.get(first, ())
        ]

    # -- choice of source ranks -------------------------------------------------------

    @cached_property
    def _alike(self) -> dict[Layers, str]:
        """For each tuple of layers, the one layer whose strips are used for all of them.

        The layers of a tuple are in the same regions in the source plan, are in the same regions in
        the destination plan, and copy the same padding. Two tuples use the strips of the same layer
        if their layers have the same `_form`.
        """
        alike: dict[object, list[str]] = defaultdict(list)
        for name, seen in self.visibilities.items():
            ends = [(end.specs[name], end.parts[name]) for end in (self.source, self.destination)]
            alike[seen, self._padding.get(name), *ends].append(name)
        first: dict[object, str] = {}
        return {
            tuple(names): first.setdefault(self._form(names[0]), names[0])
            for names in alike.values()
        }

    def _form(self, layer: str) -> object:
        """Return a key that is equal for layers with the same page layouts and copied padding."""
        ends = [
            (end.specs[layer], tuple(map(end.form, end.parts[layer])))
            for end in (self.source, self.destination)
        ]
        return (self.visibilities[layer], self._padding.get(layer), *ends)

    def _choose(self, destination_rank: int) -> dict[int, dict[str, list[NeededShard]]]:
        """Choose the source ranks from which a destination rank reads each of its shards.

        Return the shards by source rank, then by layer.
        """
        if destination_rank in self._chosen:
            return self._chosen[destination_rank]
        stage, tp_rank = self.destination.plan.split_rank(destination_rank)
        needs: list[tuple[str, int, NeededShard]] = []
        for layer in dict.fromkeys(self._alike.values()):
            if self.destination.plan.region_of(layer)[0].stage == stage:
                first = self.source.plan.region_of(layer)[0].stage * self.source.plan.tp
                needs += [(layer, first, needed) for needed in self._needed(layer, tp_rank)]
        must = {
            first + needed.sources[0].tp_rank
            for _, first, needed in needs
            if len({source.tp_rank for source in needed.sources}) == 1
        }
        near = tp_rank * self.source.plan.tp // self.destination.plan.tp
        chosen: dict[int, dict[str, list[NeededShard]]] = defaultdict(lambda: defaultdict(list))
        for layer, first, needed in needs:
            # Among replicas, prefer a rank that is read anyway, then the rank at the same
            # relative position, so that destination ranks spread over the replicas.
            rank = min(
                (source.tp_rank for source in needed.sources),
                key=lambda rank: (first + rank not in must, abs(rank - near), rank),
            )
            near_part = self._near_part(layer, needed.part)
            source = min(
                (source for source in needed.sources if source.tp_rank == rank),
                key=lambda source: abs(source.part - near_part),
            )
            chosen[first + rank][layer].append(NeededShard(*needed[:5], (source,)))
        self._chosen[destination_rank] = dict(chosen)
        return self._chosen[destination_rank]

    def _near_part(self, layer: str, part: int) -> int:
        """Return the source part at the same relative position as a destination part."""
        return part * len(self.source.parts[layer]) // len(self.destination.parts[layer])

    def _needed(self, layer: str, destination_tp_rank: int) -> Iterator[NeededShard]:
        """Yield each row range of a layer that a rank needs, with the source ranks that hold it."""
        for index, part in enumerate(self.destination.parts[layer]):
            for name, view in self.fields_chosen_by(layer, part).items():
                cells = _held_by_rank(view.cells, self.destination, layer, destination_tp_rank)
                key = layer, name, cells
                if key not in self._held:
                    self._held[key] = list(self._sources(*key))
                sources = self._held[key]
                for needed in self.destination.ranges(
                    view.field.sharding, part, destination_tp_rank
                ):
                    yield from _intersect(name, index, cells, needed, sources)

    def _sources(
        self, layer: str, field: str, needed: StateBlocks
    ) -> Iterator[tuple[SourceShard, ShardRange]]:
        """Yield every range of a field that a source rank holds for some of the states `needed`."""
        for index, part in enumerate(self.source.parts[layer]):
            view = self.source.views(layer, part)[field]
            for rank in range(self.source.plan.tp):
                cells = _held_by_rank(view.cells, self.source, layer, rank)
                if cells.overlaps(needed):
                    for held in self.source.ranges(view.field.sharding, part, rank):
                        yield SourceShard(rank, index, held.local, cells), held

    # -- bytes ------------------------------------------------------------------------

    def _strip(self, layer: str, needed: NeededShard) -> StridedRuns:
        """Return the runs that copy a shard from page 0 of the source to page 0 of the destination.

        The runs include the padding after the field if padding is copied with this field.
        """
        ends = (
            (self.source, self.source.parts[layer][needed.sources[0].part]),
            (self.destination, self.destination.parts[layer][needed.part]),
        )
        name = needed.field
        runs = self._between([end.views(layer, part)[name] for end, part in ends], needed)
        if name not in self._padding.get(layer, ()):
            return runs
        padding = self._between(
            [end.padding_after(layer, part)[name] for end, part in ends], needed
        )
        (joined,) = merge_runs((runs, padding))
        return joined

    def _between(self, views: Sequence[FieldView], needed: NeededShard) -> StridedRuns:
        """Return the runs between the source's and the destination's view of a shard."""
        (source, destination), local = views, (needed.sources[0].local, needed.local)
        axis, length = destination.field.sharding.axis, needed.length
        key = (source.placement, destination.placement, axis, *local, length)
        if key not in self._runs:
            here, there = tile_alike(source.placement, destination.placement)
            if axis is not None:
                here = here.narrow(axis, local[0], length)
                there = there.narrow(axis, local[1], length)
            self._runs[key] = StridedRuns.between(here, there)
        return self._runs[key]

    def _pages(self, layers: Layers, needed: NeededShard) -> tuple[Ends, ...]:
        """Return the byte offsets of each layer's page from page 0, as (source, destination)."""
        source, destination, layer = self.source, self.destination, layers[0]
        key = (layer, needed.sources[0].part, needed.part, needed.field)
        if key not in self._offsets:
            here = source.page_offsets(source.parts[layer][needed.sources[0].part], needed.field)
            there = destination.page_offsets(destination.parts[layer][needed.part], needed.field)
            self._offsets[key] = tuple((here[name], there[name]) for name in layers)
        return self._offsets[key]


def _merged(strips: Iterable[StripPages]) -> tuple[StridedRuns, ...]:
    """Return the runs of all pages, merged into as few strips (`StridedRuns`) as possible."""
    return tuple(merge_runs(strip.shift(*page) for strip, pages in strips for page in pages))


def _held_by_rank(cells: StateBlocks, end: PlanEnd, layer: str, tp_rank: int) -> StateBlocks:
    """Return `cells`, restricted to the states of a layer that one rank holds.

    With context parallelism, each rank holds every n-th state of an attention layer. Recurrent
    states and rings are not distributed.
    """
    dcp = end.plan.dcp
    if dcp == 1 or kind_of(end.specs[layer]) in FIXED_KINDS:
        return cells
    return cells._replace(every=dcp, residue=tp_rank % dcp)


def _intersect(
    field: str,
    part: int,
    cells: StateBlocks,
    needed: ShardRange,
    sources: list[tuple[SourceShard, ShardRange]],
) -> Iterator[NeededShard]:
    """Cut the range `needed` where the ranges of the source ranks end, and yield its parts.

    With context parallelism, source ranks hold different states. Ranks with the same states are
    handled together.
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
                SourceShard(*source[:2], source.local + first - held.start, source.cells)
                for source, held in mine
                if held.start <= first and last <= held.start + held.length
            )
            local = needed.local + first - needed.start
            yield NeededShard(field, part, local, last - first, cells, holders)
