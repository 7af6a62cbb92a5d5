"""The offers of a node: blocks that peers may read."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import duration
from kvatlas.models import CacheIdentity
from kvatlas.routing import check_tables
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire.arguments import check_new_request, text_list
from kvatlas.wire.leases import Offer, Released, WrittenLayers
from kvatlas.wire.rpc import Server
from kvatlas.wire.server.node_state import NodeState

_LONGEST_OFFER = 3600.0


class OfferingNode(NodeState):
    """A node that offers requests at its endpoint: the part of `Node` that sessions use."""

    server: Server

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
        held = self.checked_tables(blocks, tokens, "source", recompute=recompute)
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
        got = repr(request)[:300]
        if offer is None:
            problem = "There is no offer of this name, or it has expired"
            hint = "Call offer(..., layered=True) first, with a larger seconds= if it expired"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=got, hint=hint)
        if offer.layers is None:
            problem, hint = "The offer is not layered", "Call offer(..., layered=True)"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=got, hint=hint)
        offer.layers.add(layer, self.mark())

    def withdraw(self, request: str) -> None:
        """End an offer early. Transfers in flight fail."""
        self.process.check()
        self.release(request, "withdrawn")

    def checked_tables(
        self, blocks: Any, tokens: Any, end: str, *, recompute: int = 0
    ) -> tuple[dict[int, Int64s], int, int]:
        """Return block tables by group, the first token, and the end of the token range."""
        start, stop = token_range(tokens, self.plan.max_len)
        tables = check_tables(
            self.plan, self.rank, blocks, (start, stop), end=end, recompute=recompute
        )
        return tables, start, stop
