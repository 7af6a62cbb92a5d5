"""Endpoints at a path of this host, `unix:///path`, for processes of one user.

The socket has mode 600, and the kernel reports the user at the other end of a connection. Processes
of other users are rejected, even if they own the folder.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.transports.errors import coded_limits, failed, own_limit, peer_lost

_SCHEME = "unix://"
_LONGEST_PATH = 100
"""The maximum bytes of a path that is used as it is.

A socket with a longer path is opened through a descriptor of its folder.
"""
_WAITING = 1024
"""The maximum number of connections that wait to be accepted."""


def unix_path(endpoint: str) -> Path | None:
    """Return the path of a `unix://` endpoint; None for other endpoints.

    >>> unix_path("unix:///run/tier.sock"), unix_path("tcp://127.0.0.1:80")
    (PosixPath('/run/tier.sock'), None)
    """
    if not isinstance(endpoint, str) or not endpoint.startswith(_SCHEME):
        return None
    path = endpoint.removeprefix(_SCHEME)
    if not path.startswith("/") or "\0" in path:
        got, hint = f"endpoint {endpoint[:200]!r}", "Use an endpoint such as unix:///run/tier.sock"
        raise failed(got, hint, "A unix:// endpoint must contain an absolute path")
    return Path(path)


def unix_endpoint(path: str | Path) -> str:
    """Return the `unix://` endpoint of a path."""
    return f"{_SCHEME}{Path(path).absolute()}"


def listen_at_path(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for this user only. The path must not exist."""
    with coded_limits():
        listening = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        # Before bind(), so that other users can never connect.
        os.fchmod(listening.fileno(), 0o600)
        with _short(path) as short:
            listening.bind(short)
        listening.listen(_WAITING)
    except OSError as problem:
        listening.close()
        got = f"{str(path)!r}: {problem}"
        hint = "Use a path that does not exist, in a folder that you can write to"
        failure = failed(got, hint, "The server cannot listen at this path")
        raise own_limit(problem) or failure from problem
    return listening


def connect_to_path(path: Path, timeout: float) -> socket.socket:
    """Return a connection to the socket at a path.

    Raise `peer_lost` if the listening process belongs to another user. Raise `TimeoutError` after
    `timeout`, or if too many connections wait to be accepted.
    """
    connected = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        connected.settimeout(timeout)
        with _short(path) as short:
            connected.connect(short)
        check_user(connected)
    except BaseException as problem:
        connected.close()
        if isinstance(problem, BlockingIOError):  # too many connections wait to be accepted
            raise TimeoutError from None
        raise
    return connected


def check_user(connected: socket.socket) -> int:
    """Return the pid of the process at the other end. Raise `peer_lost` if its user differs."""
    process, user = _other_end(connected)
    if user != os.geteuid():
        hint = "Run both processes as the same user"
        problem = "The process at the other end belongs to another user"
        raise peer_lost(f"user {user}, expected {os.geteuid()}", hint, problem)
    return process


def _other_end(connected: socket.socket) -> tuple[int, int]:
    """Return (pid, user id) of the process at the other end.

    The pid is 0 if the process is in another pid namespace.
    """
    credentials = struct.Struct("iii")
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    process, user, _ = credentials.unpack(packed)
    return process, user


def forget_path(path: Path) -> None:
    """Remove the socket at a path, if it exists. Call this when no process listens there."""
    with suppress(FileNotFoundError):
        path.unlink()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a path of the socket that is at most 107 bytes long, the limit of an address."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
