"""Offers, expectations and leases: who may touch which blocks, and until when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.protocol import Direction, new_key

Released = Callable[[str, str], None]
"""Called with a request and why it was released: `read`, `expired`, `withdrawn`, `closed`."""

_MAX_LEASES = 1 << 16
"""Leases that may be open at once: a peer cannot make this process keep more."""

_MAX_RUNS = 1 << 24
"""Runs that all open leases may have together, for the same reason."""


@dataclass
class Held:
    """Blocks of a request's tokens that peers may read or write."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int


@dataclass
class Offer(Held):
    """Blocks of a finished request, kept as they are until they are read or the offer expires."""

    expires: float
    released: Released | None = None
    readers: set[tuple[bytes, int]] = field(default_factory=set)
    """Destinations that have read all of it: the hash of a plan, and a rank of it."""


@dataclass
class Expected(Held):
    """Blocks into which a request is to be pushed."""

    source: bytes
    """The hash of the plan that it comes from."""
    sources: frozenset[int]
    """Ranks of that plan that all have to push."""
    arrived: set[int] = field(default_factory=set)
    ready: threading.Event = field(default_factory=threading.Event)

    def wants(self, source: bytes) -> bool:
        """Whether ranks of the plan with this hash may still push."""
        return self.source == source and not self.ready.is_set()


@dataclass
class Lease:
    """One transfer's right to the blocks of one request."""

    key: bytes
    session: bytes
    request: str
    direction: Direction
    peer_rank: int
    complete: bool
    """Whether it covers all that is offered or expected, every layer of it."""
    copies: tuple[Copy, ...]
    buffers: tuple[int, ...]
    """Staging buffers of this process that are the lease's own."""
    expires: float
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while this process copies for the lease, which cannot end meanwhile."""

    @property
    def held(self) -> bool:
        """Whether it has not expired."""
        return time.monotonic() < self.expires

    @property
    def left(self) -> float:
        """Seconds until it expires."""
        return max(0.0, self.expires - time.monotonic())


class Leases:
    """All leases of a process; any thread may use them."""

    def __init__(self, ended: Callable[[Lease], None]) -> None:
        self._open: dict[bytes, Lease] = {}
        self._runs = 0
        self._ended = ended
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def grant(self, seconds: float, **fields: Any) -> Lease:
        """A new lease of so many seconds."""
        lease = Lease(key=new_key(), expires=time.monotonic() + seconds, **fields)
        runs = sum(map(len, lease.copies))
        with self._lock:
            if len(self._open) >= _MAX_LEASES or self._runs + runs > _MAX_RUNS:
                raise AtlasError(
                    Code.TOO_MANY,
                    f"Too many transfers are open: {_MAX_LEASES:,} of {_MAX_RUNS:,} runs in all "
                    "is the most",
                    got=f"one more of {runs:,} runs",
                    hint="Close transfers, or wait until their leases expire",
                )
            self._open[lease.key] = lease
            self._runs += runs
        return lease

    def find(self, key: bytes, session: bytes) -> Lease:
        """A lease of this session that is still held."""
        with self._lock:
            lease = self._open.get(key)
        if lease is None or lease.session != session or not lease.held:
            raise AtlasError(
                Code.LEASE_EXPIRED,
                got="a lease that has expired, was closed, or was never granted",
                hint="Open the transfer again, for longer",
            )
        return lease

    def renew(self, lease: Lease, seconds: float) -> None:
        """Extend a lease to at least so many seconds from now."""
        lease.expires = max(lease.expires, time.monotonic() + seconds)

    def drop(self, lease: Lease) -> None:
        """End a lease; what is being copied for it is over when this returns."""
        with self._lock:
            if self._open.pop(lease.key, None) is None:
                return
            self._runs -= sum(map(len, lease.copies))
        with lease.guard:
            self._ended(lease)

    def sweep(self) -> None:
        """End leases that have expired."""
        self._drop_where(lambda lease: not lease.held)

    def drop_request(self, request: str, direction: Direction) -> None:
        """End all leases of a request in one direction: it may be offered and expected at once."""
        self._drop_where(lambda lease: (lease.request, lease.direction) == (request, direction))

    def drop_all(self, sessions: set[bytes] | None = None) -> None:
        """End all leases, or those of some sessions."""
        self._drop_where(lambda lease: sessions is None or lease.session in sessions)

    def _drop_where(self, chosen: Callable[[Lease], bool]) -> None:
        with self._lock:
            leases = [lease for lease in self._open.values() if chosen(lease)]
        for lease in leases:
            self.drop(lease)
