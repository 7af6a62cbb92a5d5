"""NIXL over UCX: between processes and machines, one-sided.

A link describes a pool to NIXL by its grid: one row (address, length, device, stride,
count) says where every run of the usual length can lie, and a transfer is then two
arrays of indices into such rows. Only runs that are off the grid get rows of their own.
That makes a million descriptors as cheap to prepare as two arrays of numbers.

NIXL fences nothing: a read of memory whose lease has ended is as good a read to it as
any. Readiness and leases are decided above this file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
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
from kvatlas.wire.transports.nixl_strided import Indices, Rows, describe

Kind = Literal["DRAM", "VRAM"]
Result = TypeVar("Result")

_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_LOST = "nixlRemoteDisconnectError"
_INITIATOR = "NIXL_INIT_AGENT"
_CLOSING = 2.0
"""Seconds that closing waits for operations that NIXL cannot give up at once."""


class _Published(msgspec.Struct, tag="nixl", forbid_unknown_fields=True):
    agent: str
    kind: Kind
    check: int
    metadata: bytes


class NixlTransport(Transport):
    """Moves bytes through a NIXL agent of its own.

    `kind` says where this end's memory is: "DRAM" on the host, "VRAM" on GPUs, whose
    numbers are then the regions' devices. The two ends may differ.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, *, kind: Kind = "DRAM", backend: str = "UCX") -> None:
        super().__init__()
        library = _library()
        self.kind: Kind = kind
        # A name is never used twice: a peer that starts again is another peer.
        self._name = f"kvatlas-{secrets.token_hex(16)}"
        strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = library.nixl_agent_config(backends=[backend], sync_mode=strict)
        self.agent: Any = translated(lambda: library.nixl_agent(self._name, config))
        if backend not in self.agent.backends:
            raise failed(f"no NIXL backend {backend!r}", hint="Choose one that NIXL brings")
        self._registered: list[Any] = []
        self._links: Counter[str] = Counter()
        self._pending: list[NixlHandle] = []

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self.agent is None:
            raise closed("transport")
        if memory:
            rows = np.array([_region(region) for region in memory.values()], dtype=np.uint64)
            self._registered.append(translated(lambda: self.agent.register_memory(rows, self.kind)))

    def publish(self) -> bytes:
        """The agent's own metadata, with what shows that it arrived whole."""
        if self.agent is None:
            raise closed("transport")
        metadata = translated(self.agent.get_agent_metadata)
        return write_metadata(
            _Published(self._name, self.kind, zlib.crc32(metadata), bytes(metadata))
        )

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer's agent, once it is seen to have registered these regions."""
        if self.agent is None:
            raise closed("transport")
        published = read_metadata(metadata, _Published)
        if published.check != zlib.crc32(published.metadata):
            raise bad_metadata("bytes that were changed on their way")
        try:
            if not self._links[published.agent]:
                added = self.agent.add_remote_agent(published.metadata)
                if added != published.agent.encode():
                    self.forget(added.decode(errors="replace"))
                    raise bad_metadata(f"an agent that is not {published.agent[:64]!r}")
            self._links[published.agent] += 1
            link = NixlLink(self, published.agent, published.kind, memory)
        except AtlasError:
            raise
        except Exception as problem:
            got = f"{type(problem).__name__}: {problem}"
            # The metadata is whole, so what fails below NIXL is the way to the peer.
            unreachable = type(problem).__name__ in (_LOST, "nixlBackendError")
            raise (peer_lost if unreachable else bad_metadata)(got) from problem
        try:
            link.probe()
        except AtlasError as problem:
            link.close()
            raise bad_metadata("regions that the peer has not registered") from problem
        return link

    def leave(self, peer: str) -> None:
        """One link fewer; the last one makes the agent forget the peer."""
        self._links[peer] -= 1
        if self._links[peer] <= 0:
            del self._links[peer]
            self.forget(peer)

    def forget(self, peer: str) -> None:
        """Remove a peer's agent, so that it can be added again."""
        if self.agent is not None:
            with suppress(Exception):  # it is gone, and that was wanted
                self.agent.remove_remote_agent(peer)

    def keep(self, handle: NixlHandle) -> None:
        """Remember an operation that could not be given up yet."""
        self._pending.append(handle)

    def close(self) -> None:
        """Give up operations, forget peers, deregister, and end the agent."""
        if self.agent is None:
            return
        deadline = time.monotonic() + _CLOSING
        while self._pending and time.monotonic() < deadline:
            pending, self._pending = self._pending, []
            for handle in pending:
                handle.release()
            if self._pending:
                time.sleep(1e-3)
        for peer in list(self._links):
            self.forget(peer)
        self._links.clear()
        for rows in self._registered:
            with suppress(Exception):
                self.agent.deregister_memory(rows)
        self._registered.clear()
        self.agent = None
        super().close()


class NixlLink(Link):
    """A peer's agent, and the grids of its pools."""

    def __init__(
        self, owner: NixlTransport, peer: str, kind: Kind, theirs: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner.memory, theirs)
        self.owner, self.peer, self._kind = owner, peer, kind
        self._open, self._lost = True, False

    def probe(self) -> None:
        """Refuse regions that the peer's agent does not know."""
        if self.theirs:
            rows = np.array([_region(r) for r in self.theirs.values()], dtype=np.uint64)
            agent = self.owner.agent
            translated(lambda: agent.prep_xfer_dlist(self.peer, rows, self._kind)).release()

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        near, mine = describe(copies, self.mine, src=write)
        far, theirs = describe(copies, self.theirs, src=not write)
        operation = "WRITE" if write else "READ"
        posted = self.call(lambda: self._start(operation, near, mine, far, theirs))
        return NixlHandle(self, posted)

    def _start(self, operation: str, near: Rows, mine: Indices, far: Rows, theirs: Indices) -> Any:
        agent = self.owner.agent
        local = agent.prep_xfer_dlist(_INITIATOR, near, self.owner.kind)
        try:
            remote = agent.prep_xfer_dlist(self.peer, far, self._kind)
            try:
                posted = agent.make_prepped_xfer(operation, local, mine, remote, theirs, b"")
            finally:
                remote.release()
        finally:
            local.release()
        try:
            agent.transfer(posted)
        except BaseException:
            with suppress(Exception):
                posted.release()
            raise
        return posted

    def check(self) -> None:
        """Refuse once the link is closed or the peer lost."""
        if self._lost:
            raise peer_lost("a peer that this link has lost")
        if not self._open or self.owner.agent is None:
            raise closed("link")

    def call(self, act: Callable[[], Result]) -> Result:
        """Call NIXL; a peer that turns out to be gone is forgotten."""
        try:
            return translated(act)
        except AtlasError as problem:
            if problem.code is Code.PEER_LOST:
                self._lost = True
                self.close()
            raise

    def close(self) -> None:
        """Forget the peer."""
        if self._open:
            self._open = False
            self.owner.leave(self.peer)


class NixlHandle(Handle):
    """A transfer that NIXL carries out."""

    def __init__(self, link: NixlLink, posted: Any) -> None:
        self._link, self._posted = link, posted
        self._done = False
        self._failure: AtlasError | None = None

    def poll(self) -> bool:
        """Ask NIXL."""
        if self._failure is not None:
            raise self._failure
        if self._done:
            return True
        if self._link.owner.agent is None:
            raise closed("transport")
        try:
            state = self._link.call(lambda: self._link.owner.agent.check_xfer_state(self._posted))
            if state == "ERR":
                raise failed("state ERR from NIXL")
        except AtlasError as failure:
            self._failure = failure
            raise
        self._done = state == "DONE"
        return self._done

    def release(self) -> None:
        """Free it, or end it; what NIXL cannot end yet is ended when the transport closes."""
        if not self._done and self._failure is None:
            self._failure = cancelled()
        if self._posted is None or self._link.owner.agent is None:
            return
        try:
            self._posted.release()
        except Exception:
            self._link.owner.keep(self)
        else:
            self._posted = None


def _library() -> Any:
    """NIXL's interface.

    The package `nixl` imports all of torch to choose between the builds that are
    installed. Where there is one, there is nothing to choose.
    """
    _without_rdma()
    builds = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
    chosen = builds[0] if len(builds) == 1 else "nixl"
    try:
        return importlib.import_module(f"{chosen}._api")
    except ImportError as problem:
        raise cannot_import("nixl", problem) from problem


def _without_rdma() -> None:
    """Keep UCX from loading its RDMA module on hosts without such a device.

    Where the system's own libibverbs is installed too, two copies of what it needs are
    loaded then, and the process crashes when it exits.
    """
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        os.environ.setdefault("UCX_MODULES", "^ib")


def _region(memory: Memory) -> tuple[int, int, int]:
    return memory.address, memory.nbytes, memory.device


def translated(act: Callable[[], Result]) -> Result:
    """Call NIXL, and turn what it raises into an error of kvatlas."""
    try:
        return act()
    except AtlasError:
        raise
    except Exception as problem:
        name = type(problem).__name__
        got = f"{name}: {problem}"
        if name == _LOST:
            raise peer_lost(got) from problem
        raise failed(got) from problem
