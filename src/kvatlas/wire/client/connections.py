"""Connections to peers: exchange hellos, check peers, and keep links open while in use."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

from kvatlas.copying.memory import STAGING, Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Costs
from kvatlas.wire.channels import PeerMonitor, no_answer
from kvatlas.wire.client.prepared_shapes import MakeStream, PreparedShapes
from kvatlas.wire.connection import endpoint_host
from kvatlas.wire.handshake_checks import Peer, checked_peer
from kvatlas.wire.leases import session_id
from kvatlas.wire.protocol import SendPlan, Welcome, bad_handshake
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.access import Access
from kvatlas.wire.transports.base import Link, Transport

PEER_GONE = {Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.DEADLINE, Code.WIRE_FAILED}
"""Error codes after which this node must connect again, because the peer may have restarted."""


_MAX_LENT = 16
"""The maximum number of links to staging segments that a peer has allocated for this node only."""

Way = Literal["direct", "staged", "coalesced"]


@dataclass(eq=False)
class PeerConnection:
    """A connected peer: the session with it, and the link to its memory."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    monitor: PeerMonitor
    """Detects the death of the peer while no transfer uses the connection."""
    stream: InitVar[MakeStream]
    background: ThreadPoolExecutor
    """Runs questions in the background during a transfer."""
    costs: dict[int, Costs] = field(default_factory=dict)
    """The measured costs of the link, by the length of the runs in bytes, a power of two."""
    measuring: threading.Lock = field(default_factory=threading.Lock)
    """Held by the transfer that measures the costs. Others wait, so they do not slow it down."""
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)
    """For each (number of runs, number of bytes), the fastest way to move them."""
    question_seconds: float = 0.0
    """How many seconds the peer takes to answer a question."""
    users: int = 0
    """The number of transfers that use the connection. It is not closed while there are any."""
    gone: bool = False

    def __post_init__(self, stream: MakeStream) -> None:
        self.shapes = PreparedShapes(self.link, stream)
        """The shapes of requests that were pulled over this link, for the fast path."""
        self._lent: dict[bytes, Link] = {}
        """Links to staging memory that the peer has allocated for this node only, by metadata."""
        self._lent_lock = threading.Lock()

    def costs_near(self, length: int) -> Costs | None:
        """Return measured costs for runs of about `length` bytes; None if there are none.

        The costs may have been measured with runs of `length`, `2 * length` or `length // 2` bytes.
        """
        near = (self.costs.get(one) for one in (length, 2 * length, length // 2))
        return next(filter(None, near), None)

    def link_to_lent(self, transport: Transport, memory: Memory, metadata: bytes) -> Link:
        """Return the link to staging memory that the peer has allocated for this node only."""
        with self._lent_lock:
            link = self._lent.get(metadata)
            if link is None:
                while len(self._lent) >= _MAX_LENT:  # the peer has most likely freed it
                    self._lent.pop(next(iter(self._lent))).close()
                link = transport.connect(metadata, {STAGING: memory})
                self._lent[metadata] = link
            return link

    def close(self) -> None:
        """Close all links to the peer."""
        with self._lent_lock:
            lent, self._lent = list(self._lent.values()), {}
        for link in (self.link, *lent):
            link.close()


class Connections:
    """Connections of a node to several endpoints. Any thread may use them.

    At most `most_idle` connections stay open while no transfer uses them.
    """

    def __init__(
        self, node: NodeState, background: ThreadPoolExecutor, most_idle: int = sys.maxsize
    ) -> None:
        self._node, self._background, self._most_idle = node, background, most_idle
        self._open: dict[str, PeerConnection] = {}
        """The open connections by endpoint. The most recently used is the last."""
        self._connecting: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.known: dict[str, Peer] = {}
        """The peers of a session, as they were at the first connection."""

    def find(self, endpoint: str) -> PeerConnection | None:
        """Return the current connection to an endpoint; None if there is none."""
        return self._open.get(endpoint)

    def close(self) -> None:
        """Close all links."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    @contextmanager
    def use(self, endpoint: str, deadline: float) -> Iterator[PeerConnection]:
        """Connect to a peer for one transfer, or share the open connection to the peer."""
        with self._lock:
            connecting = self._connecting.setdefault(endpoint, threading.Lock())
        if not connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise no_answer(endpoint)
        try:
            connection = self.take(endpoint)
            if connection is None:
                if (severed := self.find(endpoint)) is not None:
                    self.drop(severed)
                connection = self._connect(endpoint, deadline)
                connection.users = 1
                with self._lock:
                    self._open[endpoint] = connection
        finally:
            connecting.release()
        with self.using(connection):
            yield connection

    @contextmanager
    def using(self, connection: PeerConnection) -> Iterator[None]:
        """A context for one use of a connection, which calls `give_back` at the end.

        If an operation in the context finds that the peer was lost, later transfers open a new
        connection.
        """
        try:
            yield
        except AtlasError as refused:
            if refused.code in PEER_GONE:
                self.drop(connection)
            raise
        finally:
            self.give_back(connection)

    def drop(self, connection: PeerConnection) -> None:
        """Keep new transfers from using a connection, and close it once no transfer uses it."""
        with self._lock:
            connection.gone = True
            if self._open.get(connection.endpoint) is connection:
                del self._open[connection.endpoint]
            unused = not connection.users
        if unused:
            connection.close()

    def give_back(self, connection: PeerConnection) -> None:
        """End one transfer's use of a connection that `take` returned."""
        with self._lock:
            connection.users -= 1
            unused = [connection] if connection.gone and not connection.users else []
            idle = [one for one in self._open.values() if not one.users]
            unused += [self._open.pop(one.endpoint) for one in idle[: -self._most_idle]]
        for one in unused:
            one.close()

    def drop_lost(self) -> None:
        """Close unused connections, unless their peer is known to be alive."""
        with self._lock:
            idle = [one for one in self._open.values() if not one.users]
        for connection in idle:
            try:
                connection.monitor.check()
                alive = self._node.channels.has_idle(connection.endpoint)
            except AtlasError:
                alive = False
            if not alive:
                self.drop(connection)

    def take(self, endpoint: str) -> PeerConnection | None:
        """Return the open connection to an endpoint; None if there is none.

        The connection stays open until the caller passes it to `give_back`.
        """
        with self._lock:
            connection = self._open.get(endpoint)
            if connection is None or not connection.link.open:  # it was severed
                return None
            connection.users += 1
            self._open[endpoint] = self._open.pop(endpoint)
            return connection

    def _connect(self, endpoint: str, deadline: float) -> PeerConnection:
        """Exchange hellos with a peer, check its hello, and open a link to its memory."""
        node = self._node
        with node.metrics.phase("handshake"):
            hello, ask = node.hello(with_plan=False), node.channels.ask
            answer: Any = ask(endpoint, hello, (Welcome, SendPlan), deadline=deadline)
            if isinstance(answer, SendPlan):
                hello = node.hello(with_plan=True)
                answer = ask(endpoint, hello, (Welcome,), deadline=deadline)
            plan = node.peer_plans.find(answer.hello)
            if plan is None:
                raise bad_handshake("a welcome without a plan")
            proved = node.channels.proved_names(endpoint)
            peer = checked_peer(answer.hello, plan, node.transport.name, proved)
            self._check_same_plan(endpoint, peer)
            node.check_peer(peer)
            access = Access(session_id(answer.session), endpoint_host(endpoint))
            about = (peer.metadata, peer.memory, access)
            link = node.transport.connect(*about, deadline=deadline)
        stream = partial(node.stream, peer, layers=None, incoming=True)
        monitor = node.channels.monitor(endpoint)
        return PeerConnection(
            endpoint, peer, answer.session, link, monitor, stream, self._background
        )

    def _check_same_plan(self, endpoint: str, peer: Peer) -> None:
        """Raise an error if the peer's rank has changed, or if the peer has another plan."""
        known = self.known.get(endpoint, peer)
        if known.rank != peer.rank:
            problem = "The endpoint serves a different rank than when the session was opened"
            got = f"rank {peer.rank} at {endpoint}, expected rank {known.rank}"
            raise AtlasError(Code.PEER_LOST, problem, got=got, hint="Open a new session")
        if not {one.plan_hash for one in self.known.values()} <= {peer.plan_hash}:
            problem = "All endpoints of a session must serve the same plan"
            got = f"another plan at {endpoint}: {peer.plan}"
            hint = "Open a new session, with endpoints of one plan only"
            raise AtlasError(Code.PEER_LOST, problem, got=got, hint=hint)
