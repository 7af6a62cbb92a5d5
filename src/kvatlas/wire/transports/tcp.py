"""The `tcp` transport, which works between any two hosts and needs no extra library.

Connections use TLS 1.3 if the node has a secret.

The reader requests runs of a region and stores the received bytes itself. So an abandoned operation
is over at once, and no process writes to another's memory. The other end sends from separate
threads (`tcp_server`). If a reader is killed or stops, only its connection is affected.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import ClassVar

from kvatlas.copying.memory import Memory
from kvatlas.wire.security import Security
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Authorise, Guarantees
from kvatlas.wire.transports.base import Link, Shared, Transport
from kvatlas.wire.transports.host_addresses import is_loopback, own_addresses
from kvatlas.wire.transports.tcp_link import TcpLink, TcpPublished
from kvatlas.wire.transports.tcp_server import RegionServer


class TcpTransport(Transport):
    """Reads regions of other processes over TCP.

    Connections use the node's secret or TLS contexts, and each read needs a lease that covers it.
    `host` is the address that peers connect to. This end listens on no other address.

    >>> import numpy as np
    >>> from kvatlas.routing import Copy
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
            failure = errors.failed(got, hint, "The transport cannot listen")
            raise errors.own_limit(problem) or failure from problem
        self.security = Security()

    def protect(self, security: Security, authorise: Authorise) -> None:
        """Use the node's TLS for all connections, and ask the node before each read is served."""
        self.security = security
        self._server.protect(security, authorise)

    def publish(self) -> bytes:
        """Return the encoded address, readable regions and token that a peer needs to connect."""
        self.check()
        regions = {pool: (at.address, at.nbytes) for pool, at in self.reachable.items()}
        server = self._server
        published = TcpPublished(self.address, server.port, server.token, regions)
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Return a link to a peer that has these regions. `sign_in` opens its first connection."""
        published = errors.read_metadata(metadata, TcpPublished)
        try:
            ipaddress.ip_address(published.address)
        except ValueError:
            got = f"address {published.address[:64]!r}, expected an IP address"
            raise errors.bad_metadata(got) from None
        for pool, at in memory.items():
            if published.regions.get(pool) != (at.address, at.nbytes):
                got = f"region {pool} with another address or size than in the handshake"
                raise errors.bad_metadata(got)
        return TcpLink(self, published, memory, self.security)

    def _close(self) -> None:
        self._server.close()
