"""What clients of a tier ask its server, and what it answers.

No bytes of blocks are in any of these: a client is told which blocks of a file, or of shared
memory, it may read or fill, and does so itself. Every length and number has a limit, and what
depends on the tier's plan is checked against that.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvatlas.tier.request_blocks import LONGEST_KEY
from kvatlas.wire.protocol import BlockTables, Key, Message, Ok, Refusal, SendPlan

VERSION = 1
"""Both ends must speak the same: they are of one host, and can be upgraded together."""

_MAX_TOKENS = 1 << 40
_MAX_BLOCKS = 1 << 20
_MAX_PLAN = 4 << 20

MOST_NAMES = 4096
"""Names that may be asked for in one question."""
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Mark = Annotated[int, Meta(ge=0, le=1 << 62)]
Token = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
Number = Annotated[int, Meta(ge=0, le=65535)]
PlanHash = Annotated[bytes, Meta(min_length=32, max_length=32)]
BlockKey = Annotated[bytes, Meta(min_length=1, max_length=LONGEST_KEY)]
KeyRows = Annotated[
    dict[Number, Annotated[tuple[BlockKey | None, ...], Meta(max_length=_MAX_BLOCKS)]],
    Meta(max_length=4096),
]
"""A key, or none, for each block of the tier in the order of tokens, by group."""
BlockName = tuple[Number, BlockKey]


class Attach(Message, frozen=True, kw_only=True, tag="attach"):
    """Begin a session, which lasts as long as the connection that this came by."""

    version: int


class OwnedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that a tier is in."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """The one that its header has: another file may be at the path by now."""


class OwnedMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared memory that a tier is in."""

    plan: Annotated[bytes, Meta(max_length=_MAX_PLAN)]
    published: Annotated[bytes, Meta(max_length=1 << 18)]
    """Where it is, as the transport for shared memory says."""


class Attached(Message, frozen=True, kw_only=True, tag="attached"):
    """A session, and where the tier's blocks are."""

    version: int
    session: Key
    file: OwnedFile | None = None
    memory: OwnedMemory | None = None


class SessionQuestion(Message, frozen=True, kw_only=True):
    """A question of a client that has a session."""

    session: Key


class KeysQuestion(SessionQuestion, frozen=True, kw_only=True):
    """A question about a request's tokens."""

    keys: KeyRows
    start: Token
    stop: Token


class MatchKeys(KeysQuestion, frozen=True, kw_only=True, tag="match_keys"):
    """Ask how many tokens could be fetched."""


class KeysMatched(Message, frozen=True, kw_only=True, tag="keys_matched"):
    """So many."""

    tokens: Token


class PinKeys(KeysQuestion, frozen=True, kw_only=True, tag="pin_keys"):
    """Pin what there is, verified, until it is unpinned or the session ends."""


class JoinPin(SessionQuestion, frozen=True, kw_only=True, tag="join_pin"):
    """Pin what another session has pinned."""

    pin: Key


class KeysPinned(Message, frozen=True, kw_only=True, tag="keys_pinned"):
    """What is pinned, in which blocks of the tier."""

    pin: Key
    start: Token
    tokens: Token
    tables: BlockTables


class Unpin(SessionQuestion, frozen=True, kw_only=True, tag="unpin"):
    """Let go of a pin of this session."""

    pin: Key


class LearnPlan(SessionQuestion, frozen=True, kw_only=True, tag="learn_plan"):
    """A plan whose ranks are going to store."""

    plan: Annotated[bytes, Meta(max_length=_MAX_PLAN)]


class BeginStore(KeysQuestion, frozen=True, kw_only=True, tag="begin_store"):
    """Ask which blocks a rank may fill; the answer is `SendPlan` where its plan is not known."""

    plan: PlanHash
    rank: Number
    blocks: BlockTables
    """The rank's own."""


class StoreBegun(Message, frozen=True, kw_only=True, tag="store_begun"):
    """The blocks to fill; they are the store's until it ends, or its session does."""

    store: Key
    fills: Annotated[bytes, Meta(max_length=_MAX_BLOCKS * 8)]
    """Pairs of 32-bit integers: which of the blocks that are needed, and its id in the tier."""


class SummedPart(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's part adds to the checksum of a block, from writing it."""

    pool: Number
    block_id: Count
    term: Annotated[int, Meta(ge=0, lt=1 << 32)]
    nbytes: Count


class EndStore(SessionQuestion, frozen=True, kw_only=True, tag="end_store"):
    """A rank has filled its blocks, or has failed to."""

    store: Key
    brought: bool
    sums: Annotated[tuple[SummedPart, ...], Meta(max_length=_MAX_BLOCKS)] = ()


class StoreEnded(Message, frozen=True, kw_only=True, tag="store_ended"):
    """How many keys are whole now, wait for other ranks, or found no room."""

    whole: Count
    waiting: Count
    no_room: Count


class DropKeys(SessionQuestion, frozen=True, kw_only=True, tag="drop_keys"):
    """Forget keys."""

    keys: KeyRows


class KeysDropped(Message, frozen=True, kw_only=True, tag="keys_dropped"):
    """How many blocks that were."""

    blocks: Count


class ListNames(SessionQuestion, frozen=True, kw_only=True, tag="list_names"):
    """Ask what has become whole since a mark."""

    mark: Mark


class NamesListed(Message, frozen=True, kw_only=True, tag="names_listed"):
    """The first of them, and the mark after these."""

    names: Annotated[tuple[BlockName, ...], Meta(max_length=1 << 16)]
    mark: Mark


class FindNames(SessionQuestion, frozen=True, kw_only=True, tag="find_names"):
    """Ask which of some names are whole."""

    names: Annotated[tuple[BlockName, ...], Meta(max_length=MOST_NAMES)]


class NamesFound(Message, frozen=True, kw_only=True, tag="names_found"):
    """Whether each is, and how many blocks there are, and have made room for others."""

    whole: Annotated[tuple[bool, ...], Meta(max_length=MOST_NAMES)]
    blocks: Count
    evicted: Count


TierQuestion = (
    Attach | MatchKeys | PinKeys | JoinPin | Unpin | LearnPlan | BeginStore | EndStore
    | DropKeys | ListNames | FindNames
)  # fmt: skip
TierAnswer = (
    Attached | KeysMatched | KeysPinned | SendPlan | StoreBegun | StoreEnded | KeysDropped
    | NamesListed | NamesFound | Ok | Refusal
)  # fmt: skip

REPEATABLE = (MatchKeys, LearnPlan, ListNames, FindNames)
"""Questions that do no harm when they are carried out twice."""

# msgspec crashes where two threads are the first to decode a type: the first is this one.
for _kind in (TierQuestion, TierAnswer):
    msgspec.msgpack.Decoder(_kind)
