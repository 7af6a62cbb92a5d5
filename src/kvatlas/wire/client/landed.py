"""A pull by way of this end's staging buffers alone: the source does nothing for it.

Where runs are short only because the two ends lie differently, most of them touch at the
source. They are read as they lie there, joined, and put in place from a buffer of this end.
"""

from __future__ import annotations

import numpy as np

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy, Stream
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.memory_copy import copy_pools
from kvatlas.wire.stream_copy import piece_spans
from kvatlas.wire.transports.base import STAGING


def pull_landed(lease: RankLease, stream: Stream) -> None:
    """Read a stream piece by piece into a buffer, and from there into its blocks."""
    node = lease.node
    lease.borrow_own(1)
    for start, stop in piece_spans(stream, node.staging.piece):
        lease.transfer.check_cancelled()
        lease.renew_in_time()
        at, joined, apart, straight = lease.buffers[0] * node.staging.piece, [], [], []
        for copy in stream.copies(start, stop):
            read, places = join_at_source(copy, at)
            if 2 * len(read) > len(copy) and lease.may_fill_blocks():
                straight.append(copy)
                continue
            joined.append(read)
            apart.append(Copy(STAGING, copy.dst_pool, places, copy.dst, copy.length))
            at += copy.nbytes
        with node.metrics.phase("landed"):
            lease.read(joined)
            copy_pools(apart, node.pools, node.pools)
            lease.read(straight, "blocks")
        lease.transfer.add(lease.rank, stop - start)


def join_at_source(copy: Copy, at: int = 0) -> tuple[Copy, Int64s]:
    """Runs joined where they touch at the source, to be read one behind the other from `at` on.

    Also where every run lies then.

    >>> copy = Copy(0, 0, np.array([8, 0, 4]), np.array([0, 4, 8]), np.array([4, 4, 2]))
    >>> joined, places = join_at_source(copy, at=100)
    >>> joined.src, joined.dst, joined.length, places
    (array([0, 8]), array([100, 106]), array([6, 4]), array([106, 100, 104]))
    """
    order = np.argsort(copy.src, kind="stable")
    starts = copy.src[order]
    stops = starts + copy.length[order]
    cuts = np.concatenate([[0], np.flatnonzero(starts[1:] != stops[:-1]) + 1])
    first = starts[cuts]
    length = stops[np.append(cuts[1:], len(stops)) - 1] - first
    begins = np.cumsum(length) - length + at
    places = np.empty_like(starts)
    places[order] = starts + np.repeat(begins - first, np.diff(np.append(cuts, len(starts))))
    return Copy(copy.src_pool, STAGING, first, begins, length), places
