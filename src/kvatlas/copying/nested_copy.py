"""Copies of runs at regular strides in both buffers, each as one strided numpy copy.

If the two ends of a route have different layouts, there are many short runs, and looking up the
start of each takes longer than copying it. But the runs are at nested strides, by head, layer and
token, the same in every block, so numpy can iterate over them itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import gcd, prod

import numpy as np

from kvatlas.copying.memory_copy import copy_pools, copy_runs_unchecked
from kvatlas.copying.pool_bounds import check_grid_bounds
from kvatlas.copying.run_bounds import Bytes, check_nested
from kvatlas.geometry import NestedSteps
from kvatlas.routing import Copy, RunGrid
from kvatlas.routing.binding import Starts

_FEW_CALLS = 64
"""Up to this many copies are always made one by one."""
_WORTH_A_CALL = 16
"""Copies of at least this many runs are made one by one, regardless of their number."""
_ELEMENT, _WORD = 1 << 10, 256
"""Runs of up to `_ELEMENT` bytes are one numpy element; longer runs are several smaller ones.

numpy copies many elements without blocking other threads.
"""


def copy_nested(src: Bytes, dst: Bytes, places: NestedSteps, length: int) -> None:
    """Copy runs of one length between buffers.

    >>> src, dst = np.arange(16, dtype=np.uint8), np.zeros(8, np.uint8)
    >>> copy_nested(src, dst, NestedSteps.of(np.array([0, 4, 8, 12]), np.array([0, 2, 4, 6])), 2)
    >>> dst.tolist()
    [0, 1, 4, 5, 8, 9, 12, 13]
    """
    places = check_nested(src, dst, places, length)
    copy_nested_unchecked(src, dst, places, length)


def copy_nested_unchecked(src: Bytes, dst: Bytes, places: NestedSteps, length: int) -> None:
    """`copy_nested` without bounds checks, for runs that are known to be inside both buffers."""
    steps = places.steps
    if len(places.src) > _FEW_CALLS and prod(one.times for one in steps) < _WORTH_A_CALL:
        src_at, dst_at = places.written_out(steps)  # in no order: better looked up one by one
        lengths = np.full(len(src_at), length)
        for _ in copy_runs_unchecked(src, dst, src_at, dst_at, lengths):
            pass
        return
    word = length if length <= _ELEMENT else gcd(length, _WORD)
    shape = (*(one.times for one in steps), length // word)
    kind = f"V{word}"
    strides = [(*(one.src for one in steps), word), (*(one.dst for one in steps), word)]
    for start, to in zip(places.src.tolist(), places.dst.tolist(), strict=True):
        there = np.ndarray(shape, kind, dst, to, strides[1])
        there[...] = np.ndarray(shape, kind, src, start, strides[0])


def copy_grids(
    grids: Iterable[RunGrid], src: Mapping[int, Bytes], dst: Mapping[int, Bytes]
) -> None:
    """Copy the runs of grids between pools.

    >>> starts = Starts.of(np.array([0, 4]), np.array([0, 2]))
    >>> pools = {0: np.arange(16, dtype=np.uint8)}, {0: np.zeros(8, np.uint8)}
    >>> spans = np.array([8, 0]), np.array([0, 4]), np.array([2, 2])
    >>> copy_grids([RunGrid(0, 0, starts, *spans)], *pools)
    >>> pools[1][0].tolist()
    [8, 9, 12, 13, 0, 1, 4, 5]
    """
    for grid in grids:
        if not len(grid.length) or not len(grid.starts.src):
            continue
        check_grid_bounds([grid], src, dst)
        firsts, source, target = _nested(grid.starts), src[grid.src_pool], dst[grid.dst_pool]
        for length in np.unique(grid.length).tolist():
            some = grid.length == length
            src_at = (grid.src[some, None] + firsts.src).reshape(-1)
            dst_at = (grid.dst[some, None] + firsts.dst).reshape(-1)
            copy_nested_unchecked(source, target, NestedSteps(src_at, dst_at, firsts.steps), length)


def move_pools(
    moves: Iterable[Copy | RunGrid], src: Mapping[int, Bytes], dst: Mapping[int, Bytes]
) -> None:
    """Copy runs and grids between pools."""
    for move in moves:
        if isinstance(move, RunGrid):
            copy_grids([move], src, dst)
        else:
            copy_pools([move], src, dst)


@lru_cache(maxsize=64)
def _nested(starts: Starts) -> NestedSteps:
    """Return the part that all requests of one route share."""
    return NestedSteps.of(starts.src, starts.dst)
