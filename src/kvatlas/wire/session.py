"""`Session`: a node's connections to the ranks that feed it, or that it feeds.

`pull` reads a request from its source ranks and `push` writes it to its destination
ranks; both give a `Transfer` at once and run beside the caller. A transfer is ready when
every source rank of the route has delivered all of its bytes and has said, afterwards,
that its blocks were still held. Anything else is a failure with a code, and delivers
nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.route import Costs
from kvatlas.wire import messages as say
from kvatlas.wire.channel import ask, log
from kvatlas.wire.moving import About, Connected, How, Moving
from kvatlas.wire.node import Node
from kvatlas.wire.peers import Peer, checked_peer
from kvatlas.wire.transfer import Transfer
from kvatlas.wire.transport import Link

_RETRIED = {
    Code.DEADLINE,
    Code.PEER_LOST,
    Code.WIRE_FAILED,
    Code.LEASE_EXPIRED,
    Code.UNKNOWN_SESSION,
    Code.UNKNOWN_REQUEST,
    Code.CHECKSUM,
}
"""What another replica may do better."""


class Session:
    """Connections of a node to peers of one plan; several of one rank are replicas."""

    def __init__(self, node: Node, endpoints: Sequence[str], *, seconds: float = 10.0) -> None:
        self.node = node
        self._replicas: dict[int, list[str]] = {}
        self._connected: dict[str, Connected] = {}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(16, thread_name_prefix="kvatlas-transfer")
        self._closed = False
        try:
            for endpoint in endpoints:
                found = self._shake_hands(endpoint, time.monotonic() + seconds)
                self._replicas.setdefault(found.peer.rank, []).append(endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def peers(self) -> list[Peer]:
        """The peers, in the order of their ranks."""
        return [
            self._connected[endpoint].peer
            for rank in sorted(self._replicas)
            for endpoint in self._replicas[rank]
        ]

    def link(self, rank: int) -> Link:
        """The transport's own connection to a rank, for those who know what they read."""
        with self._lock:
            for endpoint in self._replicas.get(rank, ()):
                if endpoint in self._connected:
                    return self._connected[endpoint].link
        raise AtlasError(
            Code.NOT_A_SOURCE,
            "A link is to a rank that the session is connected to",
            got=f"rank {rank}, not one of {sorted(self._replicas)}",
            hint="Pass the endpoints of all ranks",
        )

    def pull(
        self,
        request: str,
        *,
        dst_blocks: Any,
        tokens: Any,
        src_blocks: Any = None,
        layers: Collection[str] | None = None,
        seconds: float = 30.0,
        how: How = "auto",
        costs: Costs | None = None,
        checksums: bool = False,
        streamed: bool = False,
    ) -> Transfer:
        """Read a request's tokens from its source ranks into blocks of this node.

        Source blocks may be left out: the source knows what it offers. With `streamed`,
        layers arrive one after the other and `Transfer.layers` says which have.
        """
        peer = self._any_peer()
        way = self.node.route_from(peer)
        ranks = way.sources(self.node.rank)
        needs = way.needs(
            dst_rank=self.node.rank, dst_blocks=dst_blocks, tokens=tokens, layers=layers
        )
        total = sum(int(lengths.sum()) for _, lengths in needs.values())
        about = About(
            "pull", request, dst_blocks, src_blocks, tokens, layers, seconds, how, costs,
            checksums=checksums, streamed=streamed,
        )  # fmt: skip
        return self._start(about, ranks, total)

    def push(
        self,
        request: str,
        *,
        src_blocks: Any,
        tokens: Any,
        dst_blocks: Any = None,
        layers: Collection[str] | None = None,
        seconds: float = 30.0,
        how: How = "auto",
        costs: Costs | None = None,
        checksums: bool = False,
    ) -> Transfer:
        """Write a request's tokens from blocks of this node to every rank that reads from it."""
        peer = self._any_peer()
        way = self.node.route_to(peer)
        ranks = tuple(
            rank
            for rank in range(peer.plan.tp * peer.plan.pp)
            if self.node.rank in way.sources(rank)
        )
        about = About(
            "push", request, src_blocks, dst_blocks, tokens, layers, seconds, how, costs,
            checksums=checksums, streamed=False,
        )  # fmt: skip
        return self._start(about, ranks, None)

    def close(self) -> None:
        """Forget all peers; transfers under way are cancelled."""
        with self._lock:
            self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        for found in self._connected.values():
            found.link.close()
        self._connected.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _any_peer(self) -> Peer:
        with self._lock:
            if self._closed or not self._connected:
                raise AtlasError(
                    Code.PEER_LOST,
                    "A session has peers",
                    got="none, or the session is closed",
                    hint="Connect to the ranks of the other plan",
                )
            return next(iter(self._connected.values())).peer

    def _start(self, about: About, ranks: Sequence[int], total: int | None) -> Transfer:
        missing = [rank for rank in ranks if rank not in self._replicas]
        if missing:
            raise AtlasError(
                Code.NOT_A_SOURCE,
                f"A session is connected to all ranks that take part: {tuple(ranks)}",
                got=f"none for {missing}",
                hint="Pass the endpoints of all of them",
            )
        transfer = Transfer(about.request, ranks, total)
        deadline = time.monotonic() + about.seconds
        for rank in ranks:
            self._workers.submit(self._one_rank, transfer, about, rank, deadline)
        return transfer

    def _one_rank(self, transfer: Transfer, about: About, rank: int, deadline: float) -> None:
        """Carry out one rank's part, on one replica after the other until one does it."""
        problem: AtlasError | None = None
        for endpoint in self._replicas[rank]:
            try:
                connected = self._connection(endpoint, deadline)
                Moving(self.node, connected, about, transfer, deadline).run()
            except AtlasError as refused:
                problem = refused
                self._after(endpoint, refused)
                if refused.code not in _RETRIED or transfer.cancelled:
                    break
                transfer.again(rank)
                continue
            except Exception as defect:
                log.exception("a transfer failed")
                problem = AtlasError(
                    Code.WIRE_FAILED,
                    "A transfer ends whole or with a reason",
                    got=f"{type(defect).__name__}: {defect}",
                    hint="See the log",
                )
                break
            self.node.metrics.ended(about.way, "ok")
            transfer.finished(rank)
            return
        assert problem is not None  # noqa: S101  # there is at least one replica
        self.node.metrics.ended(about.way, str(problem.code))
        log.warning("failed request=%s rank=%d code=%s", about.request, rank, problem.code)
        transfer.failed(rank, problem)

    def _after(self, endpoint: str, refused: AtlasError) -> None:
        """Forget a peer that is gone, or that has started anew."""
        if refused.code in (Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.DEADLINE, Code.WIRE_FAILED):
            with self._lock:
                gone = self._connected.pop(endpoint, None)
            if gone is not None:
                gone.link.close()

    def _connection(self, endpoint: str, deadline: float) -> Connected:
        with self._lock:
            found = self._connected.get(endpoint)
        return found or self._shake_hands(endpoint, deadline)

    def _shake_hands(self, endpoint: str, deadline: float) -> Connected:
        node = self.node
        with node.metrics.phase("handshake"):
            answer: Any = say.SendPlan()
            for with_plan in (False, True):
                hello = node.hello(with_plan=with_plan)
                answer = ask(endpoint, hello, secret=node.secret, deadline=deadline)
                if isinstance(answer, say.Welcome):
                    break
            if not isinstance(answer, say.Welcome):
                raise say.bad_handshake(f"{type(answer).__name__} instead of a welcome")
            plan = node.plans.find(answer.hello)
            if plan is None:
                raise say.bad_handshake("a welcome without a plan")
            peer = checked_peer(answer.hello, plan, node.transport.name)
            node.route_from(peer)
            link = node.transport.connect(peer.metadata, peer.memory)
        made = Connected(endpoint, peer, answer.session, link)
        with self._lock:
            self._connected[endpoint] = made
        return made
