"""Staging buffers of a node: for its own transfers, and to lend to its peers.

If a transport shares the pools anyway (`shared="all"`), or authorises every read by the lease of
the reader, all peers use buffers of the node's one staging memory (`StagingBuffers`). Otherwise
every peer gets segments that no other process can read or write (`PeerSegments`). A segment belongs
to one session: it is kept for the session's next transfer, and freed when the session ends or
another peer needs the memory. So bytes of one peer are never in memory that another peer can
access, even if a peer stalls and continues to read much later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvatlas.copying.memory import HOST
from kvatlas.wire.transports.base import OnePeerMemory, Transport


def staging_memory(transport: Transport, device: str, nbytes: int) -> Any:
    """Allocate zeroed staging memory: an array on the host, or a byte tensor on a GPU."""
    if device == HOST:
        return transport.allocate(nbytes)
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True, eq=False)
class Loan:
    """Staging buffers that are lent to one lease.

    A buffer is a slice of `memory` with `piece` bytes. `buffers` contains the indices of the
    slices.
    """

    memory: Any
    piece: int
    buffers: tuple[int, ...]
    segment: OnePeerMemory | None = None
    """The segment that contains the buffers; None if all peers share one memory."""

    def view(self, buffer: int, nbytes: int) -> Any:
        """View the first bytes of a buffer: an array on the host, or a tensor on a GPU."""
        return self.memory[buffer * self.piece :][:nbytes]


class StagingBuffers:
    """One registered memory region, divided into buffers that are lent separately.

    Half of the buffers are for transfers of this node, half for its peers. Otherwise two nodes that
    read from each other could each wait for a buffer that the other holds. If `wiped` is true, a
    buffer is set to zero when a peer gives it back.

    >>> import numpy as np
    >>> staging = StagingBuffers(np.zeros(4 * 4096, np.uint8), 4096)
    >>> mine, lent = staging.acquire(2), staging.acquire(2, for_peer=True)
    >>> len(mine), len(lent), staging.acquire(1), staging.free
    (2, 2, [], 0)
    >>> staging.give_back(mine + lent)
    >>> staging.free
    4
    """

    def __init__(self, memory: Any, piece: int, *, wiped: bool = False) -> None:
        self.memory, self.piece, self.count = memory, piece, int(memory.nbytes) // piece
        self._wiped = wiped
        self._own = -(-self.count // 2)
        self._free = {False: list(range(self._own)), True: list(range(self._own, self.count))}
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """The number of free buffers."""
        with self._changed:
            return sum(map(len, self._free.values()))

    def most(self, *, for_peer: bool = False) -> int:
        """The number of buffers for transfers of this node or, if `for_peer` is true, for peers."""
        return self.count - self._own if for_peer else self._own

    def acquire(self, count: int, timeout: float = 0.0, *, for_peer: bool = False) -> list[int]:
        """Wait up to `timeout` for `count` free buffers. Return their indices, or an empty list."""
        free = self._free[for_peer]
        with self._changed:
            if not self._changed.wait_for(lambda: count <= len(free), timeout):
                return []
            return [free.pop() for _ in range(count)]

    def give_back(self, buffers: Iterable[int]) -> None:
        """Make acquired buffers free again."""
        with self._changed:
            for buffer in buffers:
                self._free[buffer >= self._own].append(buffer)
            self._changed.notify_all()

    def view(self, buffer: int, nbytes: int) -> Any:
        """View the first bytes of a buffer: an array on the host, or a tensor on a GPU."""
        return self.memory[buffer * self.piece :][:nbytes]

    def lend(self, session: bytes, count: int) -> Loan:
        """Lend buffers to a peer. The caller has checked that `count` are free."""
        del session
        return Loan(self.memory, self.piece, tuple(self.acquire(count, for_peer=True)))

    def take_back(self, session: bytes, loan: Loan, *, keep: bool) -> None:
        """Make lent buffers available again. `session` and `keep` have no effect here."""
        del session, keep
        if self._wiped:
            for buffer in loan.buffers:
                self.view(buffer, self.piece)[:] = 0
        self.give_back(loan.buffers)

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
        self.exist = 0
        """The number of buffers in all segments, lent or kept for their session."""
        self._lock = threading.Lock()

    def lend(self, session: bytes, count: int) -> Loan:
        """Lend the session's idle segment, or a new segment.

        If there is no room for a new segment, idle segments are freed, the oldest first.
        """
        with self._lock:
            own = [one for one in self._idle if one[0] == session and len(one[1].buffers) == count]
            if own:
                self._idle.remove(own[-1])
                return own[-1][1]
            ended = []
            while self._idle and self.exist + count > self.count:
                ended.append(self._idle.pop(0)[1])
                self.exist -= len(ended[-1].buffers)
            self.exist += count
        try:
            _end(ended)
            segment = self._make(count * self._piece)
        except BaseException:
            with self._lock:
                self.exist -= count
            raise
        return Loan(segment.view, self._piece, tuple(range(count)), segment)

    def take_back(self, session: bytes, loan: Loan, *, keep: bool) -> None:
        """Keep a segment for the session's next transfer if `keep` is true, else free it."""
        with self._lock:
            if keep:
                self._idle.append((session, loan))
                return
            self.exist -= len(loan.buffers)
        _end([loan])

    def end_sessions(self, sessions: set[bytes]) -> None:
        """Free the idle segments of the given sessions."""
        with self._lock:
            ended = [loan for session, loan in self._idle if session in sessions]
            self._idle = [one for one in self._idle if one[0] not in sessions]
            self.exist -= sum(len(loan.buffers) for loan in ended)
        _end(ended)


def _end(loans: Iterable[Loan]) -> None:
    for loan in loans:
        if loan.segment is not None:
            loan.segment.end()
