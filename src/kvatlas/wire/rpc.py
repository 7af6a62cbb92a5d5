"""The side channel: questions and answers over ZeroMQ, each within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.wire import protocol
from kvatlas.wire.transports.errors import failed

log = logging.getLogger("kvatlas.wire")

_POLL_MS = 50
_QUEUED = 16
"""Messages of a connection that wait in memory; the rest wait at the other end."""
_NONCES = 4096
"""Nonces that a server remembers, so that it refuses messages that are sent twice."""


def zmq() -> Any:
    """The ZeroMQ library, or an error that says how to get it."""
    try:
        import zmq as library
    except ImportError as missing:
        raise MissingExtraError("pyzmq", "wire") from missing
    return library


def _socket(kind: str) -> Any:
    """A socket that takes only messages of the allowed size, and few at a time."""
    lib = zmq()
    socket = lib.Context.instance().socket(getattr(lib, kind))
    socket.setsockopt(lib.LINGER, 0)
    socket.setsockopt(lib.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES + 64)
    socket.setsockopt(lib.RCVHWM, _QUEUED)
    socket.setsockopt(lib.SNDHWM, _QUEUED)
    return socket


def no_answer(endpoint: str) -> AtlasError:
    """The deadline passed before a peer answered."""
    hint = "Check that it runs and can be reached, or allow more time"
    return AtlasError(Code.DEADLINE, got=f"no answer from {endpoint}", hint=hint)


def ask(endpoint: str, message: protocol.Message, *, secret: bytes | None, deadline: float) -> Any:
    """The peer's answer, or its refusal raised here; never later than `deadline` (monotonic).

    Every question has a socket of its own, so that a late answer to one that was given up
    cannot be taken for the answer to another, and any thread may ask.
    """
    lib = zmq()
    nonce = protocol.new_key()
    socket = _socket("DEALER")
    try:
        socket.connect(endpoint)
        socket.send_multipart(protocol.seal(message, nonce, secret))
        echoed = b""
        while echoed != nonce:
            left = deadline - time.monotonic()
            if left <= 0 or not socket.poll(max(1, int(left * 1000))):
                raise no_answer(endpoint)
            echoed, answer = protocol.unseal(socket.recv_multipart(), protocol.Answer, secret)
    except lib.ZMQError as problem:
        got = f"ZeroMQ connecting to {endpoint}: {problem}"
        raise failed(got, "Endpoints look like tcp://host:port") from problem
    finally:
        socket.close()
    if isinstance(answer, protocol.Refusal):
        protocol.raise_refusal(answer)
    return answer


class Server(threading.Thread):
    """Answers questions, one after the other, until it is closed."""

    def __init__(
        self,
        listen: str,
        answer: Callable[[Any], protocol.Message],
        *,
        secret: bytes | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="kvatlas-wire", daemon=True)
        self.answer = answer
        self._idle, self._secret = idle, secret
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        self._closing = threading.Event()
        self._socket = _socket("ROUTER")
        any_port = listen.endswith(":0")
        try:
            self._socket.bind(f"{listen[:-1]}*" if any_port else listen)
        except zmq().ZMQError as problem:
            self._socket.close()
            got = f"ZeroMQ listening at {listen}: {problem}"
            raise failed(got, "Use tcp://127.0.0.1:0 for any free port") from problem
        bound: str = self._socket.getsockopt_string(zmq().LAST_ENDPOINT)
        self.endpoint = listen[:-1] + bound.rpartition(":")[2] if any_port else listen
        self.start()

    def run(self) -> None:
        """Answer until closed."""
        while not self._closing.is_set():
            if self._socket.poll(_POLL_MS):
                sender, *frames = self._socket.recv_multipart()
                self._socket.send_multipart([sender, *self._reply(frames)])
            try:
                self._idle()
            except Exception:
                log.exception("housekeeping failed")
        self._socket.close()

    def stop(self) -> None:
        """Answer no further question, without waiting for the one at hand."""
        self._closing.set()

    def close(self) -> None:
        """Stop, and wait for the answer at hand; a second call does nothing."""
        self.stop()
        if self is not threading.current_thread():
            self.join()

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        whole = len(frames) == 2 and len(frames[1]) > protocol.NONCE
        nonce = frames[1][: protocol.NONCE] if whole else bytes(protocol.NONCE)
        answer: protocol.Message
        try:
            nonce, question = protocol.unseal(frames, protocol.Question, self._secret)
            self._check_replay(nonce)
            answer = self.answer(question)
        except AtlasError as refused:
            log.warning("refused code=%s got=%s", refused.code, refused.got)
            answer = protocol.refusal_of(refused)
        except Exception as defect:
            log.exception("an answer failed")
            got = f"{type(defect).__name__} while answering"
            answer = protocol.refusal_of(failed(got, "See the peer's log"))
        return protocol.seal(answer, nonce, self._secret)

    def _check_replay(self, nonce: bytes) -> None:
        if nonce in self._nonces:
            raise protocol.bad_handshake("a message that was sent before")
        self._nonces[nonce] = None
        while len(self._nonces) > _NONCES:
            self._nonces.popitem(last=False)
