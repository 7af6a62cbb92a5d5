"""One rank's part of a pull that was begun by who asked for it, and is finished by who waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvatlas.wire.client.connections import Connections
from kvatlas.wire.client.peer_connection import PeerConnection
from kvatlas.wire.client.rank_lease import RankLease, TransferRequest
from kvatlas.wire.client.rank_transfer import RankTransfer
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.warm_shapes import StartedRead
from kvatlas.wire.server.node_state import NodeState

_EVERY = 1e-4
"""Seconds between looks at a read that nobody wants any more."""


@dataclass
class StartedPull:
    """A read that is under way, over a connection that was taken for it."""

    connections: Connections
    connection: PeerConnection
    read: StartedRead
    lease: RankLease | None = None
    """Once every byte has arrived, and the source's blocks were held until then."""

    @classmethod
    def begin(
        cls, connections: Connections, endpoint: str, request: str, tokens: Any, blocks: Any
    ) -> StartedPull | None:
        """Begin to read, where a peer is connected and such a request was pulled from it before."""
        connection = connections.take(endpoint)
        if connection is None:
            return None
        read: StartedRead | None = None
        try:
            read = connection.warm.start(request, tokens, blocks)
        finally:
            if read is None:
                connections.give_back(connection)
        return None if read is None else cls(connections, connection, read)

    @property
    def total(self) -> int:
        """Bytes that must arrive, of all ranks."""
        return self.read.warm.total

    @property
    def nbytes(self) -> int:
        """Bytes that come from this rank."""
        return self.read.warm.shape.nbytes

    @property
    def runs(self) -> int:
        """Runs that they come in."""
        return self.read.warm.shape.runs

    def finish(
        self, node: NodeState, wanted: TransferRequest, transfer: Transfer, patience: float
    ) -> None:
        """Wait until it is over, and confirm that the source held its blocks; or raise why not."""
        with self.connections.using(self.connection):
            lease = RankLease(node, self.connection, wanted, transfer, patience)
            RankTransfer(lease).finish(self.read)
        self.lease = lease

    def abandon(self) -> None:
        """Wait until nothing is written any more, where there will be no transfer."""
        self.read.handle.release()
        while not self.read.handle.settle():
            time.sleep(_EVERY)
        self.connections.give_back(self.connection)
