"""Transfers through staging buffers: pulls, and every push.

A stream goes piece by piece. The source gathers one into a buffer while the destination
reads the last one and scatters it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from kvatlas.routing import Stream
from kvatlas.wire import protocol
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.protocol import Ok


def pull_staged(lease: RankLease, stream: Stream) -> None:
    """Have pieces gathered, read and scatter them; one is gathered while another is read."""
    lease.borrow_both()
    staging, mover = lease.node.staging, lease.node.mover
    piece = min(staging.piece, lease.opened.piece)
    spans = list(_spans(stream.nbytes, piece))
    many = min(len(lease.buffers), len(lease.lent))
    gathering = _gather_beside(lease, spans[0], 0)
    try:
        for number, (start, stop) in enumerate(spans):
            lease.transfer.check_cancelled()
            lease.renew_in_time()
            gathering.result()
            if number + 1 < len(spans) and many > 1:
                gathering = _gather_beside(lease, spans[number + 1], (number + 1) % many)
            with lease.node.metrics.phase("staged"):
                lease.read([lease.staging_copy(number % many, stop - start)])
            if number + 1 < len(spans) and many == 1:
                gathering = _gather_beside(lease, spans[number + 1], 0)
            here = staging.view(lease.buffers[number % many], stop - start)
            mover.scatter(stream.copies(start, stop), here)
            lease.transfer.add(lease.rank, stop - start)
    finally:
        wait([gathering])


def _gather_beside(lease: RankLease, span: tuple[int, int], buffer: int) -> Future[Ok]:
    """Have the peer gather a piece into one of its buffers."""
    about = {"start": span[0], "stop": span[1], "buffer": lease.lent[buffer]}
    ask = partial(lease.ask_of_lease, protocol.Gather, Ok, **about)
    return lease.connection.beside.submit(ask)


def push(lease: RankLease, stream: Stream, *, staged: bool) -> None:
    """Have the peer fetch piece after piece; with `staged`, the next is gathered meanwhile."""
    staging, mover = lease.node.staging, lease.node.mover
    piece = lease.opened.piece
    if staged:
        lease.borrow_both()
        piece = min(piece, staging.piece)
    fetching: Future[Ok] | None = None
    try:
        for number, (start, stop) in enumerate(_spans(stream.nbytes, piece)):
            lease.transfer.check_cancelled()
            lease.renew_in_time()
            span: dict[str, Any] = {"start": start, "stop": stop}
            if staged:
                if fetching and len(lease.buffers) == 1:
                    fetching.result()
                buffer = lease.buffers[number % len(lease.buffers)]
                mover.gather(stream.copies(start, stop), staging.view(buffer, stop - start))
                span["staged_at"] = buffer * staging.piece
            if fetching:
                fetching.result()
            fetching = lease.connection.beside.submit(_fetch, lease, span)
        if fetching:
            fetching.result()
    finally:
        # Nobody else gets the buffers while the peer reads from them.
        wait([fetching] if fetching else [])


def _fetch(lease: RankLease, span: dict[str, Any]) -> Ok:
    lease.transfer.check_cancelled()
    with lease.node.metrics.phase("fetch"):
        ok = lease.ask_of_lease(protocol.Fetch, Ok, **span)
    lease.transfer.add(lease.rank, span["stop"] - span["start"])
    return ok


def _spans(total: int, piece: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a stream start and stop."""
    return ((start, min(total, start + piece)) for start in range(0, total, piece))
