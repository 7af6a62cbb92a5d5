"""A push: offer a request to its destination, and ask each destination rank to pull it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.wire import protocol
from kvatlas.wire.client.connections import PEER_GONE, Connections
from kvatlas.wire.client.rank_pull import ANSWER_SECONDS
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.protocol import Announced, How
from kvatlas.wire.server.offering import OfferingNode

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two polls of a rank that has not read its part yet; doubled each time."""


class OfferedPush:
    """A request that is offered and announced to every rank of its destination.

    The name of the offer is random. So only nodes that receive the announcement can read the offer,
    and a node may push one request several times in parallel.
    """

    def __init__(
        self,
        node: OfferingNode,
        connections: Connections,
        transfer: Transfer,
        tokens: tuple[int, int],
        how: How,
        checksums: bool,
    ) -> None:
        self._node, self._connections, self._transfer = node, connections, transfer
        self._tokens, self._how, self._checksums = tokens, how, checksums
        self._offer = f"push {protocol.new_key().hex()}"

    def offer(
        self,
        blocks: Any,
        readers: Sequence[Peer],
        timeout: float,
        identity: CacheIdentity | None,
    ) -> None:
        """Offer the blocks to the nodes of the destination."""
        old = [peer for peer in readers if peer.version < protocol.PUSH_VERSION]
        if old:
            problem = f"Pushes need protocol version {protocol.PUSH_VERSION} or newer at both ends"
            got = f"version {old[0].version} at node {old[0].name!r}"
            hint = "Upgrade kvatlas at that node"
            raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
        names = {peer.name for peer in readers}
        self._node.offer(
            self._offer, blocks, self._tokens, timeout=timeout, readers=names, identity=identity
        )

    def withdraw(self) -> None:
        """End the offer. Pulls in flight fail."""
        self._node.withdraw(self._offer)

    def run(self, rank: int, endpoints: Sequence[str]) -> None:
        """Have one destination rank read its part from this node, and record the outcome.

        `endpoints` are the endpoints of the rank's replicas.
        """
        transfer = self._transfer

        def push() -> None:
            try:
                transfer.add(rank, self._try_replicas(endpoints))
            except BaseException:
                self.withdraw()
                raise
            finally:
                transfer.leave()

        transfer.run_rank(rank, push, partial(self._node.metrics.ended, "push"))
        if transfer.done:  # also if it was cancelled, or its time is up
            self.withdraw()

    def _try_replicas(self, endpoints: Sequence[str]) -> int:
        """Announce the push to the replicas in turn, until one has read the request.

        Return the number of bytes that the replica read.
        """
        left = deque(endpoints)
        while True:
            try:
                return self._announce(left.popleft())
            except AtlasError as refused:
                if refused.code not in PEER_GONE or self._transfer.done or not left:
                    raise

    def _announce(self, endpoint: str) -> int:
        """Repeat the announcement until the node has read the request.

        Return the number of bytes that the node read.
        """
        pause, reconnected = _FIRST_PAUSE, False
        while True:
            self._transfer.check_cancelled()
            try:
                said = self._ask(endpoint)
            except AtlasError as refused:
                # The session has ended: connect to the peer again, once.
                if refused.code is not Code.UNKNOWN_SESSION or reconnected:
                    raise
                reconnected = True
                continue
            if said.arrived:
                return said.moved
            reconnected = False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask(self, endpoint: str) -> Announced:
        node, transfer = self._node, self._transfer
        left = max(0.001, transfer.deadline - time.monotonic())
        deadline = time.monotonic() + min(ANSWER_SECONDS, left)
        with self._connections.use(endpoint, deadline) as connection:
            question = protocol.Announce(
                session=connection.session,
                request=transfer.request,
                offer=self._offer,
                endpoint=node.endpoint,
                start=self._tokens[0],
                stop=self._tokens[1],
                seconds=left,
                how=self._how,
                checksums=self._checksums,
            )
            answer: Announced = node.channels.ask(
                endpoint, question, (Announced,), deadline=deadline
            )
        return answer
