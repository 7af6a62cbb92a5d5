"""Copies of chosen blocks between two strided placements, as fast as memory allows.

Both ends are folded together, so that an item is the longest run that is contiguous on
both, and moved as words that are as wide as alignment allows, whatever the elements are.
Three ways, because three costs compete:

- blocks that are neighbours on both ends are joined, and go as one copy of their runs;
- scattered blocks go one by one: a call for each costs less than staging every byte;
  from neighbours or to neighbours they go in one call;
- blocks too small for that are gathered into a small staging buffer that stays in the cache.

On other devices than the CPU one indexed copy of some blocks at a time does it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache import view
from kvatlas.geometry import Int64s, Placement, fold_beside, in_words, widest_word

WORDS = {
    16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8,
}  # fmt: skip
"""Types that carry words of each width; nothing is ever computed with them."""

_LARGE = 128 << 10
"""Bytes from which torch's copy of short runs is worth the price of its call."""
_SMALL = 1 << 10
"""Bytes of a block below which a call for each costs more than staging; bytes of a run
below which a memcpy for each costs more than a loop over elements."""
_STAGING = 128 << 10
"""Bytes that are staged at once."""
_INDEXED = 64
"""StridedBlocks that are staged at once on other devices than the CPU."""


class StridedBlocks(NamedTuple):
    """One end of a copy: a buffer's bytes, and where blocks lie in them, counted by axis B."""

    buffer: torch.Tensor
    placement: Placement

    def words(self, word: int) -> torch.Tensor:
        """The blocks as a tensor of words."""
        return view(self.buffer, in_words(self.placement, word), WORDS[word])

    def runs(self) -> NDArray[np.void]:
        """The blocks as an array whose elements are whole runs."""
        return as_runs(self.placement.view(self.buffer.numpy()))


def move_blocks(
    source: StridedBlocks, ids: torch.Tensor, target: StridedBlocks, places: torch.Tensor
) -> None:
    """Copy blocks `ids` of one end to blocks `places` of the other.

    Ids are in range, and no block is both read and written.
    """
    if not ids.numel():
        return
    a, b, word = _folded(source.placement, target.placement)
    source, target = source._replace(placement=a), target._replace(placement=b)
    word = min(word, _alignment(source.buffer), _alignment(target.buffer))
    if source.buffer.device.type != "cpu" or target.buffer.device.type != "cpu":
        _indexed(source.words(word), ids, target.words(word), places)
        return
    if a.axes == ("B",) and len(ids) > 1 and _one_sided(source, ids, target, places, word):
        return
    first, second, counts = _stretches(ids.numpy(), places.numpy())
    stretches = zip(first.tolist(), second.tolist(), counts.tolist(), strict=True)
    block = a.item * math.prod(a.sizes[1:])
    joined = len(counts) == len(ids) or (a.contiguous and b.contiguous)
    if block < _SMALL and len(ids) < 4 * len(counts):
        _staged(source.words(word), ids, target.words(word), places)
    elif a.axes == ("B",) and joined:
        _runs(source, first, target, second, (counts * a.item).tolist())
    elif a.item < _SMALL and block * len(ids) >= _LARGE * len(counts):
        rows, out = source.words(word), target.words(word)
        for i, j, n in stretches:
            out[j : j + n].copy_(rows[i : i + n])
    else:
        pages, pool = source.runs(), target.runs()
        for i, j, n in stretches:
            pool[j : j + n] = pages[i : i + n]


def _one_sided(
    source: StridedBlocks, ids: torch.Tensor, target: StridedBlocks, places: torch.Tensor, word: int
) -> bool:
    """Copy scattered blocks from or to neighbours in one call; False where they are not so."""
    here, there = (len(stretch_starts(end.numpy())) for end in (ids, places))
    if max(here, there) * 4 < len(ids):
        return False  # neighbours on both ends, better joined
    if there == 1 and target.placement.contiguous:
        out = target.words(word)[int(places[0]) :][: len(places)]
        torch.index_select(source.words(word), 0, ids, out=out)
        return True
    if here == 1 and source.placement.item >= _SMALL:
        target.runs()[places.numpy()] = source.runs()[int(ids[0]) :][: len(ids)]
        return True
    return False


def as_runs(array: NDArray[Any]) -> NDArray[np.void]:
    """The last axis, which is contiguous, as one element: numpy copies those by memcpy.

    >>> as_runs(np.zeros((3, 4, 8), np.int64)[:, ::2]).dtype, as_runs(np.zeros((3, 8))).shape
    (dtype('V64'), (3,))
    """
    nbytes = array.shape[-1] * array.itemsize
    runs: NDArray[np.void] = array.view(np.dtype((np.void, nbytes)))[..., 0]
    return runs


@lru_cache(maxsize=1024)
def _folded(a: Placement, b: Placement) -> tuple[Placement, Placement, int]:
    """Both ends folded inside their blocks, and the widest word that they share."""
    a, b = fold_beside(a, b, axis="B")
    return a, b, widest_word(a, b)


def _alignment(buffer: torch.Tensor) -> int:
    """The widest word that a buffer starts at a multiple of, in its storage."""
    start = buffer.storage_offset() * buffer.element_size()
    return next(word for word in WORDS if start % word == 0)


def _stretches(ids: Int64s, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Firsts and lengths of the stretches of neighbours on both ends.

    What is scattered is taken in the order of its source: memory is read fastest upwards.
    """
    starts = stretch_starts(ids, places)
    if len(ids) < 4 * len(starts):
        order = np.argsort(ids, kind="stable")
        ids, places = ids[order], places[order]
        starts = stretch_starts(ids, places)
    return ids[starts], places[starts], np.diff(starts, append=len(ids))


def stretch_starts(*ends: Int64s) -> Int64s:
    """Where a new stretch begins: some end does not go on to its next coordinate.

    >>> stretch_starts(np.array([4, 5, 6, 9]), np.array([0, 1, 7, 8])).tolist()
    [0, 2, 3]
    """
    goes_on = np.ones(len(ends[0]) - 1, dtype=bool)
    for end in ends:
        goes_on &= end[1:] == end[:-1] + 1
    return np.concatenate(([0], np.flatnonzero(~goes_on) + 1))


def _runs(
    source: StridedBlocks, ids: Int64s, target: StridedBlocks, places: Int64s, nbytes: list[int]
) -> None:
    """Stretches that are one run each: nothing copies bytes with less ado than a memoryview."""
    rows, out = (memoryview(end.buffer.numpy().data) for end in (source, target))
    froms, tos = source.placement(B=ids).tolist(), target.placement(B=places).tolist()
    for i, j, n in zip(froms, tos, nbytes, strict=True):
        out[j : j + n] = rows[i : i + n]


def _staged(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Small blocks through a staging buffer that stays in the CPU's cache."""
    nbytes = rows[0].numel() * rows.element_size()
    count = max(1, _STAGING // nbytes)
    staging = torch.empty((min(count, len(ids)), *rows.shape[1:]), dtype=rows.dtype)
    for some, there in zip(torch.split(ids, count), torch.split(places, count), strict=True):
        staged = staging[: len(some)]
        torch.index_select(rows, 0, some, out=staged)
        out.index_put_((there,), staged)


def _indexed(
    rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, places: torch.Tensor
) -> None:
    """Indexed copies of some blocks at a time, so that what is staged stays small."""
    ids, places = ids.to(rows.device), places.to(out.device)
    for some, there in zip(torch.split(ids, _INDEXED), torch.split(places, _INDEXED), strict=True):
        out.index_put_((there,), rows.index_select(0, some).to(out.device))
