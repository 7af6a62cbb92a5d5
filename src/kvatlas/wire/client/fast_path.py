"""Fast path: a pull that the calling thread launches and the waiting thread finishes.

`LaunchedPull` is one rank's part of such a pull. Its cleanup, and the notification of the source, can
wait: a thread woken at once would take the interpreter lock from the caller just as it continues.
`FollowUps` does this work a little later, in one thread for all pulls of a session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from select import select
from typing import Any

from kvatlas.wire.client.connections import Connections, PeerConnection
from kvatlas.wire.client.prepared_shapes import StartedRead
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_reads import RankReads
from kvatlas.wire.client.transfer import Transfer, TransferPart
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.rpc import log
from kvatlas.wire.server.node_state import NodeState

_SOON = 2e-3
"""Seconds of polling without a pause. A read of 1 GB takes half a millisecond."""

_NEARLY = 1e-4
"""Seconds around the expected end of a read in which the interpreter lock is not released.

Getting the lock back from another thread takes up to this long.
"""

_SETTLING = 1e-4
"""Seconds between polls of a read that was abandoned."""

_EVERY = 2e-3
"""Seconds between checks for pulls that need follow-up work."""

_LINGER = 0.1
"""Seconds that the thread keeps checking without work, because waking a thread takes longer."""

_LATER = 6e-3
"""Seconds by which follow-up work is delayed, so that it does not interrupt consecutive pulls."""


@dataclass
class LaunchedPull:
    """A read in flight, over a connection that was taken for it."""

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
        """Start reading if a peer is connected and this shape was pulled from it before."""
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
        """The bytes that must arrive from all ranks; None if not counted yet."""
        return self.read.prepared.total

    def finish(
        self, node: NodeState, wanted: TransferRequest, transfer: Transfer, patience: float
    ) -> bool:
        """Wait for the read, and check that the source held its blocks; raise if the read failed.

        Returns False if the read is over but invalid: the offer it read was not genuine.
        """
        read, nbytes = self.read, self.read.prepared.shape.nbytes
        try:
            _ = transfer.total  # raises an error for wrong blocks before this rank counts
            sound = read.sound
            soon = sound and self._is_soon_over(transfer)
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
            lease = RankLease(node, self.connection, wanted, transfer, patience, seen=read.seen)
            with self.connections.using(self.connection), RankReads(lease) as reads:
                reads.use_blocks()
                reads.finish(read.handle, "blocks", renewing=False)
                transfer.add(lease.rank, nbytes)
                lease.close(complete=True)
        self._arrived = True
        return True

    def _hold(self, node: NodeState, transfer: Transfer) -> None:
        """Keep the blocks of a transfer from being reused until the copy is over."""
        self._untidy = False
        handle, sever = self.read.handle, self.connection.link.sever
        handle.release()
        transfer.use()
        node.quarantine.hold([handle], transfer.leave, sever=sever)
        self.connections.give_back(self.connection)

    def _is_soon_over(self, transfer: Transfer) -> bool:
        """Poll a short read without sleeping. Return whether it has succeeded in that time."""
        handle, seen = self.read.handle, self.read.seen
        until = time.monotonic() + _SOON
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
        self, node: NodeState, wanted: TransferRequest, transfer: Transfer, patience: float
    ) -> RankLease | None:
        """Return the resources of a finished read, if that was deferred.

        Returns the lease that the read stands for, if every byte has arrived.
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
        return RankLease(node, self.connection, wanted, transfer, patience, seen=self.read.seen)

    def abandon(self) -> None:
        """Wait until an invalid read can no longer write to memory."""
        self._untidy = False
        self.read.handle.release()
        while not self.read.handle.settle():
            time.sleep(_SETTLING)
        self.connections.give_back(self.connection)


def _let_others_run() -> None:
    """Release the interpreter lock for a moment, without yielding the processor.

    `time.sleep(0)` takes about 60 us, a tenth of the time of a read of 1 GB. `os.sched_yield` takes
    as long as other threads keep the processor.
    """
    select((), (), (), 0)


@dataclass(eq=False)
class _FollowUp:
    part: TransferPart
    act: Callable[[], None]
    since: float = field(default_factory=time.monotonic)
    over: bool = False


class FollowUps:
    """The work after pulls that their callers have launched. Any thread may use it.

    A part that no thread has finished soon is finished by a worker. One thread checks all parts at
    intervals. It exits shortly after the work runs out.
    """

    def __init__(self, workers: Executor, beside: Executor) -> None:
        self._workers, self._beside = workers, beside
        self._kept: list[_FollowUp] = []
        self._lock = threading.Lock()
        self._looking = self._closing = False
        self._working = 0
        """Follow-ups in progress."""

    def add(self, part: TransferPart, act: Callable[[], None]) -> None:
        """Call `act` in another thread a little after `part` is over."""
        with self._lock:
            self._kept.append(_FollowUp(part, act))
            start, self._looking = not self._looking, True
        if start:
            _hand_on(self._beside, self._look)

    def close(self) -> None:
        """Finish all pulls before the worker threads end. Nothing can be added after this."""
        self._closing = True
        while self._looking or self._working:
            time.sleep(_EVERY)

    def _look(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_EVERY)
            with self._lock:
                kept = list(self._kept)
                last = time.monotonic() if kept else last
                if not kept and (self._closing or time.monotonic() - last > _LINGER):
                    self._looking = False
                    return
            for one in kept:
                self._advance(one)

    def _advance(self, one: _FollowUp) -> None:
        """Follow up a pull that is over for a while; finish one that no thread has finished."""
        now = time.monotonic()
        if self._closing:
            _carefully(one.part)
            one.part.join()
        if one.part.over and not one.over:
            one.over, one.since = True, now
        if one.over and (self._closing or now - one.since > _LATER):
            with self._lock:
                self._kept.remove(one)
                self._working += 1
            _hand_on(self._beside, self._follow_up, one)
        elif not one.over and now - one.since > _EVERY:
            one.since = float("inf")
            _hand_on(self._workers, _carefully, one.part)

    def _follow_up(self, one: _FollowUp) -> None:
        _carefully(one.act)
        with self._lock:
            self._working -= 1


def _hand_on(to: Executor, act: Callable[..., None], *given: Any) -> None:
    """Call `act` in another thread, or in this one if the executor is shut down."""
    try:
        to.submit(act, *given)
    except RuntimeError:
        act(*given)


def _carefully(act: Callable[[], None]) -> None:
    """Call `act` and log its errors, so that one failure does not affect other pulls."""
    try:
        act()
    except Exception:
        log.exception("the work after a pull failed")
