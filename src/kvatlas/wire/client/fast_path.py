"""Fast path: a pull that the calling thread launches and the waiting thread finishes.

`LaunchedPull` is one rank's part of such a pull. A thread of `follow_ups` finishes the pull if no
other thread waits for it, and releases its resources a little later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from select import select
from typing import Any

from kvatlas.errors import AtlasError
from kvatlas.wire.client.connections import Connections, PeerConnection
from kvatlas.wire.client.prepared_shapes import StartedRead
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_reads import RankReads
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.server.node_state import NodeState

_SOON = 2e-3
"""Seconds of polling without a pause. A read of 1 GB takes half a millisecond."""

_NEARLY = 1e-4
"""Seconds around the expected end of a read in which the interpreter lock is not released.

Getting the lock back from another thread takes up to this long.
"""

_SETTLING = 1e-4
"""Seconds between polls of a read that was abandoned."""


@dataclass
class LaunchedPull:
    """One rank's part of a pull on the fast path: a read in flight, and its connection."""

    connections: Connections
    connection: PeerConnection
    read: StartedRead
    _arrived: bool = False
    """Whether every byte has arrived, and the source held its blocks until then."""
    _untidy: bool = True

    @classmethod
    def launch(
        cls, connections: Connections, endpoint: str, request: str, tokens: Any, blocks: Any
    ) -> LaunchedPull | None:
        """Start a read from a connected peer; return None if the fast path does not apply."""
        connection = connections.take(endpoint)
        if connection is None:
            return None
        read: StartedRead | None = None
        try:
            read = connection.shapes.start(request, tokens, blocks)
        finally:
            if read is None:
                connections.give_back(connection)
        return None if read is None else cls(connections, connection, read)

    @property
    def total(self) -> int | None:
        """The number of bytes that must arrive from all ranks; None if it is not computed yet."""
        return self.read.prepared.total

    def finish(
        self, node: NodeState, wanted: TransferRequest, transfer: Transfer, timeout: float
    ) -> bool:
        """Wait for the read, and check that the source held its blocks.

        Raises an error if the read failed. Returns False if the read is over but its bytes are
        invalid, because `StartedRead.sound` is false.
        """
        read, nbytes = self.read, self.read.prepared.shape.arriving
        try:
            _ = transfer.total  # raises an error for wrong blocks before this rank counts
            sound = read.sound
            soon = sound and self.is_soon_over(transfer)
        except BaseException:  # such as KeyboardInterrupt: the copy still writes
            self._hold(node, transfer)
            raise
        if not sound:
            self.abandon()
            return False
        if soon:
            transfer.add(self.connection.peer.rank, nbytes)
        else:
            self._untidy = False
            lease = RankLease(node, self.connection, wanted, transfer, timeout, seen=read.seen)
            with self.connections.using(self.connection), RankReads(lease) as reads:
                reads.use_blocks()
                reads.finish(read.handle, "blocks", renewing=False)
                transfer.add(lease.rank, nbytes)
                lease.close(complete=True)
        self._arrived = True
        return True

    def _hold(self, node: NodeState, transfer: Transfer) -> None:
        """Keep the blocks of a transfer from being reused until the read is over."""
        self._untidy = False
        handle, sever = self.read.handle, self.connection.link.sever
        handle.release()
        transfer.use()
        node.quarantine.hold([handle], transfer.leave, sever=sever)
        self.connections.give_back(self.connection)

    def ends_within(self, transfer: Transfer, timeout: float) -> bool:
        """Poll for at most `timeout` seconds. Return whether `finish` would now end at once.

        The result is False if `StartedRead.sound` is false: the request is then read again.
        """
        try:
            return self.read.sound and self.is_soon_over(transfer, timeout)
        except AtlasError:
            return False

    def is_soon_over(self, transfer: Transfer, timeout: float = _SOON) -> bool:
        """Poll a short read for a while without sleeping. Return whether the read has succeeded.

        Polling ends after `timeout` seconds, or after 2 ms if `timeout` is longer.
        """
        handle, seen = self.read.handle, self.read.seen
        until = time.monotonic() + min(timeout, _SOON)
        try:
            rehearsed = False
            while not handle.peek():
                now = time.monotonic()
                if transfer.done or not seen.held or now > until:
                    return False
                if abs(now - handle.expected_end) > _NEARLY:
                    _let_others_run()
                elif not rehearsed:  # so that the last check finds the board in the cache
                    rehearsed = seen.confirmed
                    if not rehearsed:
                        return False
        except Exception:  # the normal path raises the error again
            return False
        return seen.confirmed

    def tidy_up(
        self, node: NodeState, wanted: TransferRequest, transfer: Transfer, timeout: float
    ) -> RankLease | None:
        """Release the handle and the connection of a finished read, if that is still to be done.

        Returns a lease object that can notify the source, or None if not every byte has arrived.
        """
        if self._untidy:
            self._untidy = False
            self.read.handle.poll()
            self.read.handle.release()
            self.connections.give_back(self.connection)
        if not self._arrived:
            return None
        if self.total is None and transfer.total is not None:
            self.connection.shapes.count(self.read.key, transfer.total)
        shape = self.read.prepared.shape
        node.metrics.add(bytes=shape.nbytes, descriptors=shape.runs)
        if shape.casts:
            node.metrics.add(gpu_converted_bytes=shape.arriving)
        return RankLease(node, self.connection, wanted, transfer, timeout, seen=self.read.seen)

    def abandon(self) -> None:
        """Wait until an invalid read can no longer write to memory."""
        self._untidy = False
        self.read.handle.release()
        while not self.read.handle.settle():
            time.sleep(_SETTLING)
        self.connections.give_back(self.connection)


def _let_others_run() -> None:
    """Release the interpreter lock for a moment with `select`, without yielding the processor.

    Other calls take too long: `time.sleep(0)` takes about 60 us, a tenth of the time that a 1 GB
    read takes, and `os.sched_yield` takes as long as other threads keep the processor.
    """
    select((), (), (), 0)
