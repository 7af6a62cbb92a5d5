"""Endpoints at a path of this host: `unix:///path`, for processes of one user.

The socket has mode 600, and the system says who is at the other end of a connection:
processes of other users are not heard, whoever has made the folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.wire.transports.errors import failed, peer_lost
from kvatlas.wire.transports.shm_sockets import not_in_children, other_end

_SCHEME = "unix://"
_LONGEST_PATH = 100
"""Bytes of a path that a socket takes as it is; longer ones go by a descriptor of their folder."""
_WAITING = 1024
"""Connections that wait to be accepted."""


def unix_path(endpoint: str) -> Path | None:
    """The path of an endpoint of this host; None for an endpoint of another kind.

    >>> unix_path("unix:///run/tier.sock"), unix_path("tcp://127.0.0.1:80")
    (PosixPath('/run/tier.sock'), None)
    """
    if not isinstance(endpoint, str) or not endpoint.startswith(_SCHEME):
        return None
    path = endpoint.removeprefix(_SCHEME)
    if not path.startswith("/") or "\0" in path:
        raise failed(f"endpoint {endpoint[:200]!r}", "Such endpoints look like unix:///path")
    return Path(path)


def unix_endpoint(path: str | Path) -> str:
    """The endpoint at a path."""
    return f"{_SCHEME}{Path(path).absolute()}"


def listen_at_path(path: Path) -> socket.socket:
    """A socket that listens at a path, where nothing may be; for this user alone."""
    listening = not_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        # Before it has a name: at no moment may others connect.
        os.fchmod(listening.fileno(), 0o600)
        with _short(path) as short:
            listening.bind(short)
        listening.listen(_WAITING)
    except OSError as problem:
        listening.close()
        raise failed(f"{problem} for {path}", "Use a path in a folder of your own") from problem
    return listening


def connect_to_path(path: Path, seconds: float) -> socket.socket:
    """A connection to whoever listens at a path, which must be a process of this user."""
    connected = not_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        connected.settimeout(seconds)
        with _short(path) as short:
            connected.connect(short)
        check_user(connected)
    except BaseException as problem:
        connected.close()
        if isinstance(problem, BlockingIOError):  # as many wait as may
            raise TimeoutError from None
        raise
    return connected


def check_user(connected: socket.socket) -> int:
    """Refuse a process of another user at the other end; the process there."""
    process, user = other_end(connected)
    if user != os.geteuid():
        raise peer_lost(f"a process of another user ({user})")
    return process


def forget_path(path: Path) -> None:
    """Remove a socket that nobody listens at any more."""
    with suppress(FileNotFoundError):
        path.unlink()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A path as sockets take it: they have room for 107 bytes."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
