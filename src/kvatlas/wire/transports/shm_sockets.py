"""Sends segment descriptors to peers over a local socket, from a thread.

The socket has a name in the abstract namespace, so nothing is left of it when its process ends. The
name is visible to all processes in the same network namespace, including containers with separate
process namespaces. Any process may connect, so the server asks the kernel for the peer's user: it
serves only processes of the same user that present the token. The connection then stays open while
both ends want it. Its end signals to each that the other has closed it or died.
"""

from __future__ import annotations

import hmac
import os
import resource
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.transports import errors

HANDSHAKE_SECONDS = 5.0
"""Seconds that a peer may take to answer or to present its token."""

TOKEN_BYTES = 16
_MOST_WAITING = 64
"""The maximum number of connections without a token."""
_AT_ONCE = 200
"""The number of descriptors in one message; the system's limit is 253."""
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
        self._waiting: dict[socket.socket, tuple[int, float]] = {}
        """The process and deadline of each connection without a token, oldest first."""
        self._connected: dict[socket.socket, int] = {}
        self._most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._listener = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.setblocking(False)
        self._listener.bind(_address(self.name))
        self._listener.listen(2 * _MOST_WAITING)
        self._stop, self._stopped = map(close_in_children, socket.socketpair())
        self._selector = selectors.DefaultSelector()
        for one in (self._listener, self._stopped):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="kvatlas-shm", daemon=True)
        self._thread.start()

    def add(self, descriptor: int) -> int:
        """Share a descriptor with peers from now on. Return its index."""
        self._given.append(os.dup(descriptor))
        return len(self._given) - 1

    def give_read_only(self) -> None:
        """Replace the shared descriptors by ones that peers can map for reading only."""
        for nth, descriptor in enumerate(self._given):
            flags = os.O_RDONLY | os.O_CLOEXEC
            self._given[nth] = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.close(descriptor)

    def close(self) -> None:
        """Disconnect all peers. A second call has no effect."""
        with suppress(OSError):  # closed, or another process's
            self._stop.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._step():
                pass
        finally:
            for one in (*self._connected, *self._waiting):
                hang_up(one)
            for one in (self._listener, self._stop, self._stopped):
                one.close()
            self._selector.close()
            for descriptor in self._given:
                os.close(descriptor)

    def _step(self) -> bool:
        """Wait for something to do and do it; whether the server is to stop."""
        first = next(iter(self._waiting.values()), None)
        wait = None if first is None else max(0.0, first[1] - time.monotonic())
        for key, _ in self._selector.select(wait):
            one = key.fileobj
            if one is self._stopped:
                return True
            if one is self._listener:
                self._accept()
            elif one in self._waiting:
                self._hear(one)
            elif one in self._connected:  # peers say nothing more: it is gone
                self._drop(one)
        now = time.monotonic()
        for one in [one for one, (_, until) in self._waiting.items() if until <= now]:
            self._drop(one)
        return False

    def _accept(self) -> None:
        try:
            one, _ = self._listener.accept()
        except OSError:
            time.sleep(0.02)  # most likely out of descriptors: not again at once
            return
        process, user = other_end(one)
        if user != os.getuid():
            one.close()
            return
        if len(self._waiting) >= _MOST_WAITING:
            # The oldest of whoever has most: one that opens thousands is in its own way alone.
            most = Counter(process for process, _ in self._waiting.values()).most_common(1)[0][0]
            self._drop(next(w for w, (process, _) in self._waiting.items() if process == most))
        one.setblocking(False)
        self._waiting[close_in_children(one)] = process, time.monotonic() + HANDSHAKE_SECONDS
        self._selector.register(one, selectors.EVENT_READ)

    def _hear(self, one: socket.socket) -> None:
        """Answer a connection that presents its token, or close it."""
        process = self._waiting[one][0]
        try:
            if not hmac.compare_digest(one.recv(1 + TOKEN_BYTES), self.token):
                one.send(_WRONG)
            elif self._has_most_links(process):
                one.send(_FULL)
            else:
                _send_descriptors(one, self._given[:])
                del self._waiting[one]
                self._connected[one] = process
                return
        except OSError:
            pass  # it is gone, or does not listen
        self._drop(one)

    def _has_most_links(self, process: int) -> bool:
        """Whether there is no room for another link of a process: half is left for others."""
        own = sum(other == process for other in self._connected.values())
        return len(self._connected) >= self._most or own >= self._most // 2

    def _drop(self, one: socket.socket) -> None:
        self._waiting.pop(one, None)
        self._connected.pop(one, None)
        self._selector.unregister(one)
        hang_up(one)


def receive_descriptors(name: str, token: bytes) -> tuple[socket.socket, list[int]]:
    """Connect to a server of this user. Return the connection, and the descriptors it sends."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    for _ in range(_ATTEMPTS):
        with errors.coded_limits():
            one = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            return one, _ask(one, name, token, deadline)
        except (ConnectionResetError, BrokenPipeError):
            hang_up(one)  # a server that is beset may do so before it has heard us
        except BaseException as problem:
            hang_up(one)
            if isinstance(problem, BlockingIOError):
                raise _no_answer() from None
            if isinstance(problem, OSError):
                lost = errors.peer_lost(f"no such process on this host: {problem}")
                raise errors.own_limit(problem) or lost from problem
            raise
    raise errors.peer_lost("a process that closes every connection")


def _ask(one: socket.socket, name: str, token: bytes, deadline: float) -> list[int]:
    _limit(one, deadline)
    one.connect(_address(name))
    _, user = other_end(one)
    if user != os.getuid():
        problem, hint = "The peer belongs to another user", "Run both processes as the same user"
        raise AtlasError(Code.PEER_LOST, problem, got=f"user {user}", hint=hint)
    one.send(token)
    descriptors: list[int] = []
    try:
        while True:
            _limit(one, deadline)
            said, more, flags, _ = socket.recv_fds(one, 2, _AT_ONCE, socket.MSG_CMSG_CLOEXEC)
            descriptors += more
            if flags & socket.MSG_CTRUNC:
                hint, got = "Raise the limit of open files (ulimit -n)", "a truncated message"
                problem = "Not all descriptors arrived"
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
        return errors.failed("one more link", hint, "The peer has reached its limit of links")
    return errors.bad_metadata("an invalid answer")


def _no_answer() -> AtlasError:
    return AtlasError(
        Code.DEADLINE,
        "The peer does not answer",
        got=f"no answer in {HANDSHAKE_SECONDS:.0f} s",
        hint="Check whether its process is stopped, or retry on another replica",
    )


def is_connected(one: socket.socket) -> bool:
    """Whether the other end is still connected. Cheap enough to call often."""
    descriptor = one.fileno()
    if descriptor < 0:
        return False
    looked = select.poll()
    looked.register(descriptor, select.POLLIN)
    return not looked.poll(0)  # else it has ended, or there are words where none are due


def hang_up(one: socket.socket) -> None:
    """End a connection, even if another process has it open too."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _send_descriptors(one: socket.socket, descriptors: Sequence[int]) -> None:
    for first in range(0, max(len(descriptors), 1), _AT_ONCE):
        some = descriptors[first : first + _AT_ONCE]
        said = _MORE if first + _AT_ONCE < len(descriptors) else _LAST
        if some:
            socket.send_fds(one, [said], some)
        else:
            one.send(said)


def other_end(one: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end. A process of another namespace is 0."""
    layout = struct.Struct("iii")
    process, user, _ = layout.unpack(
        one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    )
    return process, user


def _limit(one: socket.socket, deadline: float) -> None:
    """Have the kernel end calls at the deadline: only so does `connect` wait in a full queue."""
    left = max(deadline - time.monotonic(), 1e-3)
    seconds = struct.pack("@ll", int(left), int(left % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        one.setsockopt(socket.SOL_SOCKET, option, seconds)


def _address(name: str) -> str:
    return f"\0kvatlas-{name}"
