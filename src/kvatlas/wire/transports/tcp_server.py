"""Serve reads of a process's regions over TCP, with one thread per authenticated connection.

With a secret, a connection begins with a TLS handshake. The peer then answers a challenge with the
token from the published metadata, and sends the id of its session. After that the peer requests
runs of a region, by offset and length, each time with the key of a lease. If the node allows the
read, the peer receives the bytes in order. If not, it receives an error. Any other input ends the
connection. Writes are not supported.

If a peer dies or stops, only its connection ends.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import as_bytes, copy_runs_unchecked
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire import encoding
from kvatlas.wire.connection import tune
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.security import Security
from kvatlas.wire.transports.access import LEASE_BYTES, SESSION_BYTES, AskedRead, Authorise
from kvatlas.wire.transports.admission import Admission, Newcomer
from kvatlas.wire.transports.nonblocking_sockets import (
    Steps,
    receive,
    send,
    send_buffers,
    shut_down,
    until_ready,
)

log = logging.getLogger("kvatlas.wire")

TOKEN_BYTES = 32
CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
WELCOME = b"+"
"""The server's reply to a correct answer to its challenge. It can now serve the connection."""
QUESTION = struct.Struct(f"<iI{LEASE_BYTES}s")
"""The header of a request: region, number of runs, lease. The runs' starts and lengths follow."""
MOST_RUNS = 4096
"""The maximum number of runs in one request."""
GATHERED = 256 << 10
"""Bytes of short runs that are sent at once, so that they stay in the processor's cache."""
SHORT = 16 << 10
"""Runs with fewer bytes are gathered before they are sent. Longer runs are sent without a copy."""
GRANTED, REFUSED = b"+", b"-"
"""The first byte of a reply. The bytes of the runs, or the error, follow."""
REFUSAL = struct.Struct("<I")
"""The header of an error: its size in bytes. The encoded error follows."""
LONGEST_REFUSAL = 64 << 10

_ALIGNMENT = 16
_MOST_CONNECTIONS = 1024
"""The maximum number of peer connections.

They also use at most a third of the file descriptors that the process may open.
"""


def proof(token: bytes, challenge: bytes, session: bytes = bytes(SESSION_BYTES)) -> bytes:
    """Return the answer to a challenge: the session's id, followed by an HMAC with the token."""
    shown = hmac.digest(token, b"kvatlas tcp 2" + challenge + session, hashlib.sha256)
    return session + shown


def gathers(length: Int64s) -> bool:
    """Whether both ends gather runs of these lengths into one buffer."""
    total = int(length.sum())
    return total <= GATHERED and total < SHORT * len(length)


def packed(length: Int64s) -> Int64s:
    """Return the offset of each run in a buffer that contains the runs without gaps."""
    starts: Int64s = np.cumsum(length) - length
    return starts


def _allow_all(_: AskedRead) -> nullcontext[None]:
    """Allow every read of a registered region. Used by transports that have no node."""
    return nullcontext()


class _Admitted(NamedTuple):
    """An authenticated connection. Its socket is blocking."""

    connection: socket.socket
    session: bytes
    names: frozenset[str] | None
    """The node names that the peer's key proves; None if its connection proves no name."""


def _host(_: socket.socket, address: tuple[str, int]) -> str:
    return address[0]


class RegionServer:
    """Serves reads at one address. `regions` is called for each request to get the regions."""

    def __init__(self, address: str, regions: Callable[[], Mapping[int, Memory]]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._regions = regions
        self._authorise: Authorise = _allow_all
        self._security = Security()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        self.port = int(close_in_children(listener).getsockname()[1])
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._admission = Admission(listener, _host, self._handshake, "kvatlas-tcp")

    def protect(self, security: Security, authorise: Authorise) -> None:
        """Authenticate new connections with TLS if there is a secret, and authorise each read."""
        self._authorise, self._security = authorise, security

    def close(self) -> None:
        """End all connections. Returns once no thread reads the regions."""
        self._admission.close()  # no connection is admitted after this
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
        for one in threads:
            shut_down(one)
        for thread in threads.values():
            thread.join()

    def _handshake(self, one: Newcomer) -> Steps[None]:
        """Authenticate a connection, and serve it from another thread."""
        security = self._security
        tune(one.connection)
        connection = one.connection = close_in_children(security.wrap(one.connection))
        identity = yield from until_ready(partial(security.identify, connection))
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        yield from send(connection, challenge)
        answer = yield from receive(connection, SESSION_BYTES + _PROOF_BYTES)
        session = answer[:SESSION_BYTES]
        right = hmac.compare_digest(answer, proof(self.token, challenge, session))
        if not right or security is not self._security:
            raise EOFError
        connection.settimeout(None)
        self._begin(_Admitted(connection, session, identity.names))

    def _begin(self, admitted: _Admitted) -> None:
        """Serve a connection, unless too many connections are being served."""
        one = admitted.connection
        most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        thread = threading.Thread(target=self._serve, args=[admitted], daemon=True)
        with self._lock:
            room = not self._closed and len(self._threads) < most
            if room:
                self._threads[one] = thread
                try:
                    thread.start()
                    return
                except RuntimeError:  # no more threads
                    del self._threads[one]
        log.warning("connection rejected: the limit of %d data connections is reached", most)
        one.close()

    def _serve(self, admitted: _Admitted) -> None:
        one = admitted.connection
        try:
            one.sendall(WELCOME)
            while True:
                self._answer(admitted)
        except (OSError, EOFError):
            pass  # the peer is gone, or its request is invalid
        except Exception:
            log.exception("serving a read failed")
        finally:
            with self._lock:
                self._threads.pop(one)
            one.close()

    def _answer(self, admitted: _Admitted) -> None:
        """Receive one request, and send its runs or an error."""
        one = admitted.connection
        pool, count, lease = QUESTION.unpack(_exactly(one, QUESTION.size))
        if not 0 < count <= MOST_RUNS:
            raise EOFError
        starts, length = np.frombuffer(_exactly(one, 16 * count), "<i8").reshape(2, count)
        regions = self._regions()
        asked = AskedRead(
            admitted.session, admitted.names, lease, pool, starts, length, partial(shut_down, one)
        )
        try:
            check_bounds([Copy(pool, pool, starts, starts, length)], regions, regions)
            with self._authorise(asked):
                _send_runs(one, as_bytes(regions[pool]), starts, length)
        except AtlasError as refusal:
            log.warning("rejected a read of region %d: %s", pool, refusal)
            payload = encoding.encode(encoding.refusal_of(refusal))[:LONGEST_REFUSAL]
            one.sendall(REFUSED + REFUSAL.pack(len(payload)) + payload)


def _send_runs(one: socket.socket, region: Bytes, starts: Int64s, length: Int64s) -> None:
    if gathers(length):
        one.sendall(_gathered(region, starts, length).data)
        return
    runs = zip(starts.tolist(), length.tolist(), strict=True)
    send_buffers(one, [GRANTED, *(region.data[start : start + size] for start, size in runs)])


def _gathered(region: Bytes, starts: Int64s, length: Int64s) -> Bytes:
    """Return the reply as one array: the status byte, then the runs at an aligned address."""
    together = np.empty(_ALIGNMENT + int(length.sum()), np.uint8)
    together[_ALIGNMENT - 1] = GRANTED[0]
    into = together[_ALIGNMENT:]
    for _ in copy_runs_unchecked(region, into, starts, packed(length), length):
        pass
    return together[_ALIGNMENT - 1 :]


def _exactly(one: socket.socket, nbytes: int) -> bytearray:
    """Receive exactly `nbytes` bytes. Raise EOFError if the connection ends before that."""
    arrived = bytearray(nbytes)
    view = memoryview(arrived)
    while view:
        got = one.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return arrived
