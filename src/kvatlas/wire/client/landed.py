"""Coalesced pulls: read into this node's staging buffers, then scatter.

Runs are often short only because the two layouts differ; at the source most of them are adjacent.
Adjacent runs are read as one, and scattered from a buffer of this node, while another thread reads
the next batch into another buffer. The source does no work.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import wait

from kvatlas.copying.read_coalescing import LandingBatch, landing_batches
from kvatlas.routing import Stream
from kvatlas.wire.byte_ranges import ByteRanges, source_ranges
from kvatlas.wire.client.rank_lease import BUFFERS, RankLease


def pull_landed(lease: RankLease, stream: Stream) -> None:
    """Read a stream in batches into staging buffers, and scatter each into its blocks."""
    staging = lease.node.staging
    lease.borrow_own(min(BUFFERS, staging.most(), max(1, lease.node.landing_threads)))
    lease.count(stream.runs_apart)
    left = _BatchesLeft(landing_batches(stream.grids(), staging.piece))
    exact = source_ranges(stream) if lease.connection.link.exact else None
    others = [
        lease.connection.beside.submit(_land, lease, left, exact, nth)
        for nth in range(1, len(lease.buffers))
    ]
    try:
        _land(lease, left, exact, 0)
    finally:
        wait(others)  # blocks and buffers must not be reused before
    for one in others:
        one.result()


class _BatchesLeft:
    """Batches that no thread has taken yet."""

    def __init__(self, batches: Generator[LandingBatch]) -> None:
        self._batches, self._lock = batches, threading.Lock()

    def take(self) -> LandingBatch | None:
        """Return the next batch, or None if none is left."""
        with self._lock:
            return next(self._batches, None)

    def drop(self) -> None:
        """Drop the remaining batches after a failure."""
        with self._lock:
            self._batches.close()


def _land(
    lease: RankLease, left: _BatchesLeft, exact: dict[int, ByteRanges] | None, nth: int
) -> None:
    """Read batches into a buffer and scatter them into their blocks, until none is left.

    All threads but the first also end if `landing_threads` is reduced meanwhile. With `exact`, the
    bytes between the runs are not read.
    """
    node, buffer = lease.node, lease.buffers[nth]
    room = node.staging.piece
    try:
        while (not nth or nth < node.landing_threads) and (batch := left.take()) is not None:
            lease.transfer.check_cancelled()
            lease.renew_in_time()
            with node.metrics.phase("coalesced"):
                read = batch.read(buffer * room)
                lease.read([read if exact is None else exact[read.src_pool].clip(read)])
                here = node.staging.view(buffer, room)
                for one in batch.placing:
                    one.carry_out(here, node.pools)
            lease.transfer.add(lease.rank, batch.nbytes)
    except BaseException:
        left.drop()
        raise
