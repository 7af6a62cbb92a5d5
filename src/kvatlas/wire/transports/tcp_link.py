"""A link over TCP, which connects, authenticates, requests runs, and stores the received bytes."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE
from typing import Annotated, ClassVar
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import STEP, as_bytes, copy_runs_unchecked
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire import encoding, protocol
from kvatlas.wire.connection import tune
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.security import Security, not_the_secret
from kvatlas.wire.transports import errors, tcp_server
from kvatlas.wire.transports.access import Access
from kvatlas.wire.transports.base import Link, Transport
from kvatlas.wire.transports.handles import Handle, Stepwise
from kvatlas.wire.transports.nonblocking_sockets import Steps, ready, receive, send, until_ready
from kvatlas.wire.transports.tcp_server import GATHERED, MOST_RUNS, SHORT, TOKEN_BYTES

_MEETING = 5.0
"""Seconds that a peer may take to accept a first connection."""
_MOST_IDLE = 8
"""The number of idle connections that a link keeps."""
_MOST_BYTES = 128 << 30
"""Bytes after which a connection is replaced: TLS limits one key to 2**38 bytes."""
_PAUSE = 2
"""Milliseconds between checks of the clock while a peer sends nothing."""
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ENDED = (ConnectionError, EOFError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_ATTEMPTS = 4
"""The number of attempts if the peer drops connections before it has authenticated them."""


class TcpPublished(msgspec.Struct, tag="tcp", forbid_unknown_fields=True):
    """The address at which a transport serves its regions, and the token that authorizes reads."""

    address: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    regions: dict[int, tuple[int, int]]
    """(Address, size in bytes) of every readable region, by pool index."""


class TcpLink(Link):
    """A peer to read from, and idle connections to it."""

    prompt: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __init__(
        self,
        owner: Transport,
        peer: TcpPublished,
        peer_memory: Mapping[int, Memory],
        security: Security,
    ) -> None:
        super().__init__(owner, peer_memory)
        self.peer, self.security, self.access = peer, security, Access()
        self.choice = 0
        """The index of the secret that the peer accepted last."""
        self._idle: list[socket.socket] = []
        self._received: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def sign_in(self, access: Access, deadline: float) -> None:
        """Open the first connection, and authenticate it."""
        self.access = access
        try:
            _Read(self, []).wait(min(deadline, time.monotonic() + _MEETING))
        except AtlasError as refusal:
            if refusal.code in (Code.BAD_SIGNATURE, Code.TOO_MANY_FILES, Code.NOT_ENOUGH_MEMORY):
                raise
            raise errors.peer_lost(f"{self.peer.address}: {refusal.got}") from None

    def _read(self, copies: Sequence[Copy], after: int | None, lease: bytes) -> Handle:
        del after
        # The regions are looked up now: the bounds were checked against these.
        copies = [copy.expanded() for copy in copies]
        questions = [part for copy in copies for part in _questions(copy, self.own_memory, lease)]
        handle = _Read(self, questions)
        with suppress(AtlasError):  # wait() raises it again
            handle.poll()
        return handle

    def take(self) -> socket.socket | None:
        """Return an idle open connection, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                one = self._idle.pop()
            if not ready(one):
                return one
            one.close()  # readable without a request: the peer has closed it

    def give_back(self, one: socket.socket, nbytes: int) -> None:
        """Keep a connection for the next read, after `nbytes` bytes have arrived on it."""
        with self._lock:
            received = self._received[one] = self._received.get(one, 0) + nbytes
            if self.open and len(self._idle) < _MOST_IDLE and received < _MOST_BYTES:
                self._idle.append(one)
                return
        one.close()

    def _close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()


@dataclass(frozen=True)
class _Question:
    """One request: runs of a region of the peer, and their destinations."""

    pool: int
    source: Int64s
    into: Bytes
    destination: Int64s
    length: Int64s
    lease: bytes

    @property
    def payload(self) -> bytes:
        """The request as it is sent."""
        head = tcp_server.QUESTION.pack(self.pool, len(self.length), self.lease)
        return head + self.source.astype("<i8").tobytes() + self.length.astype("<i8").tobytes()


def _questions(copy: Copy, mine: Mapping[int, Memory], lease: bytes) -> Iterator[_Question]:
    """Split the runs of `copy` into requests. Short and long runs go into separate requests."""
    into = as_bytes(mine[copy.destination_pool])
    long = copy.length >= SHORT
    for chosen in (np.flatnonzero(~long), np.flatnonzero(long)):
        if not len(chosen):
            continue
        longest = int(copy.length[chosen].max())
        many = MOST_RUNS if longest >= SHORT else min(MOST_RUNS, GATHERED // longest)
        for first in range(0, len(chosen), many):
            some = chosen[first : first + many]
            columns = copy.destination[some], copy.length[some]
            yield _Question(copy.source_pool, copy.source[some], into, *columns, lease)


def _contiguous(start: Int64s, length: Int64s) -> tuple[Int64s, Int64s]:
    """Join runs that follow each other without a gap. Return (starts, lengths) of the result."""
    first = np.flatnonzero(np.append(True, start[1:] != start[:-1] + length[:-1]))
    return start[first], np.add.reduceat(length, first)


class _Read(Stepwise):
    """A read over TCP, which sends requests without waiting for the previous reply."""

    def __init__(self, link: TcpLink, questions: Sequence[_Question]) -> None:
        super().__init__(self._run(link, questions))
        self._connection: socket.socket | None = None
        self._outgoing = b""
        self._connecting = False
        self._moved = 0

    def _pause(self, seconds: float) -> None:
        """Wait until the socket is ready, if the next step needs that.

        Sleep for `seconds` if there is no connection.
        """
        one = self._connection
        if one is None or one.fileno() < 0:
            time.sleep(seconds)
        elif self.waits_for:
            ready(one, self.waits_for, _PAUSE)

    def _release(self) -> None:
        super()._release()
        self.settle()  # closes the connection, unless a step is running

    def _run(self, link: TcpLink, questions: Sequence[_Question]) -> Iterator[int]:
        whole = False
        try:
            self._connection = link.take()
            for event in self._talk(link, questions):
                yield event
                link.check()
            whole = True
        except (OSError, EOFError) as problem:
            if isinstance(problem, ssl.SSLError) and not isinstance(problem, _ENDED):
                raise _changed(f"{problem.reason} from {link.peer.address}") from None
            got = str(problem) or "a closed connection"
            lost = errors.peer_lost(f"{got} at {link.peer.address}")
            raise errors.own_limit(problem) or lost from None
        finally:
            connection, self._connection = self._connection, None
            if connection is not None and whole:
                link.give_back(connection, sum(int(one.length.sum()) for one in questions))
            elif connection is not None:
                connection.close()

    def _talk(self, link: TcpLink, questions: Sequence[_Question]) -> Iterator[int]:
        if self._connection is None:
            yield from self._open(link)
        asked: deque[_Question] = deque()
        for question in questions:
            self._outgoing += question.payload
            asked.append(question)
            if len(asked) > 1:
                yield from self._receive(asked.popleft())
        if asked:
            yield from self._receive(asked.popleft())

    def _open(self, link: TcpLink) -> Iterator[int]:
        """Connect and authenticate, with the first secret that the peer accepts."""
        choices, attempts, refusal = link.security.choices, _ATTEMPTS, None
        while choices:
            try:
                yield from self._connect(link)
                yield from self._authenticate(link)
                return
            except _ENDED:
                # A busy peer drops the oldest connections that are not authenticated.
                attempts -= 1
                if self._connecting or not attempts:
                    raise
            except ssl.SSLError as problem:
                refusal = not_the_secret(f"{problem.reason} from {link.peer.address}")
                link.choice = (link.choice + 1) % link.security.choices
                choices -= 1
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            yield 0
        assert refusal is not None  # noqa: S101  # there is at least one choice
        raise refusal

    def _connect(self, link: TcpLink) -> Iterator[int]:
        address = link.peer.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        one = self._connection = close_in_children(socket.socket(family, socket.SOCK_STREAM))
        one.setblocking(False)
        tune(one)
        self._connecting = True
        begun = one.connect_ex((address, link.peer.port))
        while begun == errno.EINPROGRESS and not ready(one, EVENT_WRITE):
            yield EVENT_WRITE
        failure = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if begun not in (0, errno.EINPROGRESS) or failure:
            code = failure or begun
            raise OSError(code, errno.errorcode.get(code, "connect"))
        self._connecting = False

    def _authenticate(self, link: TcpLink) -> Steps[None]:
        """Complete the TLS handshake if there is a secret, and answer the peer's challenge."""
        assert self._connection is not None  # noqa: S101
        host = link.access.host or link.peer.address
        one = self._connection = link.security.begin(self._connection, host, link.choice)
        if isinstance(one, ssl.SSLSocket):
            yield from until_ready(one.do_handshake)
            link.security.verify(one, link.choice)
        challenge = yield from receive(one, tcp_server.CHALLENGE_BYTES)
        yield from send(one, tcp_server.proof(link.peer.token, challenge, link.access.session))
        welcome = yield from receive(one, 1)
        if welcome != tcp_server.WELCOME:
            raise errors.bad_metadata("an invalid reply to the handshake")

    def _receive(self, question: _Question) -> Iterator[int]:
        destination, length = question.destination, question.length
        granted = bytearray(1)
        yield from self._fill(memoryview(granted))
        if granted != tcp_server.GRANTED:
            yield from self._refused()
        if tcp_server.gathers(length):
            together = np.empty(int(length.sum()), np.uint8)
            yield from self._fill(together.data)
            at = tcp_server.packed(length)
            for _ in copy_runs_unchecked(together, question.into, at, destination, length):
                yield 0
            return
        starts, sizes = _contiguous(destination, length)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            yield from self._fill(question.into.data[start : start + size])

    def _refused(self) -> Iterator[int]:
        """Receive the error that the peer sends instead of bytes, and raise it."""
        head = bytearray(tcp_server.REFUSAL.size)
        yield from self._fill(memoryview(head))
        (nbytes,) = tcp_server.REFUSAL.unpack(head)
        payload = bytearray(min(nbytes, tcp_server.LONGEST_REFUSAL))
        yield from self._fill(memoryview(payload))
        encoding.raise_refusal(encoding.decode(bytes(payload), protocol.Refusal))

    def _fill(self, view: memoryview) -> Iterator[int]:
        """Receive bytes until `view` is full, and send requests meanwhile."""
        one = self._connection
        assert one is not None  # noqa: S101
        while view:
            try:
                if self._outgoing:
                    with suppress(*_NOT_NOW):  # the rest is sent while replies are received
                        self._outgoing = self._outgoing[one.send(self._outgoing) :]
                got = one.recv_into(view, min(len(view), STEP))
            except _NOT_NOW:
                yield EVENT_READ | EVENT_WRITE if self._outgoing else EVENT_READ
                continue
            if not got:
                raise EOFError
            view = view[got:]
            self._moved += got
            if self._moved >= STEP:
                self._moved = 0
                yield 0


def _changed(got: str) -> AtlasError:
    """Return the error for bytes that TLS has rejected."""
    hint = "Retry the transfer, and check the network for faults and for attackers"
    return AtlasError(Code.CHECKSUM, "The bytes were changed in transit", got=got, hint=hint)
