"""Choose between direct, coalesced and staged transfers, by the measured costs of the link."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.read_coalescing import expected_reads
from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import ceil_div
from kvatlas.routing import ConvertedStream, Copy, Costs, Stream
from kvatlas.wire.client.connections import Way
from kvatlas.wire.client.link_measurement import measure, quickest
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_reads import BUFFERS, RankReads
from kvatlas.wire.transports.errors import failed

_LONG_RUN = 128 << 10
"""Runs of at least this many bytes are not gathered: copying them costs more than a descriptor."""
_KEPT_WAYS = 256
"""The maximum number of (runs, bytes) pairs for which the chosen way is cached."""
_SHORTEST_WAIT, _WORTH_WAITING = 0.1, 16
"""The time that a transfer waits for buffers.

It is at least `_SHORTEST_WAIT` seconds, or `_WORTH_WAITING` times the expected time of a direct
transfer if that is longer. Long transfers keep their buffers until they end, and a short transfer
must not wait for that.
"""
_LONGEST_MEASUREMENT = 2.0
"""The maximum number of seconds that a transfer waits for the measurement of another."""
_SHORTEST_RUN = 64
"""Costs are measured for runs of this many bytes, of twice, four times as many, and so on."""
_LEFT_FOR_DIRECT = 2
"""While a transfer waits for buffers, it reserves this multiple of a direct transfer's time.

If no buffers become free, a direct transfer can then still meet the deadline.
"""


def choose_way(reads: RankReads, stream: AnyStream) -> Way:
    """Return how to move a stream: `direct`, `coalesced` or `staged`.

    If the caller requested one of these ways with `how`, the result is that way, except that a
    direct pull may become `coalesced` (see `must_coalesce`). For `auto`, the result is the possible
    way with the lowest measured cost.
    """
    lease, wanted = reads.lease, reads.lease.wanted
    if isinstance(stream, ConvertedStream):
        if converts_on_the_way(lease, stream):
            return "direct"
        if wanted.how in ("direct", "coalesced"):
            hint = 'Use how="auto" or how="staged": conversion needs staging buffers'
            got = f"how={wanted.how!r} with a conversion"
            raise AtlasError(Code.CONTRADICTORY, got=got, hint=hint)
        lease.ask_for_lease_instead()
        return "staged"
    if wanted.how == "staged":
        return "staged"
    if not lease.reaches_pools():
        if wanted.how == "auto":
            return "staged"
        hint = (
            'Use how="staged", or pass make_transport(..., shared="all") to both nodes, with a '
            "transport that supports the device of the pools"
        )
        problem = "The transport cannot access the pools of one of the nodes"
        raise failed(f"how={wanted.how!r}", hint, problem)
    if wanted.how != "auto":
        if wanted.how == "coalesced" and not _can_coalesce(lease):
            problem = 'how="coalesced" needs staging buffers and pools in host memory at this node'
            got = "pools on a GPU" if lease.node.staging.most() else "no staging buffers"
            raise failed(got, 'Use how="auto"', problem)
        return "coalesced" if must_coalesce(lease) else wanted.how
    return _cheapest_way(reads, stream)


def must_coalesce(lease: RankLease) -> bool:
    """Whether a direct pull must read into staging buffers of this node instead of its blocks.

    The result is true if the link cannot end a stalled read, and another process may fill the same
    blocks after the stall: another replica, or another source of a push. The stalled read could
    then overwrite the new bytes. The result is false if this node cannot scatter from staging
    buffers.
    """
    link = lease.connection.link
    stalls = not link.prompt and not link.severs
    if lease.wanted.replaceable:
        stalls = not link.prompt and not link.adds
    elif not lease.others:
        stalls = False
    return stalls and _can_coalesce(lease)


def converts_on_the_way(lease: RankLease, stream: ConvertedStream) -> bool:
    """Whether the GPU copy kernel can cast the elements while it copies them between the pools.

    False if checksums are requested. They are computed from bytes in a staging buffer, and such a
    copy uses no staging buffer.
    """
    wanted, link = lease.wanted, lease.connection.link
    if not link.adds or wanted.checksums or wanted.how not in ("auto", "direct"):
        return False
    grids = stream.grids() if lease.reaches_pools() else None
    return grids is not None and link.converts(grids)


def _cheapest_way(reads: RankReads, stream: Stream) -> Way:
    """Return the fastest of `direct`, `coalesced` and `staged`, by estimated cost.

    Acquire the staging buffers that the result needs.
    """
    lease = reads.lease
    wanted, connection = lease.wanted, lease.connection
    if connection.link.adds or not lease.node.staging.most() or not _may_stage(lease):
        return "direct"
    if not lease.may_fill_blocks():
        return "staged"  # so a read that stalls never writes to the blocks
    if wanted.costs is not None:
        return _with_buffers(reads, stream, _weighed(lease, stream, wanted.costs), wanted.costs)
    runs = stream.runs_apart  # requests with equal runs and bytes are weighed once
    if stream.nbytes >= _LONG_RUN * runs:
        return "direct"
    length = max(_SHORTEST_RUN, 1 << (stream.nbytes // max(1, runs)).bit_length() - 1)
    measured, alike = connection.costs_near(length), (runs, stream.nbytes)
    if measured is None:
        lease.ask_for_lease_instead()
        if not _may_stage(lease):
            return "direct"
        measured = _measured(reads, length)
    costs, found = measured or Costs(), connection.ways.get(alike)
    if found is None:
        found = _weighed(lease, stream, costs)
        if measured is not None:
            # The dict is replaced, not changed, because other threads read it.
            connection.ways = dict([*connection.ways.items(), (alike, found)][-_KEPT_WAYS:])
    return _with_buffers(reads, stream, found, costs)


def _with_buffers(reads: RankReads, stream: Stream, way: Way, costs: Costs) -> Way:
    """Acquire staging buffers for `way` and return `way`; return `direct` if too few are free."""
    lease = reads.lease
    if way == "staged":
        lease.ask_for_lease_instead()
        if not _may_stage(lease):
            return "direct"
    if way == "direct":
        return way
    alone = costs.direct(stream.runs_apart, stream.nbytes)
    worth, left = _WORTH_WAITING * alone, lease.deadline - time.monotonic()
    if left > alone:  # else only a transfer with buffers can be in time
        worth = min(worth, left - _LEFT_FOR_DIRECT * alone)
    until = time.monotonic() + max(_SHORTEST_WAIT, worth)
    return way if reads.borrow(both=way == "staged", until=until) else "direct"


def _may_stage(lease: RankLease) -> bool:
    """Whether the peer may have staging buffers to lend. Without a lease, the result is true."""
    return lease.seen is not None or lease.opened.piece > 0


def _weighed(lease: RankLease, stream: Stream, costs: Costs) -> Way:
    """Return the way with the lowest cost over this link: `direct`, `coalesced` or `staged`."""
    connection = lease.connection
    # One request to borrow buffers and one to fill them; twice that, for switches of threads.
    asking = 4 * connection.question_seconds
    nbytes, direct = stream.nbytes, costs.direct(stream.runs, stream.nbytes)
    staged = asking + costs.staged(nbytes)
    if min(staged, nbytes / costs.wire + nbytes / costs.copy) >= direct:
        return "direct"
    if _can_coalesce(lease):
        pieces = ceil_div(nbytes, costs.piece)
        gathering = nbytes / costs.copy + pieces * connection.question_seconds
        reads, nbytes = expected_reads(stream.grids(), lease.node.staging.piece)
        if costs.coalesced(reads, nbytes) < min(direct, staged + gathering):
            return "coalesced"
    return "staged" if staged < direct else "direct"


def _can_coalesce(lease: RankLease) -> bool:
    """Whether this process can scatter from its own staging buffers into its pools."""
    node = lease.node
    here = {STAGING, *node.plan.rank_pools(node.rank)} <= set(node.pools)
    return here and node.staging.most() > 0


def _measured(reads: RankReads, length: int) -> Costs | None:
    """Return measured costs for runs of `length` bytes; None if they cannot be measured now."""
    connection = reads.lease.connection
    wait = min(_LONGEST_MEASUREMENT, max(0.0, reads.lease.deadline - time.monotonic()) / 2)
    if not connection.measuring.acquire(timeout=wait):
        return None
    try:
        known = connection.costs_near(length)  # another transfer may have measured them
        if known is not None or not _borrows_to_measure(reads):
            return known
        with reads.node.metrics.phase("measure"):
            (renewing,) = quickest(reads.lease.renew)
            connection.question_seconds = renewing.wall
            costs = connection.costs[length] = measure(_Rehearsal(reads), length)
        return costs
    finally:
        connection.measuring.release()


def _borrows_to_measure(reads: RankReads) -> bool:
    """Acquire staging buffers at both ends. Return False if too few are free now."""
    staging = reads.node.staging
    reads.buffers = staging.acquire(min(BUFFERS, staging.most()))
    return bool(reads.buffers) and reads.borrow(both=True, until=time.monotonic() + _SHORTEST_WAIT)


class _Rehearsal:
    """Test copies for a measurement of a link.

    A read copies from a staging buffer of the peer to a staging buffer of this node. A scatter
    copies from this node's staging buffer to scratch memory.
    """

    def __init__(self, reads: RankReads) -> None:
        self._reads = reads
        self.piece = min(reads.lease.opened.piece, reads.node.staging.piece)

    def read(self, count: int, length: int) -> Callable[[], None]:
        """Return a function that reads `count` runs of `length` bytes, with gaps between them."""
        copy = self._reads.staging_copy(0, length, *_apart(count, length))
        return partial(self._reads.read_lent, [copy])

    def scatter(self, count: int, length: int) -> Callable[[], None]:
        """Return a function that scatters `count` runs of `length` bytes into scratch memory."""
        spread = Copy(STAGING, 0, *_apart(count, length), np.full(count, length))
        node, nbytes = self._reads.node, count * length
        stream = node.staging.view(self._reads.buffers[0], nbytes)
        return node.mover.rehearsal([spread], stream, 2 * nbytes)


def _apart(count: int, length: int) -> tuple[Int64s, Int64s]:
    """Return source starts and reversed destination starts of `count` runs with gaps in between."""
    at = np.arange(count) * 2 * length
    return at, at[::-1]
