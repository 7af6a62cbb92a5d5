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
from concurrent.futures import Future, wait
from typing import Any, ClassVar

import msgspec

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport

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
            raise errors.cannot_import("mooncake", problem, _CUDA_WHEEL) from problem
        self._host = host
        self.engine: Any = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise errors.failed(f"no engine on {host}", hint="Name an address of this machine")
        self.links: set[MooncakeLink] = set()

    def _register(self, memory: Mapping[int, Memory]) -> None:
        done: list[int] = []
        for region in memory.values():
            answer = self.engine.register_memory(region.address, region.nbytes)
            if answer != 0:
                for address in done:
                    self.engine.unregister_memory(address)
                raise errors.failed(
                    f"{answer} from Mooncake for {region.nbytes:,} bytes at {region.address:#x}",
                    hint="Register regions that do not overlap",
                )
            done.append(region.address)

    def publish(self) -> bytes:
        """Where its engine listens."""
        self.check()
        return errors.write_metadata(_Published(self._host, self.engine.get_rpc_port()))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer's engine, if something listens there."""
        published = errors.read_metadata(metadata, _Published)
        if not _HOST.fullmatch(published.host) or not 0 < published.port < 1 << 16:
            raise errors.bad_metadata(f"an engine at {published.session[:64]!r}")
        if not answers(published):
            raise errors.peer_lost(f"nobody listens at {published.session}")
        link = MooncakeLink(self, published, memory)
        self.links.add(link)
        return link

    def _close(self) -> None:
        """Close links and unregister; a call that is under way keeps the engine until it ends."""
        for link in list(self.links):
            link.close()
        for region in self.memory.values():
            self.engine.unregister_memory(region.address)
        self.engine = None


def answers(peer: _Published) -> bool:
    """Whether a peer's engine accepts connections."""
    try:
        socket.create_connection((peer.host, peer.port), timeout=_ANSWERS).close()
    except OSError:
        return False
    return True


class MooncakeLink(Link):
    """A peer's engine, and the thread that calls it."""

    owner: MooncakeTransport

    def __init__(
        self, owner: MooncakeTransport, peer: _Published, theirs: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, theirs)
        self.peer = peer
        self._jobs: queue.SimpleQueue[MooncakeHandle | None] | None = None

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        handle = MooncakeHandle(*self._addresses(copies, write=write), write=write)
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            work = (self.owner.engine, self._jobs)
            threading.Thread(target=self._work, args=work, daemon=True).start()
        self._jobs.put(handle)
        return handle

    def _work(self, engine: Any, jobs: queue.SimpleQueue[MooncakeHandle | None]) -> None:
        """Carry out one operation after the other."""
        while (job := jobs.get()) is not None:
            try:
                self._carry_out(engine, job)
            except Exception as problem:
                job.outcome.set_exception(problem)
            else:
                job.outcome.set_result(None)

    def _carry_out(self, engine: Any, job: MooncakeHandle) -> None:
        """All calls of an operation."""
        act = engine.batch_transfer_sync_write if job.write else engine.batch_transfer_sync_read
        for first in range(0, len(job.runs[0]), _MAX_SLICES):
            if job.given_up:
                raise errors.cancelled()
            part = [column[first : first + _MAX_SLICES].tolist() for column in job.runs]
            answer = act(self.peer.session, *part)
            if answer != 0:
                if not answers(self.peer):
                    raise errors.peer_lost(f"nobody listens at {self.peer.session} any more")
                raise errors.failed(f"{answer} from Mooncake for {len(part[0])} slices")

    def _close(self) -> None:
        """Let its thread end after the call that it is in."""
        if self._jobs is not None:
            self._jobs.put(None)
        self.owner.links.discard(self)


class MooncakeHandle(Handle):
    """An operation that a link's thread carries out."""

    def __init__(self, *runs: Int64s, write: bool) -> None:
        self.runs, self.write = runs, write
        """Addresses at this end and at the peer's, and lengths."""
        self.given_up = False
        self.outcome: Future[None] = Future()

    def _poll(self) -> bool:
        done = self.outcome.done()
        if done:
            self.outcome.result()  # raises what went wrong
        return done

    def _pause(self, seconds: float) -> None:
        wait([self.outcome], seconds)

    def _release(self) -> None:
        """No further call for it; one that is under way cannot be taken back."""
        self.given_up = True
