"""Compute the CRC-32 of a block from parts that several ranks write in any order.

A CRC is the remainder of a polynomial, and the remainder of a sum is the sum of the remainders. So
each range of a block adds a term, which depends only on the bytes of the range and on how many
bytes follow it up to the block's end. The writer of a range can compute its term, and the block
need not be read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.address_arrays import Int64s

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, with the highest power in the lowest bit."""
START = 0xFFFFFFFF
"""The initial value of the CRC-32 of a stretch, whatever comes before it."""

_BYTES: Int64s = np.arange(256) << np.array([[0], [8], [16], [24]])
"""All remainders with one nonzero byte, for each of the four bytes: 4 rows of 256."""
_MOST_TABLES = 256
"""Maximum number of tables of 4 KiB, one per number of zeros. Others combine powers of two."""
_KEPT = 8
"""Number of cached tables. Blocks of one kind are cut in the same way."""

Words = NDArray[np.uint32]


class PartSum(NamedTuple):
    """The term that some bytes add to their block's checksum, and the number of these bytes."""

    term: int
    nbytes: int


class SummedStretches(NamedTuple):
    """Written ranges of a pool, and the CRC-32 of each, computed with initial value `START`."""

    start: Int64s
    nbytes: Int64s
    crc: Words


def part_sums(
    written: Iterable[SummedStretches], block_bytes: int
) -> Iterator[tuple[int, PartSum]]:
    """Yield (block id, contribution of the written ranges to the checksum of this block).

    Each range must be inside one block.

    >>> import zlib
    >>> data = b"two halves of a block"
    >>> crcs = np.array([zlib.crc32(data[10:], START), zlib.crc32(data[:10], START)], np.uint32)
    >>> halves = SummedStretches(np.array([73, 63]), np.array([11, 10]), crcs)
    >>> ((block_id, whole),) = part_sums([halves], block_bytes=21)
    >>> block_id, block_checksum([whole], 21) == zlib.crc32(data)
    (3, True)
    """
    start, nbytes, crc = (np.concatenate(columns) for columns in zip(*written, strict=True))
    block_id = start // block_bytes
    terms = _moved(crc ^ np.uint32(START), (block_id + 1) * block_bytes - start - nbytes)
    ids, which = np.unique(block_id, return_inverse=True)
    term, total = np.zeros(len(ids), np.uint32), np.zeros(len(ids), np.int64)
    np.bitwise_xor.at(term, which, terms)
    np.add.at(total, which, nbytes)
    for row in zip(ids.tolist(), term.tolist(), total.tolist(), strict=True):
        yield row[0], PartSum(*row[1:])


def block_checksum(parts: Iterable[PartSum], block_bytes: int) -> int | None:
    """Return the CRC-32 of a block from disjoint parts, or None if parts are missing."""
    term, total = _start(block_bytes), 0
    for part in parts:
        term, total = term ^ part.term, total + part.nbytes
    return term ^ START if total == block_bytes else None


@lru_cache
def _start(nbytes: int) -> int:
    """Return the contribution of the initial value `START` to the CRC-32 of `nbytes` bytes."""
    return int(_moved(np.array([START], np.uint32), np.array([nbytes]))[0])


def _moved(remainders: Words, after: Int64s) -> Words:
    """Return CRC-32 remainders of data to which zero bytes are appended.

    `remainders` are the remainders of the data without the zeros. `after[i]` zero bytes are
    appended to the data of remainder i.
    """
    distances, which = np.unique(after, return_inverse=True)
    if len(distances) <= _MOST_TABLES:
        return _look_up_each(_tables(distances.tobytes()), which, remainders)
    moved = remainders.copy()
    for power in range(int(distances[-1]).bit_length()):
        rows = np.flatnonzero(after >> power & 1)
        moved[rows] = _look_up(_zeros(power), moved[rows])
    return moved


@lru_cache(_KEPT)
def _tables(distances: bytes) -> Words:
    """Return one lookup table for each distance, which is a number of zero bytes.

    A table appends that many zero bytes to the data of a CRC-32 remainder. `distances` contains the
    bytes of an ascending int64 array, because arguments of cached functions must be hashable.
    """
    steps = np.diff(np.frombuffer(distances, np.int64), prepend=0).tolist()
    table = _BYTES.astype(np.uint32)
    made = np.empty((len(steps), *table.shape), np.uint32)
    for nth, step in enumerate(steps):
        table = made[nth] = _look_up(_many_zeros(step), table)
    return made


@lru_cache(_KEPT)
def _many_zeros(count: int) -> Words:
    """Return the lookup table that appends `count` zero bytes to a CRC-32 remainder."""
    table = _BYTES.astype(np.uint32)
    for power in range(count.bit_length()):
        if count >> power & 1:
            table = _look_up(_zeros(power), table)
    return table


@cache
def _zeros(power: int) -> Words:
    """Return the lookup table that appends `2 ** power` zero bytes to a CRC-32 remainder.

    It has a row of 256 entries for each of the remainder's 4 bytes. Each byte selects an entry of
    its row, and the new remainder is the XOR of the four selected entries.
    """
    if power:
        half = _zeros(power - 1)
        return _look_up(half, half)
    values = _BYTES
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ _POLYNOMIAL, values >> 1)
    return values.astype(np.uint32)


def _look_up_each(tables: Words, which: Int64s, values: Words) -> Words:
    """Append zero bytes to each CRC-32 remainder `values[i]` with table `tables[which[i]]`."""
    entries, first = tables.reshape(-1), which * _BYTES.size
    looked_up: Words = entries[first + (values & 255)]
    for row in (1, 2, 3):
        looked_up = looked_up ^ entries[first + 256 * row + (values >> 8 * row & 255)]
    return looked_up


def _look_up(table: Words, values: Words) -> Words:
    looked_up: Words = table[0][values & 255]
    for row in (1, 2, 3):
        looked_up = looked_up ^ table[row][values >> 8 * row & 255]
    return looked_up
