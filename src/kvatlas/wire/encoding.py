"""Encode and decode messages and errors, for peers with the same or another version.

The hello and the welcome of a newer version may contain unknown fields. All other messages must
match the types of this version exactly. A node sends an error to the peer whose request failed, and
the peer raises the error.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import protocol
from kvatlas.wire.protocol import Answer, Hello, Message, Question, Refusal, Welcome, bad_handshake


class NewerHello(Hello, frozen=True, kw_only=True, forbid_unknown_fields=False, tag="hello"):
    """A hello of a newer version, which may contain unknown fields."""


class _HelloVersions(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """A hello, of which only the sender's protocol versions are decoded."""

    version: int
    oldest: int | None = None


class NewerWelcome(Welcome, frozen=True, kw_only=True, forbid_unknown_fields=False, tag="welcome"):
    """A welcome of a newer version, which may contain unknown fields."""

    hello: NewerHello


class _WelcomeVersions(msgspec.Struct, frozen=True, tag_field="type", tag="welcome"):
    """A welcome, of which only the sender's protocol versions are decoded."""

    hello: _HelloVersions


_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_NEWER: dict[Any, tuple[type, type]] = {
    Question: (_HelloVersions, NewerHello),
    Answer: (_WelcomeVersions, NewerWelcome),
}
"""For each union: (the type that decodes the protocol versions only, the type for newer versions).

A message is decoded as the first type, and as the second if its sender is newer.
"""


def encode(message: Message) -> bytes:
    """Encode a message as the payload of a frame."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > protocol.MAX_MESSAGE_BYTES:
        raise AtlasError(
            Code.TOO_MANY,
            f"A message must not exceed {protocol.MAX_MESSAGE_BYTES:,} bytes",
            got=f"a {type(message).__name__} message of {len(payload):,} bytes",
            hint="Request fewer tokens, layers or checksums at once",
        )
    return payload


def decode(payload: bytes, kind: Any) -> Any:
    """Decode the message in a frame from a peer, or raise `bad_handshake`.

    >>> from kvatlas.wire.protocol import Ok
    >>> decode(encode(Ok(seconds=2.0)), Answer)
    Ok(seconds=2.0)
    >>> decode(b"what?", Answer)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The peer sent a malformed or contradictory message. \
Got 5 bytes that cannot be decoded: Expected `object`, got `int`. \
Run the same version of kvatlas at both ends. [bad_handshake]
    """
    try:
        return _decoder(kind).decode(payload)
    except _UNREADABLE as problem:
        newer = _newer(payload, kind)
        if newer is not None:
            return newer
        got = f"{len(payload):,} bytes that cannot be decoded: {str(problem)[:200]}"
        raise bad_handshake(got) from None


def _newer(payload: bytes, kind: Any) -> Any:
    """Return the hello or welcome of a newer version, or None for any other payload."""
    if kind not in _NEWER:
        return None
    outline, newer = _NEWER[kind]
    found = _readable(payload, outline)
    if found is None:
        return None
    versions = getattr(found, "hello", found)
    check_versions(versions.version, versions.oldest)
    return _readable(payload, newer) if versions.version > protocol.VERSION else None


def _readable(payload: bytes, kind: type) -> Any:
    with suppress(*_UNREADABLE):
        return _decoder(kind).decode(payload)
    return None


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type; cached, because making a decoder takes longer than decoding."""
    return msgspec.msgpack.Decoder(kind)


def check_versions(version: int, oldest: int | None) -> None:
    """Raise `unlike_versions` if this end and the peer have no protocol version in common."""
    oldest = version if oldest is None else oldest
    if min(version, protocol.VERSION) < max(oldest, protocol.OLDEST_VERSION):
        raise unlike_versions(version, oldest)


def unlike_versions(version: int, oldest: int) -> AtlasError:
    """Return the error for a peer that has no protocol version in common with this end."""
    here = f"{protocol.OLDEST_VERSION} to {protocol.VERSION} here"
    got = f"versions {oldest} to {version} at the peer, {here}"
    hint = f"Upgrade kvatlas on the host with version {min(version, protocol.VERSION)}"
    return AtlasError(Code.UNLIKE_VERSIONS, got=got, hint=hint)


class BusyError(AtlasError):
    """The error of a busy node. The peer may send its request again after `retry` seconds."""

    def __init__(self, got: str, retry: float) -> None:
        super().__init__(Code.BUSY, got=got, hint=f"Retry after {retry:g} s")
        self.retry = retry


def refusal_of(error: AtlasError) -> Refusal:
    """Return an error as a message to the peer whose request failed."""
    texts = [str(text)[:4096] for text in (error.problem, error.got, error.hint)]
    retry = error.retry if isinstance(error, BusyError) else 0.0
    return Refusal(code=str(error.code), problem=texts[0], got=texts[1], hint=texts[2], retry=retry)


def raise_refusal(refusal: Refusal) -> NoReturn:
    """Raise an error that a peer sent. An unknown code becomes `wire_failed`."""
    code = {str(code): code for code in Code}.get(refusal.code, Code.WIRE_FAILED)
    got = f"{refusal.got} (reported by the peer)"
    raise AtlasError(code, refusal.problem, got=got, hint=refusal.hint)


# msgspec crashes if two threads decode a type for the first time at once. So this module does it.
for _kind in (Question, Answer, NewerHello, NewerWelcome, _HelloVersions, _WelcomeVersions):
    _decoder(_kind)
