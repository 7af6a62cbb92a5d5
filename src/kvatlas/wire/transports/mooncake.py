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
import time
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
    check_note,
    closed,
    failed,
    missing,
    peer_lost,
    read_metadata,
    write_metadata,
)

_MOST_SLICES = 1_000
_QUEUES = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
_NOTE = "kvatlas"
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
            from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
        except ImportError as problem:
            raise missing("Mooncake (and libibverbs1)", "mooncake", problem) from problem
        self.make_note, self.acts = TransferNotify, (TransferOpcode.Read, TransferOpcode.Write)
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
                    f"{answer} for {region.nbytes:,} bytes at {region.address:#x}",
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

    def notes(self) -> list[bytes]:
        """Notes since the last call."""
        if self.engine is None:
            return []
        found = self.engine.get_notifies()
        return [bytes.fromhex(note.msg) for note in found if note.name == _NOTE]

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

    def _read(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(0, copies, note)

    def _write(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(1, copies, note)

    def _start(self, act: int, copies: Sequence[Copy], note: bytes) -> Handle:
        check_note(note)
        if not self._open or self._owner.engine is None:
            raise closed("link")
        writes = act == 1
        nothing = np.zeros(0, dtype=np.int64)
        near = far = length = nothing
        if copies:
            near = addresses(copies, self.mine, src=writes)
            far = addresses(copies, self.theirs, src=not writes)
            length = np.concatenate([copy.length for copy in copies])
        handle = MooncakeHandle(act, near, far, length, note)
        if not copies and not note:
            handle.finish(None)
            return handle
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(
                target=_work, args=(self._owner.engine, self, self._jobs), daemon=True
            ).start()
        self._jobs.put(handle)
        return handle

    def carry_out(self, engine: Any, job: MooncakeHandle) -> None:
        """All calls of an operation, the note with the last one."""
        session = f"{self._host}:{self._port}"
        act = self._owner.acts[job.act]
        near, far, length = job.near, job.far, job.length
        scratch = np.zeros(1, np.uint8)
        if not len(length):
            # A note travels with bytes: one that nobody wants.
            act = self._owner.acts[0]
            near, length = np.array([scratch.ctypes.data]), np.array([1])
            far = np.array([next(iter(self.theirs.values())).address])
        for first in range(0, len(length), _MOST_SLICES):
            if job.given_up:
                raise cancelled()
            part = slice(first, first + _MOST_SLICES)
            last = first + _MOST_SLICES >= len(length)
            note = self._owner.make_note(_NOTE, job.note.hex()) if last and job.note else None
            answer = engine.batch_transfer_sync(
                session, near[part].tolist(), far[part].tolist(), length[part].tolist(), act, note
            )
            if answer != 0:
                if not answers(self._host, self._port):
                    raise peer_lost(f"nobody listens at {session} any more")
                raise failed(f"{answer} from Mooncake for {len(near[part])} slices")

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

    def __init__(self, act: int, near: Int64s, far: Int64s, length: Int64s, note: bytes) -> None:
        self.act, self.near, self.far, self.length, self.note = act, near, far, length, note
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

    def wait(self, deadline: float) -> None:
        """Wait for the thread to say so."""
        # What the system takes as a timeout ends somewhere; a deadline need not.
        self._done.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        super().wait(deadline)

    def release(self) -> None:
        """No further call for it; one that is under way cannot be taken back."""
        self.given_up = True
