"""Admit new connections. One thread runs the handshakes of all connections.

A connection that is not authenticated yet costs a descriptor, but no thread. Few such connections
are kept. If there are too many, the host or process with the most such connections loses its oldest
connection.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.transports.nonblocking_sockets import Steps, hang_up

log = logging.getLogger("kvatlas.wire")

MOST_UNPROVEN = 64
"""The maximum number of connections that are not authenticated yet."""
_PROVING = 5.0
"""Seconds in which a connection must authenticate."""
_LOOK = 0.5
"""Seconds between checks for connections that take too long."""
_AT_ONCE = 16
"""The maximum number of connections to accept before handshakes in progress continue."""


@dataclass(eq=False)
class Newcomer:
    """An accepted connection during its handshake. Its socket is non-blocking."""

    connection: socket.socket
    source: object
    """The host or process that the connection comes from."""
    fd: int
    steps: Steps[None] = field(init=False)
    until: float = field(default_factory=lambda: time.monotonic() + _PROVING)
    """When the connection is dropped (monotonic clock); infinity once it is authenticated."""

    def admit(self) -> None:
        """Mark the connection as authenticated, so that it is not dropped for taking too long."""
        self.until = math.inf


class Admission(threading.Thread):
    """Accepts connections, and runs the generator that `handshake` returns for each connection.

    If the generator returns, it has taken over the connection. If it raises an error, the
    connection is closed. `source` returns the host or process that a connection comes from, or
    raises an error to reject the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        source: Callable[[socket.socket, Any], object],
        handshake: Callable[[Newcomer], Steps[None]],
        name: str,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._listener, self._source, self._handshake = listener, source, handshake
        self._newcomers: dict[int, Newcomer] = {}
        """Connections during their handshake, by file descriptor, the oldest first."""
        self._waiting = selectors.DefaultSelector()
        self._closed = False
        listener.setblocking(False)
        self._waiting.register(listener, selectors.EVENT_READ)
        self.start()

    def close(self) -> None:
        """Close the listener, and all connections whose handshake is not finished."""
        self._closed = True
        with suppress(OSError):  # already closed, or in a forked child
            self._listener.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Admit connections until closed."""
        while not self._closed:
            unproven = self._unproven()
            for key, _ in self._waiting.select(_LOOK if unproven else None):
                one = self._newcomers.get(key.fd)
                if key.fileobj is self._listener:
                    self._accept()
                elif one is not None and one is key.data:  # else it was dropped for a new one
                    self._advance(one)
            now = time.monotonic()
            for late in [one for one in self._newcomers.values() if one.until < now]:
                self._drop(late)
        for one in list(self._newcomers.values()):
            self._drop(one)
        self._listener.close()
        self._waiting.close()

    def _unproven(self) -> list[Newcomer]:
        return [one for one in self._newcomers.values() if one.until < math.inf]

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
            try:
                source = self._source(connection, address)
            except (AtlasError, OSError) as refusal:
                log.warning("connection rejected: %s", refusal)
                connection.close()
                continue
            self._make_room(MOST_UNPROVEN - 1)
            connection.setblocking(False)
            one = Newcomer(connection, source, connection.fileno())
            one.steps = self._handshake(one)
            self._newcomers[one.fd] = one
            self._waiting.register(one.fd, selectors.EVENT_READ, one)
            self._advance(one)

    def _make_room(self, most: int) -> None:
        """Drop unauthenticated connections until `most` are left.

        Each time, find the host or process with the most such connections, and drop its oldest.
        """
        unproven = self._unproven()
        while len(unproven) > most:
            source = Counter(one.source for one in unproven).most_common(1)[0][0]
            oldest = next(one for one in unproven if one.source == source)
            unproven.remove(oldest)
            self._drop(oldest)

    def _advance(self, one: Newcomer) -> None:
        """Continue the handshake of a connection as far as possible now."""
        try:
            self._waiting.modify(one.fd, next(one.steps), one)
        except StopIteration:
            self._forget(one)
        except AtlasError as refusal:
            log.warning("connection rejected peer=%s code=%s", one.source, refusal.code)
            self._drop(one)
        except (OSError, EOFError) as problem:
            log.debug("disconnected peer=%s problem=%r", one.source, str(problem))
            self._drop(one)
        except Exception:
            log.exception("connection failed peer=%s", one.source)
            self._drop(one)

    def _forget(self, one: Newcomer) -> None:
        del self._newcomers[one.fd]
        self._waiting.unregister(one.fd)

    def _drop(self, one: Newcomer) -> None:
        self._forget(one)
        one.steps.close()
        hang_up(one.connection)
