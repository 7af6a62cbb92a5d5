"""The messages of the side channel, and their limits.

Messages are tagged msgspec structs in msgpack, with a limit on every length and number. Block
tables are packed integers, so a short message cannot decode into a large object. Messages are
authenticated by the connection, not by this module.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.copying.memory import HOST, Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import MOST_SECONDS
from kvatlas.models import CacheIdentity

VERSION = 5
"""The protocol version of this end.

Version 1 used ZeroMQ. Version 2 had no identities. Version 3 had no keyed checksums and no TLS on
the data connections of `tcp`, and the source of a push sent the ranges that the peer fetched.
Nodes of version 4 that do not know `Keep` refuse it, and the reader then goes on without it.
Version 4 copied no padding between two nodes.
"""

OLDEST_VERSION = 2
"""The oldest protocol version that this end understands."""

IDENTITY_VERSION = 3
"""The first version whose messages contain a `CacheIdentity`."""

PUSH_VERSION = 4
"""The first version in which the source of a push sends `Announce`, and the receiver then reads."""

KEYED_VERSION = 4
"""The first version whose checksums may be keyed."""

PADDING_VERSION = 5
"""The first version whose hello has `padding`."""

MAX_MESSAGE_BYTES = 4 << 20
"""The maximum size of a message in bytes, including the plan in it."""

MAX_CHECKSUM_SPAN = 16 << 20
"""The maximum bytes of a stream that one `GetChecksums` may cover, to bound its time."""

MIN_PIECE_BYTES = 4096
"""The minimum size of a staging buffer, so that a peer cannot read a stream byte by byte."""

KEY_BYTES = 16

LONGEST_NAME = 256
"""The maximum characters in the name of a node, a request or a layer."""

LONGEST_ENDPOINT = 512
"""The maximum characters in an endpoint."""

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
Scale = Annotated[float, Meta(ge=2.0**-126, le=1e30)]
RequestNote = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""The request that a lease belongs to, repeated for the receiver's log."""
BlockTables = dict[Annotated[int, Meta(ge=0, le=65535)], bytes]
"""Block ids by group, each table as little-endian 32-bit integers."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """A question (request) or an answer (reply)."""


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A memory region that the sender has registered: a pool, or the staging buffers (index -1).

    Unknown fields from a newer version are ignored.
    """

    index: Annotated[int, Meta(ge=-1, le=65535)]
    address: Whole
    nbytes: Whole
    device: Annotated[int, Meta(ge=0, le=9999)] = 0
    """The GPU's index; 0 for the host."""
    kind: Literal["host", "cuda"] = "host"

    @classmethod
    def of(cls, index: int, at: Memory) -> RegisteredMemory:
        """Return the message that describes a region."""
        kind: Literal["host", "cuda"] = "host" if at.device == HOST else "cuda"
        return cls(index=index, address=at.address, nbytes=at.nbytes, device=at.number, kind=kind)

    @property
    def memory(self) -> Memory:
        """The region as a `Memory`, the type that transports use."""
        device = HOST if self.kind == "host" else f"cuda:{self.device}"
        return Memory(self.address, self.nbytes, device)


class ConversionTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format conversion that the sender accepts, and the scales of the sender's tensors."""

    convert: Name
    scales: Annotated[dict[Name, tuple[Scale, Scale]], Meta(max_length=16384)] = msgspec.field(
        default_factory=dict
    )
    """The scales of K and V, by layer."""


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """The sender's name, protocol versions, plan, memory and identity."""

    version: int
    oldest: int
    """The oldest protocol version that the sender also understands."""
    name: Name
    incarnation: Key
    """A random key, new at every start of the process."""
    fingerprint: Annotated[str, Meta(min_length=32, max_length=32)]
    plan_hash: Digest
    plan: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)] | None = None
    """The plan as JSON; None if the receiver is expected to have it."""
    rank: Annotated[int, Meta(ge=0, le=65535)]
    memory: Annotated[tuple[RegisteredMemory, ...], Meta(max_length=1024)]
    transport: Name
    metadata: Annotated[bytes, Meta(max_length=1 << 18)]
    conversion: ConversionTerms | None = None
    """Omitted if nothing is converted, so that peers without conversion understand the message."""
    identity: CacheIdentity | None = None
    """The identity of the sender's caches; None before version 3, or without identity checks."""
    padding: bool = False
    """Whether the sender copies padding where that joins runs. It is copied if both nodes do so.

    Padding may contain bytes of earlier requests, so nodes with private pools copy none.
    """


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a hello: the answering node's hello, and the key of the new session."""

    hello: Hello
    session: Key


class SendPlan(Message, frozen=True, kw_only=True, tag="send_plan"):
    """The answer to a hello with an unknown plan: send the hello again, with the plan."""


class Open(Message, frozen=True, kw_only=True, omit_defaults=True, tag="open"):
    """Ask for a lease to read an offered request.

    Older versions also send the direction `push`, which a node refuses.
    """

    session: Key
    direction: Literal["pull", "push"]
    request: Name
    blocks: BlockTables
    """The sender's own blocks."""
    peer_blocks: BlockTables | None = None
    """The receiver's blocks, if the sender has them; None to get them in the answer."""
    start: Whole
    stop: Whole
    layers: Annotated[tuple[Name, ...], Meta(max_length=16384)] | None = None
    seconds: Seconds
    final: bool = False
    """Whether this is the sender's last read of the offer, even if it covers only a part of it."""
    identity: CacheIdentity | None = None
    """The identity that the request's cache must have; None if the sender compares none."""


class Keep(Message, frozen=True, kw_only=True, tag="keep"):
    """Ask the receiver to keep an offer while the sender connects. No session is needed.

    The answer is `Ok` with the seconds that the offer lasts from now on.
    """

    request: Name
    seconds: Seconds


class Opened(Message, frozen=True, kw_only=True, omit_defaults=True, tag="opened"):
    """The answer to `Open`: a granted lease. The blocks stay unchanged until the lease ends."""

    lease: Key
    seconds: float
    blocks: BlockTables
    piece: Whole = 0
    """The size of a staging buffer of the node that grants the lease; 0 if it has none."""
    mark: Whole | None = None
    """The GPU event after which the blocks may be read; None if there is nothing to wait for."""
    layered: bool = False
    """Whether layers are still being written. The reader then sends `AwaitLayer` for each layer."""


class LeaseQuestion(Message, frozen=True, kw_only=True):
    """A question about a lease."""

    session: Key
    lease: Key
    request: RequestNote = ""


class Borrow(LeaseQuestion, frozen=True, kw_only=True, tag="borrow"):
    """Ask to borrow staging buffers. The receiver waits up to `seconds` until some are free."""

    buffers: Annotated[int, Meta(ge=1, le=16)]
    seconds: Seconds


class Lent(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lent"):
    """The answer to `Borrow`: staging buffers that belong to the lease while it lasts.

    The list is empty if no buffer became free.
    """

    buffers: Annotated[tuple[Whole, ...], Meta(max_length=16)] = ()
    memory: RegisteredMemory | None = None
    """The memory of the buffers, which only this peer can read; None if all peers share it."""
    metadata: Annotated[bytes, Meta(max_length=1 << 18)] = b""
    """The transport's metadata for a connection to that memory."""


class Renew(LeaseQuestion, frozen=True, kw_only=True, tag="renew"):
    """Extend a lease."""

    seconds: Seconds


class AwaitLayer(LeaseQuestion, frozen=True, kw_only=True, tag="await_layer"):
    """Ask whether a layer of an offer is written. The receiver waits up to `seconds` for it."""

    layer: Name
    seconds: Seconds


class LayerWritten(Message, frozen=True, kw_only=True, tag="layer_written"):
    """The answer to `AwaitLayer`: whether the layer is written.

    `mark` is the sender's GPU event that must complete before the layer is read; None if there is
    none.
    """

    written: bool
    mark: Whole | None = None


class Gather(LeaseQuestion, frozen=True, kw_only=True, tag="gather"):
    """Gather bytes start .. stop - 1 of the lease's stream into a staging buffer of the lease."""

    start: Whole
    stop: Whole
    buffer: Annotated[int, Meta(ge=0, le=65535)]


class GetChecksums(
    LeaseQuestion, frozen=True, kw_only=True, omit_defaults=True, tag="get_checksums"
):
    """Ask for checksums of bytes start .. stop - 1 of the lease's stream, one per `piece` bytes."""

    start: Whole
    stop: Whole
    piece: Annotated[int, Meta(ge=4096, le=1 << 30)]
    keyed: bool = False
    """Whether to answer with MACs instead of CRC-32. Omitted before version 4."""


class Checksums(Message, frozen=True, kw_only=True, tag="checksums"):
    """The answer to `GetChecksums`: little-endian 32-bit CRC-32s, or MACs of 16 bytes each."""

    sums: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]


class Close(LeaseQuestion, frozen=True, kw_only=True, tag="close"):
    """End a transfer. If `complete` is true, the sender has received every byte."""

    complete: bool


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Success, the answer to questions that need no other answer.

    `seconds` is the remaining time of the lease that the question was about.
    """

    seconds: float = 0.0


class Release(Message, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """Report that the sender has finished reading an offer.

    The offer ends once all its readers have finished.
    """

    session: Key
    request: Name
    read: bool = False
    """Whether the sender, without a lease, has read everything that it needs."""
    posting: tuple[Annotated[int, Meta(ge=0, le=65535)], Whole] | None = None
    """(Slot, generation) of the posting on the `OfferBoard` that the sender has read.

    A newer offer with the same name has another generation, and is not released.
    """


How = Literal["auto", "direct", "staged", "coalesced"]
"""How runs are moved.

`direct` uses one descriptor per run. `staged` gathers runs at the source. `coalesced` reads joined
runs and scatters them at the destination. `auto` chooses by measured cost.
"""


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """Ask the receiver to read an expected request from the sender, and to report its progress.

    The sender repeats an announcement to poll its progress. A different announcement of the same
    rank replaces the first one, unless the receiver has already read the rank's part.
    """

    session: Key
    request: Name
    offer: Name
    """The name under which the sender offers the request. The sender tells no other node."""
    endpoint: Annotated[str, Meta(min_length=1, max_length=LONGEST_ENDPOINT)]
    """The endpoint at which the sender answers."""
    start: Whole
    stop: Whole
    seconds: Seconds
    how: How = "auto"
    checksums: bool = False


class Announced(Message, frozen=True, kw_only=True, tag="announced"):
    """The answer to `Announce`: the progress of a push.

    The answering node carries out the push by reading from the announcing node. `arrived` is true
    if the answering node has read its part, and `moved` counts the bytes so far. If the read fails,
    the answer is a `Refusal` instead.
    """

    arrived: bool
    moved: Whole = 0


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """An error, which a node may send as the answer to any question."""

    code: Annotated[str, Meta(max_length=64)]
    problem: Annotated[str, Meta(max_length=4096)]
    got: Annotated[str, Meta(max_length=4096)]
    hint: Annotated[str, Meta(max_length=4096)]
    retry: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Seconds after which a busy node may be asked again."""


LeaseMessage = Borrow | Renew | AwaitLayer | Gather | GetChecksums | Close
Question = Hello | Keep | Open | LeaseMessage | Release | Announce
Answer = Welcome | SendPlan | Opened | Lent | LayerWritten | Ok | Checksums | Announced | Refusal


def new_key() -> bytes:
    """Return an unguessable key for a session or a lease."""
    return secrets.token_bytes(KEY_BYTES)


def by_group(blocks: Any) -> Mapping[int, Any]:
    """Return block tables by group. A single table belongs to group 0."""
    return blocks if isinstance(blocks, Mapping) else {0: blocks}


def pack_tables(blocks: Mapping[int, Any]) -> BlockTables:
    """Encode block tables. Entries that are not needed may be negative."""
    return {
        int(group): (np.asarray(ids, dtype=np.int64) & 0xFFFFFFFF).astype("<u4").tobytes()
        for group, ids in blocks.items()
    }


def unpack_tables(blocks: BlockTables) -> dict[int, Int64s]:
    """Decode block tables."""
    tables = {}
    for group, ids in blocks.items():
        if len(ids) % 4:
            raise bad_handshake(f"a block table of {len(ids):,} bytes, expected a multiple of 4")
        tables[group] = np.frombuffer(ids, dtype="<u4").astype(np.int64)
    return tables


def bad_handshake(
    got: str, problem: str = "", hint: str = "Run the same version of kvatlas at both ends"
) -> AtlasError:
    """Return the error for a message that is malformed or contradicts its sender's plan."""
    return AtlasError(Code.BAD_HANDSHAKE, problem, got=got, hint=hint)
