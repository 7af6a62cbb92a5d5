"""Requests whose prompts another engine has prefilled, and the offers that they read.

With `n` > 1, siblings of a request read the same offer. The offer is released when its last known
reader is done.
"""

from __future__ import annotations

from typing import Any

from kvatlas.engines.vllm.offer_readers import OfferReaders, parent_of
from kvatlas.engines.vllm.orders import RemoteRequest, StepOrders, prompt_digest
from kvatlas.engines.vllm.request_context import request_context
from kvatlas.errors import AtlasError, Code


class RemotePrefills:
    """Track which local requests read offers of other engines.

    Orders for the workers to release or keep an offer are added to the argument `orders`.
    """

    def __init__(self, *, spreads_siblings: bool) -> None:
        """Start without requests.

        If `spreads_siblings` is true, the requests that vLLM makes from one request with `n` > 1
        may run on different data-parallel ranks. The offer that they read is then left to expire,
        because other ranks may still read it when the last local reader is done.
        """
        self._spreads_siblings = spreads_siblings
        self._waiting: dict[str, RemoteRequest] = {}
        """Offers by the local request that will read them, until its blocks are allocated."""
        self._readers = OfferReaders()

    def expect(self, request: Any, offer: RemoteRequest, orders: StepOrders) -> None:
        """Count a request as a reader of an offer, and order the workers to keep the offer.

        Raise an error if the offer is for another prompt.
        """
        try:
            _check_prompt(request, offer)
        except AtlasError:
            # Another request of the same client may have the right prompt.
            if not self._readers.has_readers(offer):
                self._release_soon(offer, orders)
            raise
        self._waiting[request.request_id] = offer
        self._readers.add(request.request_id, offer)
        orders.release_soon = [one for one in orders.release_soon if one.request != offer.request]
        orders.keep.append(offer.request)

    def waiting(self, request_id: str) -> RemoteRequest | None:
        """Return the offer that a request will read; None without an offer or after `take`."""
        return self._waiting.get(request_id)

    def take(self, request_id: str) -> RemoteRequest | None:
        """Return the offer that a request will read, or None, and forget the offer.

        If the read fails, the tokens are computed; the read is not retried.
        """
        return self._waiting.pop(request_id, None)

    def begin_read(self, request_id: str) -> bool:
        """Begin a read; return whether the request is the only reader of its offer.

        If the result is true, the read also releases the offer.
        """
        final = self._readers.reads_alone(request_id)
        if final:
            self._readers.remove(request_id)
        return final

    def end_read(self, request_id: str, orders: StepOrders) -> None:
        """Remove a request from its offer's readers. If no reader is left, order a release."""
        offer = self._readers.remove(request_id)
        if offer is None:
            return
        if parent_of(request_id) is None:
            orders.let_go.append(offer)
        elif not self._spreads_siblings:
            self._release_soon(offer, orders)
        # Otherwise another data-parallel rank may still read the offer, so it must expire.

    @staticmethod
    def _release_soon(offer: RemoteRequest, orders: StepOrders) -> None:
        orders.keep = [name for name in orders.keep if name != offer.request]
        orders.release_soon.append(offer)


def _check_prompt(request: Any, offer: RemoteRequest) -> None:
    """Raise an error unless the offer has the request's prompt, adapter, salt and media."""
    context = request_context(request, offer.tokens)
    if prompt_digest(request.prompt_token_ids, offer.tokens, context) != offer.prompt:
        raise AtlasError(
            Code.UNKNOWN_REQUEST,
            "kv_transfer_params belong to another prompt, adapter, cache_salt or image",
            got=f"offer {offer.request!r} for a prompt of {request.num_prompt_tokens} tokens",
            hint="Use the parameters from the prefill response to the same request",
        )
