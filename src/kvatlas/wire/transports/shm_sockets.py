"""Send segment descriptors to peers over a local socket, from a thread.

The socket has a name in the abstract namespace, which disappears when the process ends. The
name is visible to all processes in the same network namespace, including containers with separate
process namespaces. Any process may connect, so the server asks the kernel for the peer's user: it
serves only processes of the same user that present the token. The connection then stays open until
one end closes it or exits, which the other end notices at once.
"""

from __future__ import annotations

import hmac
import math
import os
import resource
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from selectors import EVENT_READ

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.admission import MOST_UNPROVEN, Admission, Newcomer
from kvatlas.wire.transports.nonblocking_sockets import Steps, hang_up, ready, until_ready
from kvatlas.wire.unix_sockets import check_user

HANDSHAKE_SECONDS = 5.0
"""Seconds that a server may take to reply."""

TOKEN_BYTES = 16
_AT_ONCE = 200
"""The maximum number of descriptors in one message; the system's limit is 253."""
_MOST_DESCRIPTORS = 4096
_ATTEMPTS = 3
_MORE, _LAST, _WRONG, _FULL = b"+", b".", b"?", b"!"


class SegmentServer:
    """Sends segment descriptors to peers and stays connected to them.

    >>> server = SegmentServer()
    >>> connection, descriptors = receive_descriptors(server.name, server.token)
    >>> is_connected(connection), descriptors
    (True, [])
    >>> server.close()
    >>> is_connected(connection)
    False
    >>> connection.close()
    """

    def __init__(self) -> None:
        self.name, self.token = secrets.token_hex(16), secrets.token_bytes(TOKEN_BYTES)
        self._given: list[int] = []
        self.links: Counter[object] = Counter()
        """The number of connections by process."""
        self._most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        listener = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(_address(self.name))
        listener.listen(2 * MOST_UNPROVEN)
        self._admission = Admission(listener, _process, self._handshake, "kvatlas-shm")

    def add(self, descriptor: int) -> int:
        """Share a descriptor with peers from now on. Return its index."""
        self._given.append(os.dup(descriptor))
        return len(self._given) - 1

    def give_read_only(self) -> None:
        """Replace the shared descriptors by descriptors that peers can map for reading only."""
        for nth, descriptor in enumerate(self._given):
            flags = os.O_RDONLY | os.O_CLOEXEC
            self._given[nth] = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.close(descriptor)

    def close(self) -> None:
        """Disconnect all peers. A second call has no effect."""
        self._admission.close()
        while self._given:
            os.close(self._given.pop())

    def _handshake(self, one: Newcomer) -> Steps[None]:
        """Send the descriptors to a connection that presents the token, and keep it open."""
        connection, process = one.connection, one.source
        token = yield from until_ready(partial(connection.recv, 1 + TOKEN_BYTES))
        if not hmac.compare_digest(token, self.token):
            connection.send(_WRONG)
        elif self._has_most_links(process):
            connection.send(_FULL)
        else:
            _send_descriptors(connection, self._given[:])
            one.admit()
            self.links[process] += 1
            try:
                yield EVENT_READ  # peers send nothing more: the peer has disconnected
            finally:
                self.links[process] -= 1
        raise EOFError

    def _has_most_links(self, process: object) -> bool:
        """Whether a process has reached its limit of links.

        True if the server has its maximum number of links, or the process has half of that maximum.
        """
        return self.links.total() >= self._most or self.links[process] >= self._most // 2


def _process(connection: socket.socket, _: object) -> int:
    """Return the pid of the process at the other end, which must belong to this user."""
    return check_user(connection)


def receive_descriptors(
    name: str, token: bytes, deadline: float = math.inf
) -> tuple[socket.socket, list[int]]:
    """Connect to a server of the same user. Return (connection, received file descriptors).

    The server must reply before `deadline`, and within `HANDSHAKE_SECONDS`; otherwise an error is
    raised.
    """
    begun = time.monotonic()
    deadline = min(deadline, begun + HANDSHAKE_SECONDS)
    for _ in range(_ATTEMPTS):
        with errors.coded_limits():
            one = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            return one, _ask(one, name, token, deadline)
        except (ConnectionResetError, BrokenPipeError):
            hang_up(one)  # a server with too many connections drops some before their token arrives
        except BaseException as problem:
            hang_up(one)
            if isinstance(problem, BlockingIOError):
                raise _no_answer(time.monotonic() - begun) from None
            if isinstance(problem, OSError):
                lost = errors.peer_lost(f"no server on this host: {problem}")
                raise errors.own_limit(problem) or lost from problem
            raise
    raise errors.peer_lost(f"a server that closed {_ATTEMPTS} connections before it replied")


def _ask(one: socket.socket, name: str, token: bytes, deadline: float) -> list[int]:
    _limit(one, deadline)
    one.connect(_address(name))
    check_user(one)
    one.send(token)
    descriptors: list[int] = []
    try:
        while True:
            _limit(one, deadline)
            said, more, flags, _ = socket.recv_fds(one, 2, _AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            descriptors += more
            if flags & socket.MSG_CTRUNC:
                hint, got = "Raise the limit of open files (ulimit -n)", "a truncated message"
                problem = "Not all file descriptors of the peer's memory arrived"
                raise AtlasError(Code.TOO_MANY_FILES, problem, got=got, hint=hint)
            if said == _LAST:
                return descriptors
            if said != _MORE or len(descriptors) > _MOST_DESCRIPTORS:
                raise _refused(said)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _refused(said: bytes) -> Exception:
    if not said:
        return ConnectionResetError()
    if said == _WRONG:
        return errors.bad_metadata("a token that the peer rejected")
    if said == _FULL:
        hint = "Close some links, and retry"
        return errors.failed("a new link", hint, "The peer has reached its limit of links")
    if said == _MORE:
        return errors.bad_metadata(f"more than {_MOST_DESCRIPTORS:,} descriptors")
    return errors.bad_metadata(f"an invalid reply, {said!r}")


def _no_answer(seconds: float) -> AtlasError:
    return AtlasError(
        Code.DEADLINE,
        "The peer does not reply",
        got=f"no reply within {seconds:.1f} s",
        hint="Check that the peer's process is running, or retry on another replica",
    )


def is_connected(one: socket.socket) -> bool:
    """Whether the other end is still connected. This check is cheap enough to call often."""
    # A readable connection has ended, or the peer has sent unexpected data.
    return one.fileno() >= 0 and not ready(one)


def _send_descriptors(one: socket.socket, descriptors: Sequence[int]) -> None:
    for first in range(0, max(len(descriptors), 1), _AT_ONCE):
        some = descriptors[first : first + _AT_ONCE]
        said = _MORE if first + _AT_ONCE < len(descriptors) else _LAST
        if some:
            socket.send_fds(one, [said], some)
        else:
            one.send(said)


def _limit(one: socket.socket, deadline: float) -> None:
    """Set the socket's timeouts in the kernel instead of with `settimeout`.

    The socket thus stays blocking, so that `connect` waits while the server's queue of connections
    is full.
    """
    left = max(deadline - time.monotonic(), 1e-3)
    seconds = struct.pack("@ll", int(left), int(left % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        one.setsockopt(socket.SOL_SOCKET, option, seconds)


def _address(name: str) -> str:
    return f"\0kvatlas-{name}"
