"""Errors that all transports share, and encoding of the metadata that they publish."""

from __future__ import annotations

import errno
import threading
from typing import TypeVar

import msgspec

from kvatlas.errors import AtlasError, Code, MissingExtraError

MAX_METADATA_BYTES = 1 << 20
"""The maximum size of metadata in bytes. Real metadata is far smaller."""

Published = TypeVar("Published", bound=msgspec.Struct)

_decoding = threading.Lock()
"""msgspec crashes if two threads decode a type for the first time concurrently."""


def bad_metadata(
    got: object,
    hint: str = "Use the same transport at both ends, and pass the result of publish() unchanged",
    problem: str = "The peer's metadata is invalid for this transport",
) -> AtlasError:
    """Return the error for metadata that a peer's transport cannot have published."""
    return AtlasError(Code.BAD_HANDSHAKE, problem, got=got, hint=hint)


def peer_lost(
    got: object,
    hint: str = "Close this link, then retry on another replica or when the peer is back",
    problem: str = "",
) -> AtlasError:
    """Return the error for a peer that is gone."""
    return AtlasError(Code.PEER_LOST, problem, got=got, hint=hint)


def failed(
    got: object, hint: str = "See the log of the transport's library", problem: str = ""
) -> AtlasError:
    """Return the error for a failure of the transport or its library."""
    return AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint)


def no_room(what: str, nbytes: int, problem: OSError, hint: str) -> AtlasError:
    """Return the error for memory or disk space that the system cannot provide.

    `what` is the problem, and `nbytes` is the requested size.
    """
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    code = Code.NOT_ENOUGH_MEMORY if full else Code.WIRE_FAILED
    return AtlasError(code, what, got=f"{nbytes:,} bytes: {problem}", hint=hint)


def closed(what: str) -> AtlasError:
    """Return the error for using a link or transport (`what`) after it was closed."""
    return AtlasError(
        Code.WIRE_FAILED,
        f"The {what} is closed",
        got="a call after close()",
        hint=f"Open a new {what}",
    )


def cancelled() -> AtlasError:
    """Return the error for an operation that was released before it was done."""
    return AtlasError(
        Code.CANCELLED,
        "The operation was released before it was done",
        got="a poll after release()",
        hint="Release a handle only after it is done",
    )


def cannot_import(library: str, problem: ImportError, note: str = "") -> AtlasError:
    """Return the error for a transport's library that is missing or cannot be loaded."""
    if isinstance(problem, ModuleNotFoundError):
        return MissingExtraError(library, library, note)
    return AtlasError(
        Code.MISSING_EXTRA,
        f"{library} is installed but cannot be loaded",
        got=problem,
        hint="Install the missing system libraries, or use another transport",
    )


def read_metadata(metadata: bytes, kind: type[Published]) -> Published:
    """Decode metadata that a transport published, or raise `bad_handshake`.

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
    if not isinstance(metadata, bytes | bytearray):
        raise bad_metadata(f"a {type(metadata).__name__}, expected bytes")
    if len(metadata) > MAX_METADATA_BYTES:
        raise bad_metadata(f"{len(metadata):,} bytes, expected at most {MAX_METADATA_BYTES:,}")
    try:
        with _decoding:
            return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        got = f"{len(metadata)} bytes that cannot be decoded: {problem}"
        raise bad_metadata(got) from problem


def write_metadata(published: msgspec.Struct) -> bytes:
    """Encode metadata for `read_metadata`."""
    return msgspec.msgpack.encode(published)
