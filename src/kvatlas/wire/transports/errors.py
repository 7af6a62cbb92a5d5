"""Errors that all transports share, and the encoding of the metadata that they publish."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.wire.fork_safety import fresh_in_children

MAX_METADATA_BYTES = 1 << 20
"""The maximum size of metadata in bytes. Real metadata is far smaller."""

Published = TypeVar("Published", bound=msgspec.Struct)

_decoding = fresh_in_children(threading.Lock())
"""Held while metadata is decoded.

msgspec crashes if two threads decode a type for the first time concurrently.
"""


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


def own_limit(problem: BaseException) -> AtlasError | None:
    """Return the error for an exhausted limit of this process or host; None for other problems.

    >>> own_limit(OSError(errno.EMFILE, "Too many open files")).code
    <Code.TOO_MANY_FILES: 'too_many_files'>
    >>> own_limit(OSError(errno.ECONNRESET, "Connection reset by peer"))
    """
    number = problem.errno if isinstance(problem, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        hint = "Raise the limit of open files (ulimit -n), or close nodes, sessions and links"
        return AtlasError(Code.TOO_MANY_FILES, got=problem, hint=hint)
    if number in (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free memory, /dev/shm or disk space, or raise the container's limits (--shm-size)"
        return AtlasError(Code.NOT_ENOUGH_MEMORY, got=problem, hint=hint)
    return None


@contextmanager
def coded_limits() -> Iterator[None]:
    """A context that raises an `AtlasError` if a limit of this process or host is exhausted."""
    try:
        yield
    except OSError as problem:
        if limit := own_limit(problem):
            raise limit from problem
        raise


def check_descriptors(count: int) -> None:
    """Raise `too_many_files` unless this process can open `count` more files.

    Use this before calls to a library that crashes, or hides the cause, if it cannot open a file.
    """
    opened: list[int] = []
    try:
        with coded_limits():
            for _ in range(count):
                opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401
    finally:
        for descriptor in opened:
            os.close(descriptor)


def closed(what: str) -> AtlasError:
    """Return the error for using a link or transport (`what`) after it was closed."""
    return AtlasError(
        Code.WIRE_FAILED,
        f"The {what} is closed",
        got="a call after close()",
        hint=f"Create a new {what}",
    )


def cancelled() -> AtlasError:
    """Return the error for an operation that was released before it was done."""
    return AtlasError(
        Code.CANCELLED,
        "The operation was released before it was done",
        got="a poll after release()",
        hint="Release a handle only after its operation is done",
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
