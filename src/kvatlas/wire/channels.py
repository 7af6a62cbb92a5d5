"""The end of the side channel that asks: connections to peers, kept for the next question.

A connection carries one question at a time, so that an answer belongs to its question; one
whose question was given up is closed. A peer that has died is noticed at once by the end of
its connections, those that wait for no answer included.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import protocol
from kvatlas.wire.connection import Connection, split_endpoint, tune
from kvatlas.wire.refusals import raise_refusal
from kvatlas.wire.security import Security, not_the_secret
from kvatlas.wire.transports.errors import closed, failed, peer_lost
from kvatlas.wire.unix_sockets import connect_to_path, unix_path

_PER_ENDPOINT = 8
"""Connections to one endpoint at most, and so questions that it is asked at once."""

_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

_CHECK_SECONDS = 0.05
"""Seconds between looks at a connection that nobody uses."""

_REPEATABLE = (protocol.Hello, protocol.Renew, protocol.Gather, protocol.GetChecksums)
"""Questions between nodes that do no harm when they are carried out twice."""


@dataclass
class _Pool:
    """The connections to one endpoint."""

    idle: list[Connection] = field(default_factory=list)
    opened: int = 0
    """How many there are, the idle ones included."""
    lost: int = 0
    """How many the peer has ended so far."""
    choice: int = 0
    """Which secret the peer was last found to know."""


class Channels:
    """A node's connections to its peers; any thread may ask.

    Answers are of the type `answers`; questions of the types `repeatable` do no harm when they
    are carried out twice.
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
        self._changed = threading.Condition()
        self._closed = False

    def ask(self, endpoint: str, message: protocol.Message, *, deadline: float) -> Any:
        """The peer's answer, or its refusal raised here; never later than `deadline` (monotonic).

        A peer that is busy is asked again when it says so, as long as there is time.
        """
        payload = protocol.encode(message)
        repeatable = isinstance(message, self._repeatable)
        while True:
            answer = self._answer(endpoint, payload, deadline, repeatable=repeatable)
            if not isinstance(answer, protocol.Refusal):
                return answer
            pause = answer.retry * random.uniform(1.0, 1.5)  # noqa: S311  # not all at once
            if answer.code != Code.BUSY or time.monotonic() + pause >= deadline:
                raise_refusal(answer)
            time.sleep(pause)

    def monitor(self, endpoint: str) -> PeerMonitor:
        """Notices from now on whether the peer at an endpoint dies."""
        return PeerMonitor(self, endpoint, self.lost(endpoint))

    def lost(self, endpoint: str) -> int:
        """How many connections a peer has ended so far; idle ones are looked at."""
        with self._changed:
            pool = self._pools[endpoint]
            self._drop_ended(pool)
            return pool.lost

    def sweep(self) -> None:
        """Close connections that peers have ended, also to endpoints that nobody asks any more."""
        with self._changed:
            for pool in self._pools.values():
                self._drop_ended(pool)

    def close(self) -> None:
        """Ask nobody any more; a connection that waits for its answer is closed after it."""
        with self._changed:
            self._closed = True
            for pool in self._pools.values():
                for connection in pool.idle:
                    connection.close()
                pool.idle.clear()
            self._changed.notify_all()

    # -- inside ---------------------------------------------------------------------------

    def _answer(self, endpoint: str, payload: bytes, deadline: float, *, repeatable: bool) -> Any:
        """One answer; a kept connection that the peer has closed meanwhile is replaced once."""
        for last in (not repeatable, True):
            connection, kept = self._take(endpoint, deadline)
            usable = False
            try:
                connection.send(payload, deadline)
                answer = protocol.decode(connection.receive(deadline), self._answers)
                usable = connection.quiet
                if not usable:  # it ended with its answer: monitors must hear of that too
                    self._count_lost(endpoint)
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
        """A connection for one question, and whether it was kept from another one."""
        with self._changed:
            pool = self._pools[endpoint]
            while True:
                if self._closed:
                    raise closed("node")
                self._drop_ended(pool)
                if pool.idle:
                    return pool.idle.pop(), True
                if pool.opened < _PER_ENDPOINT:
                    pool.opened += 1
                    break
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise no_answer(endpoint)
        try:
            return self._open(endpoint, pool, deadline), False
        except BaseException:
            self._give_back(endpoint, None, usable=False)
            raise

    def _give_back(self, endpoint: str, connection: Connection | None, *, usable: bool) -> None:
        with self._changed:
            pool = self._pools[endpoint]
            if connection is not None and usable and not self._closed:
                pool.idle.append(connection)
            else:
                pool.opened -= 1
                if connection is not None:
                    connection.close()
            self._changed.notify_all()

    def _drop_ended(self, pool: _Pool) -> None:
        """Close idle connections that the peer has ended, or on which it speaks unasked."""
        ended = [connection for connection in pool.idle if not connection.quiet]
        for connection in ended:
            pool.idle.remove(connection)
            connection.close()
        pool.opened -= len(ended)
        pool.lost += len(ended)

    def _count_lost(self, endpoint: str) -> None:
        with self._changed:
            self._pools[endpoint].lost += 1

    def _lost(self, endpoint: str, problem: Exception) -> AtlasError:
        """The peer has ended a connection, or accepts none."""
        self._count_lost(endpoint)
        return peer_lost(f"{str(problem) or 'the end of a connection'} at {endpoint}")

    def _open(self, endpoint: str, pool: _Pool, deadline: float) -> Connection:
        """A new connection, with the first secret that the peer knows too."""
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
                got = f"{problem} for {endpoint}"
                raise failed(got, "Endpoints look like tcp://host:port") from None
            except OSError as problem:
                raise self._lost(endpoint, problem) from None
            pool.choice = choice
            return Connection(opened)
        assert refusal is not None  # noqa: S101  # there is at least one choice
        raise refusal

    def _dial(self, endpoint: str, choice: int, deadline: float) -> socket.socket:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if (path := unix_path(endpoint)) is not None:
            return connect_to_path(path, left)
        host, port = split_endpoint(endpoint)
        connected = socket.create_connection((host, port), timeout=left)
        try:
            tune(connected)
            return self._security.open(connected, host, choice)
        except BaseException:
            connected.close()
            raise


class PeerMonitor:
    """Says whether a peer has died since it was made: cheap enough to ask between polls."""

    def __init__(self, channels: Channels, endpoint: str, lost: int) -> None:
        self._channels, self._endpoint, self._lost = channels, endpoint, lost
        self._next = 0.0

    def check(self) -> None:
        """Raise `peer_lost` where the peer has ended a connection since."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _CHECK_SECONDS
        if self._channels.lost(self._endpoint) > self._lost:
            raise peer_lost(f"the end of a connection, {self._endpoint}")


def no_answer(endpoint: str) -> AtlasError:
    """The deadline passed before a peer answered."""
    hint = "Check that it runs and can be reached, or allow more time"
    return AtlasError(Code.DEADLINE, got=f"no answer from {endpoint}", hint=hint)
