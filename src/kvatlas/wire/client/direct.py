"""Direct pulls: one descriptor per run, from the source's pools into those of this node."""

from __future__ import annotations

from kvatlas.routing import ConvertedStream, Stream
from kvatlas.wire.client.rank_lease import RankLease

_BATCH = 64 << 20
"""Bytes posted at once. Progress is reported, and cancellation checked, after each batch."""

_BATCH_RUNS = 1 << 20
"""The approximate number of runs posted at once. Each costs memory at this end."""


def pull_direct(lease: RankLease, stream: Stream, behind: int | None) -> None:
    """Read a stream into its blocks in batches, or all at once if the transport computes the runs.

    `behind` is the source's mark after which the blocks may be read.
    """
    total = stream.nbytes
    if lease.connection.link.adds:
        with lease.node.metrics.phase("direct"):
            lease.read_at_once(stream.grids(), behind)
        lease.transfer.add(lease.rank, total)
        lease.read_whole = stream if lease.seen is not None else None
        return
    batch = max(4096, min(_BATCH, total * _BATCH_RUNS // max(1, stream.runs_apart)))
    for start in range(0, total, batch):
        lease.transfer.check_cancelled()
        lease.renew_in_time()
        stop = min(total, start + batch)
        copies = stream.copies(start, stop)
        lease.count(sum(map(len, copies)))
        with lease.node.metrics.phase("direct"):
            lease.read(copies, "blocks")
        lease.transfer.add(lease.rank, stop - start)


def pull_converted(lease: RankLease, stream: ConvertedStream, behind: int | None) -> None:
    """Read a stream into its blocks. The copy kernel casts the elements."""
    with lease.node.metrics.phase("converted"):
        lease.read_at_once(stream.grids() or [], behind)
    lease.node.metrics.add(gpu_converted_bytes=stream.arriving)
    lease.transfer.add(lease.rank, stream.arriving)
