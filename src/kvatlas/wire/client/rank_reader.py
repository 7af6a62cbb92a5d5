"""Read one rank's part of a pull: wait for a turn and for the offer, and try each replica."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.client.connections import PEER_GONE, Connections
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.client.rank_pull import RankPull
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.client.transfer_request import TransferRequest
from kvatlas.wire.server.node_state import NodeState

ANSWER_SECONDS = 5.0
"""Seconds that a peer has to answer, within the transfer's deadline."""
_RETRIED = PEER_GONE | {
    Code.LEASE_EXPIRED, Code.UNKNOWN_REQUEST, Code.CHECKSUM, Code.BUSY, Code.BUFFERS_RECLAIMED
}  # fmt: skip
"""Error codes that a retry on another replica may avoid."""
_TURNS = 4
"""Parts that run at once while all of them progress: more would only contend."""
_TURN_SECONDS = 0.5
"""Seconds that a part waits for its turn while the parts before it do not progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between retries of a request that is not offered yet; doubled each time."""


class RankReader:
    """Reads parts of transfers in the calling thread. Any thread may use it."""

    def __init__(self, node: NodeState, connections: Connections) -> None:
        self._node, self._connections = node, connections
        self._turns = threading.Semaphore(_TURNS)

    def read(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, replicas: Sequence[str]
    ) -> RankPull:
        """Read one rank's part when it is its turn. Retry while the request is not offered yet."""
        pause, until = _FIRST_PAUSE, transfer.begun + wanted.wait_for_offer
        while True:
            has_turn = self._turns.acquire(timeout=_TURN_SECONDS)
            try:
                return self._try_replicas(transfer, wanted, rank, replicas)
            except AtlasError as refused:
                if refused.code is not Code.UNKNOWN_REQUEST or time.monotonic() >= until:
                    raise
            finally:
                if has_turn:
                    self._turns.release()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try_replicas(
        self, transfer: Transfer, wanted: TransferRequest, rank: int, replicas: Sequence[str]
    ) -> RankPull:
        """Try the replicas in turn, connected ones first. Return the pull that succeeded."""
        unknown = {one: self._connections.find(one) is None for one in replicas}
        left = deque(sorted(unknown, key=unknown.__getitem__))
        reconnected: set[str] = set()
        while True:
            endpoint = left.popleft()
            # A replica that never answers leaves time for the others.
            remaining = transfer.deadline - time.monotonic()
            patience = min(ANSWER_SECONDS, remaining / (len(left) + 1))
            try:
                transfer.check_cancelled()
                with self._connections.use(endpoint, time.monotonic() + patience) as connection:
                    part = (self._node, connection, wanted, transfer, patience)
                    pull = RankPull(RankLease(*part, others=bool(left)))
                    pull.run()
                return pull
            except AtlasError as refused:
                if refused.code is Code.UNKNOWN_SESSION and endpoint not in reconnected:
                    # The peer has restarted: connect to it again, once.
                    reconnected.add(endpoint)
                    left.appendleft(endpoint)
                if refused.code is Code.BUFFERS_RECLAIMED:
                    left.append(endpoint)  # it starts over, there last
                if refused.code not in _RETRIED or transfer.done or not left:
                    raise
                transfer.restart(rank)
