"""`BoundRoute`: the byte ranges of one request between two ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.routing.binding import CompiledPair, Copy, Runs, joined, ranges
from kvatlas.routing.request import RequestEnds

if TYPE_CHECKING:
    from kvatlas.routing.costs import Costs, Report


@dataclass(frozen=True, eq=False)
class BoundRoute:
    """The byte ranges that copy one request from a source rank to a destination rank."""

    source_rank: int
    destination_rank: int
    copies: tuple[Copy, ...]

    def __len__(self) -> int:
        return sum(map(len, self.copies))

    @property
    def nbytes(self) -> int:
        """Total bytes to copy."""
        return sum(copy.nbytes for copy in self.copies)

    def report(self, costs: Costs | None = None) -> Report:
        """Report the number and sizes of the descriptors, and whether staging is faster."""
        from kvatlas.routing.costs import report  # not needed to bind a route

        return report(self.copies, costs)


def bind_copies(pairs: Iterable[CompiledPair], request: RequestEnds) -> tuple[Copy, ...]:
    """Return the byte ranges that copy a request, from compiled pairs of groups."""
    moving = [(compiled, request.states(compiled.pair)) for compiled in pairs]
    request.check_distinct()
    runs: dict[tuple[int, int], list[Runs]] = defaultdict(list)
    for compiled, states in moving:
        if states.total:
            bound = request.bind(compiled.pair, states.spans())
            runs[request.pools(compiled.pair)] += ranges(compiled, bound)
    return joined(runs)
