"""Access control of transports: their guarantees, and how a node authorises each read.

A transport has no plans, sessions or leases. It passes session ids and lease keys, as bytes, to
the node that uses the transport. The node decides which reads are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvatlas.geometry.address_arrays import Int64s

SESSION_BYTES = 16
LEASE_BYTES = 16


class Access(NamedTuple):
    """The session that a link presents to its peer, and the host name of the peer to verify."""

    session: bytes = bytes(SESSION_BYTES)
    """The id of the session that the link belongs to; not the key of the session."""
    host: str = ""
    """The host name that the peer's certificate must have; empty for the published address."""


class AskedRead(NamedTuple):
    """A peer's request to read runs of a region, for the node to allow or reject."""

    session: bytes
    names: frozenset[str] | None
    """The node names that the peer's key proves; None if its connection proves no name."""
    lease: bytes
    region: int
    starts: Int64s
    lengths: Int64s
    hang_up: Callable[[], None]
    """Ends the connection, so that a blocked send returns. Any thread may call it."""


Authorise = Callable[[AskedRead], AbstractContextManager[None]]
"""Raises an error for a read that is not allowed. The bytes are sent inside the context."""


class Guarantees(NamedTuple):
    """The protection that a transport gives against attackers, if the node has a secret.

    >>> Guarantees(authentication=True).missing
    ['confidentiality', 'integrity', 'authorisation']
    """

    confidentiality: bool = False
    """No third party can read the bytes in transit."""
    integrity: bool = False
    """Changes of the bytes in transit are detected."""
    authentication: bool = False
    """Only peers that the node has authenticated can access memory."""
    authorisation: bool = False
    """A peer can access only the bytes that its leases cover."""

    @property
    def missing(self) -> list[str]:
        """The names of the guarantees that the transport does not give."""
        return [name for name, given in self._asdict().items() if not given]
