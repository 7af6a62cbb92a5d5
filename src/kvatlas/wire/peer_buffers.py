"""Staging buffers for peers: buffers of one memory that all peers share, or a segment per peer.

If a transport shares the pools anyway (`shared="all"`), or authorises every read by its lease, all
peers use buffers of the node's one staging memory (`SharedBuffers`). Otherwise every peer gets
segments that no other process can read or write (`PeerSegments`). A segment belongs to one session:
it is kept for the session's next transfer, and freed when the session ends or another peer needs
the room. So bytes of one peer are never in memory that another peer can access, however late a
stopped peer continues to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvatlas.wire.staging import StagingBuffers
from kvatlas.wire.transports.base import OnePeerMemory


@dataclass(frozen=True, eq=False)
class Loan:
    """Staging buffers that are lent to one lease, as indices into a memory."""

    memory: Any
    piece: int
    buffers: tuple[int, ...]
    segment: OnePeerMemory | None = None
    """The segment that is the memory; None if all peers share the memory."""

    def view(self, buffer: int, nbytes: int) -> Any:
        """View the first bytes of a buffer: an array on the host, or a tensor on a GPU."""
        return self.memory[buffer * self.piece :][:nbytes]


class PeerBuffers(Protocol):
    """Buffers that can be lent to peers."""

    count: int
    """The number of buffers that exist at once."""

    def lend(self, session: bytes, count: int) -> Loan:
        """Return buffers for a session. The caller has checked that `count` are free."""

    def take_back(self, session: bytes, loan: Loan, *, keep: bool) -> None:
        """Take buffers back. The session may get the same memory again if `keep` is set."""

    def end_sessions(self, sessions: set[bytes]) -> None:
        """Free memory that was kept for sessions. All of their buffers were taken back."""


class SharedBuffers:
    """Buffers of the node's one staging memory.

    With `wiped`, a buffer is set to zero when it is taken back.
    """

    def __init__(self, staging: StagingBuffers, *, wiped: bool = False) -> None:
        self._staging, self._wiped = staging, wiped
        self.count = staging.most(for_peer=True)

    def lend(self, session: bytes, count: int) -> Loan:
        """Return free buffers."""
        del session
        staging = self._staging
        buffers = tuple(staging.acquire(count, for_peer=True))
        return Loan(staging.memory, staging.piece, buffers)

    def take_back(self, session: bytes, loan: Loan, *, keep: bool) -> None:
        """Take buffers back."""
        del session, keep
        if self._wiped:
            for buffer in loan.buffers:
                loan.view(buffer, loan.piece)[:] = 0
        self._staging.give_back(loan.buffers)

    def end_sessions(self, sessions: set[bytes]) -> None:
        """Do nothing: shared buffers are not kept for a session."""


class PeerSegments:
    """Segments of staging memory, each readable by the peer of one session only.

    `make` creates a segment with a given number of bytes. All segments together have at most
    `count` buffers of `piece` bytes.
    """

    def __init__(self, make: Callable[[int], OnePeerMemory], piece: int, count: int) -> None:
        self._make, self._piece, self.count = make, piece, count
        self._idle: list[tuple[bytes, Loan]] = []
        """Segments that are not lent, with their sessions; the least recently used first."""
        self._exist = 0
        """The number of buffers in all segments."""
        self._lock = threading.Lock()

    @property
    def exist(self) -> int:
        """The number of buffers in all segments, lent or kept for their session."""
        with self._lock:
            return self._exist

    def lend(self, session: bytes, count: int) -> Loan:
        """Return the session's idle segment, or a new one.

        If there is no room for a new segment, idle segments are freed, the oldest first.
        """
        with self._lock:
            own = [one for one in self._idle if one[0] == session and len(one[1].buffers) == count]
            if own:
                self._idle.remove(own[-1])
                return own[-1][1]
            ended = []
            while self._idle and self._exist + count > self.count:
                ended.append(self._idle.pop(0))
                self._exist -= len(ended[-1][1].buffers)
            self._exist += count
        try:
            for _, loan in ended:
                _end(loan)
            segment = self._make(count * self._piece)
        except BaseException:
            with self._lock:
                self._exist -= count
            raise
        return Loan(segment.view, self._piece, tuple(range(count)), segment)

    def take_back(self, session: bytes, loan: Loan, *, keep: bool) -> None:
        """Keep a segment for its session, or free it."""
        with self._lock:
            if keep:
                self._idle.append((session, loan))
                return
            self._exist -= len(loan.buffers)
        _end(loan)

    def end_sessions(self, sessions: set[bytes]) -> None:
        """Free the idle segments of the given sessions."""
        with self._lock:
            ended = [one for one in self._idle if one[0] in sessions]
            for one in ended:
                self._idle.remove(one)
                self._exist -= len(one[1].buffers)
        for _, loan in ended:
            _end(loan)


def _end(loan: Loan) -> None:
    if loan.segment is not None:
        loan.segment.end()
