"""`Node`: serves one rank's caches to peers.

A node registers its pools with a transport and answers peers. It tracks which requests are offered
and until when, which are expected, and which peers hold a lease. Everything that a peer sends is
checked against the peer's plan first, and a peer may access only what its lease covers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint, route
from kvatlas.wire.arguments import checked_identity, text_list
from kvatlas.wire.client.expected import Expected, ExpectedRequests
from kvatlas.wire.connection import open_to_strangers
from kvatlas.wire.handshake_checks import plan_hash
from kvatlas.wire.rpc import Server
from kvatlas.wire.server.answers import Answers
from kvatlas.wire.server.offering import OfferingNode
from kvatlas.wire.transports.base import Transport
from kvatlas.wire.transports.errors import coded_limits


def pools_for(plan: Plan, rank: int, transport: Transport) -> dict[int, Bytes]:
    """Allocate a rank's pools in host memory that peers of the transport can access.

    Return the pools by index.
    """
    pools = plan.rank_pools(rank).items()
    return {index: transport.allocate(pool.nbytes) for index, pool in pools}


class Node(OfferingNode):
    """One rank of a plan, served to peers.

    `memory` contains the rank's pools, which the node keeps alive. It is a `Cache`, or maps pool
    indices to tensors, arrays or `Memory`. On a GPU, offers, expectations and pulls are ordered
    after the kernels already queued on the calling thread's current stream. `listen` is the
    endpoint that peers connect to.

    With a `secret` of 16 bytes or more, only peers with the same secret can connect, and the side
    channel is encrypted. Pass `(new, old)` to accept both during a rotation, or `tls` to use TLS
    contexts instead of secrets. Without either, the node and its transport listen only on this
    host, unless `unprotected` is set. `unprotected` is also needed for a transport, such as
    Mooncake, that connects hosts but does not authenticate peers.

    All holders of one secret can use any name. To bind names to keys, pass `peers`, which maps each
    name to a `PeerAccess`: the peer's secret, and what it may do. With `tls`, the name of a peer
    must be in its certificate.

    The node keeps `buffers` staging buffers of `piece` bytes for staged transfers. The leases of a
    peer end soon after its connections have ended. With `convert` ("fp8->bf16"), the node also
    serves peers that have a different format and request the same conversion; `scales` are the
    scales of this node's tensors.

    `identity` names the weights and settings that the caches are computed with. A peer with a
    different identity gets an error, unless both nodes use `check_identity=False`.
    """

    def __post_init__(self) -> None:
        with coded_limits():
            self.check_arguments()
            self._check_transport()
            try:
                self._start()
            except BaseException:
                self.transport.close()
                raise

    def _start(self) -> None:
        """Register the memory, and listen for peers."""
        super().__post_init__()
        self.register()
        self.check_plan_travels()
        self._expected = ExpectedRequests(self)
        self.expected: dict[str, Expected] = self._expected.requests
        """The requests that the node expects, by name."""
        self.answers = Answers(self, self._expected.announced)
        self.server = Server(
            self.listen, self.answers, security=self.security, unprotected=self.unprotected,
            idle=self._sweep, closed=self.answers.sessions.disconnected,
        )  # fmt: skip

    def _sweep(self) -> None:
        self.answers.sweep()
        self._expected.sweep()

    def _check_transport(self) -> None:
        """Raise an error if other hosts could access the transport without authentication."""
        transport = self.transport
        if not transport.beyond_host or self.unprotected:
            return
        reached = f"transport {transport.name!r} at {transport.beyond_host}"
        if not self.security.protected:
            raise open_to_strangers(reached)
        if not transport.guarantees.authentication:
            raise AtlasError(
                Code.UNPROTECTED,
                "The transport does not authenticate peers, and other hosts can reach it",
                got=f"{reached}, and the transport does not use the secret",
                hint='Use the transport "tcp", or pass unprotected=True on a trusted network',
            )

    def expect(
        self,
        request: str,
        blocks: Any,
        tokens: Any,
        *,
        source: Plan,
        pushers: Collection[str],
        identity: CacheIdentity | None = None,
    ) -> Expected:
        """Let the ranks of a source plan push a request into these blocks.

        `pushers` names the nodes that may push. When one of them announces its part, this node
        connects to it and pulls the part. The event `ready` of the result is set once every source
        rank's part has arrived. If a second process pushes the same rank's part before that part
        has arrived, the first push is ended. The blocks are in use until the request is ready or
        forgotten.
        """
        self.process.check()
        tables, start, stop = self.checked_tables(blocks, tokens, "destination")
        names = frozenset(text_list(pushers, "pushers"))
        if identity is not None:
            checked_identity(identity)
        return self._expected.add(
            request, blocks=tables, start=start, stop=stop, source=plan_hash(source),
            sources=self._sources_of(source), pushers=names, identity=identity, mark=self.mark(),
        )  # fmt: skip

    def _sources_of(self, source: Plan) -> frozenset[int]:
        """Return the ranks of plan `source` from which this node reads."""
        convert: dict[str, Any] = {}
        if self.conversion is not None and fingerprint(source) != fingerprint(self.plan):
            # The ranks do not depend on the scales, which only the source has.
            convert = {
                "convert": self.conversion.convert,
                "source_scales": 1.0,
                "destination_scales": 1.0,
            }
        return frozenset(route(source, self.plan, **convert).sources(self.rank))

    def forget(self, request: str) -> None:
        """Stop expecting a request, and end its pulls. Its blocks may be reused after the call.

        Raises `deadline` if a read in flight may still write to the blocks after half a minute. The
        blocks then stay quarantined until that read has ended.
        """
        self.process.check()
        self._expected.forget(request)

    def close(self) -> None:
        """Stop answering peers, end all offers and leases, and deregister all memory.

        A call in a forked child has no effect.
        """
        if self.process.forked:
            return
        self.server.stop()
        self.leases.drop_all()  # ends answers in progress, whatever they wait for
        self.server.close()
        self.channels.close()
        for request in list(self.offers):
            self.release(request, "closed")
        self.leases.drop_all()
        self._expected.close()
        self.answers.close()
        self.mover.close()
        self.transport.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
