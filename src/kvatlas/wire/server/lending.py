"""Lend staging buffers to peers in fair shares, and reclaim them from peers without progress.

A lease borrows all its buffers at once. If several peers wait, the peer with the fewest buffers is
served first. Among peers with the same number of buffers, the one that asked first is served first.
A single peer may use all buffers.

While a peer waits, buffers are reclaimed from a lease that is *overdue*: its peer has been silent,
has not used the buffers, or moves no bytes (`_is_overdue`). If no lease is overdue and the waiting
peer has no buffer, a peer that uses more than its share in several leases loses the buffers of the
newest of these leases.

The peer of a reclaimed lease may be a stopped process that later continues, in the middle of a
read. Three rules ensure that it never mistakes another lease's bytes for its own:

1. The node reclaims under the lease's guard. So no copy for the lease is in progress, and
   none begins afterwards: `Gather` checks the loan under the guard.
2. The node lends the buffers to another lease only after it has marked the lease as reclaimed.
3. The reader sends `Close` after its last read, and its transfer is ready only when the node has
   answered with success. The node refuses `Close` for a lease that was reclaimed after a `Gather`.

If `Close` succeeds, the lease was not reclaimed before `Close` (3), so no other lease had the
buffers until then (2). Each piece that was read is therefore the one that the node had gathered for
this lease (1). The reader opens a new lease after a refusal and starts over. A lease that was
reclaimed before its first `Gather` has read no bytes from its buffers, so it may still read the
pools and succeed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import NamedTuple

from kvatlas.wire.leases import Lease, PeerKey
from kvatlas.wire.rpc import log
from kvatlas.wire.staging import Loan, PeerSegments, StagingBuffers

_SILENT_SECONDS = 2.0
"""A lease is overdue if its peer sends no request for this time. Readers send one per second."""
_UNUSED_SECONDS = 2.0
"""A lease is overdue if it has not used its buffers for this time."""
_STUCK_SECONDS = 10.0
"""A lease is overdue if it moves no new bytes for this time, whatever its peer sends."""
_SLOWEST = 256 << 10
"""Bytes per second below which a lease is overdue, after `_STUCK_SECONDS`."""
_PATIENCE = 1.0
"""Seconds that a peer without buffers waits before a peer above its share loses some."""
_FRESH = 0.4
"""Seconds for which a peer counts as waiting after it asked: it asks again every 0.2 s."""
_LOOK_SECONDS = 0.05
_PER_LEASE = 2
"""The number of buffers that one lease may borrow, or half of all buffers if that is more."""


class _Wish(NamedTuple):
    """The times at which a peer began to wait for buffers, and at which it last asked for them."""

    since: float
    last: float


class Lending:
    """Lends a node's staging buffers to peers, at most `count` at once. Any thread may use it."""

    def __init__(self, buffers: StagingBuffers | PeerSegments, count: int) -> None:
        self.buffers, self.count = buffers, count
        self._held: dict[Lease, int] = {}
        """Leases with buffers, and how many each has."""
        self._wishes: dict[PeerKey, _Wish] = {}
        self._changed = threading.Condition()

    @property
    def lent(self) -> int:
        """The number of buffers that are lent."""
        with self._changed:
            return sum(self._held.values())

    def lend(self, lease: Lease, count: int, timeout: float) -> Loan | None:
        """Lend buffers to a lease until the lease ends. Return the loan.

        Wait up to `timeout` seconds for free buffers. Return None if no buffer became free, or if
        an earlier call for the same lease is still waiting.
        """
        with lease.guard:
            if lease.loan is not None or lease.reclaimed:
                return lease.check_lent()
            if lease.borrowing or not self.count:
                return None
            lease.borrowing = True
        try:
            loan = self._wait_for(lease, count, timeout)
            with lease.guard:
                if loan is not None and lease.held:
                    lease.keep_loan(loan)
                    return loan
        finally:
            lease.borrowing = False
        if loan is not None:
            self._take_back(lease, loan, keep=False)
        lease.check()
        return None

    def end(self, lease: Lease) -> None:
        """Take back the staging buffers of an ended lease.

        With `PeerSegments`, the buffers are kept for the next transfer of the same session.
        """
        if lease.loan is not None:
            self._take_back(lease, lease.loan, keep=True)

    def reclaim(self, lease: Lease) -> None:
        """Take the staging buffers away from a lease that is still open, for another peer."""
        with lease.guard:
            if lease.over or lease.loan is None:
                return
            loan, lease.loan, lease.reclaimed = lease.loan, None, True
        lease.end_sends()
        log.warning("buffers reclaimed request=%r name=%r", lease.request, lease.peer[1])
        self._take_back(lease, loan, keep=False)

    def _wait_for(self, lease: Lease, count: int, timeout: float) -> Loan | None:
        """Wait up to `timeout` seconds for buffers. Return None if none became free."""
        count = min(count, max(_PER_LEASE, self.count // 2), self.count)
        until = time.monotonic() + timeout
        while True:
            with self._changed:
                now = time.monotonic()
                self._note_wish(lease.peer, now)
                if self._may_take(lease.peer, count):
                    self._held[lease] = count
                    del self._wishes[lease.peer]
                    break
                if now >= until:
                    return None
                late = self._overdue(lease.peer, now)
                if late is None:
                    self._changed.wait(min(until - now, _LOOK_SECONDS))
            if late is not None:
                self.reclaim(late)
        try:
            return self.buffers.lend(lease.session, count)
        except BaseException:
            self._returned(lease)
            raise

    def _take_back(self, lease: Lease, loan: Loan, *, keep: bool) -> None:
        self.buffers.take_back(lease.session, loan, keep=keep)
        self._returned(lease)

    def _returned(self, lease: Lease) -> None:
        with self._changed:
            self._held.pop(lease, None)
            self._changed.notify_all()

    # -- under the lock -------------------------------------------------------------------

    def _note_wish(self, peer: PeerKey, now: float) -> None:
        fresh = {who: one for who, one in self._wishes.items() if now - one.last < _FRESH}
        since = fresh[peer].since if peer in fresh else now
        self._wishes = {**fresh, peer: _Wish(since, now)}

    def _held_by_peer(self) -> Counter[PeerKey]:
        counts: Counter[PeerKey] = Counter()
        for lease, count in self._held.items():
            counts[lease.peer] += count
        return counts

    def _may_take(self, peer: PeerKey, count: int) -> bool:
        """Whether `count` buffers are free, not counting those reserved for peers with priority."""
        held = self._held_by_peer()
        free = self.count - sum(held.values())
        own = held[peer], self._wishes[peer].since
        first = sum((held[who], wish.since) < own for who, wish in self._wishes.items())
        return free >= count + min(_PER_LEASE, self.count) * first

    def _overdue(self, wanting: PeerKey, now: float) -> Lease | None:
        """Return the lease whose buffers the peer `wanting` should get; None if there is none."""
        leases = [lease for lease in self._held if lease.loan is not None]
        late = [lease for lease in leases if _is_overdue(lease, now)]
        if late:
            return min(late, key=lambda lease: lease.asked_at)
        held = self._held_by_peer()
        if held[wanting] or now - self._wishes[wanting].since < _PATIENCE:
            return None
        share = max(1, self.count // len({*held, *self._wishes}))
        several = Counter(lease.peer for lease in leases)
        above = [one for one in leases if several[one.peer] > 1 and held[one.peer] > share]
        return max(above, key=lambda lease: (held[lease.peer], lease.lent_at), default=None)


def _is_overdue(lease: Lease, now: float) -> bool:
    """Whether the peer of a lease is silent, has not used the buffers, or moves no bytes."""
    lent = now - lease.lent_at
    if now - lease.moved_at > _STUCK_SECONDS:
        return True
    if lent > _STUCK_SECONDS and lease.gathered < _SLOWEST * lent:
        return True
    return now - lease.asked_at > _SILENT_SECONDS or (lent > _UNUSED_SECONDS and not lease.gathered)
