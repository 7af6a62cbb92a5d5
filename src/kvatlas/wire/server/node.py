"""`Node`: one rank's caches on the wire.

A node registers its pools with a transport, answers peers, and keeps track of which
requests are offered and until when, which are expected, and who holds a lease. It trusts
nothing that a peer says before it is checked against the peer's plan; what a peer may do
is what its lease says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s, duration
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import check_tables, token_range
from kvatlas.wire.arguments import check_new_request, text_list
from kvatlas.wire.connection import open_to_strangers
from kvatlas.wire.leases import Expected, Offer, Released, WrittenLayers
from kvatlas.wire.peers import plan_hash
from kvatlas.wire.rpc import Server
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.server.answers import Answers
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.base import Transport

_LONGEST_OFFER = 3600.0


def pools_for(plan: Plan, rank: int, transport: Transport) -> dict[int, Bytes]:
    """Host memory for the pools of a rank that peers of a transport can reach, by index."""
    pools = plan.rank_pools(rank).items()
    return {index: transport.allocate(pool.nbytes) for index, pool in pools}


class Node(NodeState):
    """One rank of a plan, reachable by others.

    `memory` are the rank's pools, which it keeps alive: a `Cache`, or by index tensors, arrays
    or `Memory`. On a GPU, what is offered, expected or pulled is ordered behind the kernels that
    the calling thread's current stream was given before. `listen` is the endpoint where peers
    ask. With a `secret` of 16 bytes or more only those who know it can ask, and nobody can
    listen; `(new, old)` are both good while secrets are rotated, and `tls` takes the place of
    secrets. Without either a node and its transport listen on this host alone, unless it is
    `unprotected`.
    `buffers` staging buffers of `piece` bytes are kept for staged transfers. The leases of a
    peer end soon after its connections do. With `convert` ("fp8->bf16") peers in unlike formats
    are served that ask for the same; `scales` are those of this node's tensors.
    `identity` names the weights and settings that the caches are computed with. A peer with a
    different identity is refused, unless both nodes are made with `check_identity=False`.
    """

    def __post_init__(self) -> None:
        self.check_arguments()
        self._check_transport()
        try:
            super().__post_init__()
            self.register()
            self.check_plan_travels()
            self.answers = Answers(self)
            self.server = Server(
                self.listen, self.answers, security=self.security, unprotected=self.unprotected,
                idle=self.answers.sweep, closed=self.answers.sessions.disconnected,
            )  # fmt: skip
        except BaseException:
            self.transport.close()
            raise

    def _check_transport(self) -> None:
        """Refuse a transport that serves other hosts for a node that keeps nobody out."""
        beyond = self.transport.beyond_host
        if beyond and not self.security.protected and not self.unprotected:
            raise open_to_strangers(f"a transport {self.transport.name} at {beyond}")

    @property
    def endpoint(self) -> str:
        """Where peers reach this node."""
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
        """Let peers read a request's blocks, which stay untouched until they are released.

        `readers` are the names of the nodes that may; any may where they are left out.
        `released` is called once, with the request and why: all ranks that read from this
        one have done so, or the offer has expired. Only then may the blocks be reused.
        With `recompute`, windows also have what the last so many tokens see, for peers that
        compute those again. Entries that no token of the offer needs may hold anything.
        What is `layered` may be offered before it is there: `layer_written` says of one layer
        after the other that it is, and a pull that is `streamed` reads each as it comes.
        `identity` is that of this request, if an adapter or a salt makes it different from the
        node's. The blocks may be part of several offers; blocks that a pull fills or a push is
        expected for are refused with `blocks_in_use`.
        """
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
        """Say that a layer of a layered offer is written, once the caller's stream is done."""
        with self.lock:
            offer = self.offers.get(request)
        if offer is None or offer.layers is None:
            problem = "No layered offer has this name; it may have expired"
            hint = "Offer it first, layered and for long enough"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(request)[:300], hint=hint)
        offer.layers.add(layer, self.mark())

    def withdraw(self, request: str) -> None:
        """End an offer before its time; transfers that are under way fail."""
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

        `pushers` are the names of the nodes that may push; `ready` is set once every source
        rank has. This node reads the bytes into its staging memory and copies them into the
        blocks itself, so nothing is written to the blocks after `forget`. If a rank pushes
        again before it has arrived, the new push replaces the old one. The blocks are in use
        until the request is ready or forgotten.
        """
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
        """Expect a request no longer; its blocks may be reused once this returns."""
        with self.lock:
            expected = self.expected.pop(request, None)
        if expected is not None:
            self.leases.drop_part(expected)
            expected.release_blocks()

    def close(self) -> None:
        """Answer no more peers, end all offers and leases, deregister all memory."""
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
        """Block tables by group, and the first token and the one behind the last."""
        start, stop = token_range(tokens, self.plan.max_len)
        tables = check_tables(
            self.plan, self.rank, blocks, (start, stop), end=end, recompute=recompute
        )
        return tables, start, stop

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
