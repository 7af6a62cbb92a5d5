"""Offers of this engine's finished requests to decode engines.

With `n` > 1, vLLM splits a request into siblings with the same prompt. All siblings share one
offer, because a client uses the response parameters of only one sibling.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

from kvatlas.engines.vllm.offer_readers import parent_of
from kvatlas.engines.vllm.orders import VERSION, OfferOrder, RemoteRequest, prompt_digest
from kvatlas.engines.vllm.request_context import request_context
from kvatlas.engines.vllm.transfer_groups import TransferGroups

_FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class _SharedOffer(NamedTuple):
    """An offer that siblings share.

    Siblings are the requests that vLLM made from one request with `n` > 1.
    """

    request_id: str
    remote: RemoteRequest
    params: dict[str, Any]
    made: float


class MadeOffers:
    """Make offers of finished requests to decode engines.

    Siblings, the requests that vLLM makes from one request with `n` > 1, share one offer.
    """

    def __init__(self, engine_id: str, groups: TransferGroups, *, lease_seconds: float) -> None:
        self._engine_id, self._groups = engine_id, groups
        self._lease_seconds = lease_seconds
        self.endpoints: tuple[str, ...] = ()
        """The endpoints of this engine's ranks, in rank order."""
        self._shared: dict[str, _SharedOffer] = {}
        """Offers by the parent of their request, until workers have sent them."""

    def make(
        self, request: Any, block_ids: Any, *, windows_alone: bool
    ) -> tuple[OfferOrder | None, dict[str, Any] | None]:
        """Offer a finished request that was prefilled for another engine.

        Return a tuple (order to keep the blocks, `kv_transfer_params` of the response). The order
        is None if a sibling made the offer; both are None if the request cannot be offered. If
        `windows_alone` is true, this engine lacks the tokens before the sliding windows, and the
        offer lists these windows.
        """
        name, params = request.request_id, request.kv_transfer_params or {}
        tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        keep = params.get("do_remote_decode") and request.status.name in _FINISHED
        if not keep or tokens < 1 or not any(block_ids):
            return None, None
        prompt = prompt_digest(request.prompt_token_ids, tokens, request_context(request, tokens))
        parent = parent_of(name)
        shared = self._shared.get(parent or "")
        if shared is not None and self._is_shareable(shared, prompt, tokens):
            return None, dict(shared.params)
        offer = RemoteRequest(
            version=VERSION,
            request=f"{name[:200]}/{secrets.token_hex(8)}",
            tokens=tokens,
            endpoints=self.endpoints,
            windows=self._groups.windows(windows_alone=windows_alone),
            prompt=prompt,
        )
        answer = offer.params(self._engine_id, block_ids)
        if parent is not None:
            self._shared[parent] = _SharedOffer(name, offer, answer, time.monotonic())
        tables = self._groups.tables(block_ids, tokens)
        return OfferOrder(name, offer.request, tables, tokens), answer

    def sent(self, request_id: str) -> None:
        """Stop sharing a request's offer, because the request's blocks were sent and are freed."""
        parent = parent_of(request_id) or ""
        shared = self._shared.get(parent)
        if shared is not None and shared.request_id == request_id:
            del self._shared[parent]

    def _is_shareable(self, offer: _SharedOffer, prompt: str, tokens: int) -> bool:
        """Return whether a sibling with this prompt digest and token count may share an offer.

        Siblings share an offer until half of its lease has passed.
        """
        same = (offer.remote.prompt, offer.remote.tokens) == (prompt, tokens)
        return same and time.monotonic() < offer.made + self._lease_seconds / 2
