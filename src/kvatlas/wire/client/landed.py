"""A pull by way of this end's staging buffers alone: the source does nothing for it.

Where runs are short only because the two ends lie differently, most of them touch at the
source. They are read as they lie there, joined, and put in place from a buffer of this end,
while the next are read into another.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait

from kvatlas.routing import Stream
from kvatlas.wire.client.rank_lease import BUFFERS, RankLease
from kvatlas.wire.landing import LandingBatch, landing_batches


def pull_landed(lease: RankLease, stream: Stream) -> None:
    """Read a stream batch by batch into buffers, and from there into its blocks."""
    node = lease.node
    room = node.staging.piece
    lease.borrow_own(min(BUFFERS, node.staging.most()))
    grids, placing = stream.grids(), deque[Future[None]]()
    lease.count(sum(map(len, grids)))
    try:
        for number, batch in enumerate(landing_batches(grids, room)):
            lease.transfer.check_cancelled()
            lease.renew_in_time()
            if len(placing) == len(lease.buffers):
                placing.popleft().result()
            buffer = lease.buffers[number % len(lease.buffers)]
            with node.metrics.phase("landed"):
                lease.read([batch.read(buffer * room)])
            placing.append(lease.connection.beside.submit(_place, lease, batch, buffer))
    finally:
        wait(placing)  # nobody else gets blocks or buffers meanwhile
    for one in placing:
        one.result()


def _place(lease: RankLease, batch: LandingBatch, buffer: int) -> None:
    """Put what has been read into a buffer where it belongs."""
    node = lease.node
    here = node.staging.view(buffer, node.staging.piece)
    for one in batch.placing:
        one.carry_out(here, node.pools)
    lease.transfer.add(lease.rank, batch.nbytes)
