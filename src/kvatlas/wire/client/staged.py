"""Staged pulls: through staging buffers at both ends.

A stream moves in pieces. The source gathers one piece into a buffer while the destination reads and
scatters the previous one.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial

from kvatlas.copying.stream_pieces import (
    DESTINATION,
    AnyStream,
    StreamPiece,
    piece_spans,
)
from kvatlas.routing import ConvertedStream
from kvatlas.wire import protocol
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.protocol import Ok

_LOOK_SECONDS = 0.05
"""Seconds within which the end of a transfer is noticed while the peer gathers."""


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
            _await(lease, gathering)
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
        if not lease.transfer.done:  # else do not wait: the source may be stopped
            wait([gathering])


def _gather_beside(lease: RankLease, span: tuple[int, int], buffer: int) -> Future[Ok]:
    """Ask the peer, in another thread, to gather a piece into one of its buffers."""
    about = {"start": span[0], "stop": span[1], "buffer": lease.lent[buffer]}
    ask = partial(lease.ask_of_lease, protocol.Gather, Ok, **about)
    return lease.connection.beside.submit(ask)


def _await(lease: RankLease, gathering: Future[Ok]) -> None:
    """Wait until the peer has gathered a piece. Raise an error if the transfer ends first."""
    while not gathering.done():
        with suppress(TimeoutError):
            gathering.result(_LOOK_SECONDS)
        lease.transfer.check_cancelled()
    gathering.result()
