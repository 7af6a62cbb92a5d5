"""Admission to tcp's data port: one thread authenticates all new connections.

With a secret, a connection begins with a TLS handshake. It then answers a challenge with the token
from the published metadata, and names its session. Until that is done it costs a descriptor, but no
thread. Few such connections are kept: a new one replaces the oldest of the host with the most.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.errors import AtlasError
from kvatlas.wire.connection import tune
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.security import Security
from kvatlas.wire.transports.access import SESSION_BYTES

log = logging.getLogger("kvatlas.wire")

TOKEN_BYTES = 32
CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
WELCOME = b"+"
"""The server's reply to a correct answer to its challenge, once it can serve the connection."""

MOST_UNPROVEN = 64
"""The maximum number of connections that are not authenticated yet."""
_PROVING = 5.0
"""Seconds in which a connection must authenticate."""
_LOOK = 0.5
"""Seconds between checks for connections that take too long."""
_AT_ONCE = 16
"""The number of connections that are accepted before the others are looked at again."""


def proof(token: bytes, challenge: bytes, session: bytes = bytes(SESSION_BYTES)) -> bytes:
    """Return the answer to a challenge: the id of the session, then a proof of the token."""
    shown = hmac.digest(token, b"kvatlas tcp 2" + challenge + session, hashlib.sha256)
    return session + shown


class Admitted(NamedTuple):
    """An authenticated connection, which blocks."""

    connection: socket.socket
    session: bytes
    names: frozenset[str] | None
    """The names that the peer has proved; None if its connection proves none."""


Steps = Generator[int, None, Admitted]
"""Yields the event that a connection waits for, and returns the authenticated connection."""


@dataclass(eq=False)
class _Unproven:
    connection: socket.socket
    host: str
    fd: int
    steps: Steps = field(init=False)
    until: float = field(default_factory=lambda: time.monotonic() + _PROVING)


class Admission(threading.Thread):
    """Accepts connections, and calls `admitted` with each authenticated one, from its thread."""

    def __init__(
        self, listener: socket.socket, token: bytes, admitted: Callable[[Admitted], None]
    ) -> None:
        super().__init__(name="kvatlas-tcp", daemon=True)
        self.security = Security()
        self._listener, self._token, self._admitted = listener, token, admitted
        self._unproven: dict[int, _Unproven] = {}
        """By descriptor, oldest first."""
        self._waiting = selectors.DefaultSelector()
        self._closed = False
        listener.setblocking(False)

    def stop(self) -> None:
        """Accept no more connections. The thread ends soon."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Admit connections until stopped."""
        self._waiting.register(self._listener, selectors.EVENT_READ)
        while not self._closed:
            for key, _ in self._waiting.select(_LOOK):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._unproven:  # else it was dropped for a new one
                    self._advance(self._unproven[key.fd])
            now = time.monotonic()
            for late in [one for one in self._unproven.values() if one.until < now]:
                self._drop(late)
        for one in list(self._unproven.values()):
            self._drop(one)
        self._waiting.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                if not self._closed:  # most likely out of descriptors: wait before a retry
                    log.warning("accept failed problem=%r", str(problem))
                    self._make_room(MOST_UNPROVEN // 2)
                    time.sleep(0.02)
                return
            close_in_children(connection)
            self._make_room(MOST_UNPROVEN - 1)
            connection.setblocking(False)
            one = _Unproven(connection, str(address[0]), connection.fileno())
            one.steps = self._steps(one)
            self._unproven[one.fd] = one
            self._waiting.register(one.fd, selectors.EVENT_READ)
            self._advance(one)

    def _make_room(self, most: int) -> None:
        """Drop the oldest connections of the host with the most, until `most` are left."""
        while len(self._unproven) > most:
            host = Counter(one.host for one in self._unproven.values()).most_common(1)[0][0]
            self._drop(next(one for one in self._unproven.values() if one.host == host))

    def _advance(self, one: _Unproven) -> None:
        """Continue the handshake of a connection as far as possible now."""
        try:
            event = next(one.steps)
            self._waiting.modify(one.fd, event)
        except StopIteration as done:
            self._forget(one)
            self._admitted(done.value)
        except AtlasError as refusal:
            log.warning("connection rejected peer=%s code=%s", one.host, refusal.code)
            self._drop(one)
        except (OSError, EOFError) as problem:
            log.debug("disconnected peer=%s problem=%r", one.host, str(problem))
            self._drop(one)
        except Exception:
            log.exception("connection failed peer=%s", one.host)
            self._drop(one)

    def _forget(self, one: _Unproven) -> None:
        del self._unproven[one.fd]
        self._waiting.unregister(one.fd)

    def _drop(self, one: _Unproven) -> None:
        self._forget(one)
        one.connection.close()

    def _steps(self, one: _Unproven) -> Steps:
        security = self.security
        tune(one.connection)
        connection = one.connection = close_in_children(security.wrap(one.connection))
        while True:
            try:
                identity = security.identify(connection)
                break
            except ssl.SSLWantReadError:
                yield selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                yield selectors.EVENT_WRITE
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        yield from _send(connection, challenge)
        answer = yield from _receive(connection, SESSION_BYTES + _PROOF_BYTES)
        session = answer[:SESSION_BYTES]
        right = hmac.compare_digest(answer, proof(self._token, challenge, session))
        if not right or security is not self.security:
            raise EOFError
        connection.settimeout(None)
        return Admitted(connection, session, identity.names)


def _send(connection: socket.socket, data: bytes) -> Generator[int]:
    while data:
        try:
            data = data[connection.send(data) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield selectors.EVENT_WRITE
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ


def _receive(connection: socket.socket, nbytes: int) -> Generator[int, None, bytes]:
    arrived = b""
    while len(arrived) < nbytes:
        try:
            some = connection.recv(nbytes - len(arrived))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield selectors.EVENT_READ
            continue
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
            continue
        if not some:
            raise EOFError
        arrived += some
    return arrived
