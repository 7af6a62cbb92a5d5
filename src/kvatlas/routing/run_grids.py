"""The runs of a request in a compact form: two lists of offsets, called starts and spans.

There is one run for every pair of a start and a span, at the sum of their offsets. A device
computes the sums.

The offsets of a request's states in its blocks depend only on the number of tokens. Everything
except the block ids is therefore computed once for each number of tokens and cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import StateSpans
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.state_spans import CommonStates
from kvatlas.routing.binding import CompiledPair, Copy, RepeatedRuns, Starts, pick_spans
from kvatlas.specs.cell_formats import ElementCast

_Chosen = Literal["all", "whole", "rest"]
"""Selection of spans: all, those of whole kernel blocks, or the rest."""

_KEPT_ROWS = 1 << 11
"""Maximum number of spans that are cached for one number of tokens."""
_KEPT = 8, 128
"""Maximum numbers of cached entries per `RepeatedRuns`: of the longest and of short requests."""


BlockIds = Int64s | NDArray[np.uint32]
"""The block ids of a table, from a caller or decoded from a message."""


class SpanTemplate(NamedTuple):
    """The runs of a request as starts and spans, without block ids.

    A span is a byte range in a block. There is one run for every pair of a start and a span.
    """

    starts: Starts
    entries: tuple[Int64s, Int64s]
    """Index of each span's block table entry, at the source and at the destination."""
    offsets: tuple[Int64s, Int64s]
    """Byte offset of each span in its block, at the source and at the destination."""
    length: Int64s
    one_each: tuple[bool, bool]
    """Whether span i uses block table entry i, at the source and at the destination."""
    inside: tuple[bool, bool]
    """Whether any span has a non-zero offset in its block, at the source and at the destination."""


class SpanPattern(NamedTuple):
    """The runs between two groups as starts and spans, complete except for block ids.

    A pattern fits all requests with the same tokens and the same numbers of blocks.
    """

    pools: tuple[int, int]
    groups: tuple[int, int]
    strides: tuple[int, int]
    """Distance between consecutive blocks at the source and at the destination.

    It is in bytes, or in elements if there is a cast.
    """
    template: SpanTemplate
    cast: ElementCast | None = None
    """The cast of each element; None to copy bytes. With a cast, offsets count elements."""

    @property
    def nbytes(self) -> int:
        """The number of bytes read or written, whichever is larger."""
        count = len(self.template.starts.source) * int(self.template.length.sum())
        return count * (1 if self.cast is None else max(self.cast.items))

    def fill(self, end: int, tables: Mapping[int, BlockIds], out: Int64s) -> None:
        """Write the byte offset of each span to `out`.

        `end` is 0 for offsets at the source and 1 for the destination. `tables` are the block
        tables of this end, by group.
        """
        made, table = self.template, tables[self.groups[end]]
        used = table[: len(out)] if made.one_each[end] else table[made.entries[end]]
        np.multiply(used, self.strides[end], out=out, dtype=np.int64)
        if made.inside[end]:
            out += made.offsets[end]

    def grid(self, source: Mapping[int, BlockIds], destination: Mapping[int, BlockIds]) -> Copy:
        """Return a `Copy` with the runs of a request.

        `source` and `destination` are its block tables, by group.
        """
        made = self.template
        at = np.empty((2, len(made.length)), dtype=np.int64)
        self.fill(0, source, at[0])
        self.fill(1, destination, at[1])
        return Copy(*self.pools, at[0], at[1], made.length, starts=made.starts, cast=self.cast)

    def reach(self, end: int, blocks: int) -> tuple[int, int]:
        """Return (first, stop): the runs access only bytes `first .. stop - 1` of the pool.

        This holds for all block ids below `blocks`. `end` is 0 for the source and 1 for the
        destination.
        """
        made, last = self.template, (blocks - 1) * self.strides[end]
        starts, offsets = made.starts.at(end), made.offsets[end]
        first = int(starts.min()) + int(offsets.min()) + min(0, last)
        stop = int(starts.max()) + int((offsets + made.length).max()) + max(0, last)
        item = 1 if self.cast is None else self.cast.items[end]
        return first * item, stop * item


def span_patterns(
    pools: tuple[int, int],
    compiled: CompiledPair,
    states: CommonStates,
    span: tuple[int, int],
) -> Iterator[SpanPattern]:
    """Yield the runs that copy states `span[0] .. span[1] - 1` between two groups, as patterns."""
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
        rows = sum(len(one.length) for one in made)
        if rows <= _KEPT_ROWS:
            few, many = _KEPT
            keep = min(many, few * _KEPT_ROWS // max(1, rows))
            for old in [one for one in list(runs.kept) if isinstance(one, tuple)][: 1 - keep]:
                runs.kept.pop(old, None)
            runs.kept[key] = made
    return made


def _made(
    runs: RepeatedRuns, spans: StateSpans, chosen: _Chosen, cell: int
) -> Iterator[SpanTemplate]:
    """Yield one or two templates with the spans of states that `chosen` selects.

    `chosen` selects the spans that fill a cell, the other spans, or all spans. A cell is a kernel
    block with `cell` states.

    If the states of a block are not contiguous, each state is a separate run. The longest spans
    then get a separate template. Its starts include the offsets of the states, so that each block
    needs only one span. In the template for the shorter spans, each state becomes a span.
    """
    if chosen != "all":
        full = spans.length == cell
        spans = pick_spans(spans, full if chosen == "whole" else ~full)
    most = int(spans.length.max(initial=0))
    if chosen != "whole" and most > 1 and not runs.strip.gapless:
        starts, alike = runs.in_states(most), spans.length == most
        if starts is not None:
            first = pick_spans(spans, alike)
            ones = first._replace(length=np.ones_like(first.length))
            yield _template(runs, starts, ones, whole=False)
            spans = pick_spans(spans, ~alike)
    if len(spans.length):
        yield _template(runs, runs.starts, spans, whole=chosen == "whole")


def _template(
    runs: RepeatedRuns, starts: Starts, spans: StateSpans, *, whole: bool
) -> SpanTemplate:
    none = np.zeros(len(spans.length), dtype=np.int64)
    source, destination, length = runs.strip.byte_ranges(
        spans, (none, none), whole=whole, join=False
    )
    # There is one row per span, or one row per state.
    each = np.ones_like(spans.length) if len(source) == len(none) else spans.length
    entries = np.repeat(spans.source.entry, each), np.repeat(spans.destination.entry, each)
    in_order = np.arange(len(length))
    return SpanTemplate(
        starts, entries, (source, destination), length,
        (np.array_equal(entries[0], in_order), np.array_equal(entries[1], in_order)),
        (bool(source.any()), bool(destination.any())),
    )  # fmt: skip
