"""Serves reads of a process's regions over TCP, with one thread per connection.

A connection begins with a challenge that only a peer with the token can answer. Peers get the token
with the published metadata. The peer then requests runs of a region, by offset and length, and
receives their bytes in order. Any other input ends the connection. Writes are not supported.

If a peer dies or stops, only its connection ends.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import as_bytes, copy_runs_unchecked
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.connection import tune

log = logging.getLogger("kvatlas.wire")

TOKEN_BYTES = 32
CHALLENGE_BYTES = 32
WELCOME = b"+"
"""The server's reply to a correct answer to its challenge."""
QUESTION = struct.Struct("<iI")
"""The header of a request: region and number of runs. Starts and lengths follow."""
MOST_RUNS = 4096
"""The maximum number of runs in one request."""
GATHERED = 256 << 10
"""Bytes of short runs that are sent at once, so that they stay in the processor's cache."""
SHORT = 16 << 10
"""Shorter runs are gathered before they are sent; longer ones are sent without a copy."""

_PROVING = 5.0
"""Seconds in which a connection must answer its challenge."""
_MOST_UNPROVEN = 64
_MOST_CONNECTIONS = 1024


def proof(token: bytes, challenge: bytes) -> bytes:
    """Compute the answer to a challenge from the token."""
    return hmac.digest(token, b"kvatlas tcp" + challenge, hashlib.sha256)


def gathers(length: Int64s) -> bool:
    """Whether the runs of a request are gathered into a buffer at both ends."""
    total = int(length.sum())
    return total <= GATHERED and total < SHORT * len(length)


def packed(length: Int64s) -> Int64s:
    """Return the starts of runs that are concatenated."""
    starts: Int64s = np.cumsum(length) - length
    return starts


class RegionServer:
    """Listens at one address. `regions` returns the readable regions for each request."""

    def __init__(self, address: str, regions: Callable[[], Mapping[int, Memory]]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._regions = regions
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """Connections that have not answered their challenge, oldest first."""
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="kvatlas-tcp", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """End all connections. Returns once no thread reads the regions."""
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
        for one in (self._listener, *threads):
            _hang_up(one)
        for thread in (self._accepting, *threads.values()):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.02)  # most likely out of descriptors: not again at once
                continue
            if not self._begin(one):
                one.close()

    def _begin(self, one: socket.socket) -> bool:
        with self._lock:
            if self._closed or len(self._threads) >= _MOST_CONNECTIONS:
                return False
            if len(self._unproven) >= _MOST_UNPROVEN:
                _hang_up(next(iter(self._unproven)))
            thread = threading.Thread(target=self._serve, args=[one], daemon=True)
            self._threads[one], self._unproven[one] = thread, None
            try:
                thread.start()
            except RuntimeError:  # no more threads
                del self._threads[one], self._unproven[one]
                return False
        return True

    def _serve(self, one: socket.socket) -> None:
        try:
            tune(one)
            self._challenge(one)
            one.settimeout(None)
            while True:
                self._answer(one)
        except (OSError, EOFError):
            pass  # it is gone, or says nothing
        except AtlasError as refusal:
            log.warning("rejected a tcp reader: %s", refusal)
        finally:
            with self._lock:
                self._unproven.pop(one, None)
                self._threads.pop(one)
            one.close()

    def _challenge(self, one: socket.socket) -> None:
        one.settimeout(_PROVING)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        one.sendall(challenge)
        wanted = proof(self.token, challenge)
        if not hmac.compare_digest(_exactly(one, len(wanted)), wanted):
            raise EOFError
        with self._lock:
            self._unproven.pop(one, None)
        one.sendall(WELCOME)

    def _answer(self, one: socket.socket) -> None:
        """Send the runs that are asked for next."""
        pool, count = QUESTION.unpack(_exactly(one, QUESTION.size))
        if not 0 < count <= MOST_RUNS:
            raise EOFError
        runs = np.frombuffer(_exactly(one, 16 * count), "<i8").reshape(2, count)
        starts, length = runs
        regions = self._regions()
        check_bounds([Copy(pool, pool, starts, starts, length)], regions, regions)
        region = as_bytes(regions[pool])
        if gathers(length):
            one.sendall(_gathered(region, starts, length).data)
            return
        for start, size in zip(starts.tolist(), length.tolist(), strict=True):
            one.sendall(region.data[start : start + size])


def _gathered(region: Bytes, starts: Int64s, length: Int64s) -> Bytes:
    together = np.empty(int(length.sum()), np.uint8)
    for _ in copy_runs_unchecked(region, together, starts, packed(length), length):
        pass
    return together


def _exactly(one: socket.socket, nbytes: int) -> bytearray:
    """So many bytes, or EOFError."""
    arrived = bytearray(nbytes)
    view = memoryview(arrived)
    while view:
        got = one.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return arrived


def _hang_up(one: socket.socket) -> None:
    """End a connection, or a listener, for the thread that waits there."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
