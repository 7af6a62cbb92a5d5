"""Streams of runs, and the buffers through which they are staged.

The stream of some copies is their bytes, one copy behind the other, in the order of the
runs. Both ends of a transfer know it from the route alone, so that a piece of it needs no
description but where it starts and stops.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Bytes, Places, copy_runs, one_length


class StagingBuffers:
    """A registered buffer of some pieces, lent to transfers piece by piece.

    >>> staging = StagingBuffers(np.zeros(3 * 4096, np.uint8), 4096)
    >>> lent = staging.acquire(2)
    >>> len(lent), staging.acquire(2), staging.free
    (2, [], 1)
    >>> staging.give_back(lent)
    >>> staging.free
    3
    """

    def __init__(self, memory: Bytes, piece: int) -> None:
        self.memory, self.piece, self.count = memory, piece, memory.size // piece
        self._free = list(range(self.count))
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Buffers that nobody has now."""
        with self._lock:
            return len(self._free)

    def acquire(self, count: int) -> list[int]:
        """So many buffers, by index, or none where fewer are free."""
        with self._lock:
            return [self._free.pop() for _ in range(count)] if count <= len(self._free) else []

    def give_back(self, buffers: Iterable[int]) -> None:
        """Let others have buffers that were acquired."""
        with self._lock:
            self._free += buffers

    def view(self, buffer: int, nbytes: int) -> Bytes:
        """The first bytes of a buffer."""
        return self.memory[buffer * self.piece :][:nbytes]


def stream_bytes(copies: Sequence[Copy]) -> int:
    """Bytes of the stream of some copies."""
    return sum(copy.nbytes for copy in copies)


def stream_slice(copies: Sequence[Copy], start: int, stop: int) -> list[Copy]:
    """The part of some copies that is bytes start .. stop - 1 of their stream.

    >>> whole = Copy(0, 0, np.array([0, 100]), np.array([50, 80]), np.array([8, 8]))
    >>> (part,) = stream_slice([whole], 6, 10)
    >>> part.src, part.dst, part.length
    (array([  6, 100]), array([56, 80]), array([2, 2]))
    """
    parts = []
    before = 0
    for copy in copies:
        ends = np.cumsum(copy.length) + before
        begins = ends - copy.length
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(begins, stop, side="left"))
        if first < last and start < stop:
            low = np.maximum(begins[first:last], start)
            skip = low - begins[first:last]
            length = np.minimum(ends[first:last], stop) - low
            src, dst = copy.src[first:last] + skip, copy.dst[first:last] + skip
            parts.append(Copy(copy.src_pool, copy.dst_pool, src, dst, length))
        before += copy.nbytes
    return parts


def gather(copies: Sequence[Copy], pools: Mapping[int, Bytes], stream: Bytes) -> int:
    """The stream of some copies, out of the source's pools; how many bytes."""
    done = 0
    for copy in copies:
        at = _stream_places(copy.length, done)
        for _ in copy_runs(pools[copy.src_pool], stream, copy.src, at, copy.length):
            pass
        done += copy.nbytes
    return done


def scatter(copies: Sequence[Copy], stream: Bytes, pools: Mapping[int, Bytes]) -> int:
    """The stream of some copies, into the destination's pools; how many bytes."""
    done = 0
    for copy in copies:
        at = _stream_places(copy.length, done)
        for _ in copy_runs(stream, pools[copy.dst_pool], at, copy.dst, copy.length):
            pass
        done += copy.nbytes
    return done


def _stream_places(length: Int64s, first: int) -> Places:
    """Where runs start in a stream, each behind the one before."""
    if len(length) and one_length(length):
        size = int(length[0])
        return range(first, first + size * len(length), size)
    return np.cumsum(length) - length + first


def checksums(
    copies: Sequence[Copy],
    pools: Mapping[int, Bytes],
    span: tuple[int, int],
    piece: int,
    *,
    src: bool,
) -> Int64s:
    """A CRC-32 of every `piece` bytes of a span of the stream, read at one end."""
    part = stream_slice(copies, *span)
    if not src:
        part = [Copy(c.dst_pool, c.src_pool, c.dst, c.src, c.length) for c in part]
    stream = np.empty(stream_bytes(part), dtype=np.uint8)
    gather(part, pools, stream)
    sums = [zlib.crc32(stream[at : at + piece].data) for at in range(0, stream.size, piece)]
    return np.array(sums, dtype=np.int64)
