"""Runs of a request as sums that nobody writes out: what a device that can add is told.

Where states of a request lie in its blocks follows from how many tokens it has; the ids of the
blocks are its own. So all but the ids is made once for each number of tokens, and kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


BlockIds = Int64s | NDArray[np.uint32]
"""A block table, as the caller has it or as it stands in a message."""


class SpanTemplate(NamedTuple):
    """Spans of a request before its block ids are known, and the starts that they go with."""

    starts: Starts
    entries: tuple[Int64s, Int64s]
    """Which entry of its block table each span is in, at either end."""
    offsets: tuple[Int64s, Int64s]
    """Where it lies in that block."""
    length: Int64s
    one_each: tuple[bool, bool]
    """Whether they are in one entry after the other, from the first on."""
    inside: tuple[bool, bool]
    """Whether any lies elsewhere than where its block begins."""


class SpanPattern(NamedTuple):
    """Spans of requests of one shape between two groups: block tables are all that is missing."""

    pools: tuple[int, int]
    groups: tuple[int, int]
    strides: tuple[int, int]
    """Bytes between blocks, at either end."""
    template: SpanTemplate

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return len(self.template.starts.src) * int(self.template.length.sum())

    def fill(self, end: int, tables: Mapping[int, BlockIds], out: Int64s) -> None:
        """Where spans lie at one end, in blocks of tables that are long enough for them."""
        made, table = self.template, tables[self.groups[end]]
        used = table[: len(out)] if made.one_each[end] else table[made.entries[end]]
        np.multiply(used, self.strides[end], out=out, dtype=np.int64)
        if made.inside[end]:
            out += made.offsets[end]

    def grid(self, src: Mapping[int, BlockIds], dst: Mapping[int, BlockIds]) -> RunGrid:
        """The runs of a request."""
        made = self.template
        at = np.empty((2, len(made.length)), dtype=np.int64)
        self.fill(0, src, at[0])
        self.fill(1, dst, at[1])
        return RunGrid(*self.pools, made.starts, at[0], at[1], made.length)

    def reach(self, end: int, blocks: int) -> tuple[int, int]:
        """The first byte and the one behind the last, whichever of so many blocks are used."""
        made, last = self.template, (blocks - 1) * self.strides[end]
        starts, offsets = made.starts.at(end), made.offsets[end]
        first = int(starts.min()) + int(offsets.min()) + min(0, last)
        stop = int(starts.max()) + int((offsets + made.length).max()) + max(0, last)
        return first, stop


def span_patterns(
    pools: tuple[int, int],
    compiled: CompiledPair,
    states: CommonStates,
    span: tuple[int, int],
) -> Iterator[SpanPattern]:
    """The runs of some states between two groups, in blocks that are not known yet."""
    pair, cell = compiled.pair, compiled.pair.cells[0].states
    rest: _Chosen = "rest" if compiled.whole else "all"
    parts: list[tuple[_Chosen, list[RepeatedRuns]]] = [
        ("whole", compiled.whole),
        (rest, compiled.states),
    ]
    for chosen, all_runs in parts:
        for runs in all_runs:
            strides = runs.strip.block_strides
            for made in _templates(runs, states, span, chosen, cell):
                yield SpanPattern(pools, pair.groups, strides, made)


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
    in_order = np.arange(len(length))
    return SpanTemplate(
        starts, entries, (src, dst), length,
        (np.array_equal(entries[0], in_order), np.array_equal(entries[1], in_order)),
        (bool(src.any()), bool(dst.any())),
    )  # fmt: skip


def _pick(spans: StateSpans, chosen: NDArray[np.bool_]) -> StateSpans:
    """Some of the spans."""
    src, dst = (SpanStarts(*(array[chosen] for array in end)) for end in spans[:2])
    return StateSpans(src, dst, spans.length[chosen])
