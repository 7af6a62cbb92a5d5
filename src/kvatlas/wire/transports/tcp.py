"""TCP: between any two hosts, without extra libraries; under TLS 1.3 if the node has a secret.

The reader requests runs of a region and stores the received bytes itself. So an abandoned operation
is over at once, and no process writes to another's memory. The other end sends from separate
threads (`tcp_server`). If a reader is killed or stops, only its connection is affected.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import msgspec

from kvatlas.copying.memory import Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.security import Security
from kvatlas.wire.transports import errors, tcp_admission
from kvatlas.wire.transports.access import Access, Authorise, Guarantees
from kvatlas.wire.transports.base import Handle, Link, Shared, Transport
from kvatlas.wire.transports.listening import is_loopback, own_addresses
from kvatlas.wire.transports.tcp_read import TcpRead, questions_of, readable
from kvatlas.wire.transports.tcp_server import RegionServer

_MEETING = 5.0
"""Seconds that a peer may take to accept a first connection."""
_MOST_IDLE = 8
"""The number of idle connections that a link keeps."""


class _Published(msgspec.Struct, tag="tcp", forbid_unknown_fields=True):
    address: str
    port: int
    token: bytes
    regions: dict[int, tuple[int, int]]
    """The address and size of every readable region."""


class TcpTransport(Transport):
    """Reads regions of other processes over TCP.

    Connections use the node's secret or TLS contexts, and each read needs a lease that covers it.
    `host` is the address that peers connect to, and the only one on which this end listens.

    >>> import numpy as np
    >>> pools = [np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)]
    >>> ends = [TcpTransport(), TcpTransport()]
    >>> for end, pool in zip(ends, pools):
    ...     end.register({0: Memory(pool.ctypes.data, 8)})
    >>> link = ends[1].connect(ends[0].publish(), ends[0].memory)
    >>> link.read([Copy(0, 0, np.array([5]), np.array([0]), np.array([3]))]).wait(float("inf"))
    >>> pools[1].tolist()
    [5, 6, 7, 0, 0, 0, 0, 0]
    >>> for end in ends:
    ...     end.close()
    """

    name: ClassVar[str] = "tcp"
    oldest_version: ClassVar[int] = 4
    guarantees = Guarantees(
        confidentiality=True, integrity=True, authentication=True, authorisation=True
    )

    def __init__(self, *, host: str = "127.0.0.1", shared: Shared = "all") -> None:
        super().__init__(shared=shared)
        self.address = own_addresses(host)[0]
        self.beyond_host = "" if is_loopback(self.address) else self.address
        try:
            self._server = RegionServer(self.address, lambda: self.reachable)
        except (OSError, RuntimeError) as problem:
            got, hint = f"host={host!r}: {problem}", "Pass an address of this machine"
            raise errors.failed(got, hint, "The transport cannot listen") from problem
        self.security = Security()
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()

    def protect(self, security: Security, authorise: Authorise) -> None:
        """Use the node's TLS for all connections, and ask the node before each read is served."""
        self.security = security
        self._server.protect(security, authorise)

    def publish(self) -> bytes:
        """Return its address, its readable regions, and the token that authorizes reads."""
        self.check()
        regions = {pool: (at.address, at.nbytes) for pool, at in self.reachable.items()}
        server = self._server
        published = _Published(self.address, server.port, server.token, regions)
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer that has these regions. It is connected when it signs in."""
        published = errors.read_metadata(metadata, _Published)
        try:
            ipaddress.ip_address(published.address)
        except ValueError:
            raise errors.bad_metadata(f"the address {published.address[:64]!r}") from None
        token = len(published.token)
        if not 0 < published.port < 1 << 16 or token != tcp_admission.TOKEN_BYTES:
            raise errors.bad_metadata(f"port {published.port} and a token of {token} bytes")
        for pool, at in memory.items():
            if published.regions.get(pool) != (at.address, at.nbytes):
                raise errors.bad_metadata(f"region {pool}, which does not match the handshake")
        link = TcpLink(self, published, memory)
        self._links.add(link)
        return link

    def _close(self) -> None:
        for link in list(self._links):
            link.close()
        self._server.close()


class TcpLink(Link):
    """A peer to read from, and idle connections to it."""

    prompt: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __init__(self, owner: TcpTransport, peer: _Published, theirs: Mapping[int, Memory]) -> None:
        super().__init__(owner, theirs)
        self.peer, self.security, self.access = peer, owner.security, Access()
        self.choice = 0
        """The index of the secret that the peer accepted last."""
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def sign_in(self, access: Access) -> None:
        """Open the first connection, and authenticate it."""
        self.access = access
        try:
            TcpRead(self, []).wait(time.monotonic() + _MEETING)
        except AtlasError as refusal:
            if refusal.code is Code.BAD_SIGNATURE:
                raise
            raise errors.peer_lost(f"{self.peer.address}: {refusal.got}") from None

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        if not write:
            return self._read(copies, b"")
        hint = "Let the destination read the bytes instead"
        raise errors.failed("a write", hint, "The transport 'tcp' supports only reads")

    def _read(self, copies: Sequence[Copy], lease: bytes) -> Handle:
        # The regions are looked up now: the bounds were checked against these.
        questions = [part for copy in copies for part in questions_of(copy, self.mine, lease)]
        handle = TcpRead(self, questions)
        with suppress(AtlasError):  # whoever waits for it will see
            handle.poll()
        return handle

    def take(self) -> socket.socket | None:
        """Return an idle open connection, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                one = self._idle.pop()
            if not readable(one, 0):
                return one
            one.close()  # the peer has ended it: it says nothing unasked

    def give_back(self, one: socket.socket) -> None:
        """Keep a connection on which everything requested has arrived."""
        with self._lock:
            if self.open and len(self._idle) < _MOST_IDLE:
                self._idle.append(one)
                return
        one.close()

    def _close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()
