"""One connection of the side channel: frames over a TCP socket, each within a deadline.

A frame is a 4-byte length, followed by a message of that many bytes. Nothing is allocated for what
a length claims, only for what arrives.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import encoding, protocol
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.security import not_the_secret
from kvatlas.wire.transports.errors import failed, own_limit
from kvatlas.wire.transports.host_addresses import is_loopback

FRAME_SECONDS = 10.0
"""Seconds that a frame may take from its first byte to its last."""

_FINISH_SECONDS = 0.5
_CHECK_SECONDS = 0.05
"""Seconds between two calls of `check` while a frame is awaited."""
_WAIT_SECONDS = 2.0
"""The maximum timeout of the socket in seconds. A longer wait is split into several.

Most waits therefore use the same timeout. Changing it takes a system call.
"""
_CHUNK = 1 << 16
_LENGTH = struct.Struct(">I")
_TLS_RECORDS = b"\x15\x16"
"""The possible first bytes from a peer that uses TLS: an alert or a handshake."""
_ZEROMQ = 0xFF
"""The first byte from a peer with protocol version 1, which used ZeroMQ."""


class Connection:
    """Frames over a connected socket. Only one thread at a time may use it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._arrived = bytearray()

    def send(self, payload: bytes, deadline: float) -> None:
        """Send a whole frame by `deadline` (monotonic clock), or raise an error."""
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        while frame:
            self._set_timeout(min(_WAIT_SECONDS, seconds_left(deadline)))
            with suppress(TimeoutError):
                frame = frame[self._socket.send(frame) :]

    def receive(self, deadline: float | None, check: Callable[[], object] | None = None) -> bytes:
        """Return the next frame. Raise EOFError if the peer closes the connection.

        Without a deadline, wait indefinitely for the first byte of the frame. The rest must then
        arrive within `FRAME_SECONDS`. `check` is called while nothing arrives; an error that it
        raises ends the wait.
        """
        arrived = self._arrived
        while (missing := self._missing()) > 0:
            chunk = self._receive_some(min(missing, _CHUNK), deadline, check)
            if not chunk:
                raise EOFError
            arrived += chunk
            if deadline is None:
                deadline = time.monotonic() + FRAME_SECONDS
        end = _LENGTH.size + _LENGTH.unpack_from(arrived)[0]
        payload = bytes(arrived[_LENGTH.size : end])
        del arrived[:end]
        return payload

    def _receive_some(
        self, most: int, deadline: float | None, check: Callable[[], object] | None
    ) -> bytes:
        longest = _WAIT_SECONDS if check is None else _CHECK_SECONDS
        while True:
            self._set_timeout(longest if deadline is None else min(longest, seconds_left(deadline)))
            try:
                return self._socket.recv(most)
            except TimeoutError:
                if check is not None:
                    check()

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._socket.gettimeout():
            self._socket.settimeout(seconds)

    @property
    def quiet(self) -> bool:
        """Whether the peer has left the connection open and sent no unread data."""
        inside = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        poll = select.poll()  # not shared, because several threads may call this at once
        poll.register(self._socket.fileno(), select.POLLIN)
        return not self._arrived and not inside and not poll.poll(0)

    def hang_up(self, *, reading_only: bool = False) -> None:
        """Shut the connection down, so that a thread that reads from it returns.

        If `reading_only` is true, data may still be sent.
        """
        with suppress(OSError):
            # `SSLSocket.shutdown` would drop TLS: later data would be sent unencrypted.
            how = socket.SHUT_RD if reading_only else socket.SHUT_RDWR
            socket.socket.shutdown(self._socket, how)

    def finish(self) -> None:
        """Stop sending, and wait briefly until the peer has closed its end.

        Closing at once could reset the connection before the peer has read the last frame.
        """
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            until = time.monotonic() + _FINISH_SECONDS
            while True:
                self._socket.settimeout(seconds_left(until))
                if not socket.socket.recv(self._socket, _CHUNK):
                    return

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _missing(self) -> int:
        """Return how many bytes of the current frame are missing; 0 or less if none are.

        Before the length of the frame is known, return `_CHUNK`. Raise an error for an invalid
        length.
        """
        arrived = self._arrived
        if len(arrived) < _LENGTH.size:
            return _CHUNK
        (nbytes,) = _LENGTH.unpack_from(arrived)
        if not 0 < nbytes <= protocol.MAX_MESSAGE_BYTES:
            raise _no_frame(arrived, nbytes)
        return _LENGTH.size + int(nbytes) - len(arrived)


def seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline (monotonic clock), or raise TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _no_frame(arrived: bytearray, nbytes: int) -> AtlasError:
    """Return the error for data that is not a frame."""
    if arrived[0] in _TLS_RECORDS and arrived[1] == 3:
        return not_the_secret("a TLS connection, but this node has no secret")
    if arrived[0] == _ZEROMQ:
        return encoding.unlike_versions(1, 1)
    return protocol.bad_handshake(
        f"a frame length of {nbytes:,} bytes, expected 1 to {protocol.MAX_MESSAGE_BYTES:,}",
        problem="The peer sent data that is not a message of kvatlas",
        hint="Check that both ends of the connection are nodes of kvatlas",
    )


def tune(connected: socket.socket) -> None:
    """Make a socket send small frames at once, and detect within seconds a host that is gone."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split an endpoint into host and port.

    >>> split_endpoint("tcp://127.0.0.1:5555"), split_endpoint("tcp://[::1]:80")
    (('127.0.0.1', 5555), ('::1', 80))
    """
    host, _, port = str(endpoint).removeprefix("tcp://").rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    named = str(endpoint).startswith("tcp://") and host and "/" not in host
    if not named or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        got, hint = f"endpoint {str(endpoint)[:200]!r}", "Use an endpoint such as tcp://host:port"
        raise failed(got, hint, "The endpoint is invalid")
    return host, int(port)


def endpoint_host(endpoint: str) -> str:
    """Return the host name of an endpoint, or an empty string for a `unix://` endpoint.

    >>> endpoint_host("tcp://node-1:5555"), endpoint_host("unix:///tmp/node")
    ('node-1', '')
    """
    return split_endpoint(endpoint)[0] if endpoint.startswith("tcp://") else ""


def open_to_strangers(got: str) -> AtlasError:
    """Return the error for an endpoint that would accept connections from any host."""
    hint = "Pass the same secret= to all nodes, or unprotected=True on a trusted network"
    return AtlasError(Code.UNPROTECTED, got=f"{got} and no secret", hint=hint)


def listen_at(endpoint: str, *, protected: bool, unprotected: bool) -> socket.socket:
    """Return a listening socket.

    Raise the error `unprotected` for an address that other hosts can reach. No error is raised if
    `protected` is true (a secret or TLS protects connections), or if `unprotected` is true (the
    user accepts the risk).
    """
    host, port = split_endpoint(endpoint)
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if not is_loopback(str(address[0])) and not protected and not unprotected:
            raise open_to_strangers(f"listen={endpoint!r}")
        listening = close_in_children(socket.socket(family, kind, number))
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1024)
        except OSError:
            listening.close()
            raise
    except OSError as problem:
        got = f"{endpoint}: {problem}"
        hint = "Use tcp://127.0.0.1:0 for any free port"
        unheard = "The node cannot listen at this endpoint"
        raise own_limit(problem) or failed(got, hint, unheard) from problem
    return listening
