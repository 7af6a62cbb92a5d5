"""Transfers through staging buffers: staged pulls, and every push.

A stream moves in pieces. The source gathers one piece into a buffer while the destination reads and
scatters the previous one.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from kvatlas.copying.stream_copy import (
    DESTINATION,
    SOURCE,
    AnyStream,
    StreamPiece,
    piece_spans,
)
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.protocol import Ok
from kvatlas.wire.read_grants import ReadGrant
from kvatlas.wire.transports.errors import failed


def pull_staged(lease: RankLease, stream: AnyStream) -> None:
    """Pull piece by piece: the peer gathers one while this node reads and scatters another."""
    lease.borrow_both()
    staging = lease.node.staging
    piece = min(staging.piece, lease.opened.piece)
    spans = list(piece_spans(stream, piece))
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
                lease.read_lent([lease.staging_copy(number % many, stop - start)])
            if number + 1 < len(spans) and many == 1:
                gathering = _gather_beside(lease, spans[number + 1], 0)
            here = staging.view(lease.buffers[number % many], stop - start)
            if isinstance(stream, ConvertedStream):
                lease.note_converted(start, stop, here)
            arriving = StreamPiece.of(stream, start, stop, DESTINATION)
            lease.transfer.add(lease.rank, lease.node.deliver(here, arriving))
    finally:
        wait([gathering])


def _gather_beside(lease: RankLease, span: tuple[int, int], buffer: int) -> Future[Ok]:
    """Have the peer gather a piece into one of its buffers."""
    about = {"start": span[0], "stop": span[1], "buffer": lease.lent[buffer]}
    ask = partial(lease.ask_of_lease, protocol.Gather, Ok, **about)
    return lease.connection.beside.submit(ask)


def push(lease: RankLease, stream: AnyStream, *, staged: bool) -> None:
    """Have the peer fetch the pieces in order. With `staged`, gather the next one meanwhile."""
    staging = lease.node.staging
    piece = lease.opened.piece
    if staged:
        if lease.node.transport.lends_segments:
            hint = 'Let the destination pull the request, or share the pools (shared="all")'
            problem = "The destination cannot read the staging memory of this node"
            raise failed('a push with shared="staging"', hint, problem)
        lease.borrow_both()
        piece = min(piece, staging.piece)
    grant = ReadGrant(
        lease.connection.session,
        None if staged else stream,
        lambda: lease.buffers if staged else [],
        staging.piece,
    )
    with lease.node.pushing(lease.opened.lease, grant):
        _push_pieces(lease, stream, piece, staged=staged)


def _push_pieces(lease: RankLease, stream: AnyStream, piece: int, *, staged: bool) -> None:
    staging = lease.node.staging
    fetching: Future[Ok] | None = None
    try:
        for number, (start, stop) in enumerate(piece_spans(stream, piece)):
            lease.transfer.check_cancelled()
            lease.renew_in_time()
            span: dict[str, Any] = {"start": start, "stop": stop}
            if staged:
                if fetching and len(lease.buffers) == 1:
                    fetching.result()
                buffer = lease.buffers[number % len(lease.buffers)]
                here = staging.view(buffer, stop - start)
                lease.node.fill(StreamPiece.of(stream, start, stop, SOURCE), here)
                if isinstance(stream, ConvertedStream):
                    lease.note_converted(start, stop, here)
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
