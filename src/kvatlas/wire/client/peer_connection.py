"""A connected peer: the session with it, and the link to its memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from typing import Literal

from kvatlas.routing import Costs
from kvatlas.wire.client.warm_shapes import MakeStream, WarmShapes
from kvatlas.wire.peers import Peer
from kvatlas.wire.transports.base import Link

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
    """The fastest way found, by the number of runs and bytes."""
    question_seconds: float = 0.0
    """How many seconds the peer takes to answer a question."""
    users: int = 0
    """The number of transfers that use it. The link is closed after the last one."""
    gone: bool = False

    def __post_init__(self, stream: MakeStream) -> None:
        self.warm = WarmShapes(self.link, stream)
        """The shapes that were pulled over this link, for the fast path."""
