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
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Costs
from kvatlas.wire import protocol as say
from kvatlas.wire.client.rank_transfer import About, Connected, How, Moving
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.peers import Peer, checked_peer
from kvatlas.wire.rpc import ask, log
from kvatlas.wire.server.node import Node
from kvatlas.wire.transports.base import Link

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


_ANSWER = 5.0
"""Seconds that a peer has for an answer, within the transfer's own deadline."""

_GONE = {Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.DEADLINE, Code.WIRE_FAILED}
"""What a peer that is gone, or has started anew, is known by."""


class Session:
    """Connections of a node to the ranks of one plan; several of one rank are replicas."""

    def __init__(self, node: Node, endpoints: Sequence[str], *, seconds: float = 10.0) -> None:
        self.node = node
        self._replicas: dict[int, list[str]] = {}
        self._known: dict[str, Peer] = {}
        self._connected: dict[str, Connected] = {}
        self._shaking = {endpoint: threading.Lock() for endpoint in endpoints}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(16, thread_name_prefix="kvatlas-transfer")
        self._running: WeakSet[Transfer] = WeakSet()
        self._closed = False
        try:
            for endpoint in dict.fromkeys(endpoints):
                made = self._shake_hands(endpoint, time.monotonic() + seconds)
                self._connected[endpoint], self._known[endpoint] = made, made.peer
                self._replicas.setdefault(made.peer.rank, []).append(endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def peers(self) -> list[Peer]:
        """The peers as they were met, in the order of their ranks."""
        return [self._known[one] for rank in sorted(self._replicas) for one in self._replicas[rank]]

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
            running = list(self._running)
        for transfer in running:
            transfer.cancel()
        self._workers.shutdown(wait=True)
        for found in self._connected.values():
            found.link.close()
        self._connected.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _any_peer(self) -> Peer:
        if self._closed or not self._known:
            raise AtlasError(
                Code.PEER_LOST,
                "A session has peers",
                got="none, or the session is closed",
                hint="Connect to the ranks of the other plan",
            )
        return next(iter(self._known.values()))

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
        with self._lock:
            self._any_peer()
            self._running.add(transfer)
            for rank in ranks:
                self._workers.submit(self._one_rank, transfer, about, rank, deadline)
        return transfer

    def _one_rank(self, transfer: Transfer, about: About, rank: int, deadline: float) -> None:
        """Carry out one rank's part, and say how it went."""
        try:
            self._on_replicas(transfer, about, rank, deadline)
        except AtlasError as refused:
            problem = refused
        except Exception as defect:
            log.exception("a transfer failed")
            problem = AtlasError(
                Code.WIRE_FAILED,
                "A transfer ends whole or with a reason",
                got=f"{type(defect).__name__}: {defect}",
                hint="See the log",
            )
        else:
            self.node.metrics.ended(about.way, "ok")
            transfer.finished(rank)
            return
        self.node.metrics.ended(about.way, str(problem.code))
        log.warning("failed request=%s rank=%d code=%s", about.request, rank, problem.code)
        transfer.failed(rank, problem)

    def _on_replicas(self, transfer: Transfer, about: About, rank: int, deadline: float) -> None:
        """One replica after the other until one does it; those at hand come first."""
        left = deque(sorted(self._replicas[rank], key=lambda one: one not in self._connected))
        anew: set[str] = set()
        while True:
            endpoint = left.popleft()
            # Who never answers leaves time for the others.
            patience = min(_ANSWER, (deadline - time.monotonic()) / (len(left) + 1))
            try:
                transfer.refuse_cancelled()
                with self._connection(endpoint, time.monotonic() + patience) as connected:
                    moving = Moving(
                        self.node, connected, about, transfer, deadline=deadline, patience=patience
                    )
                    moving.run()
            except AtlasError as refused:
                if refused.code is Code.UNKNOWN_SESSION and endpoint not in anew:
                    # It has started again, and hands can be shaken again.
                    anew.add(endpoint)
                    left.appendleft(endpoint)
                if refused.code not in _RETRIED or transfer.cancelled or not left:
                    raise
                transfer.again(rank)
            else:
                return

    @contextmanager
    def _connection(self, endpoint: str, deadline: float) -> Iterator[Connected]:
        """A peer for one transfer; its link stays open while anyone uses it."""
        connected = self._enter(endpoint, deadline)
        try:
            yield connected
        except AtlasError as refused:
            if refused.code in _GONE:
                self._forget(connected)
            raise
        finally:
            self._leave(connected)

    def _enter(self, endpoint: str, deadline: float) -> Connected:
        shaking = self._shaking[endpoint]
        if not shaking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise AtlasError(
                Code.DEADLINE,
                "A peer answers before the deadline",
                got=f"nothing from {endpoint} so far",
                hint="Check that it runs and can be reached, or allow more time",
            )
        try:
            found = self._connected.get(endpoint) or self._shake_hands(endpoint, deadline)
            with self._lock:
                self._connected[endpoint] = found
                found.users += 1
            return found
        finally:
            shaking.release()

    def _forget(self, connected: Connected) -> None:
        with self._lock:
            connected.gone = True
            if self._connected.get(connected.endpoint) is connected:
                del self._connected[connected.endpoint]

    def _leave(self, connected: Connected) -> None:
        with self._lock:
            connected.users -= 1
            over = connected.gone and not connected.users
        if over:
            connected.link.close()

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
            self._refuse_stranger(endpoint, peer)
            node.route_from(peer)
            link = node.transport.connect(peer.metadata, peer.memory)
        return Connected(endpoint, peer, answer.session, link)

    def _refuse_stranger(self, endpoint: str, peer: Peer) -> None:
        """Refuse ranks of another plan: parts of two plans do not make up a request."""
        known = self._known.get(endpoint, peer)
        plans = {one.plan_hash for one in self._known.values()}
        if known.rank != peer.rank or not plans <= {peer.plan_hash}:
            raise AtlasError(
                Code.PEER_LOST,
                "A session is with ranks of one plan, each where it was met",
                got=f"rank {peer.rank} of {peer.plan} at {endpoint}",
                hint="Open a new session",
            )
