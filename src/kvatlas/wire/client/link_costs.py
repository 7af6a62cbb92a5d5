"""What a link is measured at, and whether a stream is better staged over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream, Copy, Costs
from kvatlas.wire.client.rank_lease import BUFFERS, RankLease
from kvatlas.wire.stream_copy import AnyStream
from kvatlas.wire.transports.base import STAGING
from kvatlas.wire.transports.errors import failed


def should_stage(lease: RankLease, stream: AnyStream) -> bool:
    """Whether to go through staging buffers: as asked, or by what the link was measured at."""
    wanted, connection = lease.wanted, lease.connection
    if isinstance(stream, ConvertedStream):
        if wanted.how == "direct":
            hint = "Let the transfer be staged: cells are converted in staging buffers"
            got = "a conversion, and pools that are read as they are"
            raise AtlasError(Code.CONTRADICTORY, got=got, hint=hint)
        return True
    if wanted.how == "staged":
        return True
    if not lease.reaches_pools():
        if wanted.how == "auto":
            return True
        got = "pools that the source keeps to itself"
        raise failed(got, "Share them, or let the transfer be staged")
    if (
        wanted.how == "direct"
        or connection.link.adds
        or not lease.node.staging.most()
        or not lease.opened.piece
    ):
        return False
    if lease.others and not connection.link.prompt:
        return True  # a replica that stalls in mid-read then leaves the blocks alone
    costs = wanted.costs or connection.costs or _measured(lease)
    # For buffers and to have them filled, and as much again for threads that take turns.
    asking = 4 * connection.question_seconds
    return asking + costs.staged(stream.nbytes) < costs.direct(stream.runs, stream.nbytes)


def _measured(lease: RankLease) -> Costs:
    """What the link is measured at, if there are buffers for that now."""
    staging, connection = lease.node.staging, lease.connection
    lease.buffers = staging.acquire(min(BUFFERS, staging.most()))
    if not lease.buffers:
        return Costs()
    lease.borrow(len(lease.buffers))
    with lease.node.metrics.phase("measure"):
        connection.question_seconds = _quickest(lease.renew)
        connection.costs = _measure(lease)
    return connection.costs


def _measure(lease: RankLease) -> Costs:
    """What this link costs: many short runs against one long one, between staging buffers."""
    staging = lease.node.staging
    piece = min(lease.opened.piece, staging.piece)
    short, count = 4096, max(1, min(64, piece // 8192))
    at = np.arange(count) * 2 * short
    runs = lease.staging_copy(0, short, at, at[::-1])
    many = _quickest(partial(lease.read, [runs]))
    one = _quickest(partial(lease.read, [lease.staging_copy(0, piece)]))
    # A scatter of such short runs, as a staged transfer ends with, into scratch memory.
    spread = Copy(STAGING, 0, at, at[::-1], np.full(count, short))
    stream = staging.view(lease.buffers[0], count * short)
    rehearse = lease.node.mover.rehearsal([spread], stream, 2 * count * short)
    copying = _quickest(rehearse)
    wire = piece / one
    each = max(0.0, (many - count * short / wire) / count)
    return Costs(descriptor=each, wire=wire, copy=count * short / copying, piece=piece)


def _quickest(act: Callable[[], object]) -> float:
    """Least seconds of three turns."""
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return max(1e-9, min(taken))
