"""How transports fail: the same words for the same faults, whatever library is below."""

from __future__ import annotations

import errno
import threading
from typing import TypeVar

import msgspec

from kvatlas.errors import AtlasError, Code, MissingExtraError

MAX_METADATA_BYTES = 1 << 20
"""Bytes of metadata that are looked at; what transports publish is far smaller."""

Published = TypeVar("Published", bound=msgspec.Struct)

_decoding = threading.Lock()
"""msgspec crashes where two threads are the first to decode a type."""


def bad_metadata(got: object) -> AtlasError:
    """What a peer published is not what its transport publishes."""
    return AtlasError(
        Code.BAD_HANDSHAKE,
        "The peer's metadata is not what its transport published",
        got=got,
        hint="Use the same transport at both ends, and pass its publish() on as it is",
    )


def peer_lost(got: object) -> AtlasError:
    """The peer is gone."""
    return AtlasError(
        Code.PEER_LOST,
        got=got,
        hint="Close this link, and retry on another replica or once the peer is back",
    )


def failed(got: object, hint: str = "See the transport's own log for the cause") -> AtlasError:
    """The transport, or the library below it, has failed."""
    return AtlasError(Code.WIRE_FAILED, got=got, hint=hint)


def no_room(what: str, nbytes: int, problem: OSError, hint: str) -> AtlasError:
    """The system cannot hold so many bytes, for want of room or otherwise."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    code = Code.NOT_ENOUGH_MEMORY if full else Code.WIRE_FAILED
    return AtlasError(code, what, got=f"{nbytes:,} bytes: {problem}", hint=hint)


def closed(what: str) -> AtlasError:
    """A link or transport is used after it was closed."""
    return AtlasError(
        Code.WIRE_FAILED,
        f"The {what} is closed",
        got=f"a call to a closed {what}",
        hint=f"Open a new {what}",
    )


def cancelled() -> AtlasError:
    """An operation was released before it was done."""
    return AtlasError(
        Code.CANCELLED,
        "The operation was released before it was done",
        got="a poll of it",
        hint="Release a handle once it is done",
    )


def cannot_import(library: str, problem: ImportError, note: str = "") -> AtlasError:
    """The library of a transport, whose extra has its name, is missing or does not load."""
    if isinstance(problem, ModuleNotFoundError):
        return MissingExtraError(library, library, note)
    return AtlasError(
        Code.MISSING_EXTRA,
        f"{library} is installed and cannot be loaded",
        got=problem,
        hint="Install the system libraries that it names, or choose another transport",
    )


def read_metadata(metadata: bytes, kind: type[Published]) -> Published:
    """Decode what a transport published; anything else is refused.

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
    if not isinstance(metadata, bytes | bytearray) or len(metadata) > MAX_METADATA_BYTES:
        raise bad_metadata(f"{type(metadata).__name__}, not at most {MAX_METADATA_BYTES:,} bytes")
    try:
        with _decoding:
            return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise bad_metadata(f"{len(metadata)} bytes: {problem}") from problem


def write_metadata(published: msgspec.Struct) -> bytes:
    """What `read_metadata` reads."""
    return msgspec.msgpack.encode(published)
