"""The offers of a node: blocks that peers may read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import duration
from kvatlas.models import CacheIdentity
from kvatlas.routing import check_tables
from kvatlas.routing.token_ranges import token_range
from kvatlas.wire.arguments import check_new_request, checked_identity, text_list
from kvatlas.wire.offers import Offer, Released, WrittenLayers
from kvatlas.wire.protocol import pack_tables
from kvatlas.wire.rpc import Server, log
from kvatlas.wire.server.node_state import NodeState
from kvatlas.wire.transports.offer_board import PostedOffer, Posting

_LONGEST_OFFER = 3600.0
_CHANNELS_SECONDS = 1.0
"""Seconds between checks of connections to peers that may be gone."""


class OfferingNode(NodeState):
    """A node that offers requests at its endpoint: the part of `Node` that sessions use.

    `lock` guards offers. `Leases` documents the lock order.
    """

    server: Server

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lock = threading.Lock()
        self.offers: dict[str, Offer] = {}
        self._channels_swept = time.monotonic()

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
        timeout: float = 30.0,
        readers: Collection[str] | None = None,
        released: Released | None = None,
        recompute: int = 0,
        layered: bool = False,
        identity: CacheIdentity | None = None,
    ) -> None:
        """Let peers read a request's blocks, which must not change until they are released.

        The offer expires after `timeout` seconds in which no reader connects or makes progress.
        Readers can keep the offer from expiring for at most an hour. `readers` names the nodes that
        may read the offer; None allows any node. `released` is called once, with the request and a
        reason, when the offer ends: for example, when all ranks that read from this rank have
        finished. Only then may the blocks be reused. With `recompute`, the offer also includes the
        sliding windows of the last `recompute` tokens, for peers that compute these tokens again.
        Block table entries that no offered token needs may have any value.

        A `layered` offer may be made before its content is written: the node calls `layer_written`
        for each layer, and a `streamed` pull reads each layer as it becomes available. `identity`
        overrides the node's identity for this request, for example if it uses an adapter or a salt.

        Several offers may share blocks. Raises `blocks_in_use` if a pull fills one of the blocks,
        or an expected push will fill it.
        """
        self.process.check()
        held = self.checked_tables(blocks, tokens, "source", recompute=recompute)
        names = None if readers is None else frozenset(text_list(readers, "readers"))
        lasting = min(duration(timeout, math.inf), _LONGEST_OFFER)
        whose = self.identity if identity is None else checked_identity(identity)
        with self.lock:
            check_new_request(request, self.offers)
            now = time.monotonic()
            layers = WrittenLayers(self.plan.layers) if layered else None
            mark = None if layered else self.mark()
            claim = self.ledger.claim("offered", request, self.ledger.by_pool(held[0]))
            offer = Offer(
                request, *held, now + lasting, released, names, mark, layers, claim, whose,
                seconds=lasting, ends=now + _LONGEST_OFFER,
            )  # fmt: skip
            self.offers[request] = offer
            self._post(offer)

    def _post(self, offer: Offer) -> None:
        """Post an offer on the board, where peers on this host find it without asking this node.

        An offer is not posted if it is restricted to some readers, is written layer by layer, or
        has another identity than the node.
        """
        board = self.transport.board
        own = offer.identity == self.identity
        if board is not None and offer.readers is None and offer.layers is None and own:
            tables = pack_tables(offer.blocks)
            board.post(PostedOffer(offer.request, tables, offer.start, offer.stop, offer.mark))

    def posting(self, request: str) -> Posting | None:
        """Return the slot and generation of an offer on the board; None if it is not posted."""
        board = self.transport.board
        return None if board is None else board.posting(request)

    def layer_written(self, request: str, layer: str) -> None:
        """Let peers read a layer after the work that is now queued on the caller's CUDA stream.

        Returns at once.
        """
        self.process.check()
        with self.lock:
            offer = self.offers.get(request)
        if offer is None or offer.layers is None:
            problem = "There is no offer of this name, or it has expired"
            if offer is not None:
                problem = "The request was offered without layered=True"
            hint = "Call offer(..., layered=True) first, with a larger timeout= if an offer expired"
            raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=repr(request)[:300], hint=hint)
        offer.layers.add(layer, self.mark())

    def withdraw(self, request: str) -> None:
        """End an offer early. Transfers in flight fail."""
        self.process.check()
        self.release(request, "withdrawn")

    def release(self, request: str, why: str, only: Offer | None = None) -> None:
        """End an offer and its leases, and call its `released` callback with the reason `why`.

        If `only` is given, nothing happens unless `only` is still the offer with this name.
        """
        with self.lock:
            if only is not None and self.offers.get(request) is not only:
                return  # it has ended; a newer offer has its name
            if why == "expired" and only is not None and only.expires > time.monotonic():
                return  # a reader has kept it meanwhile
            offer = self.offers.pop(request, None)
            if self.transport.board is not None:
                self.transport.board.take_down(request)
        if offer is None:
            return
        self.leases.drop_part(offer)
        if offer.claim is not None:
            offer.claim.release()
        if offer.released is not None:
            try:
                offer.released(request, why)
            except Exception:
                # An error of the callback must not affect peers or other requests.
                log.exception("released callback failed request=%r why=%s", request, why)

    def sweep(self) -> None:
        """End expired offers and leases, and connections that peers have ended."""
        self.leases.sweep()
        now = time.monotonic()
        if now >= self._channels_swept + _CHANNELS_SECONDS:
            self._channels_swept = now
            self.channels.sweep()
        for offer in [one for one in list(self.offers.values()) if one.expires <= now]:
            log.warning("offer expired request=%r", offer.request)
            self.release(offer.request, "expired", offer)

    def checked_tables(
        self, blocks: Any, tokens: Any, end: str, *, recompute: int = 0
    ) -> tuple[dict[int, Int64s], int, int]:
        """Check block tables and tokens. Return (tables by group, first token, token after last).

        `end` ("source" or "destination") is for error messages.
        """
        start, stop = token_range(tokens, self.plan.max_len)
        tables = check_tables(
            self.plan, self.rank, blocks, (start, stop), end=end, recompute=recompute
        )
        return tables, start, stop
