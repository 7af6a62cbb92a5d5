"""Describe runs to NIXL as strided rows of possible positions, and indices into these rows.

A row (address, length, device, stride, count) stands for `count` descriptors. Runs of equal length
whose positions are multiples of one stride need a single row for the whole pool, and one index per
run. All other runs get separate rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory import Memory
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors

_MOST_INDICES = 2**31 - 1

Rows = NDArray[np.uint64]
Indices = NDArray[np.int32]


def describe(
    copies: Sequence[Copy], regions: Mapping[int, Memory], *, source: bool
) -> tuple[Rows, Indices]:
    """Return (strided rows, index of each run among the positions of all rows) for `copies`.

    If `source` is true, the result describes the source of `copies`, and `regions` are the regions
    of the source. If it is false, both are those of the destination. A row with count n has n
    positions.

    >>> at = np.array([128, 0, 192, 40])
    >>> copy = Copy(0, 0, at, at, np.array([64, 64, 64, 8]))
    >>> rows, indices = describe([copy], {0: Memory(4096, 256)}, source=True)
    >>> rows.tolist()  # address, length, device, stride, count
    [[4096, 64, 0, 64, 4], [4136, 8, 0, 8, 1]]
    >>> indices.tolist()
    [2, 0, 3, 4]
    """
    rows, indices, first = [], [], 0
    for copy in copies:
        region = regions[copy.source_pool if source else copy.destination_pool]
        starts = copy.source if source else copy.destination
        own_rows, own_indices, count = _grid(starts, copy.length, region, first)
        rows.append(own_rows)
        indices.append(own_indices)
        first += count
    if first > _MOST_INDICES:
        got, hint = f"{first:,} positions", "Split the transfer, or the pools"
        raise errors.failed(got, hint, "The runs need more positions than NIXL can index")
    return np.concatenate(rows), indices[0] if len(indices) == 1 else np.concatenate(indices)


def _grid(starts: Int64s, length: Int64s, region: Memory, first: int) -> tuple[Rows, Indices, int]:
    """Return (rows, index of each run's position, number of positions) for one copy.

    One row covers all runs with the length and alignment of the middle run, because the first and
    the last run are often shorter. Each of the remaining runs has a separate row. Positions are
    numbered from `first`.
    """
    size = int(length[len(length) // 2])
    place, phase = np.divmod(starts, size)
    usual = int(phase[len(phase) // 2])
    count = (region.nbytes - usual) // size
    apart = phase != usual
    if length.strides != (0,):
        apart |= length != size
    row = (region.address + usual, size, region.number, size, count)
    if not bool(apart.any()) and first + count <= _MOST_INDICES:
        place += first
        return np.array([row], dtype=np.uint64), place.astype(np.int32), count
    if count > _MOST_INDICES - first - len(starts):
        apart[:] = True
    others = np.flatnonzero(apart)
    rows = np.empty((1 + len(others), 5), dtype=np.uint64)
    rows[0] = row
    rows[1:, 0] = starts[others] + region.address
    rows[1:, 1] = rows[1:, 3] = length[others]
    rows[1:, 2], rows[1:, 4] = region.number, 1
    if len(others) == len(starts):
        rows, count = rows[1:], 0
    place[others] = np.arange(count, count + len(others))
    place += first
    return rows, place.astype(np.int32), count + len(others)
