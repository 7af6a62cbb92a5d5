"""`CompiledRoute`: the runs of a route, compiled on first use and cached.

A route without a conversion has runs that copy bytes. A converting route has boxes
(`ConvertedBox`) and, if elements can be converted one by one, runs that cast elements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvatlas.geometry import StridedRuns
from kvatlas.routing.binding import CompiledPair, compile_pair
from kvatlas.routing.compiler import Compiler, GroupPair
from kvatlas.routing.request import RequestEnds
from kvatlas.routing.unused_bytes import UnusedRuns

if TYPE_CHECKING:
    from kvatlas.routing.converting_compiler import ConvertedBox, ConvertingCompiler
    from kvatlas.routing.element_casts import CastPairs
    from kvatlas.routing.run_grids import SpanPattern

_V = TypeVar("_V")

_Chosen = tuple[int, int, frozenset[str] | None]
"""A source rank, a destination rank, and layer names or None for all layers."""

_PairParts = tuple[GroupPair, tuple[StridedRuns, ...], tuple[StridedRuns, ...]]
"""Two groups, the runs between them, and runs of unused bytes."""

_MOST_COMPILED = 4096
"""Maximum number of compiled rank pairs and layer subsets; the oldest are evicted first."""


class CompiledRoute:
    """The compiled runs of a route, cached for each pair of ranks and each set of layers."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[object, ...], list[CompiledPair]] = {}
        self._shared: dict[_PairParts, CompiledPair] = {}
        self._boxes: dict[_Chosen, list[ConvertedBox]] = {}
        self._casts: dict[_Chosen, CastPairs | None] = {}

    def pairs(
        self,
        compiler: Compiler,
        source_rank: int,
        destination_rank: int,
        names: frozenset[str] | None,
        unused: UnusedRuns,
    ) -> list[CompiledPair]:
        """Return the runs between two ranks, one `CompiledPair` per pair of groups.

        `unused` returns the runs of unused bytes that are copied between the ranks.
        """
        chosen = (source_rank, destination_rank, names)

        def compiled() -> list[CompiledPair]:
            filled = unused(*chosen)
            strips = compiler.strips(*chosen).items()
            if names is not None:  # Not shared: callers may pass any subset.
                return [compile_pair(pair, own, filled.get(pair, ())) for pair, own in strips]
            return [self._shared_pair((pair, own, filled.get(pair, ()))) for pair, own in strips]

        return _cached(self._pairs, (compiler, *chosen), compiled)

    def _shared_pair(self, parts: _PairParts) -> CompiledPair:
        """Return `compile_pair(*parts)`; ranks that copy the same bytes share the result."""
        return _cached(self._shared, parts, lambda: compile_pair(*parts))

    def boxes(
        self,
        converter: ConvertingCompiler,
        source_rank: int,
        destination_rank: int,
        names: frozenset[str] | None,
    ) -> list[ConvertedBox]:
        """Return the boxes of a converting route between two ranks.

        A box is a range of heads or rows of some layers. One rank reads it from another rank.
        """
        chosen = (source_rank, destination_rank, names)
        return _cached(self._boxes, chosen, lambda: converter.boxes(*chosen))

    def cast_patterns(
        self, converter: ConvertingCompiler, request: RequestEnds, names: frozenset[str] | None
    ) -> list[SpanPattern] | None:
        """Return the runs of a request as patterns that cast elements, without block ids.

        Return None if elements cannot be converted one by one.
        """
        from kvatlas.routing.element_casts import cast_patterns, compile_casts

        chosen = (request.source.rank, request.destination.rank, names)
        pairs = _cached(self._casts, chosen, lambda: compile_casts(converter, *chosen))
        return None if pairs is None else cast_patterns(pairs, request)


def _cached(made: dict[Any, _V], key: object, make: Callable[[], _V]) -> _V:
    """Return `made[key]`; if it is missing, store the result of `make()` and evict old entries."""
    with suppress(KeyError):
        return made[key]
    value = made[key] = make()
    for old in list(made)[:-_MOST_COMPILED]:
        made.pop(old, None)
    return value
