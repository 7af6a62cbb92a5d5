"""Orders from the scheduler to the workers, and the messages between engines.

Engines communicate through `kv_transfer_params`, which proxies forward unchanged. The response of
a prefill engine contains the name of the request, its number of tokens and the endpoints of the
engine's ranks.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.chained_keys import BlockKeys

VERSION = 1
"""Version of the parameters. An engine that does not support it computes the request itself."""

_ENDPOINT = re.compile(r"tcp://[^\s/]{1,255}:\d{1,5}")
Endpoint = Annotated[str, Meta(max_length=300)]


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that a prefill engine has finished and offers to decode engines."""

    version: int
    request: Annotated[str, Meta(min_length=1, max_length=256)]
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=4096)]
    """Endpoints of all ranks, in rank order."""
    windows: Annotated[tuple[int, ...], Meta(max_length=256)] = ()
    """Sizes in tokens of the windows and chunks outside of which the engine has no tokens."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """A digest of the tokens, adapter, salt and media that K and V depend on."""

    def params(self, engine_id: str, block_ids: Any = ()) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the response that offers this request.

        Block ids are included for proxies that expect the parameters of vLLM's own connector. No
        engine reads them.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_request_id": self.request,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "kvatlas": msgspec.json.decode(msgspec.json.encode(self)),
        }

    @classmethod
    def read(cls, params: dict[str, Any]) -> RemoteRequest:
        """Parse the `kv_transfer_params` of a client's request.

        >>> offer = RemoteRequest(version=1, request="r", tokens=9, endpoints=("tcp://h:1",))
        >>> RemoteRequest.read(offer.params("engine")) == offer
        True
        >>> RemoteRequest.read({"do_remote_prefill": True, "remote_block_ids": [1]})
        Traceback (most recent call last):
        kvatlas.errors.AtlasError: kv_transfer_params do not identify a request of another engine. \
Got no key 'kvatlas'. Run KVAtlasConnector in both engines, and forward kv_transfer_params \
unchanged. [bad_config]
        """
        said = params.get("kvatlas")
        if said is None:
            raise _bad_params("no key 'kvatlas'")
        try:
            told = msgspec.convert(said, cls)
        except msgspec.ValidationError as wrong:
            raise _bad_params(str(wrong)) from None
        if told.version != VERSION:
            raise _bad_params(f"version {told.version}, expected {VERSION}")
        for endpoint in told.endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise _bad_params(f"endpoint {endpoint!r}")
        return told


def prompt_digest(prompt: Sequence[int] | None, tokens: int, context: bytes = b"") -> str:
    """Return a digest of a prompt's first `tokens` tokens and of the request's context.

    `context` is the result of `request_context`, which is empty for a request without adapter,
    salt, media and embeddings.

    >>> prompt_digest([1, 2, 3], 2) == prompt_digest([1, 2, 9, 9], 2)
    True
    >>> prompt_digest([1, 2], 2) == prompt_digest([1, 2], 2, b"an adapter")
    False
    """
    digest = blake2b(array("q", (prompt or ())[:tokens]).tobytes(), digest_size=16, key=context)
    return digest.hexdigest()


def _bad_params(got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_CONFIG,
        "kv_transfer_params do not identify a request of another engine",
        got=got,
        hint="Run KVAtlasConnector in both engines, and forward kv_transfer_params unchanged",
    )


Tables = tuple[tuple[int, ...], ...]
"""Block ids by group; -1 for entries without a block."""


@dataclass(frozen=True)
class PullOrder:
    """An order to read tokens start .. stop - 1 of another engine's request into local blocks."""

    request_id: str
    remote: RemoteRequest
    tables: Tables
    start: int
    stop: int
    final: bool = True
    """Whether this is the last read of the offer; it then releases the offer."""


@dataclass(frozen=True)
class OfferOrder:
    """An order to keep the blocks of a finished request for another engine to read."""

    request_id: str
    name: str
    """The name of the offer for peers; unique even if request ids repeat."""
    tables: Tables
    tokens: int


@dataclass(frozen=True)
class LoadOrder:
    """An order to read tokens start .. stop - 1 of a request from the tier into local blocks."""

    request_id: str
    pin: bytes
    """The name of the scheduler's pin on the blocks, which workers share; empty for a store.

    Pinned blocks are not evicted from the tier.
    """
    keys: BlockKeys
    """The keys of the same blocks, for a tier whose server has restarted and lost its pins."""
    tables: Tables
    start: int
    stop: int


@dataclass(frozen=True)
class StoreOrder:
    """An order to store tokens of a request in the tier.

    vLLM frees the blocks of a finished request after the store. The order for a running request has
    the number of a checkpoint, which workers report to the scheduler after the store.
    """

    request_id: str
    keys: BlockKeys
    tables: Tables
    spans: tuple[tuple[int, int], ...]
    """Ranges (start, stop) of tokens. Windows and recurrent states are stored at each stop."""
    checkpoint: int | None = None
    """The number of the checkpoint; None for a finished request."""


@dataclass
class StepOrders:
    """The orders for a worker in one step."""

    pulls: list[PullOrder] = field(default_factory=list)
    offers: list[OfferOrder] = field(default_factory=list)
    let_go: list[RemoteRequest] = field(default_factory=list)
    """Offers of other engines to release now, because no local request reads them."""
    release_soon: list[RemoteRequest] = field(default_factory=list)
    """Offers to release after a delay: a sibling of the last reader may still arrive."""
    keep: list[str] = field(default_factory=list)
    """Names of offers that have a reader again."""
    cancelled: list[str] = field(default_factory=list)
    """Requests of this engine that were aborted while being read."""
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
