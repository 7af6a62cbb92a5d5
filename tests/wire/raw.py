"""Bytes on the wire as they are, without any of the library's own care."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Any

from kvatlas.wire import encoding, protocol
from kvatlas.wire.connection import Connection, split_endpoint
from kvatlas.wire.security import Security


def framed(payload: bytes) -> bytes:
    """A payload behind its length."""
    return struct.pack(">I", len(payload)) + payload


def connected(endpoint: str) -> socket.socket:
    """A plain connection on which nothing has been said."""
    return socket.create_connection(split_endpoint(endpoint), timeout=10)


class Raw:
    """A peer that says whatever it likes; hung up on, it calls again."""

    def __init__(self, endpoint: str, secret: Any = None) -> None:
        self.endpoint, self.security = endpoint, Security(secret)
        self._connect()

    def _connect(self) -> None:
        host, _ = split_endpoint(self.endpoint)
        self.socket = self.security.open(connected(self.endpoint), host, 0)
        self._connection = Connection(self.socket)

    def send(self, some: bytes) -> None:
        """Put bytes on the wire."""
        if not self._connection.quiet:
            self.close()
            self._connect()
        self.socket.settimeout(10)
        with suppress(ConnectionError):  # it has heard enough
            self.socket.sendall(some)

    def heard(self, seconds: float) -> Any:
        """The next answer, or None where there is none in time."""
        try:
            payload = self._connection.receive(time.monotonic() + seconds)
        except (OSError, EOFError):
            return None
        return encoding.decode(payload, protocol.Answer)

    def tell(self, some: bytes, seconds: float = 10.0) -> Any:
        self.send(some)
        return self.heard(seconds)

    def ask(self, message: protocol.Message) -> Any:
        """An answer, or a refusal as it travels."""
        said = self.tell(framed(encoding.encode(message)))
        assert said is not None, f"no answer to {type(message).__name__}"
        return said

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Clock:
    """Processor time of this process, so that a busy machine does not matter."""

    def __enter__(self) -> Clock:
        self.begun = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.begun
