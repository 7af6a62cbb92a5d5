"""A peer that has welcomed this node: the session with it, the link to its memory."""

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
    """A peer that has welcomed this node, and the link to its memory."""

    endpoint: str
    peer: Peer
    session: bytes
    link: Link
    stream: InitVar[MakeStream]
    beside: ThreadPoolExecutor
    """Asks questions while a transfer does something else."""
    costs: Costs | None = None
    """What the link was measured at."""
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)
    """Which way was found the fastest, by runs and bytes."""
    question_seconds: float = 0.0
    """How long the peer takes to answer a question."""
    users: int = 0
    """Transfers that use it now: the link is closed after the last of them."""
    gone: bool = False

    def __post_init__(self, stream: MakeStream) -> None:
        self.warm = WarmShapes(self.link, stream)
        """What was pulled over it, to be pulled sooner the next time."""
