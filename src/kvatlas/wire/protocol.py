"""The messages of the side channel, and how they are encoded and limited.

Messages are msgspec structs in msgpack, tagged, with a limit on every length and number;
block tables are packed integers, so that a few bytes never decode into many. Who sent them,
and that nobody changed them, is the connection's business.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import MOST_SECONDS
from kvatlas.models import CacheIdentity
from kvatlas.wire.transports.base import HOST, Memory

VERSION = 3
"""The version of this end. Version 1 used ZeroMQ; version 2 had no identities."""

OLDEST_VERSION = 2
"""The oldest version that this end understands."""

IDENTITY_VERSION = 3
"""The first version whose messages carry an identity."""

MAX_MESSAGE_BYTES = 4 << 20
"""Bytes of a message, the plan in it included."""

MAX_CHECKSUM_SPAN = 16 << 20
"""Bytes of a stream that one question about checksums may span, so that answers stay quick."""

MIN_PIECE_BYTES = 4096
"""The least size of a staging buffer, so that a peer cannot ask for a stream byte by byte."""

KEY_BYTES = 16

LONGEST_NAME = 256
"""Characters of the name of a node, a request or a layer."""

Direction = Literal["pull", "push"]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
Scale = Annotated[float, Meta(ge=2.0**-126, le=1e30)]
RequestNote = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""The request that a lease is about, repeated for the log of the other end."""
BlockTables = dict[Annotated[int, Meta(ge=0, le=65535)], bytes]
"""Block ids by group, each table as little-endian 32-bit integers."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """A question or an answer."""


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A region that the sender has registered with its transport: a pool, or staging (-1).

    A newer version may say more of it, which is left unread.
    """

    index: Annotated[int, Meta(ge=-1, le=65535)]
    address: Whole
    nbytes: Whole
    device: Annotated[int, Meta(ge=0, le=9999)] = 0
    """The number of its GPU; 0 for the host."""
    kind: Literal["host", "cuda"] = "host"

    @classmethod
    def of(cls, index: int, at: Memory) -> RegisteredMemory:
        """A region as it travels."""
        kind: Literal["host", "cuda"] = "host" if at.device == HOST else "cuda"
        return cls(index=index, address=at.address, nbytes=at.nbytes, device=at.number, kind=kind)

    @property
    def memory(self) -> Memory:
        """The region as transports know it."""
        device = HOST if self.kind == "host" else f"cuda:{self.device}"
        return Memory(self.address, self.nbytes, device)


class ConversionTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sender agrees to convert between unlike formats, and the scales of its tensors."""

    convert: Name
    scales: Annotated[dict[Name, tuple[Scale, Scale]], Meta(max_length=16384)] = msgspec.field(
        default_factory=dict
    )
    """Of K and of V, by layer."""


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """Who the sender is, what it caches, and where."""

    version: int
    oldest: int
    """The oldest version that the sender understands too."""
    name: Name
    incarnation: Key
    """Drawn anew whenever the process starts."""
    fingerprint: Annotated[str, Meta(min_length=32, max_length=32)]
    plan_hash: Digest
    plan: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)] | None = None
    """The plan as JSON; left out where the peer is thought to have it."""
    rank: Annotated[int, Meta(ge=0, le=65535)]
    memory: Annotated[tuple[RegisteredMemory, ...], Meta(max_length=1024)]
    transport: Name
    metadata: Annotated[bytes, Meta(max_length=1 << 18)]
    conversion: ConversionTerms | None = None
    """Left out where nothing is converted: peers that know of no conversion understand that."""
    identity: CacheIdentity | None = None
    """The identity of the sender's caches; None if it compares none, or before version 3."""


class NewerHello(Hello, frozen=True, kw_only=True, forbid_unknown_fields=False, tag="hello"):
    """A hello of a newer version, which may say more than is understood here."""


class _HelloVersions(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """A hello, decoded only as far as the versions of its sender."""

    version: int
    oldest: int | None = None


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a hello: the other end's own hello, and a session."""

    hello: Hello
    session: Key


class SendPlan(Message, frozen=True, kw_only=True, tag="send_plan"):
    """The answer to a hello whose plan is not known here: say it again, with the plan."""


class Open(Message, frozen=True, kw_only=True, omit_defaults=True, tag="open"):
    """Begin a transfer: `pull` reads what is offered, `push` brings what is expected."""

    session: Key
    direction: Direction
    request: Name
    blocks: BlockTables
    """The sender's own blocks."""
    peer_blocks: BlockTables | None = None
    """The other end's blocks as the sender knows them; None to be told."""
    start: Whole
    stop: Whole
    layers: Annotated[tuple[Name, ...], Meta(max_length=16384)] | None = None
    seconds: Seconds
    final: bool = False
    """The sender reads no more of what is offered, however much of it this is."""
    identity: CacheIdentity | None = None
    """The identity of the request's cache, if it is not that of the sender's hello."""


class Opened(Message, frozen=True, kw_only=True, omit_defaults=True, tag="opened"):
    """A lease: the blocks stay as they are until it ends."""

    lease: Key
    seconds: float
    blocks: BlockTables
    piece: Whole = 0
    """Bytes of a staging buffer of this end; 0 where it has none."""
    mark: Whole | None = None
    """The mark of this end behind which its blocks are read; None where nothing is to wait for."""
    layered: bool = False
    """Whether layers are still being written: each is waited for before it is read."""


class LeaseQuestion(Message, frozen=True, kw_only=True):
    """A question about a lease."""

    session: Key
    lease: Key
    request: RequestNote = ""


class Borrow(LeaseQuestion, frozen=True, kw_only=True, tag="borrow"):
    """Ask for staging buffers of the other end, waiting a while for them."""

    buffers: Annotated[int, Meta(ge=1, le=16)]
    seconds: Seconds


class Lent(Message, frozen=True, kw_only=True, tag="lent"):
    """Staging buffers that are the lease's own while it lasts; none where none came free."""

    buffers: Annotated[tuple[Whole, ...], Meta(max_length=16)] = ()


class Renew(LeaseQuestion, frozen=True, kw_only=True, tag="renew"):
    """Extend a lease."""

    seconds: Seconds


class AwaitLayer(LeaseQuestion, frozen=True, kw_only=True, tag="await_layer"):
    """Ask whether a layer of what is offered has been written, waiting a while until it is."""

    layer: Name
    seconds: Seconds


class LayerWritten(Message, frozen=True, kw_only=True, tag="layer_written"):
    """Whether it has, and the mark behind which it is read."""

    written: bool
    mark: Whole | None = None


class Gather(LeaseQuestion, frozen=True, kw_only=True, tag="gather"):
    """Gather bytes start .. stop - 1 of an offered stream into a staging buffer of the lease."""

    start: Whole
    stop: Whole
    buffer: Annotated[int, Meta(ge=0, le=65535)]


class Fetch(LeaseQuestion, frozen=True, kw_only=True, tag="fetch"):
    """Read bytes start .. stop - 1 of a pushed stream and put them into the expected blocks.

    The receiver does the reading, into staging memory of its own, so that nobody else ever
    writes to its pools. Pieces are fetched one after the other, each where the last one ended.
    """

    start: Whole
    stop: Whole
    staged_at: Whole | None = None
    """Where they lie, gathered, in the sender's staging memory; None to read its pools."""


class GetChecksums(LeaseQuestion, frozen=True, kw_only=True, tag="get_checksums"):
    """Ask for checksums of bytes start .. stop - 1 of the lease's stream, piece by piece."""

    start: Whole
    stop: Whole
    piece: Annotated[int, Meta(ge=4096, le=1 << 30)]


class Checksums(Message, frozen=True, kw_only=True, tag="checksums"):
    """Checksums, as little-endian 32-bit integers."""

    sums: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class Close(LeaseQuestion, frozen=True, kw_only=True, tag="close"):
    """End a transfer; `complete` says that every byte has moved."""

    complete: bool


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Done; `seconds` are left of the lease that the question was about."""

    seconds: float = 0.0


class Release(Message, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """The sender reads no more of an offered request: where it was the last, the offer ends."""

    session: Key
    request: Name
    read: bool = False
    """Whether it has read all that it wanted, without a lease."""
    posting: tuple[Annotated[int, Meta(ge=0, le=65535)], Whole] | None = None
    """Which posting it has read, where it was seen on a board: its slot, and that's generation.

    An offer that was made anew under the same name is another, and is kept.
    """


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """Not done, and why."""

    code: Annotated[str, Meta(max_length=64)]
    problem: Annotated[str, Meta(max_length=4096)]
    got: Annotated[str, Meta(max_length=4096)]
    hint: Annotated[str, Meta(max_length=4096)]
    retry: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Seconds after which a peer that was busy may be asked again."""


Question = (
    Hello | Open | Borrow | Renew | AwaitLayer | Gather | Fetch | GetChecksums | Close | Release
)
Answer = Welcome | SendPlan | Opened | Lent | LayerWritten | Ok | Checksums | Refusal

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def encode(message: Message) -> bytes:
    """A message as it travels in a frame."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise AtlasError(
            Code.TOO_MANY,
            f"A message has more than {MAX_MESSAGE_BYTES:,} bytes",
            got=f"{type(message).__name__} of {len(payload):,} bytes",
            hint="Ask for fewer tokens, layers or checksums at once",
        )
    return payload


def decode(payload: bytes, kind: Any) -> Any:
    """The message in a frame from outside, or a refusal.

    >>> decode(encode(Ok(seconds=2.0)), Answer)
    Ok(seconds=2.0)
    >>> decode(b"what?", Answer)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The peer sent a malformed or contradictory message. \
Got Expected `object`, got `int`. Run the same version of kvatlas at both ends. [bad_handshake]
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except _UNREADABLE as problem:
        newer = _newer_hello(payload) if kind is Question else None
        if newer is not None:
            return newer
        raise bad_handshake(str(problem)[:200]) from None


def _newer_hello(payload: bytes) -> NewerHello | None:
    """The hello of a newer version; None where it is none, or is malformed in any version."""
    try:
        versions = msgspec.msgpack.decode(payload, type=_HelloVersions)
    except _UNREADABLE:
        return None
    check_versions(versions.version, versions.oldest)
    try:
        newer = versions.version > VERSION
        return msgspec.msgpack.decode(payload, type=NewerHello) if newer else None
    except _UNREADABLE:
        return None


def check_versions(version: int, oldest: int | None) -> None:
    """Refuse a peer with which this end has no version in common."""
    oldest = version if oldest is None else oldest
    if min(version, VERSION) < max(oldest, OLDEST_VERSION):
        raise unlike_versions(version, oldest)


def unlike_versions(version: int, oldest: int) -> AtlasError:
    """The peer speaks other versions than this end does."""
    return AtlasError(
        Code.UNLIKE_VERSIONS,
        got=f"versions {oldest} to {version} against {OLDEST_VERSION} to {VERSION}",
        hint=f"Upgrade the older end, which speaks version {min(version, VERSION)}",
    )


def new_key() -> bytes:
    """The key of a session or a lease, that nobody can guess."""
    return secrets.token_bytes(KEY_BYTES)


def by_group(blocks: Any) -> Mapping[int, Any]:
    """Block tables by group; a table alone is that of group 0."""
    return blocks if isinstance(blocks, Mapping) else {0: blocks}


def pack_tables(blocks: Mapping[int, Any]) -> BlockTables:
    """Encode block tables; ids that are not needed may be negative here."""
    return {
        int(group): (np.asarray(ids, dtype=np.int64) & 0xFFFFFFFF).astype("<u4").tobytes()
        for group, ids in blocks.items()
    }


def unpack_tables(blocks: BlockTables) -> dict[int, Int64s]:
    """Decode block tables."""
    tables = {}
    for group, ids in blocks.items():
        if len(ids) % 4:
            raise bad_handshake(f"a block table of {len(ids)} bytes")
        tables[group] = np.frombuffer(ids, dtype="<u4").astype(np.int64)
    return tables


def bad_handshake(got: str) -> AtlasError:
    """A message that is malformed, or contradicts its sender's plan."""
    return AtlasError(
        Code.BAD_HANDSHAKE, got=got, hint="Run the same version of kvatlas at both ends"
    )


# msgspec crashes where two threads are the first to decode a type: the first is this one.
for _kind in (Question, Answer, NewerHello, _HelloVersions):
    msgspec.msgpack.Decoder(_kind)
