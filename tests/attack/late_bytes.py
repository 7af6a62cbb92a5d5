"""Sources that are stopped in mid-read: does a byte arrive in memory that was given on?

Real processes over loopback. A reader gives up on a source that stands still, gives its
memory to somebody else as soon as it may, and then the source goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from kvatlas.routing import Copy
from kvatlas.wire import Handle
from tests.wire.transports.ends import KINDS, OVER_TCP, Kind, Peer, eventually, soon
from tests.wire.transports.peer import End

POOL, RUN = 32 << 20, 256 << 10
NEXT_OWNER = 9
_MOST_STARTS = 20
_GIVING_UP = 2.0
"""Seconds that giving an operation up may take, with much to spare."""

# Where the peer's processor has to serve, so that stopping it stops a read.
STOPPABLE = {
    kind.name: replace(kind, settings={**kind.settings, "MC_TRANSFER_TIMEOUT": "5"})
    for kind in (*KINDS, OVER_TCP)
    if kind.needs_peer and kind.name != "tcp"  # whose reads are over once they are given up
}


def stopped_reads(transport: str, tries: int, *, patient: bool = True) -> tuple[int, int]:
    """Stop so many sources in mid-read; how many, and after how many all memory was kept.

    Every other read is severed while its source stands still; after the others the source
    goes on, and the read comes to its end unheeded. Memory is given on once the operation
    has settled; whoever is not `patient` gives it on at once.
    """
    kind = STOPPABLE[transport]
    held = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kind.settings.items():
            patch.setenv(name, value)
        for number in range(tries):
            held += _kept(kind, sever=number % 2 == 0, patient=patient)
    return tries, held


def _kept(kind: Kind, *, sever: bool, patient: bool) -> bool:
    """Whether memory stays as its next owner leaves it."""
    near = End(kind.name, dict(kind.options), {0: POOL})
    with _source(kind) as peer:
        link = near.transport.connect(peer.metadata, peer.regions)
        handle = in_mid_read(near, peer, link.read)
        start = time.monotonic()
        handle.release()
        assert time.monotonic() - start < _GIVING_UP, "giving up held the caller"
        assert not handle.settle(), "settled while its source may go on"
        if patient and sever:
            link.sever()
            assert eventually(handle.settle, 40), "severed, and never settled"
        elif patient:
            peer.signal(signal.SIGCONT)
            assert eventually(handle.settle, 40), "at its end, and never settled"
        near.bytes[:] = NEXT_OWNER
        peer.signal(signal.SIGCONT)
        # Long enough for all of it: the whole pool takes a tenth of that.
        until = soon(0.6)
        while time.monotonic() < until and bool((near.bytes == NEXT_OWNER).all()):
            handle.settle()  # drives libraries that act only when they are asked
        kept = bool((near.bytes == NEXT_OWNER).all())
        link.close()
    assert eventually(handle.settle, 40)
    near.drop()
    return kept


@contextmanager
def _source(kind: Kind) -> Iterator[Peer]:
    peer = Peer(kind, {}, {0: POOL})
    peer.ask("fill", 1)
    try:
        yield peer
    finally:
        with suppress(ProcessLookupError):  # a library may have ended it
            peer.signal(signal.SIGKILL)
        peer.end()


def in_mid_read(near: End, peer: Peer, read: object) -> Handle:
    """A read whose source was stopped when some bytes had arrived and others had not."""
    assert callable(read)
    at = np.arange(POOL // RUN) * RUN
    for _ in range(_MOST_STARTS):
        near.bytes[:] = 0
        handle: Handle = read([Copy(0, 0, at, at, np.full(len(at), RUN))])
        first = near.bytes[near.offsets[0] :][:64]
        while not first.any() and not handle.poll():
            pass
        peer.signal(signal.SIGSTOP)
        until = soon(0.2)
        while time.monotonic() < until and not handle.poll():
            time.sleep(0.001)
        if not handle.poll():
            return handle
        peer.signal(signal.SIGCONT)
        handle.release()
    raise AssertionError("every read was over before its source stood still")
