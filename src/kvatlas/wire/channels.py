"""The client end of the side channel, over which nodes exchange control messages.

A connection carries one question at a time, so each answer belongs to the last question. After the
answer, the connection stays open for the next question. A connection whose question timed out is
closed. When a peer dies, its connections end, so the node notices the loss at once, even on
idle connections.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import encoding, protocol
from kvatlas.wire.connection import Connection, seconds_left, split_endpoint, tune
from kvatlas.wire.fork_safety import OwningProcess, close_in_children
from kvatlas.wire.security import Security, not_the_secret
from kvatlas.wire.transports.errors import closed, failed, own_limit, peer_lost
from kvatlas.wire.unix_sockets import connect_to_path, unix_path

_PER_ENDPOINT = 8
"""The maximum number of connections to one endpoint, and so of concurrent questions to it."""

_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

_DIAL_SECONDS = 10.0
"""The maximum seconds to reach a peer. An existing connection may wait longer for an answer."""

_CHECK_SECONDS = 0.05
"""Seconds between checks of an idle connection."""

_REPEATABLE = (
    protocol.Hello, protocol.Keep, protocol.Renew, protocol.Gather, protocol.GetChecksums,
    protocol.Announce,
)  # fmt: skip
"""Idempotent questions between nodes, which may be sent twice."""


@dataclass
class _Pool:
    """The connections to one endpoint."""

    idle: list[Connection] = field(default_factory=list)
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_PER_ENDPOINT))
    """Limits the number of connections. A question acquires it while it uses a connection."""
    lost: int = 0
    """The number of connections that the peer has ended so far."""
    choice: int = 0
    """The index of the secret that the peer accepted last."""
    names: frozenset[str] | None = None
    """The node names that the peer's key proves; None if the peer may use any name."""


class Channels:
    """A node's connections to its peers. Any thread may ask questions.

    Answers must be of the type `answers`. Questions of the types in `repeatable` are idempotent and
    may be sent twice.
    """

    def __init__(
        self,
        security: Security,
        *,
        answers: Any = protocol.Answer,
        repeatable: tuple[type, ...] = _REPEATABLE,
    ) -> None:
        self._security, self._answers, self._repeatable = security, answers, repeatable
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)
        self._lock = threading.Lock()
        self._closed = False
        self._process = OwningProcess("node")

    def ask(
        self,
        endpoint: str,
        message: protocol.Message,
        expected: tuple[type, ...] = (object,),
        *,
        deadline: float,
        check: Callable[[], object] | None = None,
    ) -> Any:
        """Return the peer's answer, or raise the error it sent, by `deadline` (monotonic clock).

        Raise `bad_handshake` for an answer whose type is not in `expected`. A busy peer is asked
        again after the delay that it requests, until the deadline. `check` is called during the
        wait for the answer; an error that it raises ends the wait.
        """
        self._process.check()
        payload = encoding.encode(message)
        repeatable = isinstance(message, self._repeatable)
        while True:
            answer = self._answer(endpoint, payload, deadline, check, repeatable=repeatable)
            if not isinstance(answer, protocol.Refusal):
                if not isinstance(answer, expected):
                    names = " or ".join(kind.__name__ for kind in expected)
                    raise protocol.bad_handshake(
                        f"a {type(answer).__name__} message, expected {names}"
                    )
                return answer
            pause = answer.retry * random.uniform(1.0, 1.5)  # noqa: S311  # peers retry at different times
            if answer.code != Code.BUSY or time.monotonic() + pause >= deadline:
                encoding.raise_refusal(answer)
            time.sleep(pause)

    def monitor(self, endpoint: str) -> PeerMonitor:
        """Return a monitor that detects the death of the peer at an endpoint."""
        return PeerMonitor(self, endpoint, self.lost(endpoint))

    def lost(self, endpoint: str) -> int:
        """Check idle connections, and return how many connections the peer has ended so far."""
        with self._lock:
            pool = self._pools[endpoint]
            self._drop_ended(pool)
            return pool.lost

    def has_idle(self, endpoint: str) -> bool:
        """Whether an idle connection is open. If so, the process at the endpoint has not exited."""
        with self._lock:
            return bool(self._pools[endpoint].idle)

    def proved_names(self, endpoint: str) -> frozenset[str] | None:
        """Return the node names that the peer's key proves; None if the peer may use any name."""
        with self._lock:
            return self._pools[endpoint].names

    def sweep(self) -> None:
        """Close connections that peers have ended, including those to unused endpoints."""
        with self._lock:
            for pool in self._pools.values():
                self._drop_ended(pool)

    def close(self) -> None:
        """Close idle connections now, and each busy connection once its answer has arrived.

        A call in a forked child has no effect.
        """
        if self._process.forked:
            return
        with self._lock:
            self._closed = True
            for pool in self._pools.values():
                for connection in pool.idle:
                    connection.close()
                pool.idle.clear()

    # -- inside ---------------------------------------------------------------------------

    def _answer(
        self,
        endpoint: str,
        payload: bytes,
        deadline: float,
        check: Callable[[], object] | None,
        *,
        repeatable: bool,
    ) -> Any:
        """Send a question, and return its answer.

        If it turns out that the peer has closed an idle connection, a repeatable question is sent
        again over a new connection.
        """
        for last in (not repeatable, True):
            connection, kept = self._take(endpoint, deadline)
            usable = False
            try:
                connection.send(payload, deadline)
                answer = encoding.decode(connection.receive(deadline, check), self._answers)
                # If the peer closes it later, `_drop_ended` counts it as lost. A peer that cannot
                # read the first question of a connection soon closes it as that of a stranger.
                usable = kept or not _is_unreadable(answer)
                return answer
            except TimeoutError:
                raise no_answer(endpoint) from None
            except (OSError, EOFError) as problem:
                if isinstance(problem, ssl.SSLError) and not isinstance(problem, _ENDED):
                    raise not_the_secret(f"{problem.reason} from {endpoint}") from None
                lost = self._lost(endpoint, problem)
                if last or not kept:
                    raise lost from None
            finally:
                self._give_back(endpoint, connection, usable=usable)
        raise AssertionError  # the second turn returns or raises

    def _take(self, endpoint: str, deadline: float) -> tuple[Connection, bool]:
        """Return a connection for one question, and whether an earlier question used it."""
        with self._lock:
            pool = self._pools[endpoint]
        if not pool.turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise no_answer(endpoint)
        try:
            with self._lock:
                if self._closed:
                    raise closed("node")
                self._drop_ended(pool)
                if pool.idle:
                    return pool.idle.pop(), True
            return self._open(endpoint, pool, deadline), False
        except BaseException:
            pool.turns.release()
            raise

    def _give_back(self, endpoint: str, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            pool = self._pools[endpoint]
            if usable and not self._closed:
                pool.idle.append(connection)
            else:
                connection.close()
        pool.turns.release()

    def _drop_ended(self, pool: _Pool) -> None:
        """Close idle connections that the peer has closed, or on which it sent unexpected data."""
        ended = [connection for connection in pool.idle if not connection.quiet]
        for connection in ended:
            pool.idle.remove(connection)
            connection.close()
        pool.lost += len(ended)

    def _lost(self, endpoint: str, problem: Exception | None = None) -> AtlasError:
        """Count a connection that was lost or not accepted, and return the error for it."""
        with self._lock:
            self._pools[endpoint].lost += 1
        return peer_lost(f"{str(problem or '') or 'a closed connection'} at {endpoint}")

    def _open(self, endpoint: str, pool: _Pool, deadline: float) -> Connection:
        """Open a connection with the first secret that the peer accepts."""
        refusal: AtlasError | None = None
        for turn in range(self._security.choices):
            choice = (pool.choice + turn) % self._security.choices
            try:
                opened = self._dial(endpoint, choice, deadline)
            except TimeoutError:
                raise no_answer(endpoint) from None
            except _ENDED as problem:
                raise self._lost(endpoint, problem) from None
            except ssl.SSLError as problem:
                refusal = not_the_secret(f"{problem.reason} from {endpoint}")
                continue
            except socket.gaierror as problem:
                got, hint = f"{endpoint}: {problem}", "Check the host name, or use an IP address"
                unresolved = "The endpoint's host name cannot be resolved"
                raise failed(got, hint, unresolved) from None
            except OSError as problem:
                raise own_limit(problem) or self._lost(endpoint, problem) from None
            pool.choice = choice
            if unix_path(endpoint) is None:
                pool.names = self._security.verify(opened, choice).names
            return Connection(opened)
        assert refusal is not None  # noqa: S101  # there is at least one choice
        raise refusal

    def _dial(self, endpoint: str, choice: int, deadline: float) -> socket.socket:
        if (path := unix_path(endpoint)) is not None:
            return connect_to_path(path, seconds_left(deadline))
        host, port = split_endpoint(endpoint)
        connected = close_in_children(
            socket.create_connection(
                (host, port), timeout=min(_DIAL_SECONDS, seconds_left(deadline))
            )
        )
        try:
            tune(connected)
            connected.settimeout(seconds_left(deadline))
            return self._security.open(connected, host, choice)
        except BaseException:
            connected.close()
            raise


class PeerMonitor:
    """Detects that a peer has died since the monitor was made. `check` is cheap."""

    def __init__(self, channels: Channels, endpoint: str, lost: int) -> None:
        self._channels, self._endpoint, self._lost = channels, endpoint, lost
        self._next = 0.0

    def check(self) -> None:
        """Raise `peer_lost` if the peer has closed a connection since the monitor was made."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _CHECK_SECONDS
        if self._channels.lost(self._endpoint) > self._lost:
            raise peer_lost(f"a closed connection to {self._endpoint}")


def _is_unreadable(answer: Any) -> bool:
    """Whether an answer is an error of a peer that may not have understood the question."""
    return isinstance(answer, protocol.Refusal) and answer.code == Code.BAD_HANDSHAKE


def no_answer(endpoint: str) -> AtlasError:
    """Return the error for a deadline that passed before the peer replied."""
    hint = "Check that the peer is running and reachable, or allow more time"
    return AtlasError(Code.DEADLINE, got=f"no reply from {endpoint}", hint=hint)
