"""Leases, which allow a peer to read the blocks of a request for a limited time."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.byte_ranges import ByteRanges, source_ranges
from kvatlas.wire.encoding import BusyError
from kvatlas.wire.offers import Offer
from kvatlas.wire.protocol import bad_handshake, new_key
from kvatlas.wire.staging import Loan
from kvatlas.wire.transports.access import SESSION_BYTES, AskedRead

_MAX_LEASES = 1 << 16
"""The maximum number of open leases, so that peers cannot exhaust this process's memory."""

_MAX_ENTRIES = 1 << 24
"""The maximum number of block table entries over all open leases, for the same reason."""

_MAX_LEASES_OF_PEER = 1 << 10
"""The maximum number of open leases of one peer."""

_BUSY_SECONDS = 0.25
"""Seconds after which a peer with too many leases may ask again."""

_FINISHING = 0.05
"""Seconds that a send in progress may continue after its lease has ended."""

_NONE = 0, 0

PeerKey = tuple[str, str]
"""The key of a peer in quotas: (its host, certificate or process, its node name)."""


def session_id(key: bytes) -> bytes:
    """Return the id that data connections send instead of the secret key of their session."""
    return hashlib.blake2b(key, digest_size=SESSION_BYTES, person=b"kvatlas session").digest()


@dataclass(eq=False)
class Lease:
    """One transfer's right to use the blocks of one request."""

    key: bytes
    session: bytes
    request: str
    complete: bool
    """Whether the lease covers all tokens and all layers of the offer."""
    stream: AnyStream
    entries: int
    """The number of block table entries in the lease."""
    expires: float
    peer: PeerKey = ("", "")
    names: frozenset[str] | None = None
    """The node names that the peer's key proves; None if the peer may use any name."""
    part_of: Offer | None = None
    """The offer that the lease was granted for. A later offer may have the same name."""
    loan: Loan | None = None
    """Staging buffers of this process that are lent to the lease."""
    borrowing: bool = False
    """Whether a `Borrow` of the peer is waiting for buffers."""
    lent_at: float = 0.0
    asked_at: float = field(default_factory=time.monotonic)
    """When the peer last asked a question about the lease (monotonic clock)."""
    moved_at: float = field(default_factory=time.monotonic)
    """When the lease last made progress: new bytes were gathered or checked."""
    reclaimed: bool = False
    """Whether the lease's staging buffers were given to another peer."""
    staged: bool = False
    """Whether any bytes were gathered into the staging buffers."""
    gathered: int = 0
    """How many leading bytes of the stream this process has gathered for the reader."""
    over: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Locked while this process accesses blocks or buffers for the lease.

    The lease cannot end while the lock is held.
    """
    _sends: dict[object, Callable[[], None]] = field(default_factory=dict)
    """For each send of a transport in progress, the function that ends its connection."""
    _sends_changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def buffers(self) -> tuple[int, ...]:
        """The indices of the staging buffers that are lent to this lease."""
        return () if self.loan is None else self.loan.buffers

    @property
    def held(self) -> bool:
        """Whether the lease has neither ended nor expired."""
        return not self.over and time.monotonic() < self.expires

    @property
    def left(self) -> float:
        """The seconds until the lease expires; 0 if it has expired."""
        return max(0.0, self.expires - time.monotonic())

    def check(self) -> None:
        """Raise `lease_expired` if the lease has ended or expired."""
        if not self.held:
            raise lease_expired()

    def keep_loan(self, loan: Loan) -> None:
        """Record that these staging buffers are now lent to the lease."""
        self.loan = loan
        self.lent_at = self.moved_at = time.monotonic()

    def check_lent(self) -> Loan:
        """Return the lent buffers. Raise an error if they were reclaimed or never borrowed."""
        if self.reclaimed:
            raise buffers_reclaimed()
        if self.loan is None:
            problem = "The peer uses a staging buffer that it has not borrowed"
            raise bad_handshake("a lease without buffers", problem)
        return self.loan

    def check_all_gathered(self) -> None:
        """Raise an error unless this node has gathered every byte of the stream."""
        if self.gathered != self.stream.nbytes:
            raise bad_handshake(
                f"{self.gathered:,} of {self.stream.nbytes:,} bytes",
                "The peer closed a pull as complete before all its bytes were gathered",
                "Send Gather for every piece before Close(complete=True)",
            )

    # -- reads that a transport authorises ------------------------------------------------

    @contextmanager
    def reading(self, asked: AskedRead) -> Iterator[None]:
        """Allow a read during the `with` block. Raise an error if the lease does not cover it."""
        same_session = hmac.compare_digest(asked.session, session_id(self.session))
        if not same_session or (self.names is not None and asked.names != self.names):
            raise lease_expired()
        send = object()
        with self._sends_changed:
            self.check()
            self._sends[send] = asked.hang_up
        try:
            # Recorded before the check, so that whoever reclaims the buffers waits for this send.
            self._check_covered(asked)
            yield
        finally:
            with self._sends_changed:
                del self._sends[send]
                self._sends_changed.notify_all()

    def end_sends(self) -> None:
        """End the sends in progress. When this returns, each later read is checked anew.

        If a peer does not receive the bytes of a send in time, the peer's connection is closed.
        """
        with self._sends_changed:
            if self._sends_changed.wait_for(lambda: not self._sends, _FINISHING):
                return
            for hang_up in self._sends.values():
                hang_up()
            self._sends_changed.wait_for(lambda: not self._sends)

    @cached_property
    def _stream_ranges(self) -> dict[int, ByteRanges]:
        return source_ranges(self.stream)

    def _readable(self, region: int) -> ByteRanges | None:
        """Return the byte ranges that the peer may read in a region; None if it may read none."""
        if region != STAGING:
            return self._stream_ranges.get(region)
        if self.reclaimed:
            raise buffers_reclaimed()
        if (loan := self.loan) is None:
            return None
        at = np.array(loan.buffers, dtype=np.int64) * loan.piece
        return ByteRanges.of(at, at + loan.piece)

    def _check_covered(self, asked: AskedRead) -> None:
        ranges = self._readable(asked.region)
        if ranges is None or not ranges.cover(asked.starts, asked.lengths):
            raise AtlasError(
                Code.FORBIDDEN,
                "The lease does not cover these bytes",
                got=f"{len(asked.starts)} runs of region {asked.region}, "
                f"the first at byte {int(asked.starts.min()):,}",
                hint="Read only the blocks of the request, and staging buffers that the lease has "
                "borrowed",
            )


def lease_expired() -> AtlasError:
    """Return the error for a lease that has ended or never existed."""
    return AtlasError(
        Code.LEASE_EXPIRED,
        got="a lease that is not open",
        hint="Retry with a larger timeout=",
    )


def buffers_reclaimed() -> AtlasError:
    """Return the error for a transfer whose staging buffers were given to another peer."""
    return AtlasError(
        Code.BUFFERS_RECLAIMED,
        got="a transfer that made no progress while other peers waited for buffers",
        hint="Retry the transfer, or pass a larger buffers= to the source node",
    )


class Leases:
    """All leases of a process. Any thread may use them.

    Locks are taken in this order: a lease's guard, then the node's lock, then one of the locks of
    leases, sessions, routes and staging buffers. Copies run while a guard is held. No thread waits
    for a peer, binds or compiles while it holds one of these locks.
    """

    def __init__(self, ended: Callable[[Lease], None]) -> None:
        self._open: dict[bytes, Lease] = {}
        self._counts: dict[PeerKey | str | None, tuple[int, int]] = {}
        """(Leases, block table entries) of each peer, of each host, and of all peers (key None)."""
        self._ended = ended
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def grant(self, seconds: float, **fields: Any) -> Lease:
        """Grant a new lease for `seconds`."""
        lease = Lease(key=new_key(), expires=time.monotonic() + seconds, **fields)
        with self._lock:
            self._check_quotas(lease)
            self._open[lease.key] = lease
            self._count(lease, 1)
        return lease

    def _check_quotas(self, new: Lease) -> None:
        """Raise `too_many` if the leases of all peers would exceed the node's limits.

        Raise `busy` if the leases of this peer, or of all peers on its host, exceed their limits.
        """
        count, entries = self._counts.get(None, _NONE)
        if count >= _MAX_LEASES or entries + new.entries > _MAX_ENTRIES:
            raise AtlasError(
                Code.TOO_MANY,
                f"A node allows at most {_MAX_LEASES:,} open leases, with at most "
                f"{_MAX_ENTRIES:,} block table entries in total",
                got=f"{count:,} open leases with {entries:,} entries, and a request for a lease "
                f"with {new.entries:,} entries",
                hint="Wait until other transfers from this node have ended",
            )
        of_peer, kept = self._counts.get(new.peer, _NONE)
        of_host, _ = self._counts.get(new.peer[0], _NONE)
        full = of_peer >= _MAX_LEASES_OF_PEER or of_host >= _MAX_LEASES // 2
        if full or (kept and kept + new.entries > _MAX_ENTRIES // 2):
            raise BusyError(
                f"a peer with {of_peer:,} open transfers (limit {_MAX_LEASES_OF_PEER:,}) and "
                f"{kept:,} block table entries (limit {_MAX_ENTRIES // 2:,}), whose host has "
                f"{of_host:,} open transfers (limit {_MAX_LEASES // 2:,})",
                _BUSY_SECONDS,
            )

    def _count(self, lease: Lease, step: int) -> None:
        """Add a lease to the counts (`step` 1) or remove it (-1).

        There is one count for all leases, one for each peer and one for each host.
        """
        scopes: tuple[PeerKey | str | None, ...] = (None, lease.peer, lease.peer[0])
        for whose in scopes:
            count, entries = self._counts.get(whose, _NONE)
            self._counts[whose] = count + step, entries + step * lease.entries
            if not self._counts[whose][0]:
                del self._counts[whose]  # so that disconnected peers use no memory

    def find(self, key: bytes, session: bytes | None = None) -> Lease:
        """Return the open lease with this key, or raise `lease_expired`.

        If `session` is given, the lease must also belong to that session.
        """
        with self._lock:
            lease = self._open.get(key)
        if lease is None or session not in (None, lease.session) or not lease.held:
            raise lease_expired()
        return lease

    def renew(self, lease: Lease, seconds: float) -> None:
        """Extend a lease to `seconds` from now, but not beyond the end of its offer.

        To extend the offer too, call `Offer.keep` first.
        """
        latest = math.inf if lease.part_of is None else lease.part_of.expires
        lease.expires = max(lease.expires, min(time.monotonic() + seconds, latest))

    def drop(self, lease: Lease) -> None:
        """End a lease. When this returns, no copy and no send is in progress for it.

        Several threads may drop one lease at once. The lease stays listed until its copy is over,
        so that each thread waits for the copy.
        """
        lease.over = True
        with lease.guard:
            lease.end_sends()
            with self._lock:
                if self._open.pop(lease.key, None) is None:
                    return
                self._count(lease, -1)
        self._ended(lease)

    def sweep(self) -> None:
        """End leases that have expired."""
        self._drop_where(lambda lease: not lease.held)

    def drop_part(self, offer: Offer) -> None:
        """End all leases of this offer. A newer offer with the same name keeps its leases."""
        self._drop_where(lambda lease: lease.part_of is offer)

    def drop_all(self, sessions: set[bytes] | None = None) -> None:
        """End all leases, or the leases of the given sessions."""
        self._drop_where(lambda lease: sessions is None or lease.session in sessions)

    def _drop_where(self, chosen: Callable[[Lease], bool]) -> None:
        with self._lock:
            leases = [lease for lease in self._open.values() if chosen(lease)]
        for lease in leases:
            self.drop(lease)
