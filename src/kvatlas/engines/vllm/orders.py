"""What the scheduler's side of the connector tells the workers', and what engines tell each other.

Engines speak through `kv_transfer_params`, which proxies pass on as they are: a prefill
engine's answer names the request, how many tokens of it there are, and where its ranks are.
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
"""Of the parameters; an engine that reads others computes the request itself."""

_ENDPOINT = re.compile(r"tcp://[^\s/]{1,255}:\d{1,5}")
Endpoint = Annotated[str, Meta(max_length=300)]


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that a prefill engine has finished, as decode engines are told of it."""

    version: int
    request: Annotated[str, Meta(min_length=1, max_length=256)]
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=4096)]
    """Of all ranks, in their order."""
    windows: Annotated[tuple[int, ...], Meta(max_length=256)] = ()
    """Windows and chunks of which only the last tokens are kept."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """A digest of the tokens, adapter, salt and media that K and V depend on."""

    def params(self, engine_id: str, block_ids: Any = ()) -> dict[str, Any]:
        """The `kv_transfer_params` of a response.

        Block ids are there for proxies that look at what vLLM's own connector answers; no
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
        """The request that a client's `kv_transfer_params` name, or a refusal.

        >>> told = RemoteRequest(version=1, request="r", tokens=9, endpoints=("tcp://h:1",))
        >>> RemoteRequest.read(told.params("engine")) == told
        True
        >>> RemoteRequest.read({"do_remote_prefill": True, "remote_block_ids": [1]})
        Traceback (most recent call last):
        kvatlas.errors.AtlasError: kv_transfer_params do not name a request of another engine. \
Got no word of kvatlas. Run KVAtlasConnector at both ends, and pass its parameters on. [bad_config]
        """
        said = params.get("kvatlas")
        if said is None:
            raise _bad_params("no word of kvatlas")
        try:
            told = msgspec.convert(said, cls)
        except msgspec.ValidationError as wrong:
            raise _bad_params(str(wrong)) from None
        if told.version != VERSION:
            raise _bad_params(f"version {told.version} where this engine reads {VERSION}")
        for endpoint in told.endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise _bad_params(f"endpoint {endpoint!r}")
        return told


def prompt_digest(prompt: Sequence[int] | None, tokens: int, context: bytes = b"") -> str:
    """Return a digest of the first tokens of a prompt, and of what else K and V depend on.

    `context` is empty for a request without adapter, salt, media and embeddings.

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
        "kv_transfer_params do not name a request of another engine",
        got=got,
        hint="Run KVAtlasConnector at both ends, and pass its parameters on",
    )


Tables = tuple[tuple[int, ...], ...]
"""Block ids by group; -1 for entries that hold nothing."""


@dataclass(frozen=True)
class PullOrder:
    """Read tokens start .. stop - 1 of another engine's request into these blocks."""

    request_id: str
    remote: RemoteRequest
    tables: Tables
    start: int
    stop: int
    final: bool = True
    """Whether this is the last read of the offer, which it then releases."""


@dataclass(frozen=True)
class OfferOrder:
    """Keep these blocks of a finished request for another engine to read."""

    request_id: str
    name: str
    """What peers call it: never used twice, whatever requests are called."""
    tables: Tables
    tokens: int


@dataclass(frozen=True)
class LoadOrder:
    """Read tokens start .. stop - 1 of a request from the tier into these blocks."""

    request_id: str
    pin: bytes
    """What the scheduler has pinned, by the name under which others join it; empty in a store."""
    keys: BlockKeys
    """The same by its keys: whoever serves the tier next knows no pins."""
    tables: Tables
    start: int
    stop: int


@dataclass(frozen=True)
class StoreOrder:
    """Keep tokens start .. stop - 1 of a finished request in the tier; its blocks wait for it."""

    request_id: str
    keys: BlockKeys
    tables: Tables
    start: int
    stop: int


@dataclass
class StepOrders:
    """What a worker has to do after one step."""

    pulls: list[PullOrder] = field(default_factory=list)
    offers: list[OfferOrder] = field(default_factory=list)
    let_go: list[RemoteRequest] = field(default_factory=list)
    """Requests of other engines that are not going to be read."""
    release_soon: list[RemoteRequest] = field(default_factory=list)
    """Offers without a known reader; a sibling of the last reader may still arrive."""
    keep: list[str] = field(default_factory=list)
    """Names of offers that have a reader again."""
    cancelled: list[str] = field(default_factory=list)
    """Requests of this engine that were aborted while they were being read."""
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
