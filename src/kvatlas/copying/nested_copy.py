"""Copy runs that have regular strides in both buffers, with strided numpy copies.

If the source and the destination have different layouts, there are many short runs. Looking up the
start of a run takes longer than copying the run. But the strides of heads, layers and tokens are
the same in every block, so one strided numpy copy covers many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import gcd, prod

import numpy as np

from kvatlas.copying.memory_copy import copy_runs, copy_runs_unchecked, find_pool
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.copying.run_bounds import Bytes, check_nested
from kvatlas.geometry import NestedSteps
from kvatlas.routing import Copy
from kvatlas.routing.binding import ORIGIN, Starts

_FEW_CALLS = 64
"""Up to this many strided copies are always worthwhile."""
_WORTH_A_CALL = 16
"""Strided copies of at least this many runs each are worthwhile, however many there are."""
_ELEMENT, _WORD = 1 << 10, 256
"""A run of up to `_ELEMENT` bytes is copied as one numpy element.

A longer run is copied as elements of up to `_WORD` bytes, because numpy releases the interpreter
lock while it copies many elements.
"""


def copy_nested(source: Bytes, destination: Bytes, places: NestedSteps, length: int) -> None:
    """Copy runs of `length` bytes from `source` to `destination`, at the offsets in `places`.

    >>> source, destination = np.arange(16, dtype=np.uint8), np.zeros(8, np.uint8)
    >>> places = NestedSteps.of(np.array([0, 4, 8, 12]), np.array([0, 2, 4, 6]))
    >>> copy_nested(source, destination, places, 2)
    >>> destination.tolist()
    [0, 1, 4, 5, 8, 9, 12, 13]
    """
    places = check_nested(source, destination, places, length)
    copy_nested_unchecked(source, destination, places, length)


def copy_nested_unchecked(
    source: Bytes, destination: Bytes, places: NestedSteps, length: int
) -> None:
    """Copy runs like `copy_nested`, without bounds checks: runs must be inside both buffers."""
    steps = places.steps
    if len(places.source) > _FEW_CALLS and prod(one.times for one in steps) < _WORTH_A_CALL:
        source_at, destination_at = places.written_out(steps)  # too irregular for strides
        lengths = np.full(len(source_at), length)
        for _ in copy_runs_unchecked(source, destination, source_at, destination_at, lengths):
            pass
        return
    word = length if length <= _ELEMENT else gcd(length, _WORD)
    shape = (*(one.times for one in steps), length // word)
    kind = f"V{word}"
    strides = [(*(one.source for one in steps), word), (*(one.destination for one in steps), word)]
    for start, to in zip(places.source.tolist(), places.destination.tolist(), strict=True):
        there = np.ndarray(shape, kind, destination, to, strides[1])
        there[...] = np.ndarray(shape, kind, source, start, strides[0])


def copy_pools(
    copies: Iterable[Copy], source: Mapping[int, Bytes], destination: Mapping[int, Bytes]
) -> None:
    """Copy the runs of `copies` between pools, which are given by index.

    >>> pools = {0: np.arange(16, dtype=np.uint8)}, {0: np.zeros(8, np.uint8)}
    >>> copy_pools([Copy(0, 0, np.array([6, 0]), np.array([0, 4]), np.array([2, 3]))], *pools)
    >>> pools[1][0].tolist()
    [6, 7, 0, 0, 0, 1, 2, 0]
    >>> starts = Starts.of(np.array([0, 4]), np.array([0, 2]))
    >>> spans = np.array([8, 0]), np.array([0, 4]), np.array([2, 2])
    >>> copy_pools([Copy(0, 0, *spans, starts=starts)], *pools)
    >>> pools[1][0].tolist()
    [8, 9, 12, 13, 0, 1, 4, 5]
    """
    for copy in copies:
        from_pool, to_pool = (
            find_pool(source, copy.source_pool),
            find_pool(destination, copy.destination_pool),
        )
        if copy.starts is ORIGIN:
            for _ in copy_runs(from_pool, to_pool, copy.source, copy.destination, copy.length):
                pass
        elif len(copy):
            check_bounds([copy], source, destination)
            _copy_grid(copy, from_pool, to_pool)


def _copy_grid(copy: Copy, source: Bytes, target: Bytes) -> None:
    """Copy one run per pair of a start and a span. Spans of equal length are copied together."""
    firsts = _nested(copy.starts)
    for length in np.unique(copy.length).tolist():
        some = copy.length == length
        source_at = (copy.source[some, None] + firsts.source).reshape(-1)
        destination_at = (copy.destination[some, None] + firsts.destination).reshape(-1)
        copy_nested_unchecked(
            source, target, NestedSteps(source_at, destination_at, firsts.steps), length
        )


@lru_cache(maxsize=64)
def _nested(starts: Starts) -> NestedSteps:
    """Return starts as nested strides. All requests of a route use the same cached result."""
    return NestedSteps.of(starts.source, starts.destination)
