"""Frames on the wire as they are, without any of the library's own care."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from kvatlas.wire import protocol


class Raw:
    """A peer that says whatever it likes."""

    def __init__(self, endpoint: str, secret: bytes | None = None) -> None:
        self.secret = secret
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[bytes]) -> None:
        """Put frames on the wire; a message of no frames is one that is empty."""
        self._socket.send_multipart(list(frames) or [b""])

    def heard(self, seconds: float) -> Any:
        """The next answer, or None where there is none in time."""
        if not self._socket.poll(int(seconds * 1000)):
            return None
        return protocol.unseal(self._socket.recv_multipart(), protocol.Answer, self.secret)[1]

    def tell(self, frames: Sequence[bytes], seconds: float = 10.0) -> Any:
        self.send(frames)
        return self.heard(seconds)

    def ask(self, message: protocol.Message, nonce: bytes | None = None) -> Any:
        """An answer, or a refusal as it travels."""
        said = self.tell(protocol.seal(message, nonce or protocol.new_key(), self.secret))
        assert said is not None, f"no answer to {type(message).__name__}"
        return said

    def close(self) -> None:
        self._socket.close()

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
