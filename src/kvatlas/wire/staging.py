"""Gathering scattered ranges into one stream, and scattering a stream into ranges.

The stream of some copies is their bytes, one copy behind the other, in the order of the
rows. Both ends of a transfer know it from the route alone, so that a piece of it needs
no description but where it starts and stops.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy

Bytes = NDArray[np.uint8]

_LONG = 32 << 10
_FEW = 4


def stream_bytes(copies: Sequence[Copy]) -> int:
    """Bytes of the stream of some copies."""
    return sum(copy.nbytes for copy in copies)


def cut(copies: Sequence[Copy], start: int, stop: int) -> list[Copy]:
    """The part of some copies that is bytes start .. stop - 1 of their stream.

    >>> whole = Copy(0, 0, np.array([0, 100]), np.array([50, 80]), np.array([8, 8]))
    >>> (part,) = cut([whole], 6, 10)
    >>> part.src, part.dst, part.length
    (array([  6, 100]), array([56, 80]), array([2, 2]))
    """
    found = []
    before = 0
    for copy in copies:
        ends = np.cumsum(copy.length) + before
        begins = ends - copy.length
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(begins, stop, side="left"))
        if first < last:
            low = np.maximum(begins[first:last], start)
            skip = low - begins[first:last]
            length = np.minimum(ends[first:last], stop) - low
            src, dst = copy.src[first:last] + skip, copy.dst[first:last] + skip
            found.append(Copy(copy.src_pool, copy.dst_pool, src, dst, length))
        before += copy.nbytes
    return found


def gather(copies: Sequence[Copy], pools: Mapping[int, Bytes], out: Bytes) -> int:
    """The stream of some copies, from the source's pools into `out`; how many bytes."""
    at = 0
    for copy in copies:
        pool = pools[copy.src_pool]
        for starts, length, many in _alike(copy.src, copy.length):
            _gather_rows(pool, starts, length, out[at : at + many * length])
            at += many * length
    return at


def scatter(copies: Sequence[Copy], stream: Bytes, pools: Mapping[int, Bytes]) -> int:
    """The stream of some copies into the destination's pools; how many bytes."""
    at = 0
    for copy in copies:
        pool = pools[copy.dst_pool]
        for starts, length, many in _alike(copy.dst, copy.length):
            rows = stream[at : at + many * length].reshape(many, length)
            if many == 1:
                pool[int(starts[0]) : int(starts[0]) + length] = rows[0]
            else:
                _windows(pool, length)[starts] = rows
            at += many * length
    return at


def sums(
    copies: Sequence[Copy],
    pools: Mapping[int, Bytes],
    span: tuple[int, int],
    piece: int,
    *,
    src: bool,
) -> Int64s:
    """A checksum for every `piece` bytes of a span of the stream, read at one end."""
    part = cut(copies, *span)
    if not src:
        part = [Copy(c.dst_pool, c.src_pool, c.dst, c.src, c.length) for c in part]
    room = np.empty(stream_bytes(part), dtype=np.uint8)
    gather(part, pools, room)
    found = [zlib.crc32(room[at : at + piece].data) for at in range(0, room.size, piece)]
    return np.array(found, dtype=np.int64)


def _gather_rows(pool: Bytes, starts: Int64s, length: int, out: Bytes) -> None:
    """Runs of one length. Long ones go one by one, short ones all at once."""
    if length >= _LONG or len(starts) < _FEW:
        for row, start in enumerate(starts.tolist()):
            out[row * length : (row + 1) * length] = pool[start : start + length]
        return
    first = int(starts.min())
    if not ((starts - first) % length).any():
        # Whole steps apart: each run is one element of a wide type, and elements copy fast.
        items = pool[first : first + (pool.size - first) // length * length].view(f"V{length}")
        np.take(items, (starts - first) // length, out=out.view(f"V{length}"), mode="clip")
        return
    out.reshape(len(starts), length)[:] = _windows(pool, length)[starts]


def _alike(starts: Int64s, length: Int64s) -> Iterator[tuple[Int64s, int, int]]:
    """Rows in stretches of one length: (starts, length, how many)."""
    if not len(starts):
        return
    edges = np.flatnonzero(np.diff(length)) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(starts)], strict=True):
        yield starts[first:last], int(length[first]), last - first


def _windows(pool: Bytes, length: int) -> Bytes:
    """Every run of `length` bytes of a pool, as overlapping rows: nothing is copied."""
    shape = (pool.size - length + 1, length)
    return np.lib.stride_tricks.as_strided(pool, shape, (1, 1))
