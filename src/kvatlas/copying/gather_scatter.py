"""Gather runs into a stream, scatter a stream into runs, and compute checksums of streams.

The stream of a list of copies is the concatenation of their bytes, in the order of the runs. The
source and the destination of a transfer compute the same stream from the route. A start and a stop
offset are therefore enough to describe a piece of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvatlas.copying.checksum import crc32
from kvatlas.copying.memory_copy import copy_runs_unchecked, one_length
from kvatlas.copying.run_bounds import Bytes, Places
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy


def stream_bytes(copies: Sequence[Copy]) -> int:
    """Return the total size in bytes of all runs of `copies`."""
    return sum(copy.nbytes for copy in copies)


def gather(copies: Sequence[Copy], pools: Mapping[int, Bytes], stream: Bytes) -> int:
    """Gather the source runs of `copies` from `pools` into `stream`. Return the number of bytes."""
    done = 0
    for copy in copies:
        source, _, length = copy.runs()
        at = _stream_places(length, done)
        for _ in copy_runs_unchecked(pools[copy.source_pool], stream, source, at, length):
            pass
        done += copy.nbytes
    return done


def scatter(copies: Sequence[Copy], stream: Bytes, pools: Mapping[int, Bytes]) -> int:
    """Scatter `stream` to the destination runs of `copies` in `pools`. Return the byte count."""
    done = 0
    for copy in copies:
        _, destination, length = copy.runs()
        at = _stream_places(length, done)
        for _ in copy_runs_unchecked(stream, pools[copy.destination_pool], at, destination, length):
            pass
        done += copy.nbytes
    return done


def _stream_places(length: Int64s, first: int) -> Places:
    """Return the offset of each run in the stream; the first run is at `first`."""
    if len(length) and one_length(length):
        size = int(length[0])
        return range(first, first + size * len(length), size)
    return np.cumsum(length) - length + first


def checksums(
    copies: Sequence[Copy], pools: Mapping[int, Bytes], piece: int, *, source: bool
) -> Int64s:
    """Divide the stream of `copies` into pieces of `piece` bytes; return the CRC-32 of each.

    The stream is the concatenation of the runs. If `source` is true, `pools` are the source's
    pools, otherwise the destination's.
    """
    if not source:
        copies = [copy.reversed() for copy in copies]
    stream = np.empty(stream_bytes(copies), dtype=np.uint8)
    gather(copies, pools, stream)
    return crc_pieces(stream, piece)


def crc_pieces(stream: Bytes, piece: int) -> Int64s:
    """Return the CRC-32 of each piece of `piece` bytes; the last piece may be shorter.

    >>> crc_pieces(np.zeros(3, np.uint8), 2).tolist()
    [1104745215, 3523407757]
    """
    sums = [crc32(stream[at : at + piece].data) for at in range(0, stream.size, piece)]
    return np.array(sums, dtype=np.int64)
