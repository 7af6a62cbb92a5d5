"""The messages between the clients and the server of a tier.

Messages contain no bytes of blocks. The server assigns blocks of a file or of shared memory, and
the client reads or fills them itself. Every length and number has a limit, and values that depend
on the tier's plan are checked against it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvatlas.tier.request_blocks import LONGEST_KEY
from kvatlas.wire.protocol import BlockTables, Key, Message, Ok, Refusal, SendPlan

VERSION = 2
"""Protocol version. Both ends must use the same one: they share a host."""

_MAX_TOKENS = 1 << 40
_MAX_BLOCKS = 1 << 20
_MAX_PLAN = 4 << 20

MOST_NAMES = 4096
"""Maximum number of names in one request."""
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Token = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
Number = Annotated[int, Meta(ge=0, le=65535)]
PlanHash = Annotated[bytes, Meta(min_length=32, max_length=32)]
BlockKey = Annotated[bytes, Meta(min_length=1, max_length=LONGEST_KEY)]
KeyRows = Annotated[
    dict[Number, Annotated[tuple[BlockKey | None, ...], Meta(max_length=_MAX_BLOCKS)]],
    Meta(max_length=4096),
]
"""A key or None for each block of the tier in token order, by group."""
BlockName = tuple[Number, BlockKey]


class Attach(Message, frozen=True, kw_only=True, tag="attach"):
    """Begin a session, which lasts as long as the connection that carries this message."""

    version: int


class OwnedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file in which a tier's blocks are stored."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """The id in the file's header. It detects that the path now leads to another file."""


class OwnedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared memory in which a tier's blocks are stored."""

    plan: Annotated[bytes, Meta(max_length=_MAX_PLAN)]
    published: Annotated[bytes, Meta(max_length=1 << 18)]
    """Its location, as the shared memory transport publishes it."""


class Attached(Message, frozen=True, kw_only=True, tag="attached"):
    """Reply to `Attach`: the new session and the location of the tier's blocks."""

    version: int
    session: Key
    file: OwnedFile | None = None
    memory: OwnedMemory | None = None


class SessionQuestion(Message, frozen=True, kw_only=True):
    """Base class of messages from a client in a session."""

    session: Key


class KeysQuestion(SessionQuestion, frozen=True, kw_only=True):
    """Base class of messages about tokens start .. stop - 1 of an inference request."""

    keys: KeyRows
    start: Token
    stop: Token


class MatchKeys(KeysQuestion, frozen=True, kw_only=True, tag="match_keys"):
    """Ask how many tokens of a request can be fetched."""


class KeysMatched(Message, frozen=True, kw_only=True, tag="keys_matched"):
    """Reply to `MatchKeys`: the number of tokens that can be fetched."""

    tokens: Token


class PinKeys(KeysQuestion, frozen=True, kw_only=True, tag="pin_keys"):
    """Pin and verify the stored blocks of a request, until `Unpin` or the end of the session."""


class JoinPin(SessionQuestion, frozen=True, kw_only=True, tag="join_pin"):
    """Pin the blocks that another session has pinned."""

    pin: Key


class KeysPinned(Message, frozen=True, kw_only=True, tag="keys_pinned"):
    """Reply to `PinKeys` and `JoinPin`: the pinned tokens and their blocks in the tier."""

    pin: Key
    start: Token
    tokens: Token
    tables: BlockTables


class Unpin(SessionQuestion, frozen=True, kw_only=True, tag="unpin"):
    """Release a pin of this session."""

    pin: Key


class LearnPlan(SessionQuestion, frozen=True, kw_only=True, tag="learn_plan"):
    """Send the plan of ranks that will store blocks. Later messages contain only its hash."""

    plan: Annotated[bytes, Meta(max_length=_MAX_PLAN)]


class BeginStore(KeysQuestion, frozen=True, kw_only=True, tag="begin_store"):
    """Ask which blocks a rank may fill. If the server lacks the plan, the reply is `SendPlan`."""

    plan: PlanHash
    rank: Number
    blocks: BlockTables
    """The rank's block tables."""


class StoreBegun(Message, frozen=True, kw_only=True, tag="store_begun"):
    """Reply to `BeginStore`: the blocks to fill, reserved until `EndStore` or the session's end."""

    store: Key
    fills: Annotated[bytes, Meta(max_length=_MAX_BLOCKS * 8)]
    """Pairs of 32-bit integers: the index among the needed blocks, and the block id."""


class SummedPart(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution to the checksum of a block: a CRC-32 term and a number of bytes."""

    pool: Number
    block_id: Count
    term: Annotated[int, Meta(ge=0, lt=1 << 32)]
    nbytes: Count


class EndStore(SessionQuestion, frozen=True, kw_only=True, tag="end_store"):
    """Report that a rank has filled its blocks, or that it has failed to do so."""

    store: Key
    brought: bool
    sums: Annotated[tuple[SummedPart, ...], Meta(max_length=_MAX_BLOCKS)] = ()


class StoreEnded(Message, frozen=True, kw_only=True, tag="store_ended"):
    """Reply to `EndStore`: how many keys are complete, wait for other ranks, or found no space."""

    whole: Count
    waiting: Count
    no_room: Count


class DropKeys(SessionQuestion, frozen=True, kw_only=True, tag="drop_keys"):
    """Remove blocks by key."""

    keys: KeyRows


class KeysDropped(Message, frozen=True, kw_only=True, tag="keys_dropped"):
    """Reply to `DropKeys`: the number of blocks that were removed."""

    blocks: Count


class FindNames(SessionQuestion, frozen=True, kw_only=True, tag="find_names"):
    """Ask which of the given (group, key) pairs have a complete block in the tier."""

    names: Annotated[tuple[BlockName, ...], Meta(max_length=MOST_NAMES)]


class NamesFound(Message, frozen=True, kw_only=True, tag="names_found"):
    """Reply to `FindNames`: whether each of the requested blocks exists.

    It also contains the number of complete blocks of the tier and the number of evicted blocks.
    """

    whole: Annotated[tuple[bool, ...], Meta(max_length=MOST_NAMES)]
    blocks: Count
    evicted: Count


TierQuestion = (
    Attach | MatchKeys | PinKeys | JoinPin | Unpin | LearnPlan | BeginStore | EndStore
    | DropKeys | FindNames
)  # fmt: skip
TierAnswer = (
    Attached | KeysMatched | KeysPinned | SendPlan | StoreBegun | StoreEnded | KeysDropped
    | NamesFound | Ok | Refusal
)  # fmt: skip

REPEATABLE = (MatchKeys, LearnPlan, FindNames)
"""Idempotent requests, which may be repeated."""

# msgspec crashes if two threads decode a type for the first time, so it is prepared here.
for _kind in (TierQuestion, TierAnswer):
    msgspec.msgpack.Decoder(_kind)
