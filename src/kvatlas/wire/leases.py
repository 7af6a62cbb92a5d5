"""Offers and leases: which peers may read which blocks, and until when."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.wire.block_ledger import BlockClaim
from kvatlas.wire.peer_buffers import Loan
from kvatlas.wire.protocol import new_key
from kvatlas.wire.read_grants import ReadGrant
from kvatlas.wire.refusals import BusyError, lease_expired

T = TypeVar("T")

Released = Callable[[str, str], None]
"""Called with a request and a reason: `read`, `let_go`, `expired`, `withdrawn` or `closed`."""

_MAX_LEASES = 1 << 16
"""The maximum number of open leases, so that peers cannot exhaust this process's memory."""

_MAX_ENTRIES = 1 << 24
"""The maximum number of block table entries over all open leases, for the same reason."""

_MAX_LEASES_OF_PEER = 1 << 10
"""The maximum number of open leases of one peer."""

_BUSY_SECONDS = 0.25
"""Seconds after which a peer with too many leases may ask again."""

PeerKey = tuple[str, str]
"""A peer as quotas count it: its host, certificate or process, and its name."""


@dataclass
class Held:
    """Blocks of a request's tokens that peers may read."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    claim: BlockClaim | None = field(default=None, kw_only=True)
    """The claim on the blocks in the node's ledger; None for an offer of a peer."""
    identity: CacheIdentity | None = field(default=None, kw_only=True)
    """The identity of the cache; None if the node compares no identities."""

    def release_blocks(self) -> None:
        """Release the claim, so that other operations of the node can use the blocks."""
        if self.claim is not None:
            self.claim.release()

    def check_asked(self, tokens: tuple[int, int], told: Mapping[int, Int64s], plan: Plan) -> None:
        """Raise an error if the tokens are not held, or the peer names other blocks for them."""
        for group, ids in told.items():
            mine = self.blocks.get(group)
            kept = mine >= 0 if mine is not None and len(ids) == len(mine) else None
            if mine is None or kept is None or not np.array_equal(ids[kept], mine[kept]):
                raise AtlasError(
                    Code.UNKNOWN_REQUEST,
                    "The given source blocks are not the blocks of the offer",
                    got=f"different block ids for group {group}",
                    hint="Omit src_blocks= to use the blocks of the offer",
                )
        # A lone recurrent state is the one after the last token.
        alone = any(
            group.kind == "recurrent" and len(self.blocks.get(index, ())) == 1
            for index, group in enumerate(plan.groups)
        )
        start, stop = tokens
        if not self.start <= start <= stop <= self.stop:
            problem = f"The tokens must be within those of the offer, {self.start}..{self.stop}"
            hint = "Request only tokens that the source offers"
            raise AtlasError(Code.BAD_TOKENS, problem, got=(start, stop), hint=hint)
        if alone and stop != self.stop:
            problem = (
                f"The tokens must end at {self.stop}: the offer has the recurrent state after its "
                "last token only"
            )
            hint = f"Pass tokens=({start}, {self.stop})"
            raise AtlasError(Code.BAD_TOKENS, problem, got=(start, stop), hint=hint)


class WrittenLayers:
    """The layers of an offer that are written, each with its mark."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._written: dict[str, int | None] = {}
        self._changed = threading.Condition()

    def add(self, layer: str, mark: int | None) -> None:
        """Record that a layer is written once its mark completes."""
        with self._changed:
            problem = ""
            if layer not in self._names:
                problem = "The node's plan has no such layer"
            elif layer in self._written:
                problem = "The layer was already marked as written"
            if problem:
                hint = "Call layer_written once per layer of the node's plan"
                raise AtlasError(Code.UNKNOWN_LAYER, problem, got=repr(layer)[:300], hint=hint)
            self._written[layer] = mark
            self._changed.notify_all()

    def wait(self, layer: str, seconds: float) -> tuple[bool, int | None]:
        """Wait up to `seconds` for a layer. Return whether it is written, and its mark."""
        with self._changed:
            written = self._changed.wait_for(lambda: layer in self._written, seconds)
            return written, self._written.get(layer)


@dataclass
class Offer(Held):
    """Blocks of a finished request, kept unchanged until they are read or the offer expires."""

    expires: float
    released: Released | None = None
    readers: frozenset[str] | None = None
    """Names of the nodes that may read it; None for any."""
    read_by: set[tuple[bytes, int]] = field(default_factory=set)
    """Destinations that have finished reading it, each as the hash of a plan and a rank."""
    let_go_by: set[tuple[bytes, int]] = field(default_factory=set)
    """Destinations in `read_by` that are not known to have read all of it."""
    mark: int | None = None
    """The mark after which the blocks hold their content, if they are on a GPU."""
    layers: WrittenLayers | None = None
    """The layers that are written; None if all of them are."""

    def may_be_read_by(self, name: str) -> bool:
        """Whether a node of this name may read the offer."""
        return self.readers is None or name in self.readers


@dataclass
class Lease:
    """One transfer's right to use the blocks of one request."""

    key: bytes
    session: bytes
    request: str
    complete: bool
    """Whether it covers everything that is offered, in every layer."""
    stream: AnyStream
    entries: int
    """The number of block table entries that it keeps."""
    expires: float
    peer: PeerKey = ("", "")
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
    """Whether the buffers were given to another peer."""
    staged: bool = False
    """Whether any piece was gathered into the buffers."""
    gathered: int = 0
    """Leading bytes of a pulled stream that this process has gathered for the reader."""
    grant: ReadGrant | None = None
    """The bytes that the peer may read, for transports that authorise each read."""
    part_of: Offer | None = None
    """The offer that it was granted for. A later offer may have the same name."""
    over: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while this process accesses blocks or buffers for the lease, which cannot end then."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """The staging buffers that are lent to it."""
        return () if self.loan is None else self.loan.buffers

    @property
    def held(self) -> bool:
        """Whether it has neither ended nor expired."""
        return not self.over and time.monotonic() < self.expires

    @property
    def left(self) -> float:
        """Seconds until it expires."""
        return max(0.0, self.expires - time.monotonic())

    def check(self) -> None:
        """Raise `lease_expired` if it is no longer held."""
        if not self.held:
            raise lease_expired()

    def buffers_lent(self) -> tuple[int, ...]:
        """Return the buffers that the peer may read, or raise an error if they were reclaimed."""
        if self.reclaimed:
            raise buffers_reclaimed()
        return self.buffers

    def keep_loan(self, loan: Loan) -> None:
        """Record the buffers that are lent to it from now on."""
        self.loan, self.lent_at = loan, time.monotonic()
        self.moved_at = self.lent_at

    def check_lent(self) -> Loan:
        """Return its buffers. Raise an error if they were reclaimed or never borrowed."""
        if self.loan is None:
            raise buffers_reclaimed() if self.reclaimed else _nothing_borrowed()
        return self.loan

    def check_all_gathered(self) -> None:
        """Raise an error if this process has gathered fewer bytes than the stream has."""
        if self.gathered != self.stream.nbytes:
            problem = "The peer closed a pull as complete before all its bytes were gathered"
            got = f"{self.gathered:,} of {self.stream.nbytes:,} bytes"
            hint = "Send Gather for every piece before Close(complete=True)"
            raise AtlasError(Code.BAD_HANDSHAKE, problem, got=got, hint=hint)


def buffers_reclaimed() -> AtlasError:
    """Return the error for a transfer whose staging buffers were given to another peer."""
    return AtlasError(
        Code.BUFFERS_RECLAIMED,
        got="a transfer that made no progress while other peers waited for buffers",
        hint="Retry the transfer, or pass a larger buffers= to the source node",
    )


def _nothing_borrowed() -> AtlasError:
    return AtlasError(
        Code.BAD_HANDSHAKE,
        "The peer uses a staging buffer that it has not borrowed",
        got="a lease without buffers",
        hint="Run the same version of kvatlas at both ends",
    )


class Leases:
    """All leases of a process. Any thread may use them.

    Locks are taken in one order: a lease's guard, then the node's lock, then those of leases,
    sessions, routes and staging buffers. No other lock is taken under the last group. Waiting for a
    peer, binding and compiling never happen under any of these locks; copies run under a guard.
    """

    def __init__(self, ended: Callable[[Lease], None]) -> None:
        self._open: dict[bytes, Lease] = {}
        self._of_peer: Counter[PeerKey] = Counter()
        self._of_host: Counter[str] = Counter()
        self._entries_of_peer: Counter[PeerKey] = Counter()
        self._entries = 0
        self._ended = ended
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def grant(self, seconds: float, **fields: Any) -> Lease:
        """Grant a new lease for `seconds`."""
        lease = Lease(key=new_key(), expires=time.monotonic() + seconds, **fields)
        with self._lock:
            hint = "Wait until other transfers from this node have ended"
            if len(self._open) >= _MAX_LEASES:
                problem = f"A node must not have more than {_MAX_LEASES:,} open leases"
                raise AtlasError(Code.TOO_MANY, problem, got="one more lease", hint=hint)
            if self._entries + lease.entries > _MAX_ENTRIES:
                problem = (
                    f"The open leases of a node must not have more than {_MAX_ENTRIES:,} block "
                    "table entries in total"
                )
                got = f"{self._entries:,} entries, and a new lease with {lease.entries:,}"
                raise AtlasError(Code.TOO_MANY, problem, got=got, hint=hint)
            self._check_quota(lease.peer, lease.entries)
            self._open[lease.key] = lease
            self._count(lease, 1)
        return lease

    def _check_quota(self, peer: PeerKey, entries: int) -> None:
        """Raise `busy` if a peer, or all peers of its host together, use up their share."""
        of_peer, of_host = self._of_peer[peer], self._of_host[peer[0]]
        if of_peer >= _MAX_LEASES_OF_PEER or of_host >= _MAX_LEASES // 2:
            got = (
                f"{of_peer:,} open transfers of this peer (limit {_MAX_LEASES_OF_PEER:,}), "
                f"{of_host:,} of its host (limit {_MAX_LEASES // 2:,})"
            )
            raise BusyError(got, _BUSY_SECONDS)
        held = self._entries_of_peer[peer]
        if held and held + entries > _MAX_ENTRIES // 2:
            got = (
                f"{held:,} + {entries:,} block table entries of this peer "
                f"(limit {_MAX_ENTRIES // 2:,})"
            )
            raise BusyError(got, _BUSY_SECONDS)

    def _count(self, lease: Lease, step: int) -> None:
        self._entries += step * lease.entries
        _add(self._entries_of_peer, lease.peer, step * lease.entries)
        _add(self._of_peer, lease.peer, step)
        _add(self._of_host, lease.peer[0], step)

    def find(self, key: bytes, session: bytes) -> Lease:
        """Return a lease of this session, or raise `lease_expired`."""
        with self._lock:
            lease = self._open.get(key)
        if lease is None or lease.session != session or not lease.held:
            raise lease_expired()
        return lease

    def read_grant(self, key: bytes) -> ReadGrant | None:
        """Return what a peer may read with the lease of this key; None if it has ended."""
        with self._lock:
            lease = self._open.get(key)
        return lease.grant if lease is not None and lease.held else None

    def renew(self, lease: Lease, seconds: float) -> None:
        """Extend a lease to at least `seconds` from now."""
        lease.expires = max(lease.expires, time.monotonic() + seconds)

    def drop(self, lease: Lease) -> None:
        """End a lease. When this returns, no copy and no send is in progress for it.

        Several threads may drop one lease at once: it stays listed until its copy is over, so
        that each of them waits for the copy.
        """
        lease.over = True
        with lease.guard:
            if lease.grant is not None:
                lease.grant.end()
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
        """End all leases, or those of the given sessions."""
        self._drop_where(lambda lease: sessions is None or lease.session in sessions)

    def _drop_where(self, chosen: Callable[[Lease], bool]) -> None:
        with self._lock:
            leases = [lease for lease in self._open.values() if chosen(lease)]
        for lease in leases:
            self.drop(lease)


def _add(counts: Counter[T], key: T, step: int) -> None:
    """Add `step` to a count. Delete counts of zero, so that gone peers take no memory."""
    counts[key] += step
    if not counts[key]:
        del counts[key]
