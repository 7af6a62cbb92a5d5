"""`Node`: serves one rank's caches to peers.

A node registers its pools with a transport and answers peers. It tracks which requests are offered
and until when, which are expected, and which peers hold a lease. Everything that a peer sends is
checked against the peer's plan first, and a peer may access only what its lease covers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import duration
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import check_tables
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire.arguments import check_new_request, text_list
from kvatlas.wire.connection import open_to_strangers
from kvatlas.wire.leases import Expected, Offer, Released, WrittenLayers
from kvatlas.wire.peers import plan_hash
from kvatlas.wire.rpc import Server
from kvatlas.wire.server.answers import Answers
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.base import Transport
from kvatlas.wire.transports.errors import coded_limits

_LONGEST_OFFER = 3600.0


def pools_for(plan: Plan, rank: int, transport: Transport) -> dict[int, Bytes]:
    """Allocate host memory for a rank's pools that peers of a transport can access, by index."""
    pools = plan.rank_pools(rank).items()
    return {index: transport.allocate(pool.nbytes) for index, pool in pools}


class Node(NodeState):
    """One rank of a plan, served to peers.

    `memory` is the rank's pools, which the node keeps alive: a `Cache`, or tensors, arrays or
    `Memory` by index. On a GPU, offers, expectations and pulls are ordered after the kernels
    already queued on the calling thread's current stream. `listen` is the endpoint that peers
    connect to.

    With a `secret` of 16 bytes or more, only peers with the same secret can connect, and the side
    channel is encrypted. Pass `(new, old)` to accept both during a rotation, or `tls` to use TLS
    contexts instead of secrets. Without either, the node and its transport listen only on this
    host, unless `unprotected` is set. It is also needed for a transport between hosts that does not
    authenticate its peers, such as Mooncake.

    All holders of one secret can use any name. To bind names to keys, pass `peers`: a `PeerAccess`
    with its own secret, and what it may do, for each name. With `tls`, the name of a peer must be
    in its certificate.

    The node keeps `buffers` staging buffers of `piece` bytes for staged transfers. The leases of a
    peer end soon after its connections do. With `convert` ("fp8->bf16"), the node also serves peers
    with a different format that request the same conversion; `scales` are the scales of this node's
    tensors.

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
        self.answers = Answers(self)
        self.server = Server(
            self.listen, self.answers, security=self.security, unprotected=self.unprotected,
            idle=self.answers.sweep, closed=self.answers.sessions.disconnected,
        )  # fmt: skip

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
                got=f"{reached}, which does not use the secret",
                hint='Use the transport "tcp", or pass unprotected=True on a trusted network',
            )

    @property
    def endpoint(self) -> str:
        """The endpoint at which peers reach this node."""
        return self.server.endpoint

    def offer(
        self,
        request: str,
        blocks: Any,
        tokens: Any,
        *,
        seconds: float = 30.0,
        readers: Collection[str] | None = None,
        released: Released | None = None,
        recompute: int = 0,
        layered: bool = False,
        identity: CacheIdentity | None = None,
    ) -> None:
        """Let peers read a request's blocks, which must not change until they are released.

        `readers` names the nodes that may read; None allows any. `released` is called once, with
        the request and a reason, for example when all ranks that read from this one have done so or
        the offer has expired. Only then may the blocks be reused. With `recompute`, sliding windows
        also include what the last `recompute` tokens need, for peers that compute these tokens
        again. Block table entries that no offered token needs may have any value.

        A `layered` offer may be made before its content is written: the node calls `layer_written`
        for each layer, and a `streamed` pull reads each layer as it becomes available. `identity`
        overrides the node's identity for this request, for example if it uses an adapter or a salt.

        Several offers may share blocks. Raises `blocks_in_use` if a pull fills one of the blocks or
        a push is expected in it.
        """
        self.process.check()
        held = self._checked(blocks, tokens, "source", recompute=recompute)
        names = None if readers is None else frozenset(text_list(readers, "readers"))
        lasting = min(duration(seconds, math.inf), _LONGEST_OFFER)
        whose = self.request_identity(identity)
        with self.lock:
            check_new_request(request, self.offers)
            until = time.monotonic() + lasting
            layers = WrittenLayers(self.plan.layers) if layered else None
            mark = None if layered else self.mark()
            claim = self.ledger.claim("offered", request, self.ledger.by_pool(held[0]))
            offer = Offer(
                request, *held, until, released, names, mark=mark, layers=layers, claim=claim,
                identity=whose,
            )  # fmt: skip
            self.offers[request] = offer
            self.post(offer)

    def layer_written(self, request: str, layer: str) -> None:
        """Mark a layer of a layered offer as written, once the caller's stream has finished it."""
        self.process.check()
        with self.lock:
            offer = self.offers.get(request)
        if offer is None or offer.layers is None:
            problem = "There is no layered offer of this name, or it has expired"
            hint = "Call offer(..., layered=True) first, with a longer time limit"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(request)[:300], hint=hint)
        offer.layers.add(layer, self.mark())

    def withdraw(self, request: str) -> None:
        """End an offer early. Transfers in flight fail."""
        self.process.check()
        self.release(request, "withdrawn")

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

        `pushers` names the nodes that may push. `ready` is set once every source rank has pushed.
        This node reads the bytes into its staging memory and copies them into the blocks itself, so
        nothing is written to the blocks after `forget`. If a rank pushes again before it has
        arrived, the new push replaces the old one. The blocks are in use until the request is ready
        or forgotten.
        """
        self.process.check()
        held = self._checked(blocks, tokens, "destination")
        names = frozenset(text_list(pushers, "pushers"))
        sources, mark, whose = self.sources_of(source), self.mark(), self.request_identity(identity)
        with self.lock:
            check_new_request(request, self.expected)
            claim = self.ledger.claim("expected", request, self.ledger.by_pool(held[0]))
            expected = self.expected[request] = Expected(
                request, *held, plan_hash(source), sources, names, mark=mark, claim=claim,
                identity=whose,
            )  # fmt: skip
        return expected

    def forget(self, request: str) -> None:
        """Stop expecting a request. Its blocks may be reused once this returns."""
        self.process.check()
        with self.lock:
            expected = self.expected.pop(request, None)
        if expected is not None:
            self.leases.drop_part(expected)
            expected.release_blocks()

    def close(self) -> None:
        """Stop answering peers, end all offers and leases, and deregister all memory.

        A call in a forked child has no effect.
        """
        if self.process.forked:
            return
        self.server.stop()
        self.leases.drop_all()  # answers at hand end, whatever they wait for
        self.server.close()
        self.channels.close()
        for request in list(self.offers):
            self.release(request, "closed")
        self.leases.drop_all()
        for request in list(self.expected):
            self.forget(request)
        self.answers.close()
        self.mover.close()
        self.transport.close()

    def _checked(
        self, blocks: Any, tokens: Any, end: str, *, recompute: int = 0
    ) -> tuple[dict[int, Int64s], int, int]:
        """Return block tables by group, the first token, and the end of the token range."""
        start, stop = token_range(tokens, self.plan.max_len)
        tables = check_tables(
            self.plan, self.rank, blocks, (start, stop), end=end, recompute=recompute
        )
        return tables, start, stop

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
