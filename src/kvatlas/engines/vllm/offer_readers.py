"""Track the local requests that may still read an offer of another engine.

With `n` > 1, vLLM splits a request into siblings with the same `kv_transfer_params`. Siblings
reach the scheduler at different steps, and none of them records `n`. The offer is released when
the last known reader has ended.
"""

from __future__ import annotations

import re

from kvatlas.engines.vllm.orders import RemoteRequest

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""Matches `INDEX_PARENT`, the id that vLLM gives to each sample of a request with `n` > 1."""


def parent_of(request_id: str) -> str | None:
    """Return the id of the request that vLLM split into several; None if it was not split.

    `request_id` is the id of one of the parts.

    >>> parent_of("3_chatcmpl-5f1a"), parent_of("chatcmpl-5f1a")
    ('chatcmpl-5f1a', None)
    """
    found = _CHILD.fullmatch(request_id)
    return None if found is None else found[1]


class OfferReaders:
    """Offers of other engines, and the local requests that read each of them.

    Several samples of one request may read the same offer. `remove` returns the offer once its last
    reader is removed.

    >>> offer = RemoteRequest(version=1, request="p", tokens=9, endpoints=("tcp://h:1",))
    >>> readers = OfferReaders()
    >>> readers.add("0_d", offer), readers.add("1_d", offer)
    (None, None)
    >>> readers.remove("0_d"), readers.remove("1_d") == offer
    (None, True)
    """

    def __init__(self) -> None:
        self._offers: dict[str, RemoteRequest] = {}
        """Offers by the local request that reads them."""
        self._readers: dict[str, set[str]] = {}
        """Local requests by the name of the offer."""

    def __len__(self) -> int:
        """Return the number of offers that have readers."""
        return len(self._readers)

    def add(self, request_id: str, offer: RemoteRequest) -> None:
        """Count a request as a reader of an offer."""
        self._offers[request_id] = offer
        self._readers.setdefault(offer.request, set()).add(request_id)

    def has_readers(self, offer: RemoteRequest) -> bool:
        """Return whether a local request may still read an offer."""
        return offer.request in self._readers

    def reads_alone(self, request_id: str) -> bool:
        """Return whether a request is the only one of this engine that may read its offer.

        The result is false if the request has siblings, that is, if vLLM made it from a client's
        request with `n` > 1.
        """
        offer = self._offers[request_id]
        return parent_of(request_id) is None and len(self._readers[offer.request]) == 1

    def remove(self, request_id: str) -> RemoteRequest | None:
        """Forget a reader; return its offer if the offer has no readers left, else None."""
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return None
        readers = self._readers[offer.request]
        readers.discard(request_id)
        if readers:
            return None
        del self._readers[offer.request]
        return offer
