"""NIXL over UCX: between processes and machines, one-sided.

A link describes a pool to NIXL by its grid: one row (address, length, device, stride,
count) says where every run of the usual length can lie, and a transfer is then two
arrays of indices into such rows. Only runs that are off the grid get rows of their own.
That makes a million descriptors as cheap to prepare as two arrays of numbers.

One agent serves peers; every link reads and writes with an agent of its own. For NIXL
ends no operation that was begun: a request that is released, or whose peer is removed,
still writes to memory when the peer goes on. Only the end of the agent proves that all is
over, so it is brought about as soon as it is safe:
- A link that is closed lets what is under way come to its end.
- One that has lost its peer is closed too: UCX ends whatever went over a connection that broke,
  and says so of every operation when it is looked at.
- One that is severed gives its agent up with operations under way. With RDMA the network writes
  by itself, so the agent is destroyed. Without, it is retired: it has no thread of its own, so
  that nothing is received once nobody calls it, and it is kept for good, for UCX aborts, now and
  then, both the process that destroys such an agent and the peer that was replying to it.

NIXL fences nothing else: a read of memory whose lease has ended is as good a read to it
as any. Readiness and leases are decided above this file.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import math
import os
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors, nixl_metadata
from kvatlas.wire.transports.base import Handle, Link, Memory, Shared, Transport
from kvatlas.wire.transports.nixl_metadata import Kind
from kvatlas.wire.transports.nixl_strided import Rows, describe

log = logging.getLogger("kvatlas.wire")

_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_LOST = "nixlRemoteDisconnectError"
_INITIATOR = "NIXL_INIT_AGENT"
_DEVICES = "UCX_NET_DEVICES"
_CLOSING = 2.0
"""Seconds that a transport which is closed gives to operations that are under way."""
_BREAKING = 2.0
"""Seconds in which all operations over a connection that broke are seen to have ended."""
_BETWEEN_LOOKS = 5e-3
_MEETING = 20e-3
"""Seconds in which two agents agree on the ways between them, where neither is busy."""


class NixlTransport(Transport):
    """Moves bytes through NIXL agents of its own.

    `kind` says where this end's memory is: "DRAM" on the host, "VRAM" on GPUs, whose
    numbers are then the regions' devices. The two ends may differ. `device` is the one
    network device that UCX uses and listens on, as it names them ("eth0", "mlx5_0:1"):
    the loopback unless it is given, or UCX_NET_DEVICES set.
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        kind: Kind = "DRAM",
        backend: str = "UCX",
        device: str | None = None,
        shared: Shared = "all",
    ) -> None:
        super().__init__(shared=shared)
        self._library = _library()
        self.kind, self.backend = kind, backend
        self._device = _network_device(device)
        # A name is never used twice: a peer that starts again is another peer.
        self._name = f"kvatlas-{secrets.token_hex(16)}"
        self._agent: Any = self.make_agent(self._name, serves=True)
        self.by_cpu = backend == "UCX" and kind == "DRAM" and not _has_rdma()
        """Whether bytes arrive only while an agent of this process is called."""
        self.links: set[NixlLink] = set()
        """Those whose agents have not ended."""

    def make_agent(self, name: str, *, serves: bool) -> Any:
        """A NIXL agent; one that serves peers does so from a thread of its own."""
        strict = self._library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = self._library.nixl_agent_config(
            enable_prog_thread=serves, backends=[], sync_mode=strict
        )
        options = {"engine_config": f"NET_DEVICES={self._device}"} if self.backend == "UCX" else {}
        try:
            agent = self._library.nixl_agent(name, config)
            agent.create_backend(self.backend, options)
        except Exception as problem:
            got = f"no NIXL backend {self.backend!r} on {self._device!r}: {problem}"
            hint = "Choose a backend that NIXL brings, and a network device of this machine"
            raise errors.failed(got, hint=hint) from problem
        return agent

    def _register(self, memory: Mapping[int, Memory]) -> None:
        memory = {pool: region for pool, region in memory.items() if self.shares(pool)}
        if memory:
            with translated():
                self._agent.register_memory(_rows(memory), self.kind)

    def publish(self) -> bytes:
        """Where its agent is, and the keys to its regions."""
        self.check()
        with translated():
            metadata = bytes(self._agent.get_agent_metadata())
        memory = _not_empty(self.reachable)
        published = nixl_metadata.take_apart(metadata, self._name, self.kind, self.backend, memory)
        # What peers would refuse is not worth their time.
        nixl_metadata.check(published, self.backend, memory)
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a peer's agent, once it is seen to have registered these regions."""
        published = errors.read_metadata(metadata, nixl_metadata.Published)
        nixl_metadata.check(published, self.backend, _not_empty(memory))
        link = NixlLink(self, published, memory)
        self.links.add(link)
        try:
            link.meet(nixl_metadata.put_together(published, self.backend))
        except BaseException:
            link.close()
            raise
        return link

    def _close(self) -> None:
        """End all agents; what is still under way after a while ends with them."""
        for link in list(self.links):
            link.close()
        deadline = time.monotonic() + _CLOSING
        while self.links and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)
        for link in list(self.links):
            link.sever()
        self._agent = None


class NixlLink(Link):
    """A peer's agent, and this link's own."""

    owner: NixlTransport

    def __init__(
        self,
        owner: NixlTransport,
        published: nixl_metadata.Published,
        theirs: Mapping[int, Memory],
    ) -> None:
        super().__init__(owner, theirs)
        self.peer, self._kind, self._lost = published.agent, published.kind, False
        self.lock = threading.RLock()
        """Held around every call of the agent, so that none is under way when it is ended."""
        self.agent: Any = owner.make_agent(f"{owner.name}-{secrets.token_hex(16)}", serves=False)
        self._below = weakref.ref(self.agent.agent)
        self._retired = False
        self.posted: set[NixlHandle] = set()
        """Operations that were not seen to be over."""
        self._broken: set[NixlHandle] = set()
        """Operations that ended as the connection broke: they are given back with the agent."""
        self._registered: set[int] = set()

    def meet(self, metadata: bytes) -> None:
        """Tell the agent of its peer."""
        with translated():
            self._register_memory()
        try:
            self.agent.add_remote_agent(metadata)
            if rows := _not_empty(self.theirs):
                self.agent.prep_xfer_dlist(self.peer, _rows(rows), self._kind).release()
            # An operation that comes before they agree may need the peer's processor where
            # a later one does not. The agent acts only when it is asked something.
            deadline = time.monotonic() + _MEETING
            while time.monotonic() < deadline:
                self.agent.get_new_notifs()
                time.sleep(1e-3)
        except Exception as problem:
            got = f"{type(problem).__name__}: {problem}"
            # The form is right, so what fails below NIXL is the way to the peer.
            unreachable = type(problem).__name__ in (_LOST, "nixlBackendError")
            raise (errors.peer_lost if unreachable else errors.bad_metadata)(got) from problem

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        with self.lock:
            self.check()
            self._look_at_all()  # lets go of what was given up and is over by now
            with translated():
                handle = self._prepare(copies, write=write)
            self.posted.add(handle)
            # No frame that a failure keeps may hold what NIXL has made: that keeps the agent.
            handle.start()
        return handle

    def _prepare(self, copies: Sequence[Copy], *, write: bool) -> NixlHandle:
        near, mine = describe(copies, self.mine, src=write)
        far, theirs = describe(copies, self.theirs, src=not write)
        with ExitStack() as prepared:
            self._register_memory()
            local = self.agent.prep_xfer_dlist(_INITIATOR, near, self.owner.kind)
            prepared.callback(local.release)
            remote = self.agent.prep_xfer_dlist(self.peer, far, self._kind)
            prepared.callback(remote.release)
            operation = "WRITE" if write else "READ"
            request = self.agent.make_prepped_xfer(operation, local, mine, remote, theirs, b"")
        return NixlHandle(self, request)

    def _register_memory(self) -> None:
        """Tell the agent of regions that it does not know yet."""
        memory = _not_empty(self.mine)
        new = {pool: memory[pool] for pool in set(memory) - self._registered}
        if new:
            self.agent.register_memory(_rows(new), self.owner.kind)
            self._registered |= set(new)

    def check(self) -> None:
        """Refuse once the link is closed or the peer lost."""
        if self._lost:
            raise errors.peer_lost("a peer that this link has lost")
        super().check()

    def failed(self, handle: NixlHandle, problem: AtlasError) -> None:
        """An operation has failed, which makes it the link's last. The lock is held.

        NIXL does not say whether what belongs to it has come to rest. Where the connection
        broke, all that went over it has, once every operation was seen to end.
        """
        self.open = False
        if problem.code is not Code.PEER_LOST:
            return self._end()
        self.posted.discard(handle)
        self._broken.add(handle)
        if not self._lost:
            self._lost = True
            self._end_after(_BREAKING)
        return None

    def sever(self) -> None:
        """End what is under way, now; a peer that was about to reply may not survive it."""
        self.open = False
        with self.lock:
            self._look_at_all()  # what is over by now need not be given up
            self._end()

    def _close(self) -> None:
        self._end_after(math.inf)

    def _end_after(self, seconds: float) -> None:
        """End the agent once nothing is under way, or it is too late, without waiting for that."""
        if self.posted:
            threading.Thread(target=self._drain, args=[seconds], daemon=True).start()
        else:
            self._end()

    def _drain(self, seconds: float) -> None:
        """Look at what is under way until nothing is."""
        deadline = time.monotonic() + seconds
        while self.posted and time.monotonic() < deadline:
            self._look_at_all()
            time.sleep(_BETWEEN_LOOKS)
        self._end()

    def _look_at_all(self) -> None:
        for handle in list(self.posted):
            handle.settle()

    def _end(self) -> None:
        """End the agent, and see that it has gone; or retire it, and never call it again."""
        with self.lock:
            if self.agent is None:
                return
            agent, self.agent = self.agent, None
            handles = self.posted | self._broken
            if self.posted and self.owner.by_cpu:
                _retire(agent, *(handle.take_request() for handle in handles))
                self._retired = True
                self.owner.retired += 1
            else:
                for handle in handles:
                    handle.drop()
            self.posted.clear()
            self._broken.clear()
            del agent
        self.owner.links.discard(self)

    @property
    def ended(self) -> bool:
        """Whether nothing can arrive any more: the agent is retired, or seen to be gone."""
        return self._retired or self._below() is None


def _retire(*objects: Any) -> None:
    """Keep what must never be destroyed, not even when the interpreter ends."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    log.warning("retired a NIXL agent with %d operations under way", len(objects) - 1)


class NixlHandle(Handle):
    """A transfer that NIXL carries out."""

    def __init__(self, link: NixlLink, request: Any) -> None:
        self._link, self._request = link, request
        self._arrived = False
        """Whether NIXL has said so, to whoever looked first."""
        self._problem: AtlasError | None = None
        """What NIXL has said instead."""

    def start(self) -> None:
        """Let NIXL begin; how that fails is seen by whoever looks. The link's lock is held."""
        with suppress(AtlasError), self._calling():
            self._link.agent.transfer(self._request)

    def _poll(self) -> bool:
        with self._link.lock:
            return self._look()

    def _look(self) -> bool:
        """Whether it is done; gives the request back then. The link's lock is held."""
        link = self._link
        if self._problem is not None:
            raise self._problem
        if self._arrived:
            return True
        if self._request is None:
            raise errors.closed("link")
        with self._calling():
            state = link.agent.check_xfer_state(self._request)
            if state == "ERR":
                raise errors.failed("state ERR from NIXL")
        if state != "DONE":
            return False
        link.posted.discard(self)
        self.drop()
        self._arrived = True
        return True

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around calls of the agent for this operation: where they fail, so has the operation."""
        try:
            with translated():
                yield
        except AtlasError as problem:
            self._problem = problem
            self._link.failed(self, problem)
            raise

    def _settle(self) -> bool:
        """Over where NIXL says so, or its agent is gone."""
        link = self._link
        if not link.lock.acquire(blocking=False):
            return False  # a call is under way, perhaps this operation's
        try:
            with suppress(AtlasError):
                self._look()
            return self._arrived or link.ended
        finally:
            link.lock.release()

    def take_request(self) -> Any:
        """The request, which is then no longer looked at."""
        request, self._request = self._request, None
        return request

    def drop(self) -> None:
        """Give the request back to NIXL, which forgets it; that ends nothing."""
        request = self.take_request()
        with suppress(Exception):
            request.release()


def _not_empty(memory: Mapping[int, Memory]) -> dict[int, Memory]:
    return {pool: region for pool, region in memory.items() if region.nbytes}


def _network_device(wanted: str | None) -> str:
    """The device for UCX, which lets its own setting go before all others."""
    setting = os.environ.get(_DEVICES)
    if wanted is not None and setting not in (None, wanted):
        got = f"device={wanted!r} and {_DEVICES}={setting}"
        raise errors.failed(got, hint=f"Unset {_DEVICES}, or leave device out")
    return wanted or setting or "lo"


def _library() -> Any:
    """NIXL's interface.

    The package `nixl` imports all of torch to choose between the builds that are
    installed. Where there is one, there is nothing to choose.
    """
    _without_rdma()
    # UCX warns of operations that end with their agent, which is what it is ended for.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
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
    if not _has_rdma():
        os.environ.setdefault("UCX_MODULES", "^ib")


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


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
        # What is kept of a failure must not keep the agent, whose end is waited for.
        traceback.clear_frames(problem.__traceback__)
        name = type(problem).__name__
        fault = errors.peer_lost if name == _LOST else errors.failed
        raise fault(f"{name}: {problem}") from problem
