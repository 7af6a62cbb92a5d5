"""The copy itself: chosen blocks from one strided place to another, as fast as memory allows.

Both sides are folded together, so that an item is the longest stretch that is contiguous
on both; what is moved is then runs of wide lanes, whatever the elements are. Three ways,
because three costs compete:

- neighbours on both sides are joined, and go as one copy of their runs;
- scattered blocks go one by one: a call for each costs less than staging every byte;
  from neighbours or to neighbours they go in one call;
- blocks too small for that are gathered into a small stage that stays in the cache.

On other devices than the processor one indexed copy in pieces does it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache import view
from kvatlas.geometry import Placement, fold_beside, in_words, widest_word

Int64s = NDArray[np.int64]

LANES = {
    16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8,
}  # fmt: skip
"""Types that carry bytes of each width; nothing is ever computed with them."""

_LARGE = 128 << 10
"""Bytes from which torch's copy of short runs is worth the price of its call."""
_SMALL = 1 << 10
"""Bytes of a block below which a call for each costs more than staging; bytes of a run
below which a memcpy for each costs more than a loop over elements."""
_STAGE = 128 << 10
"""Bytes that are staged at once."""


def move_blocks(
    source: tuple[torch.Tensor, Placement],
    ids: torch.Tensor,
    target: tuple[torch.Tensor, Placement],
    places: torch.Tensor,
) -> None:
    """Coordinates `ids` of axis B of one placement to `places` of another, in their buffers.

    Ids are in range, and no block is both read and written.
    """
    if not ids.numel():
        return
    (given, a), (taken, b) = source, target
    a, b, lane = _folded(a, b)
    lane = min(lane, aligned(given), aligned(taken))
    if given.device.type != "cpu" or taken.device.type != "cpu":
        _indexed(_lanes(given, a, lane), ids, _lanes(taken, b, lane), places)
        return
    if a.axes == ("B",) and len(ids) > 1 and _one_sided(given, a, ids, taken, b, places, lane):
        return
    first, second, counts = _stretches(ids.numpy(), places.numpy())
    block = a.item * math.prod(a.sizes[1:])
    joined = len(counts) == len(ids) or (a.contiguous and b.contiguous)
    if block < _SMALL and len(ids) < 4 * len(counts):
        _staged(_lanes(given, a, lane), ids, _lanes(taken, b, lane), places)
    elif a.axes == ("B",) and joined:
        _runs((given, a), first, (taken, b), second, (counts * a.item).tolist())
    elif a.item < _SMALL and block * len(ids) >= _LARGE * len(counts):
        rows, out = _lanes(given, a, lane), _lanes(taken, b, lane)
        for i, j, n in zip(first.tolist(), second.tolist(), counts.tolist(), strict=True):
            out[j : j + n].copy_(rows[i : i + n])
    else:
        pages, pool = (as_runs(p.view(buffer.numpy())) for buffer, p in ((given, a), (taken, b)))
        for i, j, n in zip(first.tolist(), second.tolist(), counts.tolist(), strict=True):
            pool[j : j + n] = pages[i : i + n]


def _one_sided(
    given: torch.Tensor,
    a: Placement,
    ids: torch.Tensor,
    taken: torch.Tensor,
    b: Placement,
    places: torch.Tensor,
    lane: int,
) -> bool:
    """Scattered blocks from or to neighbours: one call that is given all ids. Says if it was so."""
    here, there = (len(stretch_starts(side.numpy())) for side in (ids, places))
    if max(here, there) * 4 < len(ids):
        return False  # neighbours on both sides, better joined
    if there == 1 and b.contiguous:
        out = _lanes(taken, b, lane)[int(places[0]) :][: len(places)]
        torch.index_select(_lanes(given, a, lane), 0, ids, out=out)
        return True
    if here == 1 and a.item >= _SMALL:
        rows, pool = (as_runs(p.view(buffer.numpy())) for buffer, p in ((given, a), (taken, b)))
        pool[places.numpy()] = rows[int(ids[0]) :][: len(ids)]
        return True
    return False


def as_runs(array: NDArray[Any]) -> NDArray[np.void]:
    """The last axis, which is one stretch, as one element: numpy copies those by memcpy.

    >>> as_runs(np.zeros((3, 4, 8), np.int64)[:, ::2]).dtype, as_runs(np.zeros((3, 8))).shape
    (dtype('V64'), (3,))
    """
    nbytes = array.shape[-1] * array.itemsize
    runs: NDArray[np.void] = array.view(np.dtype((np.void, nbytes)))[..., 0]
    return runs


@lru_cache(maxsize=1024)
def _folded(a: Placement, b: Placement) -> tuple[Placement, Placement, int]:
    """Both sides folded inside their blocks, and the widest lane that they share."""
    a, b = fold_beside(a, b, axis="B")
    return a, b, widest_word(a, b)


def aligned(buffer: torch.Tensor) -> int:
    """The widest lane that a buffer starts at a multiple of, in its storage."""
    start = buffer.storage_offset() * buffer.element_size()
    return next(lane for lane in LANES if start % lane == 0)


def _lanes(buffer: torch.Tensor, placement: Placement, lane: int) -> torch.Tensor:
    return view(buffer, in_words(placement, lane), LANES[lane])


def _stretches(ids: Int64s, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Firsts and lengths of the stretches of neighbours on both sides.

    What is scattered is taken in the order of its source: memory is read fastest upwards.
    """
    starts = stretch_starts(ids, places)
    if len(ids) < 4 * len(starts):
        order = np.argsort(ids, kind="stable")
        ids, places = ids[order], places[order]
        starts = stretch_starts(ids, places)
    return ids[starts], places[starts], np.diff(starts, append=len(ids))


def stretch_starts(*sides: Int64s) -> Int64s:
    """Where a new stretch begins: some side does not go on to its next coordinate.

    >>> stretch_starts(np.array([4, 5, 6, 9]), np.array([0, 1, 7, 8])).tolist()
    [0, 2, 3]
    """
    goes_on = np.ones(len(sides[0]) - 1, dtype=bool)
    for side in sides:
        goes_on &= side[1:] == side[:-1] + 1
    return np.concatenate(([0], np.flatnonzero(~goes_on) + 1))


def _runs(
    source: tuple[torch.Tensor, Placement],
    ids: Int64s,
    target: tuple[torch.Tensor, Placement],
    places: Int64s,
    nbytes: list[int],
) -> None:
    """Stretches that are one run each: nothing copies bytes with less ado than a memoryview."""
    (given, a), (taken, b) = source, target
    rows, out = (memoryview(buffer.numpy().data) for buffer in (given, taken))
    for i, j, n in zip(a(B=ids).tolist(), b(B=places).tolist(), nbytes, strict=True):
        out[j : j + n] = rows[i : i + n]


def _staged(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Small blocks through a stage that stays in the processor's cache."""
    nbytes = rows[0].numel() * rows.element_size()
    count = max(1, _STAGE // nbytes)
    stage = torch.empty((min(count, len(ids)), *rows.shape[1:]), dtype=rows.dtype)
    for some, there in zip(torch.split(ids, count), torch.split(places, count), strict=True):
        part = stage[: len(some)]
        torch.index_select(rows, 0, some, out=part)
        out.index_put_((there,), part)


def _indexed(
    rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, places: torch.Tensor
) -> None:
    """Anywhere else: indexed copies of 64 blocks, so that what is staged stays small."""
    ids, places = ids.to(rows.device), places.to(out.device)
    for some, there in zip(torch.split(ids, 64), torch.split(places, 64), strict=True):
        out.index_put_((there,), rows.index_select(0, some).to(out.device))
