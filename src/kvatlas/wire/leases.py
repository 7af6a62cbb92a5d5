"""Offers, expectations and leases: who may touch which blocks, and until when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.wire.block_ledger import BlockClaim
from kvatlas.wire.peers import Peer
from kvatlas.wire.protocol import Direction, new_key
from kvatlas.wire.stream_copy import AnyStream
from kvatlas.wire.transports.base import Handle

Released = Callable[[str, str], None]
"""Called with a request and why: `read`, `let_go`, `expired`, `withdrawn` or `closed`."""

_MAX_LEASES = 1 << 16
"""Leases that may be open at once: a peer cannot make this process keep more."""

_MAX_ENTRIES = 1 << 24
"""Entries that the block tables of all open leases may have together, for the same reason."""


@dataclass
class Held:
    """Blocks of a request's tokens that peers may read or write."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    claim: BlockClaim | None = field(default=None, kw_only=True)
    """The claim on the blocks in the node's ledger; None for an offer of a peer."""
    identity: CacheIdentity | None = field(default=None, kw_only=True)
    """The identity of the cache; None if the node compares no identities."""

    def release_blocks(self) -> None:
        """Let other operations of the node use the blocks."""
        if self.claim is not None:
            self.claim.release()

    def check_asked(self, tokens: tuple[int, int], told: Mapping[int, Int64s], plan: Plan) -> None:
        """Refuse tokens that are not held, and a peer that means other blocks by the request."""
        for group, ids in told.items():
            mine = self.blocks.get(group)
            kept = mine >= 0 if mine is not None and len(ids) == len(mine) else None
            if mine is None or kept is None or not np.array_equal(ids[kept], mine[kept]):
                raise AtlasError(
                    Code.UNKNOWN_REQUEST,
                    "The two ends mean different blocks by the request",
                    got=f"other blocks for group {group}",
                    hint="Leave the peer's blocks out to be told them",
                )
        # A lone recurrent state is the one after the last token.
        alone = any(
            group.kind == "recurrent" and len(self.blocks.get(index, ())) == 1
            for index, group in enumerate(plan.groups)
        )
        start, stop = tokens
        if not self.start <= start <= stop <= self.stop or (alone and stop != self.stop):
            raise AtlasError(
                Code.BAD_TOKENS,
                f"The tokens are not among {self.start}..{self.stop}"
                + (", or do not end with the last, whose state is the one kept" if alone else ""),
                got=(start, stop),
                hint="Ask for what is offered",
            )


class WrittenLayers:
    """Layers of an offer that have been written, each with its mark."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._written: dict[str, int | None] = {}
        self._changed = threading.Condition()

    def add(self, layer: str, mark: int | None) -> None:
        """A layer has been written, once what was marked is done."""
        with self._changed:
            if layer not in self._names or layer in self._written:
                problem = "There is no such layer, or it was written before"
                hint = "Name each layer of the node's plan once"
                raise AtlasError(Code.UNKNOWN_LAYER, problem, got=repr(layer)[:300], hint=hint)
            self._written[layer] = mark
            self._changed.notify_all()

    def wait(self, layer: str, seconds: float) -> tuple[bool, int | None]:
        """Whether a layer is written within so many seconds, and its mark."""
        with self._changed:
            written = self._changed.wait_for(lambda: layer in self._written, seconds)
            return written, self._written.get(layer)


@dataclass
class Offer(Held):
    """Blocks of a finished request, kept as they are until they are read or the offer expires."""

    expires: float
    released: Released | None = None
    readers: frozenset[str] | None = None
    """Names of the nodes that may read it; None for any."""
    read_by: set[tuple[bytes, int]] = field(default_factory=set)
    """Destinations that read no more of it: the hash of a plan, and a rank of it."""
    let_go_by: set[tuple[bytes, int]] = field(default_factory=set)
    """Those of them that have not said that they had read it, or cannot have."""
    mark: int | None = None
    """Behind which the blocks hold what they shall, where they are on a GPU."""
    layers: WrittenLayers | None = None
    """Those that are written already; None where all are."""

    def may_be_read_by(self, name: str) -> bool:
        """Whether a node of this name may read it."""
        return self.readers is None or name in self.readers


@dataclass
class Expected(Held):
    """Blocks into which a request is to be pushed."""

    source: bytes
    """The hash of the plan that it comes from."""
    sources: frozenset[int]
    """Ranks of that plan that all have to push."""
    pushers: frozenset[str]
    """Names of the nodes that may push."""
    current: dict[int, bytes] = field(default_factory=dict)
    """The key of each source rank's newest lease; an older lease of the rank is fenced."""
    arrived: set[int] = field(default_factory=set)
    """Source ranks whose bytes are complete. An arrived rank is not pushed again."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set once this node has itself put every byte of every source where it belongs."""
    mark: int | None = None
    """Behind which the blocks may be written, where they are on a GPU."""

    @property
    def complete(self) -> bool:
        """Whether all sources have arrived."""
        return self.sources <= self.arrived

    def may_be_pushed_by(self, peer: Peer) -> bool:
        """Whether a peer may begin to push its part."""
        if peer.plan_hash != self.source or peer.name not in self.pushers:
            return False
        return peer.rank not in self.arrived


class LeaseRead:
    """One read into a lease's buffers, which are in use from before it is posted."""

    def __init__(self) -> None:
        self._over = False
        self._posted: Handle | None = None

    def run(self, post: Callable[[], Handle], deadline: float, check: Callable[[], None]) -> None:
        """Post it and wait; `check` is called meanwhile, and what it raises ends the wait."""
        try:
            self._posted = post()
        finally:
            self._over = self._posted is None
        try:
            self._posted.wait(deadline, check)
        finally:
            self._posted.release()

    def settle(self) -> bool:
        """Whether nothing can be read into the buffers any more."""
        return self._over or (self._posted is not None and self._posted.settle())


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
    stream: AnyStream
    entries: int
    """Entries of the block tables that it keeps."""
    expires: float
    buffers: list[int] = field(default_factory=list)
    """Staging buffers of this process that are the lease's own."""
    gathered: int = 0
    """Bytes from the first on of a pulled stream that this process has gathered for its reader."""
    fetched: int = 0
    """Bytes of a pushed stream that this process has read and put into the blocks."""
    received: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums of its pieces as they came, where they were converted before they were put."""
    reads: list[LeaseRead] = field(default_factory=list)
    """What this process is reading into those buffers."""
    sever: Callable[[], None] = lambda: None
    """Tears down the link that those reads go over."""
    part_of: Held | None = None
    """The offer or expectation that it was granted for. A later one may have the same name."""
    over: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while this process touches blocks or buffers for the lease, which cannot end then."""

    @property
    def held(self) -> bool:
        """Whether it has neither ended nor expired."""
        return not self.over and time.monotonic() < self.expires

    @property
    def left(self) -> float:
        """Seconds until it expires."""
        return max(0.0, self.expires - time.monotonic())

    def check(self) -> None:
        """Refuse a lease that is no longer held."""
        if not self.held:
            raise lease_expired()

    def check_all_moved(self, moved: int) -> None:
        """Refuse to call a transfer complete of which so many bytes have moved, and not all."""
        if moved != self.stream.nbytes:
            problem = f"A {self.direction} was called complete before all of it had moved"
            got = f"{moved:,} of {self.stream.nbytes:,} bytes"
            hint = "Have every piece gathered or fetched first"
            raise AtlasError(Code.BAD_HANDSHAKE, problem, got=got, hint=hint)


def lease_expired() -> AtlasError:
    """The lease has ended, or there never was one."""
    return AtlasError(
        Code.LEASE_EXPIRED,
        got="a lease that has expired, was closed, or was never granted",
        hint="Open the transfer again, for longer",
    )


class Leases:
    """All leases of a process; any thread may use them.

    Locks are taken in one order: a lease's guard, then the node's lock, then those of leases,
    sessions, routes and staging buffers, under which nothing else is taken. Nothing that waits
    for a peer, binds or compiles is done under any of them, but copies under a guard.
    """

    def __init__(self, ended: Callable[[Lease], None]) -> None:
        self._open: dict[bytes, Lease] = {}
        self._entries = 0
        self._ended = ended
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def grant(self, seconds: float, **fields: Any) -> Lease:
        """A new lease of so many seconds."""
        lease = Lease(key=new_key(), expires=time.monotonic() + seconds, **fields)
        with self._lock:
            if len(self._open) >= _MAX_LEASES or self._entries + lease.entries > _MAX_ENTRIES:
                raise AtlasError(
                    Code.TOO_MANY,
                    f"Too many transfers are open: {_MAX_LEASES:,}, and {_MAX_ENTRIES:,} blocks "
                    "in all, are the most",
                    got=f"one more of {lease.entries:,} blocks",
                    hint="Close transfers, or wait until their leases expire",
                )
            self._open[lease.key] = lease
            self._entries += lease.entries
        return lease

    def find(self, key: bytes, session: bytes) -> Lease:
        """A lease of this session that is still held."""
        with self._lock:
            lease = self._open.get(key)
        if lease is None or lease.session != session or not lease.held:
            raise lease_expired()
        return lease

    def renew(self, lease: Lease, seconds: float) -> None:
        """Extend a lease to at least so many seconds from now."""
        lease.expires = max(lease.expires, time.monotonic() + seconds)

    def fence(self, newer: Lease) -> list[Lease]:
        """End older leases of the part that a new lease writes, and return them.

        From now on they are refused. A copy that is in progress for one of them is over once
        `drop` has returned, which the caller must call without holding a lock.
        """
        with self._lock:
            part = (newer.request, newer.direction, newer.peer_rank)
            older = [
                lease
                for lease in self._open.values()
                if lease is not newer and (lease.request, lease.direction, lease.peer_rank) == part
            ]
        for lease in older:
            lease.over = True
        return older

    def drop(self, lease: Lease) -> None:
        """End a lease. When this returns, no copy is in progress for it.

        Several threads may drop one lease at once: it stays listed until its copy is over, so
        that each of them waits for the copy.
        """
        lease.over = True
        with lease.guard, self._lock:
            if self._open.pop(lease.key, None) is None:
                return
            self._entries -= lease.entries
        self._ended(lease)

    def sweep(self) -> None:
        """End leases that have expired."""
        self._drop_where(lambda lease: not lease.held)

    def drop_part(self, held: Held) -> None:
        """End all leases of an offer or an expectation, and none of another with its name."""
        self._drop_where(lambda lease: lease.part_of is held)

    def drop_all(self, sessions: set[bytes] | None = None) -> None:
        """End all leases, or those of some sessions."""
        self._drop_where(lambda lease: sessions is None or lease.session in sessions)

    def _drop_where(self, chosen: Callable[[Lease], bool]) -> None:
        with self._lock:
            leases = [lease for lease in self._open.values() if chosen(lease)]
        for lease in leases:
            self.drop(lease)
