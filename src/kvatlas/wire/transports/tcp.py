"""Plain TCP: between any two hosts, without extra libraries.

The reader requests runs of a region and stores the received bytes itself. So an abandoned operation
is over at once, and no process writes to another's memory. The other end sends from separate
threads (`tcp_server`). If a reader is killed or stops, only its connection is affected.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import STEP, as_bytes, copy_runs_unchecked
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.connection import tune
from kvatlas.wire.transports import errors, tcp_server
from kvatlas.wire.transports.base import Handle, Link, Shared, Transport
from kvatlas.wire.transports.listening import is_loopback, own_addresses
from kvatlas.wire.transports.polled_copy import Stepwise
from kvatlas.wire.transports.tcp_server import GATHERED, MOST_RUNS, SHORT, RegionServer

_MEETING = 5.0
"""Seconds that a peer may take to accept a first connection."""
_MOST_IDLE = 8
"""The number of idle connections that a link keeps."""
_PAUSE = 2
"""Milliseconds between checks of the clock while a peer sends nothing."""
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Errors of this process, not of the network."""


class _Published(msgspec.Struct, tag="tcp", forbid_unknown_fields=True):
    address: str
    port: int
    token: bytes
    regions: dict[int, tuple[int, int]]
    """The address and size of every readable region."""


class TcpTransport(Transport):
    """Reads regions of other processes over TCP.

    `host` is the address that peers connect to, and the only one on which this end listens.

    >>> pools = [np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)]
    >>> ends = [TcpTransport(), TcpTransport()]
    >>> for end, pool in zip(ends, pools):
    ...     end.register({0: Memory(pool.ctypes.data, 8)})
    >>> link = ends[1].connect(ends[0].publish(), ends[0].memory)
    >>> link.read([Copy(0, 0, np.array([5]), np.array([0]), np.array([3]))]).wait(float("inf"))
    >>> pools[1].tolist()
    [5, 6, 7, 0, 0, 0, 0, 0]
    >>> for end in ends:
    ...     end.close()
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, *, host: str = "127.0.0.1", shared: Shared = "all") -> None:
        super().__init__(shared=shared)
        self.address = own_addresses(host)[0]
        self.beyond_host = "" if is_loopback(self.address) else self.address
        try:
            self._server = RegionServer(self.address, lambda: self.reachable)
        except (OSError, RuntimeError) as problem:
            got, hint = f"host={host!r}: {problem}", "Pass an address of this machine"
            raise errors.failed(got, hint, "The transport cannot listen") from problem
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()

    def publish(self) -> bytes:
        """Return its address, its readable regions, and the token that authorizes reads."""
        self.check()
        regions = {pool: (at.address, at.nbytes) for pool, at in self.reachable.items()}
        server = self._server
        published = _Published(self.address, server.port, server.token, regions)
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer that has these regions, once it has welcomed a connection."""
        published = errors.read_metadata(metadata, _Published)
        try:
            ipaddress.ip_address(published.address)
        except ValueError:
            raise errors.bad_metadata(f"the address {published.address[:64]!r}") from None
        token = len(published.token)
        if not 0 < published.port < 1 << 16 or token != tcp_server.TOKEN_BYTES:
            raise errors.bad_metadata(f"port {published.port} and a token of {token} bytes")
        for pool, at in memory.items():
            if published.regions.get(pool) != (at.address, at.nbytes):
                raise errors.bad_metadata(f"region {pool}, which does not match the handshake")
        link = TcpLink(self, published, memory)
        try:
            _Read(link, []).wait(time.monotonic() + _MEETING)
        except AtlasError as refusal:
            raise errors.peer_lost(f"{published.address}: {refusal.got}") from None
        self._links.add(link)
        return link

    def _close(self) -> None:
        for link in list(self._links):
            link.close()
        self._server.close()


class TcpLink(Link):
    """A peer to read from, and idle connections to it."""

    prompt: ClassVar[bool] = True

    def __init__(self, owner: TcpTransport, peer: _Published, theirs: Mapping[int, Memory]) -> None:
        super().__init__(owner, theirs)
        self.peer = peer
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        if write:
            hint = "Let the destination read the bytes instead"
            raise errors.failed("a write", hint, "The transport 'tcp' supports only reads")
        # The regions are looked up now: the bounds were checked against these.
        questions = [part for copy in copies for part in _questions(copy, self.mine)]
        handle = _Read(self, questions)
        with suppress(AtlasError):  # whoever waits for it will see
            handle.poll()
        return handle

    def take(self) -> socket.socket | None:
        """Return an idle open connection, if there is one."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                one = self._idle.pop()
            if not _readable(one, 0):
                return one
            one.close()  # the peer has ended it: it says nothing unasked

    def give_back(self, one: socket.socket) -> None:
        """Keep a connection on which everything requested has arrived."""
        with self._lock:
            if self.open and len(self._idle) < _MOST_IDLE:
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
    """Runs of a region of the peer, and where they go."""

    pool: int
    src: Int64s
    into: Bytes
    dst: Int64s
    length: Int64s

    @property
    def payload(self) -> bytes:
        """How the peer is asked."""
        head = tcp_server.QUESTION.pack(self.pool, len(self.length))
        return head + self.src.astype("<i8").tobytes() + self.length.astype("<i8").tobytes()


def _questions(copy: Copy, mine: Mapping[int, Memory]) -> Iterator[_Question]:
    """A copy as questions: short runs together, long ones apart from them."""
    into = as_bytes(mine[copy.dst_pool])
    long = copy.length >= SHORT
    for chosen in (np.flatnonzero(~long), np.flatnonzero(long)):
        if not len(chosen):
            continue
        longest = int(copy.length[chosen].max())
        many = MOST_RUNS if longest >= SHORT else min(MOST_RUNS, GATHERED // longest)
        for first in range(0, len(chosen), many):
            some = chosen[first : first + many]
            columns = copy.dst[some], copy.length[some]
            yield _Question(copy.src_pool, copy.src[some], into, *columns)


class _Read(Stepwise):
    """Asks, one question ahead of the answer that it waits for, and puts answers where they go."""

    def __init__(self, link: TcpLink, questions: Sequence[_Question]) -> None:
        super().__init__(self._run(link, questions))
        self._connection: socket.socket | None = None
        self._outgoing = b""
        self._moved = 0

    def _pause(self, seconds: float) -> None:
        """The peer has to act: look again as soon as it has."""
        if self._connection is None or self._connection.fileno() < 0:
            time.sleep(seconds)
        else:
            _readable(self._connection, _PAUSE, writable=bool(self._outgoing))

    def _release(self) -> None:
        super()._release()
        self.settle()  # closes the connection, unless a step is running

    def _run(self, link: TcpLink, questions: Sequence[_Question]) -> Iterator[None]:
        whole = False
        try:
            self._connection = link.take()
            for _ in self._talk(link.peer, questions):
                yield
                link.check()
            whole = True
        except OSError as problem:
            if problem.errno in _OWN_LIMITS:
                hint = "Raise the limit of open files (ulimit -n)"
                raise errors.failed(problem, hint, "The process cannot open a socket") from None
            raise errors.peer_lost(f"{problem} at {link.peer.address}") from None
        finally:
            connection, self._connection = self._connection, None
            if connection is not None and whole:
                link.give_back(connection)
            elif connection is not None:
                connection.close()

    def _talk(self, peer: _Published, questions: Sequence[_Question]) -> Iterator[None]:
        if self._connection is None:
            yield from self._open(peer)
        asked: deque[_Question] = deque()
        for question in questions:
            self._outgoing += question.payload
            asked.append(question)
            if len(asked) > 1:
                yield from self._receive(asked.popleft())
        if asked:
            yield from self._receive(asked.popleft())

    def _open(self, peer: _Published) -> Iterator[None]:
        """Connect, and answer the peer's challenge."""
        family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
        one = self._connection = socket.socket(family, socket.SOCK_STREAM)
        one.setblocking(False)
        tune(one)
        begun = one.connect_ex((peer.address, peer.port))
        if begun not in (0, errno.EINPROGRESS):
            raise OSError(begun, errno.errorcode.get(begun, "connect"))
        challenge, welcome = bytearray(tcp_server.CHALLENGE_BYTES), bytearray(1)
        yield from self._fill(memoryview(challenge))
        self._outgoing += tcp_server.proof(peer.token, bytes(challenge))
        yield from self._fill(memoryview(welcome))
        if welcome != tcp_server.WELCOME:
            raise errors.bad_metadata("an invalid reply to the handshake")

    def _receive(self, question: _Question) -> Iterator[None]:
        dst, length = question.dst, question.length
        if tcp_server.gathers(length):
            together = np.empty(int(length.sum()), np.uint8)
            yield from self._fill(together.data)
            at = tcp_server.packed(length)
            yield from copy_runs_unchecked(together, question.into, at, dst, length)
            return
        for start, size in zip(dst.tolist(), length.tolist(), strict=True):
            yield from self._fill(question.into.data[start : start + size])

    def _fill(self, view: memoryview) -> Iterator[None]:
        """Take so many bytes as they come, a step at a time."""
        assert self._connection is not None  # noqa: S101
        while view:
            try:
                self._send()
                got = self._connection.recv_into(view, min(len(view), STEP))
            except BlockingIOError:
                yield
                continue
            if not got:
                raise errors.peer_lost("a closed connection")
            view = view[got:]
            self._moved += got
            if self._moved >= STEP:
                self._moved = 0
                yield

    def _send(self) -> None:
        """Send what can be sent now; a peer that is busy answering reads on later."""
        assert self._connection is not None  # noqa: S101
        if self._outgoing:
            with suppress(BlockingIOError):
                self._outgoing = self._outgoing[self._connection.send(self._outgoing) :]


def _readable(one: socket.socket, milliseconds: int, *, writable: bool = False) -> bool:
    """Wait until something has come, or something more can be sent; whether so."""
    looked = select.poll()
    looked.register(one.fileno(), select.POLLIN | (select.POLLOUT if writable else 0))
    return bool(looked.poll(milliseconds))
