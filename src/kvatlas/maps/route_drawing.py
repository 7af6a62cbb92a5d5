"""A route as data for a drawing: the runs of a request, and the table of `kvatlas check`.

All runs are counted. If there are many, only a part is drawn, and the HTML page reports that.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan
from kvatlas.routing import Route, check, scattered

MOST_RUNS = 12_000
"""Maximum number of drawn runs, over all pairs of ranks."""
MOST_PAIRS = 32
"""Maximum number of pairs of ranks whose runs are drawn. The table lists all pairs."""


_KEYS = {"source_rank": "src_rank", "destination_rank": "dst_rank"}
"""JSON keys of two fields, as the HTML page expects them."""


class PairDrawing(msgspec.Struct, frozen=True, kw_only=True, rename=_KEYS):
    """The runs from one rank to another."""

    source_rank: int
    destination_rank: int
    runs: tuple[tuple[int, int, int, int, int], ...]
    """(source pool, destination pool, source address, destination address, bytes) of each run."""
    counted: int
    nbytes: int
    sizes: dict[int, int]
    """Number of runs by size: the value of key n is the number of runs of n to 2n - 1 bytes."""


class RouteDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """The route between two plans, or the reasons why there is none."""

    check: dict[str, Any]
    tokens: int
    tables: tuple[dict[int, list[int]], ...]
    """Block ids of the drawn request by group, at the source and at the destination."""
    pairs: tuple[PairDrawing, ...]


def draw_route(source: Plan, destination: Plan, *, tokens: int | None = None) -> RouteDrawing:
    """Return the drawing of the route between two plans: counts of all runs, and runs to draw.

    The runs copy a request of `tokens` tokens. If `tokens` is None, `check()` chooses the number.
    """
    answer = check(source, destination, tokens=tokens)
    drawn = min(max(source.block_size, destination.block_size), answer.tokens)
    tables = scattered(source, drawn), scattered(destination, drawn)
    pairs: tuple[PairDrawing, ...] = ()
    if answer.ok:
        way = Route(source, destination)
        shown = answer.pairs[:MOST_PAIRS]
        most = MOST_RUNS // max(1, len(shown))
        pairs = tuple(
            _pair(way, pair.source_rank, pair.destination_rank, drawn, tables, most)
            for pair in shown
        )
    return RouteDrawing(check=answer.as_dict(), tokens=drawn, tables=tables, pairs=pairs)


def _pair(
    way: Route,
    source_rank: int,
    destination_rank: int,
    tokens: int,
    tables: tuple[dict[int, list[int]], dict[int, list[int]]],
    most: int,
) -> PairDrawing:
    bound = way.bind(
        source_rank=source_rank,
        destination_rank=destination_rank,
        source_blocks=tables[0],
        destination_blocks=tables[1],
        tokens=tokens,
    )
    counted = len(bound)
    step = -(-counted // most)
    runs: list[tuple[int, int, int, int, int]] = []
    for copy in bound.copies:
        pools = np.full(len(copy), copy.source_pool), np.full(len(copy), copy.destination_pool)
        columns: list[Int64s] = [*pools, copy.source, copy.destination, copy.length]
        sampled = [column[:: max(1, step)].tolist() for column in columns]
        runs += zip(*sampled, strict=True)
    return PairDrawing(
        source_rank=source_rank,
        destination_rank=destination_rank,
        runs=tuple(runs),
        counted=counted,
        nbytes=bound.nbytes,
        sizes=bound.report().sizes,
    )
