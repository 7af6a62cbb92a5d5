"""What two processes say to each other, and how much of it is believed.

Messages are msgspec structs in msgpack, tagged, with a limit on every length and number;
block tables are packed integers, so that a few bytes never decode into many. Each message
travels as a signature and a payload that begins with a nonce: an answer repeats the nonce
of its question, and with a shared secret both are signed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s

VERSION = 1
MOST = 4 << 20
"""Bytes of a message, the plan in it included."""

SUMMED = 16 << 20
"""Bytes of a stream that one question about checksums may span: an answer takes no time."""

SMALLEST_PIECE = 4096
"""Bytes that a staging slot has at least, so that a stream is never cut into dust."""

NONCE = 16
_SIGNATURE = 32

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Key = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Whole = Annotated[int, Meta(ge=0, le=2**62)]
Packed = dict[Annotated[int, Meta(ge=0, le=65535)], bytes]
"""Block ids by group, each table as little-endian 32-bit integers."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="say"
):
    """Anything that is said."""


class Spot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered region of the speaker."""

    index: Annotated[int, Meta(ge=-1, le=65535)]
    address: Whole
    nbytes: Whole
    device: Annotated[int, Meta(ge=0, le=65535)] = 0


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Who the speaker is, what it caches, and where."""

    version: int
    name: Name
    run: Key
    """Drawn anew whenever the process starts."""
    fingerprint: Annotated[str, Meta(min_length=32, max_length=32)]
    plan_hash: Digest
    plan: Annotated[bytes, Meta(max_length=MOST)] | None = None
    """The plan as JSON; left out where the peer is thought to have it."""
    rank: Annotated[int, Meta(ge=0, le=65535)]
    spots: Annotated[tuple[Spot, ...], Meta(max_length=1024)]
    transport: Name
    metadata: Annotated[bytes, Meta(max_length=1 << 18)]


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a hello: the same about the other side, and a session."""

    hello: Hello
    session: Key


class SendPlan(Message, frozen=True, kw_only=True, tag="send_plan"):
    """The answer to a hello with a hash that means nothing here."""


class Open(Message, frozen=True, kw_only=True, tag="open"):
    """Begin a transfer: `pull` reads what is offered, `push` writes what is expected."""

    session: Key
    way: Literal["pull", "push"]
    request: Name
    blocks: Packed
    """The speaker's own blocks."""
    peer_blocks: Packed | None = None
    """The other side's blocks as the speaker knows them; None to be told."""
    start: Whole
    stop: Whole
    layers: Annotated[tuple[Name, ...], Meta(max_length=16384)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=86400)]
    slots: Annotated[int, Meta(ge=0, le=16)] = 0
    """Staging slots that the speaker would like."""


class Opened(Message, frozen=True, kw_only=True, tag="opened"):
    """A lease: the blocks stay what they are until it ends."""

    lease: Key
    seconds: float
    blocks: Packed
    slots: Annotated[tuple[Whole, ...], Meta(max_length=16)] = ()
    """Staging slots that are the lease's own while it lasts; none where none are free."""
    piece: Whole = 0
    """Bytes of a slot."""


class Renew(Message, frozen=True, kw_only=True, tag="renew"):
    """Ask for more time."""

    session: Key
    lease: Key
    seconds: Annotated[float, Meta(gt=0, le=86400)]


class Gather(Message, frozen=True, kw_only=True, tag="gather"):
    """Bytes start .. stop - 1 of a lease's stream into a slot of the staging buffer.

    For a push it is the other way: the slot holds them and they are to be scattered.
    """

    session: Key
    lease: Key
    start: Whole
    stop: Whole
    slot: Annotated[int, Meta(ge=0, le=1024)]


class Sums(Message, frozen=True, kw_only=True, tag="sums"):
    """Ask for checksums of bytes start .. stop - 1 of the lease's stream, piece by piece."""

    session: Key
    lease: Key
    start: Whole
    stop: Whole
    piece: Annotated[int, Meta(ge=4096, le=1 << 30)]


class Summed(Message, frozen=True, kw_only=True, tag="summed"):
    """Checksums, as little-endian 32-bit integers."""

    sums: Annotated[bytes, Meta(max_length=MOST)]


class Close(Message, frozen=True, kw_only=True, tag="close"):
    """The transfer is over: whole, or not."""

    session: Key
    lease: Key
    whole: bool


class Fine(Message, frozen=True, kw_only=True, tag="fine"):
    """Yes; `seconds` are left of the lease that was asked about."""

    seconds: float = 0.0


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """No, and why."""

    code: Annotated[str, Meta(max_length=64)]
    problem: Annotated[str, Meta(max_length=4096)]
    got: Annotated[str, Meta(max_length=4096)]
    hint: Annotated[str, Meta(max_length=4096)]


Question = Hello | Open | Renew | Gather | Sums | Close
Answer = Welcome | SendPlan | Opened | Fine | Summed | Refusal

M = TypeVar("M")


def seal(message: Message, nonce: bytes, secret: bytes | None) -> list[bytes]:
    """A message as the frames that travel: a signature, and the nonce with what is said."""
    payload = nonce + msgspec.msgpack.encode(message)
    return [_signature(payload, secret), payload]


def unseal(frames: list[bytes], kind: Any, secret: bytes | None) -> tuple[bytes, Any]:
    """(nonce, message) of frames from outside, or a refusal.

    >>> frames = seal(Fine(seconds=2.0), bytes(16), b"secret")
    >>> unseal(frames, Answer, b"secret")[1]
    Fine(seconds=2.0)
    >>> unseal(frames, Answer, b"other")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: Messages are signed with the secret that both ends share. \
Got a signature that does not match. Give both ends the same secret. [bad_signature]
    """
    if len(frames) != 2 or not NONCE < len(frames[1]) <= MOST:
        raise bad_handshake("frames that are no message")
    signature, payload = frames
    if not hmac.compare_digest(signature, _signature(payload, secret)):
        raise AtlasError(
            Code.BAD_SIGNATURE,
            "Messages are signed with the secret that both ends share",
            got="a signature that does not match",
            hint="Give both ends the same secret",
        )
    try:
        return payload[:NONCE], msgspec.msgpack.decode(payload[NONCE:], type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise bad_handshake(str(problem)[:200]) from None


def new_key() -> bytes:
    """A nonce, a session or a lease that nobody can guess."""
    return secrets.token_bytes(NONCE)


def pack(blocks: Mapping[int, Any]) -> Packed:
    """Block tables as they travel; ids that are not needed may be negative here."""
    return {
        int(group): (np.asarray(ids, dtype=np.int64) & 0xFFFFFFFF).astype("<u4").tobytes()
        for group, ids in blocks.items()
    }


def unpack(blocks: Packed) -> dict[int, Int64s]:
    """Block tables that travelled."""
    found = {}
    for group, ids in blocks.items():
        if len(ids) % 4:
            raise bad_handshake(f"a block table of {len(ids)} bytes")
        found[group] = np.frombuffer(ids, dtype="<u4").astype(np.int64)
    return found


def refusal_of(problem: AtlasError) -> Refusal:
    """A refusal as it travels."""
    texts = [str(text)[:4096] for text in (problem.problem, problem.got, problem.hint)]
    return Refusal(code=str(problem.code), problem=texts[0], got=texts[1], hint=texts[2])


def raise_refusal(said: Refusal) -> None:
    """A refusal that came from a peer, raised here with its own code."""
    known = {str(code): code for code in Code}
    code = known.get(said.code, Code.WIRE_FAILED)
    raise AtlasError(code, said.problem, got=f"{said.got} (says the peer)", hint=said.hint)


def bad_handshake(got: str) -> AtlasError:
    """A refusal of what a peer said."""
    return AtlasError(
        Code.BAD_HANDSHAKE,
        "What a peer says is well formed and fits its plan",
        got=got,
        hint="Run the same version of kvatlas at both ends",
    )


def _signature(payload: bytes, secret: bytes | None) -> bytes:
    return b"" if secret is None else hmac.digest(secret, payload, "sha256")
