"""Runs of a request as sums that nobody writes out: what a device that can add is told.

Where states of a request lie in its blocks follows from how many tokens it has; the ids of the
blocks are its own. So all but the ids is made once for each number of tokens, and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import CommonStates, Int64s, SpanStarts, StateSpans
from kvatlas.routing.binding import CompiledPair, RepeatedRuns, RunGrid, Starts

_Chosen = Literal["all", "whole", "rest"]
"""Which spans: all, those of whole cells, or the others."""

_KEPT_ROWS = 1 << 11
"""Spans of one number of tokens that are kept."""
_KEPT = 8
"""Numbers of tokens for which they are."""


class SpanTemplate(NamedTuple):
    """Spans of a request before its block ids are known, and the starts that they go with."""

    starts: Starts
    entries: tuple[Int64s, Int64s]
    """Which entry of its block table each span is in, at either end."""
    offsets: tuple[Int64s, Int64s]
    """Where it lies in that block."""
    length: Int64s

    def at(self, end: int, table: Int64s, stride: int) -> Int64s:
        """Where spans lie at one end, in blocks of a table."""
        found: Int64s = table[self.entries[end]] * stride
        found += self.offsets[end]
        return found


def grids(
    pools: tuple[int, int],
    compiled: CompiledPair,
    states: CommonStates,
    span: tuple[int, int],
    tables: tuple[Int64s, Int64s],
) -> Iterator[RunGrid]:
    """The runs of some states between two groups, with the block tables of either end."""
    cell = compiled.pair.cells[0].states
    rest: _Chosen = "rest" if compiled.whole else "all"
    parts: list[tuple[_Chosen, list[RepeatedRuns]]] = [
        ("whole", compiled.whole),
        (rest, compiled.states),
    ]
    for chosen, all_runs in parts:
        for runs in all_runs:
            strides = runs.strip.block_strides
            for made in _templates(runs, states, span, chosen, cell):
                src, dst = (made.at(end, tables[end], strides[end]) for end in (0, 1))
                yield RunGrid(*pools, made.starts, src, dst, made.length)


def _templates(
    runs: RepeatedRuns, states: CommonStates, span: tuple[int, int], chosen: _Chosen, cell: int
) -> list[SpanTemplate]:
    key = (states, span, chosen)
    made: list[SpanTemplate] | None = runs.kept.get(key)
    if made is None:
        made = list(_made(runs, states.spans(*span), chosen, cell))
        if sum(len(one.length) for one in made) <= _KEPT_ROWS:
            for old in [one for one in list(runs.kept) if isinstance(one, tuple)][: 1 - _KEPT]:
                runs.kept.pop(old, None)
            runs.kept[key] = made
    return made


def _made(
    runs: RepeatedRuns, spans: StateSpans, chosen: _Chosen, cell: int
) -> Iterator[SpanTemplate]:
    """States that go one by one are starts where spans have equally many, and spans else.

    The route knows those starts, so that a request brings a span for every block.
    """
    if chosen != "all":
        full = spans.length == cell
        spans = _pick(spans, full if chosen == "whole" else ~full)
    most = int(spans.length.max(initial=0))
    if chosen != "whole" and most > 1 and not runs.strip.gapless:
        starts, alike = runs.in_states(most), spans.length == most
        if starts is not None:
            first = _pick(spans, alike)
            ones = first._replace(length=np.ones_like(first.length))
            yield _template(runs, starts, ones, whole=False)
            spans = _pick(spans, ~alike)
    if len(spans.length):
        yield _template(runs, runs.starts, spans, whole=chosen == "whole")


def _template(
    runs: RepeatedRuns, starts: Starts, spans: StateSpans, *, whole: bool
) -> SpanTemplate:
    none = np.zeros(len(spans.length), dtype=np.int64)
    src, dst, length = runs.strip.byte_ranges(spans, (none, none), whole=whole, join=False)
    # A row for each span, or for each of its states.
    each = np.ones_like(spans.length) if len(src) == len(none) else spans.length
    entries = np.repeat(spans.src.entry, each), np.repeat(spans.dst.entry, each)
    return SpanTemplate(starts, entries, (src, dst), length)


def _pick(spans: StateSpans, chosen: NDArray[np.bool_]) -> StateSpans:
    """Some of the spans."""
    src, dst = (SpanStarts(*(array[chosen] for array in end)) for end in spans[:2])
    return StateSpans(src, dst, spans.length[chosen])
