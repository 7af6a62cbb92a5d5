"""A connected peer: the session with it, and the link to its memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from typing import Literal

from kvatlas.copying.memory import STAGING, Memory
from kvatlas.routing import Costs
from kvatlas.wire.client.warm_shapes import MakeStream, WarmShapes
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.transports.base import Link, Transport

_MAX_LENT = 16
"""The maximum number of links to staging segments that a peer has for this node alone."""

Way = Literal["direct", "staged", "coalesced"]


@dataclass
class PeerConnection:
    """A connected peer, and the link to its memory."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    stream: InitVar[MakeStream]
    beside: ThreadPoolExecutor
    """Runs questions in the background during a transfer."""
    costs: Costs | None = None
    """The measured costs of the link."""
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)
    """The fastest way for a given number of runs and bytes."""
    question_seconds: float = 0.0
    """How many seconds the peer takes to answer a question."""
    users: int = 0
    """The number of transfers that use it. The link is closed after the last one."""
    gone: bool = False

    def __post_init__(self, stream: MakeStream) -> None:
        self.warm = WarmShapes(self.link, stream)
        """The shapes that were pulled over this link, for the fast path."""
        self._lent: dict[bytes, Link] = {}
        """Links to staging memory that the peer has for this node alone, by metadata."""
        self._lent_lock = threading.Lock()

    def link_to_lent(self, transport: Transport, memory: Memory, metadata: bytes) -> Link:
        """Return the link to staging memory that the peer has for this node alone."""
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
