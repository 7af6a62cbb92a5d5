"""The options of one pull."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

from kvatlas.models import CacheIdentity
from kvatlas.routing import Costs
from kvatlas.wire.arguments import checked_identity
from kvatlas.wire.protocol import How
from kvatlas.wire.transports.errors import failed

RENAMED_HOWS = {"landed": "coalesced"}
"""Former values of `how` and their new names, for the hint of an error."""


@dataclass(frozen=True)
class TransferRequest:
    """The options of a pull."""

    request: str
    blocks: Any
    peer_blocks: Any
    tokens: Any
    layers: Collection[str] | None
    timeout: float
    how: How
    costs: Costs | None
    checksums: bool
    streamed: bool
    final: bool = False
    wait_for_offer: float = 0.0
    identity: CacheIdentity | None = None
    """The identity of the request's cache; None for the node's identity."""
    patient: bool = False
    """Whether `timeout` limits the time without progress instead of the whole time."""
    replaceable: bool = False
    """Whether another process may replace the source during the pull and fill the same blocks."""
    mark: int | None = None
    """The GPU event after which this node's blocks may be accessed; None on the host."""

    def __post_init__(self) -> None:
        if self.identity is not None:
            checked_identity(self.identity)
        check_how(self.how)


def check_how(how: object) -> None:
    """Raise an error for a value that is not one of `How`."""
    if how not in get_args(How):
        problem = "The value of `how` is unknown"
        raise failed(f"how={how!r}", how_hint(how), problem)


def how_hint(how: object) -> str:
    """Return the hint of the error for a value that is not one of `How`.

    >>> how_hint("landed")
    "'landed' is now called 'coalesced'"
    """
    if renamed := RENAMED_HOWS.get(str(how)):
        return f"{how!r} is now called {renamed!r}"
    return f"Choose one of {', '.join(get_args(How))}"
