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
from kvatlas.wire.protocol import new_key

Released = Callable[[str, str], None]
"""Called with a request and why it was released: `read`, `expired`, `withdrawn`, `closed`."""

_MOST = 1 << 16
"""Leases that may be open at once: a peer cannot make this process keep more."""

_MOST_RUNS = 1 << 24
"""Runs that all open leases may have together, for the same reason."""


@dataclass
class Offer:
    """Blocks of a finished request, kept as they are until they were read or time is up."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    expires: float
    released: Released | None = None
    readers: set[tuple[bytes, int]] = field(default_factory=set)
    """Destinations that have read all of it: the hash of a plan, and a rank of it."""


@dataclass
class Expected:
    """Blocks that wait for a request to be pushed into them."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    source: bytes
    """The hash of the plan that it comes from."""
    sources: frozenset[int]
    """Ranks of that plan that all have to arrive."""
    arrived: set[int] = field(default_factory=set)
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass
class Lease:
    """One transfer's right to the blocks of one request."""

    key: bytes
    session: bytes
    request: str
    way: str
    peer_rank: int
    whole: bool
    """Whether it covers the whole offer, every layer of it."""
    copies: tuple[Copy, ...]
    slots: tuple[int, ...]
    expires: float
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while this process copies for it: it ends before or after, never during."""

    @property
    def held(self) -> bool:
        """Whether it has not expired."""
        return time.monotonic() < self.expires

    @property
    def left(self) -> float:
        """Seconds until it expires."""
        return max(0.0, self.expires - time.monotonic())


class Leases:
    """All leases of a process; every access is guarded."""

    def __init__(self, ended: Callable[[Lease], None]) -> None:
        self._open: dict[bytes, Lease] = {}
        self._runs = 0
        self._ended = ended
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def add(self, seconds: float, **about: Any) -> Lease:
        """A new lease of so many seconds."""
        lease = Lease(key=new_key(), expires=time.monotonic() + seconds, **about)
        runs = sum(map(len, lease.copies))
        with self._lock:
            if len(self._open) >= _MOST or self._runs + runs > _MOST_RUNS:
                raise AtlasError(
                    Code.TOO_MANY,
                    f"At most {_MOST:,} transfers of {_MOST_RUNS:,} runs are open at once",
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
                "A transfer holds a lease while it runs",
                got="a lease that is over, or was never given",
                hint="Open the transfer again, for longer",
            )
        return lease

    def renew(self, lease: Lease, seconds: float) -> None:
        """Make a lease last at least so many seconds from now."""
        lease.expires = max(lease.expires, time.monotonic() + seconds)

    def drop(self, lease: Lease) -> None:
        """End a lease; what is being copied for it is over when this returns."""
        with self._lock:
            found = self._open.pop(lease.key, None)
            self._runs -= sum(map(len, found.copies)) if found is not None else 0
        if found is not None:
            with found.guard:
                self._ended(found)

    def sweep(self) -> None:
        """Forget leases that have expired."""
        with self._lock:
            over = [lease for lease in self._open.values() if not lease.held]
        for lease in over:
            self.drop(lease)

    def drop_request(self, request: str, way: str) -> None:
        """End all leases of a request that go one way: it may be offered and expected at once."""
        with self._lock:
            mine = [one for one in self._open.values() if (one.request, one.way) == (request, way)]
        for lease in mine:
            self.drop(lease)

    def drop_all(self, sessions: set[bytes] | None = None) -> None:
        """End all leases, or those of some sessions."""
        with self._lock:
            every = list(self._open.values())
        for lease in every:
            if sessions is None or lease.session in sessions:
                self.drop(lease)
