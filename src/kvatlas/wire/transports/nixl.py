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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
from kvatlas.wire.transports.nixl_strided import Rows, describe

Kind = Literal["DRAM", "VRAM"]

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
        with translated():
            self.agent: Any = library.nixl_agent(self._name, config)
        if backend not in self.agent.backends:
            raise errors.failed(f"no NIXL backend {backend!r}", hint="Choose one that NIXL brings")
        self._registered: list[Any] = []
        self._links: Counter[str] = Counter()
        self.pending: list[NixlHandle] = []
        """Operations that could not be given up yet."""

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if memory:
            with translated():
                self._registered.append(self.agent.register_memory(_rows(memory), self.kind))

    def publish(self) -> bytes:
        """The agent's own metadata, with what shows that it arrived whole."""
        self.check()
        with translated():
            metadata = self.agent.get_agent_metadata()
        published = _Published(self._name, self.kind, zlib.crc32(metadata), bytes(metadata))
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer's agent, once it is seen to have registered these regions."""
        published = errors.read_metadata(metadata, _Published)
        if published.check != zlib.crc32(published.metadata):
            raise errors.bad_metadata("bytes that were changed on their way")
        try:
            if not self._links[published.agent]:
                added = self.agent.add_remote_agent(published.metadata)
                if added != published.agent.encode():
                    self.forget(added.decode(errors="replace"))
                    raise errors.bad_metadata(f"an agent that is not {published.agent[:64]!r}")
            self._links[published.agent] += 1
            link = NixlLink(self, published.agent, published.kind, memory)
        except AtlasError:
            raise
        except Exception as problem:
            got = f"{type(problem).__name__}: {problem}"
            # The metadata is whole, so what fails below NIXL is the way to the peer.
            unreachable = type(problem).__name__ in (_LOST, "nixlBackendError")
            raise (errors.peer_lost if unreachable else errors.bad_metadata)(got) from problem
        try:
            if memory:
                rows = _rows(memory)
                self.agent.prep_xfer_dlist(published.agent, rows, published.kind).release()
        except Exception as problem:
            link.close()
            raise errors.bad_metadata("regions that the peer has not registered") from problem
        return link

    def leave(self, peer: str) -> None:
        """One link fewer; the last one makes the agent forget the peer."""
        self._links[peer] -= 1
        if self._links[peer] <= 0:
            del self._links[peer]
            self.forget(peer)

    def forget(self, peer: str) -> None:
        """Remove a peer's agent, so that it can be added again."""
        with suppress(Exception):  # it is gone, or this agent is, and that was wanted
            self.agent.remove_remote_agent(peer)

    def _close(self) -> None:
        """Give up operations, forget peers, deregister, and end the agent."""
        deadline = time.monotonic() + _CLOSING
        while self.pending and time.monotonic() < deadline:
            pending, self.pending = self.pending, []
            for handle in pending:
                handle.release()
            if self.pending:
                time.sleep(1e-3)
        for peer in list(self._links):
            self.forget(peer)
        self._links.clear()
        for rows in self._registered:
            with suppress(Exception):
                self.agent.deregister_memory(rows)
        self._registered.clear()
        self.agent = None


class NixlLink(Link):
    """A peer's agent, and the grids of its pools."""

    owner: NixlTransport

    def __init__(
        self, owner: NixlTransport, peer: str, kind: Kind, theirs: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, theirs)
        self.peer, self._kind, self._lost = peer, kind, False

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        near, mine = describe(copies, self.mine, src=write)
        far, theirs = describe(copies, self.theirs, src=not write)
        agent = self.owner.agent
        with self.calling():
            with ExitStack() as prepared:
                local = agent.prep_xfer_dlist(_INITIATOR, near, self.owner.kind)
                prepared.callback(local.release)
                remote = agent.prep_xfer_dlist(self.peer, far, self._kind)
                prepared.callback(remote.release)
                operation = "WRITE" if write else "READ"
                posted = agent.make_prepped_xfer(operation, local, mine, remote, theirs, b"")
            handle = NixlHandle(self, posted)
            try:
                agent.transfer(posted)
            except BaseException:
                handle.release()
                raise
        return handle

    def check(self) -> None:
        """Refuse once the link is closed or the peer lost."""
        if self._lost:
            raise errors.peer_lost("a peer that this link has lost")
        super().check()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around calls of NIXL: a peer that turns out to be gone is forgotten."""
        try:
            with translated():
                yield
        except AtlasError as problem:
            if problem.code is Code.PEER_LOST:
                self._lost = True
                self.close()
            raise

    def _close(self) -> None:
        self.owner.leave(self.peer)


class NixlHandle(Handle):
    """A transfer that NIXL carries out."""

    def __init__(self, link: NixlLink, posted: Any) -> None:
        self._link, self._posted = link, posted

    def _poll(self) -> bool:
        owner = self._link.owner
        owner.check()
        with self._link.calling():
            state = owner.agent.check_xfer_state(self._posted)
        if state == "ERR":
            raise errors.failed("state ERR from NIXL")
        return bool(state == "DONE")

    def _release(self) -> None:
        """Free it, or end it; what NIXL cannot end yet is ended when the transport closes."""
        if self._posted is None or self._link.owner.agent is None:
            return
        try:
            self._posted.release()
        except Exception:
            self._link.owner.pending.append(self)
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
        raise errors.cannot_import("nixl", problem) from problem


def _without_rdma() -> None:
    """Keep UCX from loading its RDMA module on hosts without such a device.

    Where the system's own libibverbs is installed too, two copies of what it needs are
    loaded then, and the process crashes when it exits.
    """
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        os.environ.setdefault("UCX_MODULES", "^ib")


def _rows(memory: Mapping[int, Memory]) -> Rows:
    regions = [(region.address, region.nbytes, region.device) for region in memory.values()]
    return np.array(regions, dtype=np.uint64)


@contextmanager
def translated() -> Iterator[None]:
    """Turn what NIXL raises into an error of kvatlas."""
    try:
        yield
    except AtlasError:
        raise
    except Exception as problem:
        name = type(problem).__name__
        fault = errors.peer_lost if name == _LOST else errors.failed
        raise fault(f"{name}: {problem}") from problem
