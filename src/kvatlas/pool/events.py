"""KV events: messages about stored and evicted blocks, in the format of vLLM 0.32.

Routers use them to find the engine that has cached a prompt's prefix. A batch is `[time, events,
data-parallel rank]` in msgpack, and an event is a map that includes the event's type. A block hash
covers everything up to the end of the block. Events contain 64 bits of the hash, as in vLLM. Each
group of a hybrid model has separate events, with the group's number and kind, because a prefix is a
hit only if all groups have the blocks that the next token needs. Received data is validated before
it is used.
"""

from __future__ import annotations

from itertools import groupby
from math import isfinite
from typing import Annotated, Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Group
from kvatlas.pool.prefix_hash import HashChain, PrefixIdentity
from kvatlas.pool.prefix_index import BlockName

MOST_BYTES = 1 << 26
"""Maximum size of a received batch in bytes."""
MEDIUM = "GPU"
"""vLLM's name for GPU memory as a cache medium."""

BlockHash = Annotated[int, msgspec.Meta(ge=-(2**63))] | bytes
_Token = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Consecutive blocks that were stored and can be reused from now on."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """The hash of the block before the first one; None at the beginning of a prompt."""
    token_ids: list[_Token]
    block_size: _Size
    lora_id: int | None = msgspec.field(default_factory=lambda: None)
    medium: str | None = msgspec.field(default_factory=lambda: MEDIUM)
    lora_name: str | None = msgspec.field(default_factory=lambda: None)
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """For each block, the other inputs of its hash: adapter, (image, position) and salt."""
    group_idx: _Rank | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[_Token]] | None = None
    """For each block, the tokens after it that its hash also covers, for the layers of a drafter.

    vLLM 0.33 sends them; None if hashes cover no more than their block.
    """

    def __post_init__(self) -> None:
        """Raise an error if token ids are missing, or if a list does not have one item per block.

        There may be more tokens than the blocks hold: for windows, vLLM omits evicted blocks, but
        not their tokens.
        """
        count, blocks = len(self.token_ids), len(self.block_hashes)
        if count % self.block_size or count < blocks * self.block_size:
            least = blocks * self.block_size
            expected = f"expected a multiple of {self.block_size} and at least {least}"
            raise ValueError(f"{count} token_ids for {blocks} blocks, {expected}")
        for name in ("extra_keys", "lookahead_token_ids"):
            found = getattr(self, name)
            if found is not None and len(found) != blocks:
                told = f"{len(found)} {name} for {blocks} blocks"
                raise ValueError(f"{told}, expected one per block")


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that were evicted."""

    block_hashes: list[BlockHash]
    medium: str | None = msgspec.field(default_factory=lambda: MEDIUM)
    group_idx: _Rank | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """All cached blocks were removed."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events in order, with the time when they were sent."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: _Rank | None = None

    def __post_init__(self) -> None:
        """Raise an error unless the time is finite."""
        if not isfinite(self.ts):
            raise ValueError(f"a time ts of {self.ts}, expected a finite number")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """Encode a batch in vLLM's format."""
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode and validate a batch from a peer.

    >>> decode_batch(encode_batch(EventBatch(1.5, [BlockRemoved([7])]))).events
    [BlockRemoved(block_hashes=[7], medium='GPU', group_idx=None, locality=None, ownership=None)]
    """
    got: Any = f"{len(payload)} bytes"
    if len(payload) <= MOST_BYTES:
        try:
            return _DECODER.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            got = error
    raise AtlasError(
        Code.BAD_HANDSHAKE,
        "This is not a batch of KV events in the format of vLLM 0.32",
        got=got,
        hint="Check the version of the publisher",
    )


# -- events that a BlockPool sends -------------------------------------------------------


def stored_event(
    number: int, group: Group, chain: HashChain, first: int, blocks: int
) -> BlockStored:
    """Return the event that reports `blocks` newly stored blocks of group `number`.

    The blocks start at index `first` of the group's block table.
    """
    size, stop = group.block, first + blocks
    identity, keys = chain.identity, None
    if identity.lora or identity.salt or identity.media:
        keys = [_extra_keys(identity, n * size, (n + 1) * size) for n in range(first, stop)]
    windows = group.kind in ("sliding_window", "sliding_window_mla")
    return BlockStored(
        block_hashes=list(map(_external, chain.ends(size, first, stop))),
        parent_block_hash=_external(chain.at(first * size)) if first else None,
        token_ids=chain.tokens(first * size, stop * size),
        block_size=size,
        lora_name=identity.lora or None,
        extra_keys=keys,
        group_idx=number,
        kv_cache_spec_kind="mamba" if group.kind == "recurrent" else group.kind,
        kv_cache_spec_sliding_window=group.window if windows else None,
    )


def removed_events(names: list[BlockName]) -> list[BlockEvent]:
    """Return events for evicted blocks, given their keys in the prefix index.

    Consecutive blocks of the same group share an event.
    """
    return [
        BlockRemoved([_external(name.digest) for name in part], group_idx=number)
        for number, part in groupby(names, key=lambda name: name.group)
    ]


def _external(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _extra_keys(identity: PrefixIdentity, start: int, stop: int) -> tuple[Any, ...] | None:
    """Return what the hash of tokens start .. stop - 1 includes in addition to the tokens.

    The values are in vLLM's order: adapter, media and salt. Returns None if there are none.
    """
    keys: list[Any] = [identity.lora] if identity.lora else []
    keys += [(one.hex(), at - start) for at, one in identity.media if start <= at < stop]
    keys += [identity.salt.hex()] if identity.salt and not start else []
    return tuple(keys) or None
