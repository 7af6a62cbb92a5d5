"""Copy selected blocks between two strided placements, close to memory bandwidth.

Axes that are contiguous in both source and target are merged. The runs of bytes that are then
contiguous in both are called items. Items are moved as the widest words that their alignment
permits, independent of the element type. The method depends on the blocks:

- Blocks that are adjacent in both source and target are joined and copied as one.
- Blocks that are adjacent only in the source or only in the target are copied by a single call.
- Other small blocks are gathered in a staging buffer that fits in the CPU cache, and larger ones
  are copied one by one, because a call per block costs less than staging the block's bytes.

On devices other than the CPU, an indexed copy handles several blocks at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache.tensors import view
from kvatlas.geometry import Placement
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.combine import fold_beside, in_words, widest_word

WORDS = {
    16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8,
}  # fmt: skip
"""Dtypes used to move words of each width; no arithmetic is done on them."""

_LARGE = 128 << 10
"""Minimum bytes for which torch's copy of short runs pays for the overhead of its call."""
_SMALL = 1 << 10
"""Below this size, staging a block is cheaper than a call per block, and a loop over elements is
cheaper than a memcpy per run. In bytes."""
_STAGING = 128 << 10
"""Size of the staging buffer in bytes."""
_INDEXED = 64
"""Number of blocks that are staged at a time on devices other than the CPU."""


class StridedBlocks(NamedTuple):
    """The source or target of a copy: a buffer, and the placement of its blocks along axis B."""

    buffer: torch.Tensor
    placement: Placement

    def words(self, word: int) -> torch.Tensor:
        """Return a view of the blocks as integers of `word` bytes."""
        return view(self.buffer, in_words(self.placement, word), WORDS[word])

    def runs(self) -> NDArray[np.void]:
        """Return a view of the blocks in which each element is a whole run of contiguous bytes."""
        return as_runs(self.placement.view(self.buffer.numpy()))


def move_blocks(
    source: StridedBlocks, ids: torch.Tensor, target: StridedBlocks, places: torch.Tensor
) -> None:
    """Copy blocks `ids` of the source to blocks `places` of the target.

    The caller must ensure that block ids are in range, and that no block is both read
    and written.
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
    """Copy all blocks in one call if they are adjacent in the source or in the target.

    Returns whether the blocks were copied. Nothing is copied if source and target both have long
    stretches of adjacent blocks, because one copy per stretch is then faster.
    """
    here, there = (len(stretch_starts(end.numpy())) for end in (ids, places))
    if max(here, there) * 4 < len(ids):
        return False
    if there == 1 and target.placement.contiguous:
        out = target.words(word)[int(places[0]) :][: len(places)]
        torch.index_select(source.words(word), 0, ids, out=out)
        return True
    if here == 1 and source.placement.item >= _SMALL:
        target.runs()[places.numpy()] = source.runs()[int(ids[0]) :][: len(ids)]
        return True
    return False


def as_runs(array: NDArray[Any]) -> NDArray[np.void]:
    """View the contiguous last axis of an array as one element, which numpy copies with memcpy.

    >>> as_runs(np.zeros((3, 4, 8), np.int64)[:, ::2]).dtype, as_runs(np.zeros((3, 8))).shape
    (dtype('V64'), (3,))
    """
    nbytes = array.shape[-1] * array.itemsize
    runs: NDArray[np.void] = array.view(np.dtype((np.void, nbytes)))[..., 0]
    return runs


@lru_cache(maxsize=1024)
def _folded(a: Placement, b: Placement) -> tuple[Placement, Placement, int]:
    """Return placements `a` and `b` with axes merged inside each block, and a word size in bytes.

    Axes that are contiguous in both placements become one. `word` is the size in bytes of the
    widest integers that the alignment of both placements permits.
    """
    a, b = fold_beside(a, b, axis="B")
    return a, b, widest_word(a, b)


def _alignment(buffer: torch.Tensor) -> int:
    """Return the size in bytes of the widest word to which the start of a buffer is aligned."""
    start = buffer.storage_offset() * buffer.element_size()
    return next(word for word in WORDS if start % word == 0)


def _stretches(ids: Int64s, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return (first source ids, first target ids, block counts) of the stretches to copy.

    A stretch is a range of blocks that are adjacent in both source and target. If most stretches
    are short, blocks are first sorted by source id, because ascending reads are fastest.
    """
    starts = stretch_starts(ids, places)
    if len(ids) < 4 * len(starts):
        order = np.argsort(ids, kind="stable")
        ids, places = ids[order], places[order]
        starts = stretch_starts(ids, places)
    return ids[starts], places[starts], np.diff(starts, append=len(ids))


def stretch_starts(*ends: Int64s) -> Int64s:
    """Return the indices where a stretch of consecutive ids begins.

    An index continues a stretch if, in every array, its id is the previous id + 1.

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
    """Copy the first `nbytes[i]` bytes of source block `ids[i]` to target block `places[i]`.

    Uses memoryviews, which have the lowest overhead.
    """
    rows, out = (memoryview(end.buffer.numpy().data) for end in (source, target))
    froms, tos = source.placement(B=ids).tolist(), target.placement(B=places).tolist()
    for i, j, n in zip(froms, tos, nbytes, strict=True):
        out[j : j + n] = rows[i : i + n]


def _staged(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
    """Copy small blocks through a staging buffer that fits in the CPU cache."""
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
    """Copy blocks by index, several at a time, so that the temporary copy stays small."""
    ids, places = ids.to(rows.device), places.to(out.device)
    for some, there in zip(torch.split(ids, _INDEXED), torch.split(places, _INDEXED), strict=True):
        out.index_put_((there,), rows.index_select(0, some).to(out.device))
