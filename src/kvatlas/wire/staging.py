"""Streams of runs, and the buffers through which they are staged.

The stream of some copies is the concatenation of their bytes, in the order of the runs. Both ends
of a transfer derive it from the route alone, so a piece is fully described by where it starts and
stops.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.checksum import crc32
from kvatlas.wire.memory_copy import copy_runs_unchecked, one_length
from kvatlas.wire.run_bounds import Bytes, Places


class StagingBuffers:
    """A registered memory of several buffers, lent one by one.

    Half of the buffers are for transfers of this node, half for its peers. Otherwise two nodes that
    read from each other could each wait for a buffer that the other holds.

    >>> staging = StagingBuffers(np.zeros(4 * 4096, np.uint8), 4096)
    >>> mine, lent = staging.acquire(2), staging.acquire(2, for_peer=True)
    >>> len(mine), len(lent), staging.acquire(1), staging.free
    (2, 2, [], 0)
    >>> staging.give_back(mine + lent)
    >>> staging.free
    4
    """

    def __init__(self, memory: Any, piece: int) -> None:
        self.memory, self.piece, self.count = memory, piece, int(memory.nbytes) // piece
        own = -(-self.count // 2)
        self._free = {False: list(range(own)), True: list(range(own, self.count))}
        self._own = own
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """The number of free buffers."""
        with self._changed:
            return sum(map(len, self._free.values()))

    def most(self, *, for_peer: bool = False) -> int:
        """The number of buffers available to transfers of this node, or to its peers."""
        return self.count - self._own if for_peer else self._own

    def acquire(self, count: int, seconds: float = 0.0, *, for_peer: bool = False) -> list[int]:
        """Wait for `count` free buffers and return their indices; none if that takes too long."""
        free = self._free[for_peer]
        with self._changed:
            if not self._changed.wait_for(lambda: count <= len(free), seconds):
                return []
            return [free.pop() for _ in range(count)]

    def give_back(self, buffers: Iterable[int]) -> None:
        """Return buffers that were acquired."""
        with self._changed:
            for buffer in buffers:
                self._free[buffer >= self._own].append(buffer)
            self._changed.notify_all()

    def view(self, buffer: int, nbytes: int) -> Any:
        """View the first bytes of a buffer: an array on the host, or a tensor on a GPU."""
        return self.memory[buffer * self.piece :][:nbytes]


def stream_bytes(copies: Sequence[Copy]) -> int:
    """Return the size in bytes of the stream of some copies."""
    return sum(copy.nbytes for copy in copies)


def gather(copies: Sequence[Copy], pools: Mapping[int, Bytes], stream: Bytes) -> int:
    """Gather the stream of some copies from the source's pools. Return its bytes."""
    done = 0
    for copy in copies:
        at = _stream_places(copy.length, done)
        for _ in copy_runs_unchecked(pools[copy.src_pool], stream, copy.src, at, copy.length):
            pass
        done += copy.nbytes
    return done


def scatter(copies: Sequence[Copy], stream: Bytes, pools: Mapping[int, Bytes]) -> int:
    """Scatter the stream of some copies into the destination's pools. Return its bytes."""
    done = 0
    for copy in copies:
        at = _stream_places(copy.length, done)
        for _ in copy_runs_unchecked(stream, pools[copy.dst_pool], at, copy.dst, copy.length):
            pass
        done += copy.nbytes
    return done


def _stream_places(length: Int64s, first: int) -> Places:
    """Return the start of each run in the stream."""
    if len(length) and one_length(length):
        size = int(length[0])
        return range(first, first + size * len(length), size)
    return np.cumsum(length) - length + first


def checksums(
    copies: Sequence[Copy], pools: Mapping[int, Bytes], piece: int, *, src: bool
) -> Int64s:
    """Return a CRC-32 of every `piece` bytes of the stream of some copies, read at one end."""
    if not src:
        copies = [Copy(c.dst_pool, c.src_pool, c.dst, c.src, c.length) for c in copies]
    stream = np.empty(stream_bytes(copies), dtype=np.uint8)
    gather(copies, pools, stream)
    return crc_pieces(stream, piece)


def crc_pieces(stream: Bytes, piece: int) -> Int64s:
    """Return a CRC-32 of every `piece` bytes.

    >>> crc_pieces(np.zeros(3, np.uint8), 2).tolist()
    [1104745215, 3523407757]
    """
    sums = [crc32(stream[at : at + piece].data) for at in range(0, stream.size, piece)]
    return np.array(sums, dtype=np.int64)
