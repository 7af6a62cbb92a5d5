"""The side channel: questions and answers over ZeroMQ, each within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.protocol import (
    MOST,
    Answer,
    Message,
    Question,
    Refusal,
    bad_handshake,
    new_key,
    raise_refusal,
    refusal_of,
    seal,
    unseal,
)

log = logging.getLogger("kvatlas.wire")

_POLL_MS = 50
_QUEUED = 16
"""Messages of a connection that wait in memory; the rest wait at the other end."""
_REMEMBERED = 4096


def zmq() -> Any:
    """The library, or a refusal that says how to get it."""
    try:
        import zmq as found
    except ImportError as missing:
        raise AtlasError(
            Code.MISSING_EXTRA,
            "Wires talk over ZeroMQ",
            got="no module zmq",
            hint="pip install 'kvatlas[wire]'",
        ) from missing
    return found


def _limited(socket: Any) -> Any:
    lib = zmq()
    socket.setsockopt(lib.LINGER, 0)
    socket.setsockopt(lib.MAXMSGSIZE, MOST + 64)
    socket.setsockopt(lib.RCVHWM, _QUEUED)
    socket.setsockopt(lib.SNDHWM, _QUEUED)
    return socket


def ask(endpoint: str, message: Message, *, secret: bytes | None, deadline: float) -> Any:
    """The peer's answer, or its refusal raised here; never later than `deadline` (monotonic).

    Every question has a socket of its own, so that a late answer to one that was given up
    cannot be taken for the answer to another, and any thread may ask.
    """
    lib = zmq()
    nonce = new_key()
    socket = _limited(lib.Context.instance().socket(lib.DEALER))
    try:
        socket.connect(endpoint)
        socket.send_multipart(seal(message, nonce, secret))
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not socket.poll(max(1, int(left * 1000))):
                raise AtlasError(
                    Code.DEADLINE,
                    "A peer answers before the deadline",
                    got=f"nothing from {endpoint}",
                    hint="Check that it runs and can be reached, or allow more time",
                )
            echoed, said = unseal(socket.recv_multipart(), Answer, secret)
            if echoed == nonce:
                break
    except lib.ZMQError as problem:
        raise AtlasError(
            Code.WIRE_FAILED,
            "An endpoint is one that ZeroMQ can reach",
            got=f"{endpoint}: {problem}",
            hint="Endpoints look like tcp://host:port",
        ) from problem
    finally:
        socket.close()
    if isinstance(said, Refusal):
        raise_refusal(said)
    return said


class Server(threading.Thread):
    """Answers questions, one after the other, until it is closed."""

    def __init__(
        self,
        listen: str,
        answer: Callable[[Any], Message],
        *,
        secret: bytes | None,
        idle: Callable[[], None],
    ) -> None:
        super().__init__(name="kvatlas-wire", daemon=True)
        lib = zmq()
        self._answer, self._idle, self._secret = answer, idle, secret
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._over = threading.Event()
        self._socket = _limited(lib.Context.instance().socket(lib.ROUTER))
        try:
            if listen.endswith(":0"):
                port = self._socket.bind_to_random_port(listen[:-2])
                self.endpoint = f"{listen[:-2]}:{port}"
            else:
                self._socket.bind(listen)
                self.endpoint = listen
        except lib.ZMQError as problem:
            self._socket.close()
            raise AtlasError(
                Code.WIRE_FAILED,
                "A process listens where nobody else does",
                got=f"{listen}: {problem}",
                hint="Use tcp://127.0.0.1:0 for any free port",
            ) from problem
        self.start()

    def run(self) -> None:
        """Answer until closed."""
        while not self._over.is_set():
            if self._socket.poll(_POLL_MS):
                sender, *frames = self._socket.recv_multipart()
                reply = self._reply(frames)
                if reply is not None:
                    self._socket.send_multipart([sender, *reply])
            try:
                self._idle()
            except Exception:
                log.exception("housekeeping failed")
        self._socket.close()

    def close(self) -> None:
        """Stop answering; a second call does nothing."""
        self._over.set()
        if self is not threading.current_thread():
            self.join()

    def _reply(self, frames: list[bytes]) -> list[bytes] | None:
        nonce = frames[1][:16] if len(frames) == 2 and len(frames[1]) > 16 else bytes(16)
        try:
            nonce, question = unseal(frames, Question, self._secret)
            self._refuse_replay(nonce)
            said = self._answer(question)
        except AtlasError as refused:
            log.warning("refused code=%s got=%s", refused.code, refused.got)
            said = refusal_of(refused)
        except Exception as defect:
            log.exception("an answer failed")
            said = refusal_of(
                AtlasError(
                    Code.WIRE_FAILED,
                    "A peer answers what it is asked",
                    got=type(defect).__name__,
                    hint="See the peer's log",
                )
            )
        return seal(said, nonce, self._secret)

    def _refuse_replay(self, nonce: bytes) -> None:
        if nonce in self._seen:
            raise bad_handshake("a message that was said before")
        self._seen[nonce] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
