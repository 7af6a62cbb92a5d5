"""The options of one transfer, as the caller of `pull` or `push` passed them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvatlas.geometry import duration
from kvatlas.models import CacheIdentity
from kvatlas.routing import Costs
from kvatlas.wire.arguments import check_request_name, checked_identity
from kvatlas.wire.protocol import Direction
from kvatlas.wire.transports.errors import failed

How = Literal["auto", "direct", "staged", "landed"]
"""How a pull reads its runs.

`direct`: one descriptor per run. `staged`: gather at the source. `landed`: read adjacent runs
together and scatter at the destination. `auto`: by measured cost.
"""


@dataclass(frozen=True)
class TransferRequest:
    """The options that the caller of `pull` or `push` passed."""

    direction: Direction
    request: str
    blocks: Any
    peer_blocks: Any
    tokens: Any
    layers: Collection[str] | None
    seconds: float
    how: How
    costs: Costs | None
    checksums: bool
    streamed: bool
    final: bool = False
    wait_for_offer: float = 0.0
    identity: CacheIdentity | None = None
    """The identity of the request's cache, if it differs from the node's."""
    mark: int | None = None
    """The mark after which this node's blocks may be read or written, if they are on a GPU."""

    def __post_init__(self) -> None:
        check_request_name(self.request)
        if self.identity is not None:
            checked_identity(self.identity)
        duration(self.seconds)
        duration(self.wait_for_offer)
        if self.how not in get_args(How):
            hint = f"Choose one of {', '.join(get_args(How))}"
            raise failed(f"how={self.how!r}", hint, "There is no such way to move a request")
