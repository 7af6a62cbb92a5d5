"""Mooncake's transfer engine over TCP, without a metadata server.

Mooncake's calls block, possibly forever if the peer is stopped, and return 0 or -1. So each link
has a thread that makes the calls, and a handle only checks that thread's progress.

Each call is limited in two ways. Its slices (contiguous runs) are fewer than Mooncake's queues
hold: a queue that overflows makes the peer unusable for seconds. Its number of bytes is small, so
that the call ends soon.

After a call has returned -1, some of its slices may still be in flight. They write to memory when
the peer continues. Only destroying the engine stops them: this closes the engine's connections and
joins the one thread that reads from them. So a transport has one engine that serves peers, and each
link has a separate engine for its calls. The link destroys that engine after a failed call.

Mooncake listens on every interface, even if a host is passed. `socket_filter` restricts that.
Mooncake rejects ranges outside the peer's registered memory. It does not check ranges in this
process; only the link's bounds check does.
"""

from __future__ import annotations

import ipaddress
import math
import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import split_runs
from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.fork_safety import fresh_in_children
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Access
from kvatlas.wire.transports.base import Link, Separation, Shared, Transport
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.host_addresses import is_loopback, own_addresses
from kvatlas.wire.transports.socket_filter import connected, listeners, narrow

_MAX_SLICES = 1_000
_MAX_BYTES = 64 << 20
_SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    # Seconds until a call to a stopped peer returns -1.
    "MC_TRANSFER_TIMEOUT": "10",
}
_CUDA_WHEEL = "; this installs the CPU wheel, GPU users install mooncake-transfer-engine instead"
_ANSWERS = 1.0
"""Seconds within which a live peer accepts a connection."""
_TRIES = 3
"""The maximum number of attempts to create an engine and restrict its sockets."""
_SHORTEST_PAUSE = 0.01
"""The minimum number of seconds between two checks of an operation."""
_LISTENERS = 2
"""The number of listening sockets of an engine: one for metadata, one for data."""
_ATTENTION = struct.pack("ll", 0, 50_000)
"""A timeval: how long an engine that is being destroyed may wait in accept()."""

_DESCRIPTORS = 64
"""Descriptors that must be free before an engine is created: it crashes if none are left."""

_making = fresh_in_children(threading.Lock())
"""Held while an engine is created, so that its sockets can be identified."""


class _Published(msgspec.Struct, tag="mooncake", forbid_unknown_fields=True):
    host: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.:-]{0,252}\Z")]
    port: Annotated[int, Meta(ge=1, le=65535)]

    @property
    def session(self) -> str:
        return f"{self.host}:{self.port}"


class MooncakeTransport(Transport):
    """Moves bytes with Mooncake engines.

    `host` is the only address at which peers can reach the transport.
    """

    name: ClassVar[str] = "mooncake"
    separation: ClassVar[Separation] = "none"

    def __init__(self, *, host: str = "127.0.0.1", shared: Shared = "all") -> None:
        super().__init__(shared=shared)
        self.host = host
        beyond = [one for one in own_addresses(host) if not is_loopback(one)]
        self.beyond_host = ", ".join(beyond)
        self._engine: Any = make_engine(host)

    def _register(self, memory: Mapping[int, Memory]) -> None:
        done: list[int] = []
        for region in (memory[pool] for pool in memory if self.shares(pool)):
            answer = self._engine.register_memory(region.address, region.nbytes)
            if answer != 0:
                for address in done:
                    self._engine.unregister_memory(address)
                raise errors.failed(
                    f"return value {answer} for {region.nbytes:,} bytes at {region.address:#x}",
                    hint="Register regions that do not overlap",
                    problem="Mooncake cannot register this memory",
                )
            done.append(region.address)

    def publish(self) -> bytes:
        """Return the address of the engine that serves peers."""
        self.check()
        return errors.write_metadata(_Published(self.host, self._engine.get_rpc_port()))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        return MooncakeLink(self, errors.read_metadata(metadata, _Published), memory)

    def _close(self) -> None:
        """Destroy the engine that serves peers."""
        self._engine = None


def make_engine(host: str) -> Any:
    """Return a new Mooncake engine that accepts connections to `host` only."""
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as problem:
        raise errors.cannot_import("mooncake", problem, _CUDA_WHEEL) from problem
    addresses = own_addresses(host)
    with _making:
        for _ in range(_TRIES):
            errors.check_descriptors(_DESCRIPTORS)
            before = set(listeners())
            engine = TransferEngine()
            if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
                hint = "Pass an address of this machine"
                raise errors.failed(f"host={host!r}", hint, "Mooncake cannot start an engine")
            if _restrict_listeners(before, addresses):
                # The engine's pending accept() still has the old timeout. A connection ends it.
                answers(_Published(host, engine.get_rpc_port()))
                return engine
    got = f"{_TRIES} attempts in which a process connected, or another thread opened a socket"
    hint = "Retry, and check which processes connect to this machine"
    raise errors.failed(got, hint, f"Mooncake's sockets cannot be restricted to {host!r}")


def _restrict_listeners(before: Container[int], addresses: Iterable[str]) -> bool:
    """Restrict the listening sockets of a new engine to `addresses`.

    Return False if a process has already connected to one of the sockets, or if they cannot be told
    apart from sockets that another thread opened at the same time.
    """
    after = listeners()
    new = [one for inode, one in after.items() if inode not in before and _everywhere(one)]
    try:
        if len(new) < _LISTENERS:
            got = f"{len(new)} listening sockets, expected {_LISTENERS}"
            hint = "Install a version that kvatlas is tested with"
            raise errors.failed(got, hint, "This version of Mooncake is not supported")
        if len(new) > _LISTENERS:
            return False  # another thread opened sockets too
        for one in new:
            narrow(one, addresses)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ATTENTION)
        return not connected(one.getsockname()[1] for one in new)
    finally:
        for one in after.values():
            one.close()


def _everywhere(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def answers(peer: _Published, deadline: float = math.inf) -> bool:
    """Whether a peer's engine accepts connections."""
    seconds = max(1e-3, min(_ANSWERS, deadline - time.monotonic()))
    try:
        socket.create_connection((peer.host, peer.port), timeout=seconds).close()
    except OSError as problem:
        if limit := errors.own_limit(problem):
            raise limit from problem
        return False
    return True


class MooncakeLink(Link):
    """A connection to a peer's engine, and the thread that makes the calls to Mooncake."""

    severs: ClassVar[bool] = False
    owner: MooncakeTransport

    def __init__(
        self, owner: MooncakeTransport, peer: _Published, peer_memory: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, peer_memory)
        self.peer = peer
        self._jobs: queue.SimpleQueue[MooncakeHandle | None] = queue.SimpleQueue()
        self._first = np.zeros(1, dtype=np.uint8)
        """The destination of the first byte that an engine reads."""
        self._working = False

    def sign_in(self, access: Access, deadline: float) -> None:
        """Check that something listens at the peer's address."""
        del access
        if not answers(self.peer, deadline):
            raise errors.peer_lost(f"no listening engine at {self.peer.session}")

    def _post(self, copies: Sequence[Copy]) -> Handle:
        mine, theirs = self.own_memory, self.peer_memory
        near = [copy.destination + mine[copy.destination_pool].address for copy in copies]
        far = [copy.source + theirs[copy.source_pool].address for copy in copies]
        runs = near, far, [copy.length for copy in copies]
        handle = MooncakeHandle(*map(np.concatenate, runs))
        if not self._working:
            self._working = True
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put(handle)
        return handle

    def _work(self) -> None:
        """Carry out operations one by one, and destroy the engine after a failed call."""
        engine = None
        while (job := self._jobs.get()) is not None:
            met = True
            try:
                failure = None
                if engine is None:
                    engine = make_engine(self.owner.host)
                    failure = self._first_call(engine)
                    met = failure is None
                failure = failure or self._carry_out(engine, job)
            except AtlasError as problem:
                failure = problem
            except Exception as problem:
                # A new error, because the traceback of `problem` would keep the engine alive.
                failure = errors.failed(f"{type(problem).__name__}: {problem}")
            if failure is None:
                job.outcome.set_result(None)
                continue
            job.outcome.set_exception(failure)
            if engine is not None and not (met and job.quiet):
                seen = weakref.ref(engine)
                engine = None
                job.quiet = seen() is None

    def _carry_out(self, engine: Any, job: MooncakeHandle) -> AtlasError | None:
        """Make all calls of an operation. Return the error if one fails, otherwise None."""
        for part in in_calls(*job.runs):
            if not self.open or not job.begin():
                return errors.cancelled()
            job.quiet = False
            if failure := self._called(engine, part):
                return failure
            job.quiet = True
        return None

    def _first_call(self, engine: Any) -> AtlasError | None:
        """Make the engine's first call: read one byte of the peer. Return the error if that fails.

        In its first call, an engine asks the peer for its regions, and waits a minute if the peer
        is stopped. The byte is read into a separate buffer, so no cache block is in use meanwhile.
        """
        region = next((region for region in self.peer_memory.values() if region.nbytes), None)
        if region is None:
            return None
        call = [[self._first.ctypes.data], [region.address], [1]]
        return self._called(engine, call)

    def _called(self, engine: Any, part: list[list[int]]) -> AtlasError | None:
        """Make one call, with a part that `in_calls` yields. Return its error, or None."""
        answer = engine.batch_transfer_sync_read(self.peer.session, *part)
        if answer == 0:
            return None
        if not answers(self.peer):
            return errors.peer_lost(f"no listening engine at {self.peer.session}")
        return errors.failed(
            f"return value {answer} for {len(part[0])} slices",
            hint="See Mooncake's log",
            problem="A Mooncake transfer failed",
        )

    def _close(self) -> None:
        """Make the thread end after the call in progress. The engine ends with the thread."""
        self._jobs.put(None)


def in_calls(near: Int64s, far: Int64s, length: Int64s) -> Iterator[list[list[int]]]:
    """Divide runs into parts, one per Mooncake call, within the limits of a call.

    Yield each part as three lists: addresses at this end, addresses at the peer, lengths in bytes.

    >>> runs = np.array([0, 0, 0]), np.array([5, 6, 7]), np.array([1 << 20, 70 << 20, 1])
    >>> [len(part[0]) for part in in_calls(*runs)]  # 16 MiB at most in a run, 64 in a call
    [4, 3]
    """
    columns = split_runs(near, far, length)
    ends = np.cumsum(columns[2])
    first = before = 0
    while first < len(ends):
        fit = int(np.searchsorted(ends, before + _MAX_BYTES, side="right"))
        last = min(fit, first + _MAX_SLICES)
        yield [column[first:last].tolist() for column in columns]
        first, before = last, int(ends[last - 1])


class MooncakeHandle(Handle):
    """An operation that a link's thread carries out."""

    def __init__(self, *runs: Int64s) -> None:
        self.runs = runs
        """The runs as (addresses here, addresses at the peer, lengths)."""
        self._lock = threading.Lock()
        self._given_up = False
        self.begun = False
        """Whether a call was made for the operation."""
        self.quiet = True
        """Whether all calls so far have succeeded, or their engine was destroyed."""
        self.outcome: Future[None] = Future()

    def _poll(self) -> bool:
        done = self.outcome.done()
        if done:
            self.outcome.result()  # raises the error of a failed operation
        return done

    def _pause(self, seconds: float) -> None:
        # The end of the operation ends the pause. Shorter pauses would slow the operation down.
        with suppress(TimeoutError):
            self.outcome.exception(max(seconds, _SHORTEST_PAUSE))

    def begin(self) -> bool:
        """Record that a call begins. Return False if the handle was released.

        If the result is False, the caller must not make the call.
        """
        with self._lock:
            self.begun = self.begun or not self._given_up
            return not self._given_up

    def _release(self) -> None:
        """Start no further call of Mooncake. A call in progress continues."""
        with self._lock:
            self._given_up = True

    def _settle(self) -> bool:
        """Whether the operation certainly no longer accesses memory.

        The result is true if the operation was released before its first call. It is also true if
        the link's thread is done with the operation, and either each call has succeeded or the
        engine is destroyed.
        """
        with self._lock:
            if self._given_up and not self.begun:
                return True
        return self.outcome.done() and self.quiet
