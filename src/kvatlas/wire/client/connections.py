"""A session's connections: exchange hellos, check peers, and keep links open while in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.channels import no_answer
from kvatlas.wire.client.peer_connection import PeerConnection
from kvatlas.wire.connection import endpoint_host
from kvatlas.wire.peers import Peer, checked_peer
from kvatlas.wire.protocol import SendPlan, Welcome, bad_handshake, wrong_answer
from kvatlas.wire.read_grants import session_id
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.access import Access

PEER_GONE = {Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.DEADLINE, Code.WIRE_FAILED}
"""Error codes after which a peer must be connected again: it may have exited or restarted."""


class Connections:
    """Connections of a node to the endpoints of a session. Any thread may use them."""

    def __init__(
        self, node: NodeState, endpoints: Sequence[str], beside: ThreadPoolExecutor
    ) -> None:
        self._node, self._beside = node, beside
        self._open: dict[str, PeerConnection] = {}
        self._connecting = {endpoint: threading.Lock() for endpoint in endpoints}
        self._lock = threading.Lock()
        self.known: dict[str, Peer] = {}
        """The peers as they were at the first connection."""

    def connect(self, endpoint: str, deadline: float) -> Peer:
        """Connect to a peer for the first time."""
        connection = self._open[endpoint] = self._connect(endpoint, deadline)
        self.known[endpoint] = connection.peer
        return connection.peer

    def find(self, endpoint: str) -> PeerConnection | None:
        """Return the current connection to an endpoint, or None."""
        return self._open.get(endpoint)

    def close(self) -> None:
        """Close all links."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    @contextmanager
    def use(self, endpoint: str, deadline: float) -> Iterator[PeerConnection]:
        """Connect to a peer for one transfer. Its link stays open while any transfer uses it."""
        connecting = self._connecting[endpoint]
        if not connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise no_answer(endpoint)
        try:
            connection = self.take(endpoint)
            if connection is None:
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
        """A context that returns a taken connection, and drops it if its peer was lost."""
        try:
            yield
        except AtlasError as refused:
            if refused.code in PEER_GONE:
                with self._lock:
                    connection.gone = True
                    if self._open.get(connection.endpoint) is connection:
                        del self._open[connection.endpoint]
            raise
        finally:
            self.give_back(connection)

    def give_back(self, connection: PeerConnection) -> None:
        """Return a connection that was taken."""
        with self._lock:
            connection.users -= 1
            unused = connection.gone and not connection.users
        if unused:
            connection.close()

    def take(self, endpoint: str) -> PeerConnection | None:
        """Take the connection to an endpoint, if any, and keep it open until it is returned."""
        with self._lock:
            connection = self._open.get(endpoint)
            if connection is None or not connection.link.open:  # it was severed
                return None
            connection.users += 1
            return connection

    def _connect(self, endpoint: str, deadline: float) -> PeerConnection:
        """Exchange hellos with a peer, check its hello, and open a link to its memory."""
        node = self._node
        with node.metrics.phase("handshake"):
            answer: Any = SendPlan()
            for with_plan in (False, True):
                if isinstance(answer, SendPlan):
                    hello = node.hello(with_plan=with_plan)
                    answer = node.channels.ask(endpoint, hello, deadline=deadline)
            if not isinstance(answer, Welcome):
                raise wrong_answer(answer, Welcome)
            plan = node.peer_plans.find(answer.hello)
            if plan is None:
                raise bad_handshake("a welcome without a plan")
            proved = node.channels.proved_names(endpoint)
            peer = replace(checked_peer(answer.hello, plan, node.transport.name), names=proved)
            node.check_peer(peer)
            self._check_same_plan(endpoint, peer)
            node.check_route(peer)
            node.check_peer_identity(peer)
            access = Access(session_id(answer.session), endpoint_host(endpoint))
            about = (peer.metadata, peer.memory, access)
            link = node.transport.connect(*about, deadline=deadline)
        stream = partial(node.stream, peer, layers=None, incoming=True)
        return PeerConnection(endpoint, peer, answer.session, link, stream, self._beside)

    def _check_same_plan(self, endpoint: str, peer: Peer) -> None:
        """Raise an error if the endpoint's rank has changed, or its plan is not the session's."""
        known = self.known.get(endpoint, peer)
        if known.rank != peer.rank:
            problem = "The endpoint now serves another rank than when the session was opened"
            got = f"rank {peer.rank} at {endpoint}, expected rank {known.rank}"
            raise AtlasError(Code.PEER_LOST, problem, got=got, hint="Open a new session")
        if not {one.plan_hash for one in self.known.values()} <= {peer.plan_hash}:
            problem = "All endpoints of a session must serve the same plan"
            got = f"another plan at {endpoint}: {peer.plan}"
            hint = "Open a new session, with endpoints of one plan only"
            raise AtlasError(Code.PEER_LOST, problem, got=got, hint=hint)
