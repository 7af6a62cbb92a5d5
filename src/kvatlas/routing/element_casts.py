"""Element-wise conversions, expressed as runs between source pages and destination pages.

If every element can be converted separately, with at most a per-tensor scale, source and
destination have the same elements in the same runs. Only the size of an element differs.
Offsets and lengths therefore count elements instead of bytes, and everything else works as in
other routes. The elements are cast while they are copied, without a second pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import StridedRuns, merge_runs
from kvatlas.geometry.combine import tile_alike
from kvatlas.geometry.strided_runs import fold_states
from kvatlas.routing.binding import CompiledPair, compile_pair, repeated
from kvatlas.routing.compiler import GroupPair, NeededShard
from kvatlas.routing.conversion import way_between
from kvatlas.routing.converting_compiler import ConvertingCompiler
from kvatlas.routing.request import RequestEnds
from kvatlas.routing.run_grids import SpanPattern
from kvatlas.routing.streams import Stream
from kvatlas.specs.cell_formats import ElementCast

CastPairs = Mapping[ElementCast | None, list[CompiledPair]]
"""Compiled pairs by element cast; None for bytes that are copied unchanged."""

_Strips = dict[GroupPair, dict[ElementCast | None, list[StridedRuns]]]


def compile_casts(
    compiler: ConvertingCompiler,
    source_rank: int,
    destination_rank: int,
    layers: frozenset[str] | None,
) -> CastPairs | None:
    """Return the runs that a destination rank reads from a source rank, grouped by their cast.

    Returns None if the conversion is not element-wise.
    """
    strips: _Strips = defaultdict(lambda: defaultdict(list))
    for alike, needed in compiler.choices(source_rank, destination_rank):
        for name in alike:
            if layers is None or name in layers:
                way = way_between(*compiler.cells(name, needed.field))
                if way == "rows" or not _add_layer(compiler, strips, name, needed):
                    return None
    pairs: dict[ElementCast | None, list[CompiledPair]] = defaultdict(list)
    for pair, by_cast in strips.items():
        types: dict[object, list[ElementCast]] = defaultdict(list)
        for cast, own in by_cast.items():
            if cast is None:
                pairs[None].append(compile_pair(pair, merge_runs(own)))
            else:
                types[cast[:2]].append(cast)
        for casts in types.values():
            scales = tuple(cast.scales[0] for cast in casts)
            made = _compile_scaled(pair, [merge_runs(by_cast[cast]) for cast in casts])
            pairs[casts[0]._replace(scales=scales)].append(made)
    return pairs


def _compile_scaled(pair: GroupPair, strips: Sequence[Sequence[StridedRuns]]) -> CompiledPair:
    """Compile the runs between two groups if their elements have several scales.

    `strips` contains one list of merged strips (`StridedRuns`) for each scale.
    """
    source, destination = pair.cells
    fold = pair.per_state is not None and source.states == destination.states
    whole = [fold_states(own, source.states) if fold else [] for own in strips]
    runs = []
    for every in (strips, whole):
        which = [number for number, own in enumerate(every) for _ in own]
        runs.append(repeated([strip for own in every for strip in own], which))
    return CompiledPair(pair, *runs)


def cast_patterns(pairs: CastPairs, request: RequestEnds) -> list[SpanPattern]:
    """Return the runs of a request, without block ids, with the cast of their elements."""
    return [
        pattern._replace(cast=cast)
        for cast, own in pairs.items()
        for pattern in Stream(own, request).patterns()
    ]


def _add_layer(
    compiler: ConvertingCompiler, strips: _Strips, layer: str, needed: NeededShard
) -> bool:
    """Add the runs of each field of a layer to `strips`, by pair of groups and by cast.

    Returns False if elements do not start at multiples of their size, so they cannot be cast.
    """
    one, two = compiler.cells(layer, needed.field)
    copied = way_between(one, two) == "copied"
    for row in two.rows:
        pair = compiler.group_pair(layer, compiler.of_field(layer, needed, row.name))
        cast = None if copied else one.cast_to(two, row.name)
        try:
            strips[pair][cast].append(_strip(compiler, layer, needed, row.name, cast))
        except AtlasError as refused:
            if refused.code is not Code.MISALIGNED:
                raise
            return False
    return True


def _strip(
    compiler: ConvertingCompiler,
    layer: str,
    needed: NeededShard,
    field: str,
    cast: ElementCast | None,
) -> StridedRuns:
    """Return the runs of one field, in elements if there is a cast, else in bytes."""
    source = needed.sources[0]
    ends = []
    for end, index, local in (
        (compiler.source, source.part, source.local),
        (compiler.destination, needed.part, needed.local),
    ):
        part = end.parts[layer][index]
        view = end.views(layer, part)[field]
        placed = view.placement.shift(end.page_offsets(part, field)[layer])
        axis = view.field.sharding.axis
        if axis is not None:
            placed = placed.narrow(axis, local, needed.length)
        ends.append(placed if cast is None else placed.in_items())
    return StridedRuns.between(*tile_alike(*ends))
