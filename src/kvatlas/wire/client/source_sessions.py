"""Sessions with the nodes that push to this one, kept for their next push."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.channels import no_answer
from kvatlas.wire.client.connections import PEER_GONE
from kvatlas.wire.client.session import Session
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.server.offering import OfferingNode

_KEPT = 64
"""The maximum number of idle sessions that are kept."""
_CONNECT_SECONDS = 5.0

_Key = tuple[str, bytes]
"""An endpoint, and the incarnation of the process that announced it."""


@dataclass(eq=False)
class _Source:
    """A node that pushes, and the session with it."""

    connecting: threading.Lock = field(default_factory=threading.Lock)
    session: Session | None = None
    users: int = 0

    def connect(self, node: OfferingNode, endpoint: str, seconds: float) -> Session:
        """Return the session, after connecting if there is none."""
        if not self.connecting.acquire(timeout=seconds):
            raise no_answer(endpoint)
        try:
            if self.session is None:
                self.session = Session(node, [endpoint], seconds=seconds)
            return self.session
        finally:
            self.connecting.release()

    def close(self) -> None:
        """Disconnect."""
        if self.session is not None:
            self.session.close()


class SourceSessions:
    """Sessions of a node with the processes that push to it. Any thread may use them."""

    def __init__(self, node: OfferingNode) -> None:
        self._node = node
        self._known: OrderedDict[_Key, _Source] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def use(self, peer: Peer, endpoint: str, deadline: float) -> Iterator[Session]:
        """Connect to an endpoint. Raise an error unless `peer` is the process that answers there.

        The session is dropped if its peer is lost while it is used.
        """
        key = endpoint, peer.incarnation
        with self._lock:
            source = self._known.setdefault(key, _Source())
            self._known.move_to_end(key)
            source.users += 1
        try:
            seconds = max(0.001, min(_CONNECT_SECONDS, deadline - time.monotonic()))
            session = source.connect(self._node, endpoint, seconds)
            _check_same_process(peer, session.peers[0], endpoint)
            yield session
        except AtlasError as refused:
            if refused.code in PEER_GONE | {Code.BAD_HANDSHAKE}:
                with self._lock:
                    if self._known.get(key) is source:
                        del self._known[key]
            raise
        finally:
            self._give_back(key, source)

    def close(self) -> None:
        """Close all sessions. None may be in use."""
        with self._lock:
            sources = list(self._known.values())
            self._known.clear()
        for source in sources:
            source.close()

    def _give_back(self, key: _Key, source: _Source) -> None:
        """End the use of a session. Those that are no longer kept are closed."""
        with self._lock:
            source.users -= 1
            idle = [known for known, one in self._known.items() if not one.users]
            unused = [self._known.pop(known) for known in idle[:-_KEPT]]
            if not source.users and self._known.get(key) is not source and source not in unused:
                unused.append(source)
        for one in unused:
            one.close()


def _check_same_process(announced: Peer, reached: Peer, endpoint: str) -> None:
    """Raise an error unless the process at an endpoint is the one that announced it."""
    same = all(
        getattr(announced, name) == getattr(reached, name)
        for name in ("name", "incarnation", "rank", "plan_hash")
    )
    if not same:
        raise AtlasError(
            Code.BAD_HANDSHAKE,
            "The process at the announced endpoint is not the one that announced the push",
            got=f"{_process(reached)} at {endpoint}, expected {_process(announced)}",
            hint="Push from a node whose endpoint the destination can connect to",
        )


def _process(peer: Peer) -> str:
    process, plan = peer.incarnation.hex()[:8], peer.plan_hash.hex()[:8]
    return f"node {peer.name!r} (rank {peer.rank}, process {process}, plan {plan})"
