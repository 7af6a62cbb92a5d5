"""How transports refuse: the same words for the same faults, whatever library is below."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvatlas.errors import AtlasError, Code

MOST_METADATA = 1 << 20
"""Bytes of metadata that are looked at; what transports publish is far smaller."""

MOST_NOTE = 16 << 10
"""Bytes of a note, so that every transport can carry it."""

Published = TypeVar("Published", bound=msgspec.Struct)


def bad_metadata(got: object) -> AtlasError:
    """What a peer published is not what its transport publishes."""
    return AtlasError(
        Code.BAD_HANDSHAKE,
        "A peer's metadata is what its transport published, whole and unchanged",
        got=got,
        hint="Use the same transport at both ends, and pass its publish() on as it is",
    )


def peer_lost(got: object) -> AtlasError:
    """The peer is gone."""
    return AtlasError(
        Code.PEER_LOST,
        "The peer is there until the transfer ends",
        got=got,
        hint="Close this link, and retry on another replica or once the peer is back",
    )


def failed(got: object, hint: str = "See the transport's own log for the cause") -> AtlasError:
    """The transport did not do what it was asked."""
    return AtlasError(Code.WIRE_FAILED, "The transport does what it was asked", got=got, hint=hint)


def closed(what: str) -> AtlasError:
    """Something is asked of a link or transport that was closed."""
    return failed(f"a {what} that was closed", hint=f"Open a new {what}")


def cancelled() -> AtlasError:
    """Somebody asks after an operation that was given up."""
    return AtlasError(
        Code.CANCELLED,
        "An operation that was released before it ended delivers nothing",
        got="a question about one",
        hint="Release a handle once it is done",
    )


def missing(library: str, extra: str, cause: ImportError) -> AtlasError:
    """A transport whose library cannot be imported."""
    return AtlasError(
        Code.MISSING_EXTRA,
        f"The {extra} transport needs {library}",
        got=f"{cause}",
        hint=f"pip install 'kvatlas[{extra}]', or choose another transport",
    )


def check_note(note: bytes) -> None:
    """Refuse notes that some transport could not carry."""
    if len(note) > MOST_NOTE:
        raise AtlasError(
            Code.TOO_MANY,
            f"A note has at most {MOST_NOTE:,} bytes",
            got=f"{len(note):,}",
            hint="Send what is long as data, and a note that names it",
        )


def read_metadata(metadata: bytes, kind: type[Published]) -> Published:
    """Metadata as the struct that a transport published; anything else is refused.

    >>> class Port(msgspec.Struct):
    ...     port: int
    >>> read_metadata(write_metadata(Port(80)), Port)
    Port(port=80)
    >>> try:
    ...     read_metadata(b"{", Port)
    ... except AtlasError as refusal:
    ...     print(refusal.code)
    bad_handshake
    """
    if not isinstance(metadata, bytes | bytearray) or len(metadata) > MOST_METADATA:
        raise bad_metadata(f"{type(metadata).__name__}, not at most {MOST_METADATA:,} bytes")
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise bad_metadata(f"{len(metadata)} bytes: {problem}") from problem


def write_metadata(published: msgspec.Struct) -> bytes:
    """What `read_metadata` reads."""
    return msgspec.msgpack.encode(published)
