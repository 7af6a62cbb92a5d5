"""Endpoints at a path on this host: `unix:///path`, for processes of one user.

The socket has mode 600, and the kernel reports the user at the other end of a connection. Processes
of other users are rejected, even if they own the folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.transports.errors import coded_limits, failed, own_limit, peer_lost
from kvatlas.wire.transports.shm_sockets import other_end

_SCHEME = "unix://"
_LONGEST_PATH = 100
"""The maximum path length of a socket. Longer ones are opened through their folder."""
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
        got, hint = f"endpoint {endpoint[:200]!r}", "Use an endpoint such as unix:///path"
        raise failed(got, hint, "The endpoint is invalid")
    return Path(path)


def unix_endpoint(path: str | Path) -> str:
    """Return the endpoint at a path."""
    return f"{_SCHEME}{Path(path).absolute()}"


def listen_at_path(path: Path) -> socket.socket:
    """Listen at a path that does not exist yet, for this user only."""
    with coded_limits():
        listening = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        # Before it has a name: at no moment may others connect.
        os.fchmod(listening.fileno(), 0o600)
        with _short(path) as short:
            listening.bind(short)
        listening.listen(_WAITING)
    except OSError as problem:
        listening.close()
        got, hint = f"{problem} for {path}", "Use an unused path in a folder that you can write to"
        unheard = "The server cannot listen at this path"
        raise own_limit(problem) or failed(got, hint, unheard) from problem
    return listening


def connect_to_path(path: Path, seconds: float) -> socket.socket:
    """Connect to the socket at a path. Its process must belong to this user."""
    connected = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
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
    """Return the process at the other end, or raise an error if it belongs to another user."""
    process, user = other_end(connected)
    if user != os.geteuid():
        raise peer_lost(f"a process of another user ({user})")
    return process


def forget_path(path: Path) -> None:
    """Remove a socket that no process listens at anymore, if it exists."""
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
