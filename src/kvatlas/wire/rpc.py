"""The server end of the side channel, over which nodes exchange control messages.

Each connection has a thread. The number of connections is limited.

A connection is unauthenticated until its first question is decoded. If the node has a secret, the
peer must have the same secret to get that far. Only a few unauthenticated connections are kept, and
a new connection replaces the oldest of them, so strangers cannot lock out peers. Authenticated
connections are limited per host (or per certificate) and in total. A peer above the limit gets a
`busy` error with a delay after which to retry.
"""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import encoding, protocol
from kvatlas.wire.connection import FRAME_SECONDS, Connection, listen_at, tune
from kvatlas.wire.fork_safety import OwningProcess, close_in_children
from kvatlas.wire.security import Security
from kvatlas.wire.transports.errors import failed, own_limit
from kvatlas.wire.unix_sockets import check_user, listen_at_path, unix_path

log = logging.getLogger("kvatlas.wire")

_MAX_STRANGERS = 32
_MAX_CONNECTIONS = 1024
"""The maximum number of peer connections.

They also use at most a third of the file descriptors that the process may open.
"""
_MAX_ANSWERING = 64
"""The maximum number of questions that are answered concurrently.

Further questions wait briefly, and then get a `busy` error.
"""

_STRANGER_SECONDS = 5.0
"""Seconds for a new connection to authenticate, and the same again for its first question."""
_BUSY_SECONDS = 0.25
"""Seconds that a question waits for its turn. The `busy` error asks for the same delay."""
_IDLE_SECONDS = 0.05
_DROP_SECONDS = 1.0
"""Seconds to wait for the thread of a connection that was dropped; normally it ends at once."""


class Caller:
    """The peer's end of a connection, as passed to `answer`."""

    def __init__(self, connected: socket.socket) -> None:
        self.connection = Connection(connected)
        self.host, self.on_this_host = "127.0.0.1", True
        """The address of the peer, and whether it is an address of this host."""
        if connected.family == socket.AF_UNIX:
            self.identity = f"process {check_user(connected)}"
        else:
            self.identity = self.host = str(connected.getpeername()[0])
            self.on_this_host = self.host == connected.getsockname()[0]
        # `identity` is the key for its quotas: its host, its certificate, or its process.
        self.names: frozenset[str] | None = None
        """The node names that the peer's key proves; None if the peer may use any name."""
        self.known = self.answering = False
        self.open = True

    def hang_up(self) -> None:
        """End the connection. An answer in progress is still sent."""
        self.connection.hang_up(reading_only=self.answering)


class Server(threading.Thread):
    """Answers questions until it is closed, in parallel for different connections.

    `answer` is called with a question of the type `questions` and its caller. `closed` is called
    with a caller that disconnected, and `idle` at regular intervals.
    """

    def __init__(
        self,
        listen: str,
        answer: Callable[[Any, Caller], protocol.Message],
        *,
        security: Security | None = None,
        unprotected: bool = False,
        questions: Any = protocol.Question,
        idle: Callable[[], None] = lambda: None,
        closed: Callable[[Caller], None] = lambda _: None,
    ) -> None:
        super().__init__(name="kvatlas-wire", daemon=True)
        self.answer, self._questions = answer, questions
        self._idle, self._closed = idle, closed
        self._security = security or Security()
        self._callers: dict[Caller, threading.Thread] = {}
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_MAX_ANSWERING)
        self._closing = threading.Event()
        self.process = OwningProcess("server")
        if (path := unix_path(listen)) is not None:
            self._listening = listen_at_path(path)
            self.endpoint = listen
        else:
            protected = self._security.protected
            self._listening = listen_at(listen, protected=protected, unprotected=unprotected)
            port = self._listening.getsockname()[1]
            self.endpoint = f"{listen.rpartition(':')[0]}:{port}"
        self._housekeeping = threading.Thread(
            target=self._keep_house, name="kvatlas-sweep", daemon=True
        )
        self._housekeeping.start()
        self.start()

    def run(self) -> None:
        """Accept connections until closed."""
        while not self._closing.is_set():
            try:
                connected, _ = self._listening.accept()
            except OSError as problem:
                if not self._closing.is_set():  # no descriptors are left, or the caller has gone
                    log.warning("accept failed problem=%r", str(problem))
                    self._drop_strangers(_MAX_STRANGERS // 2)
                    self._closing.wait(_IDLE_SECONDS)
                continue
            try:
                self._receive_caller(close_in_children(connected))
            except Exception as problem:
                log.warning("connection failed problem=%r", str(problem))
                connected.close()
        self._listening.close()

    def stop(self) -> None:
        """Stop answering, without waiting for answers in progress."""
        if self.process.forked:
            return
        self._closing.set()
        with suppress(OSError):  # it is closed already
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        with self._lock:
            callers = list(self._callers)
        for caller in callers:
            caller.hang_up()

    def close(self) -> None:
        """Stop, and wait for answers in progress.

        A second call, and a call in a forked child, has no effect.
        """
        if self.process.forked:
            return
        self.stop()
        _join(self)  # no connection is accepted after this
        with self._lock:
            threads = [self._housekeeping, *self._callers.values()]
        for thread in threads:
            _join(thread)

    # -- callers --------------------------------------------------------------------------

    def _receive_caller(self, connected: socket.socket) -> None:
        if connected.family != socket.AF_UNIX:
            tune(connected)
        caller = Caller(connected)
        self._drop_strangers(_MAX_STRANGERS - 1)
        thread = threading.Thread(
            target=self._serve, args=(caller, connected), name="kvatlas-answers", daemon=True
        )
        with self._lock:
            self._callers[caller] = thread
        try:
            thread.start()
        except RuntimeError:
            self._forget(caller)
            raise
        if self._closing.is_set():
            caller.hang_up()

    def _drop_strangers(self, most: int) -> None:
        """Disconnect unauthenticated connections until at most `most` are left.

        Each time, the host with the most such connections loses its oldest connection. A host that
        opens many connections thus loses its own connections.
        """
        dropped = []
        with self._lock:
            strangers = [one for one in self._callers if not one.known and one.open]
            while len(strangers) > most:
                counts = Counter(one.identity for one in strangers)
                host = counts.most_common(1)[0][0]
                oldest = next(one for one in strangers if one.identity == host)
                strangers.remove(oldest)
                oldest.open = False
                oldest.hang_up()
                dropped.append(self._callers[oldest])
        for thread in dropped:  # so that the number of threads is bounded too
            thread.join(_DROP_SECONDS)

    def _admit(self, caller: Caller) -> bool:
        """Return whether an authenticated caller fits into the limits."""
        most = min(_MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        with self._lock:
            known = [one for one in self._callers if one.known]
            same = sum(one.identity == caller.identity for one in known)
            caller.known = len(known) < most and same < max(1, most // 2)
        return caller.known

    def _forget(self, caller: Caller) -> None:
        caller.open = False
        with self._lock:
            self._callers.pop(caller, None)
        caller.connection.close()
        try:
            self._closed(caller)
        except Exception:
            log.exception("cleanup after a disconnected peer failed")

    def _serve(self, caller: Caller, connected: socket.socket) -> None:
        """Answer one caller until it disconnects. An error ends only this caller's connection."""
        try:
            connected.settimeout(_STRANGER_SECONDS)
            protected = close_in_children(self._security.wrap(connected))
            caller.connection = Connection(protected)
            if self._closing.is_set() or not caller.open:
                return  # it was dropped before the wrapped connection was stored
            if connected.family != socket.AF_UNIX:
                caller.identity, caller.names = self._security.identify(protected)
            self._answer_all(caller)
        except AtlasError as refusal:
            got = str(refusal.got)
            log.warning(
                "connection rejected peer=%s code=%s got=%r", caller.identity, refusal.code, got
            )
        except (OSError, EOFError) as problem:
            log.debug("disconnected peer=%s problem=%r", caller.identity, str(problem))
        except Exception:
            log.exception("connection failed peer=%s", caller.identity)
        finally:
            self._forget(caller)

    def _answer_all(self, caller: Caller) -> None:
        while caller.open and not self._closing.is_set():
            until = None if caller.known else time.monotonic() + _STRANGER_SECONDS
            question, stays = None, False
            try:
                payload = caller.connection.receive(until)  # after invalid data, nothing is read
                stays = caller.answering = True
                question = encoding.decode(payload, self._questions)
                if not caller.known and not self._admit(caller):
                    stays = False
                    raise encoding.BusyError("the maximum number of connections", 1.0)
                answer = self._answer(question, caller)
            except AtlasError as refusal:
                answer = _refused(refusal, question, caller)
                caller.open = caller.open and stays
            caller.connection.send(answer, time.monotonic() + FRAME_SECONDS)
            caller.answering = False
        if not caller.open:
            caller.connection.finish()

    def _answer(self, question: Any, caller: Caller) -> bytes:
        """Return the encoded answer to a question. Any exception becomes an `AtlasError`."""
        if not self._turns.acquire(timeout=_BUSY_SECONDS):
            raise encoding.BusyError(f"{_MAX_ANSWERING} requests in progress", _BUSY_SECONDS)
        try:
            return encoding.encode(self.answer(question, caller))
        except AtlasError:
            raise
        except Exception as defect:
            log.exception("answering a request failed")
            got = f"{type(defect).__name__} while the peer handled the request"
            failure = failed(got, "See the peer's log", "The peer failed internally")
            raise own_limit(defect) or failure from defect
        finally:
            self._turns.release()

    def _keep_house(self) -> None:
        while not self._closing.wait(_IDLE_SECONDS):
            try:
                self._idle()
            except Exception:
                log.exception("periodic cleanup failed")


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()


def _refused(refusal: AtlasError, question: Any, caller: Caller) -> bytes:
    """Log an error, and return it as an encoded `Refusal`."""
    kind = "-" if question is None else type(question).__name__.lower()
    request, got = getattr(question, "request", ""), str(refusal.got)[:200]
    # A reader with `wait_for_offer` asks for a request repeatedly until it is offered.
    level = logging.INFO if refusal.code is Code.UNKNOWN_REQUEST else logging.WARNING
    log.log(
        level,
        "rejected message=%s request=%r peer=%s code=%s got=%r",
        kind, request, caller.identity, refusal.code, got,
    )  # fmt: skip
    return encoding.encode(encoding.refusal_of(refusal))
