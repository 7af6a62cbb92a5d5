"""Mooncake's transfer engine over TCP, its peers found without a metadata server.

Mooncake answers 0 or -1 and blocks meanwhile, also for ever where the peer stands
still. So each link has a thread that makes its calls, and a handle only looks at how
far that has come. Calls are kept below the length of Mooncake's queues, which when
overrun make a peer unusable for seconds.

Mooncake refuses what lies outside the peer's memory, and does not look at this end's:
the bounds that a link checks are all there is.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport, addresses
from kvatlas.wire.transports.errors import (
    bad_metadata,
    cancelled,
    cannot_import,
    closed,
    failed,
    peer_lost,
    read_metadata,
    write_metadata,
)

_MAX_SLICES = 1_000
_QUEUES = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
_CUDA_WHEEL = "; it brings the CPU wheel, GPU users install mooncake-transfer-engine instead"
_ANSWERS = 1.0
"""Seconds in which a peer that is alive accepts a connection."""


class _Published(msgspec.Struct, tag="mooncake", forbid_unknown_fields=True):
    host: str
    port: int

    @property
    def session(self) -> str:
        return f"{self.host}:{self.port}"


class MooncakeTransport(Transport):
    """Moves bytes through a Mooncake engine of its own; `host` is how peers reach it."""

    name: ClassVar[str] = "mooncake"

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        super().__init__()
        for setting in _QUEUES:
            os.environ.setdefault(setting, "65535")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as problem:
            raise cannot_import("mooncake", problem, _CUDA_WHEEL) from problem
        self._host = host
        self.engine: Any = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            self.engine = None
            raise failed(f"no engine on {host}", hint="Name an address of this machine")
        self._links: list[MooncakeLink] = []

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self.engine is None:
            raise closed("transport")
        done: list[int] = []
        for region in memory.values():
            answer = self.engine.register_memory(region.address, region.nbytes)
            if answer != 0:
                for address in done:
                    self.engine.unregister_memory(address)
                raise failed(
                    f"{answer} from Mooncake for {region.nbytes:,} bytes at {region.address:#x}",
                    hint="Register regions that do not overlap",
                )
            done.append(region.address)

    def publish(self) -> bytes:
        """Where its engine listens."""
        if self.engine is None:
            raise closed("transport")
        return write_metadata(_Published(self._host, self.engine.get_rpc_port()))

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer's engine, if something listens there."""
        published = read_metadata(metadata, _Published)
        if self.engine is None:
            raise closed("transport")
        if not _HOST.fullmatch(published.host) or not 0 < published.port < 1 << 16:
            raise bad_metadata(f"an engine at {published.session[:64]!r}")
        if not answers(published.host, published.port):
            raise peer_lost(f"nobody listens at {published.session}")
        link = MooncakeLink(self, published.host, published.port, memory)
        self._links.append(link)
        return link

    def forget(self, link: MooncakeLink) -> None:
        """A link that was closed."""
        if link in self._links:
            self._links.remove(link)

    def close(self) -> None:
        """Close links and unregister; a call that is under way keeps the engine until it ends."""
        if self.engine is None:
            return
        for link in list(self._links):
            link.close()
        for region in self.memory.values():
            self.engine.unregister_memory(region.address)
        self.engine = None
        super().close()


def answers(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=_ANSWERS).close()
    except OSError:
        return False
    return True


class MooncakeLink(Link):
    """A peer's engine, and the thread that calls it."""

    def __init__(
        self, owner: MooncakeTransport, host: str, port: int, theirs: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner.memory, theirs)
        self._owner, self._host, self._port = owner, host, port
        self._jobs: queue.SimpleQueue[MooncakeHandle | None] | None = None
        self._open = True

    def check(self) -> None:
        """Refuse once the link or its transport is closed."""
        if not self._open or self._owner.engine is None:
            raise closed("link")

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        near = addresses(copies, self.mine, src=write)
        far = addresses(copies, self.theirs, src=not write)
        length = np.concatenate([copy.length for copy in copies])
        handle = MooncakeHandle(near, far, length, write=write)
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(
                target=_work, args=(self._owner.engine, self, self._jobs), daemon=True
            ).start()
        self._jobs.put(handle)
        return handle

    def carry_out(self, engine: Any, job: MooncakeHandle) -> None:
        """All calls of an operation."""
        session = f"{self._host}:{self._port}"
        act = engine.batch_transfer_sync_write if job.write else engine.batch_transfer_sync_read
        columns = job.near, job.far, job.length
        for first in range(0, len(job.length), _MAX_SLICES):
            if job.given_up:
                raise cancelled()
            part = [column[first : first + _MAX_SLICES].tolist() for column in columns]
            answer = act(session, *part)
            if answer != 0:
                if not answers(self._host, self._port):
                    raise peer_lost(f"nobody listens at {session} any more")
                raise failed(f"{answer} from Mooncake for {len(part[0])} slices")

    def close(self) -> None:
        """Let its thread end after the call that it is in."""
        if self._open:
            self._open = False
            if self._jobs is not None:
                self._jobs.put(None)
            self._owner.forget(self)


def _work(engine: Any, link: MooncakeLink, jobs: queue.SimpleQueue[MooncakeHandle | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            link.carry_out(engine, job)
        except AtlasError as failure:
            job.finish(failure)
        except Exception as problem:
            job.finish(failed(f"{type(problem).__name__}: {problem}"))
        else:
            job.finish(None)


class MooncakeHandle(Handle):
    """An operation that a link's thread carries out."""

    def __init__(self, near: Int64s, far: Int64s, length: Int64s, *, write: bool) -> None:
        self.near, self.far, self.length, self.write = near, far, length, write
        self.given_up = False
        self._done = threading.Event()
        self._failure: AtlasError | None = None

    def finish(self, failure: AtlasError | None) -> None:
        """Say how it went."""
        self._failure = failure
        self._done.set()

    def poll(self) -> bool:
        """Look whether the thread has said so."""
        if self.given_up and not self._done.is_set():
            raise cancelled()
        if self._done.is_set() and self._failure is not None:
            raise self._failure
        return self._done.is_set()

    def _pause(self, seconds: float) -> None:
        self._done.wait(seconds)

    def release(self) -> None:
        """No further call for it; one that is under way cannot be taken back."""
        self.given_up = True
