"""A NIXL link with a separate agent, which can be destroyed to stop all operations.

NIXL cannot cancel an operation: a request that was released, or whose peer was removed, still
writes to memory if the peer continues. Only destroying the agent guarantees that no operation is
left. The link gives up its agent as soon as that is safe:
- A closed link lets its operations in flight finish first.
- A link that has lost its peer is closed too. UCX ends all operations of a broken connection, and
  reports the end of each operation when it is polled.
- A severed link gives up its agent with operations in flight. With RDMA the network card writes to
  memory by itself, so the agent is destroyed. Without RDMA the agent is retired: it has no thread,
  so nothing arrives once it is no longer called. A retired agent is never destroyed, because
  destroying it sometimes makes UCX abort both this process and the peer that was replying.
"""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from kvatlas.copying.memory import Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors, nixl_metadata
from kvatlas.wire.transports.access import Access
from kvatlas.wire.transports.base import Link, Transport
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.nixl_agents import PEER_LOST, Agents, not_empty, rows_of, translated
from kvatlas.wire.transports.nixl_strided import describe
from kvatlas.wire.transports.offer_board import open_board

log = logging.getLogger("kvatlas.wire")

BETWEEN_LOOKS = 5e-3
"""Seconds between two polls of operations while a link is being closed."""
_INITIATOR = "NIXL_INIT_AGENT"
_BREAKING = 2.0
"""Seconds within which NIXL reports the end of all operations of a broken connection."""
_MEETING = 20e-3
"""Seconds within which two idle agents set up the connections between them."""


class NixlLink(Link):
    """A connection to a peer's agent, through a separate agent of this process."""

    def __init__(
        self,
        owner: Transport,
        agents: Agents,
        published: nixl_metadata.Published,
        peer_memory: Mapping[int, Memory],
    ) -> None:
        super().__init__(owner, peer_memory)
        self._agents, self._published = agents, published
        self.peer, self._kind, self._lost = published.agent, published.kind, False
        self.lock = threading.RLock()
        """Held during every call to the agent, so that none is in progress when it is destroyed."""
        self.agent: Any = agents.make(f"{owner.name}-{secrets.token_hex(16)}", serves=False)
        self._below = weakref.ref(self.agent.agent)
        self.retired = False
        """Whether the agent was retired: it is never called again, and never destroyed."""
        self.posted: set[NixlHandle] = set()
        """Operations that may still be in flight."""
        self._broken: set[NixlHandle] = set()
        """Operations that ended when the connection broke; released together with the agent."""
        self._registered: set[int] = set()
        self.board = None if published.board is None else open_board(published.board)

    def sign_in(self, access: Access, deadline: float) -> None:
        """Pass the peer's metadata to the agent, and wait until both agents are connected."""
        del access, deadline
        with translated():
            self._register_memory()
        metadata = nixl_metadata.put_together(self._published, self._agents.backend)
        try:
            self.agent.add_remote_agent(metadata)
            if rows := not_empty(self.peer_memory):
                self.agent.prep_xfer_dlist(self.peer, rows_of(rows), self._kind).release()
            # Only operations before the end of the setup may need the peer's CPU.
            # An agent without a thread makes progress only during calls.
            until = time.monotonic() + _MEETING
            while time.monotonic() < until:
                self.agent.get_new_notifs()
                time.sleep(1e-3)
        except Exception as problem:
            # A stored error must not keep the agent alive through the frames of its traceback.
            traceback.clear_frames(problem.__traceback__)
            got = f"{type(problem).__name__}: {problem}"
            # The metadata was checked before, so an error of the backend means: no connection.
            unreachable = type(problem).__name__ in (PEER_LOST, "nixlBackendError")
            raise (errors.peer_lost if unreachable else errors.bad_metadata)(got) from problem

    def _post(self, copies: Sequence[Copy]) -> Handle:
        with self.lock:
            self.check()
            self._look_at_all()  # release the requests of abandoned operations that have ended
            with translated():
                handle = self._prepare(copies)
            self.posted.add(handle)
            # No local variable may refer to NIXL's objects: a traceback would keep the agent alive.
            try:
                handle.start()
            except BaseException:  # an interrupt: the caller gets no handle to wait for
                if not handle.settle():
                    self.sever()
                raise
        return handle

    def _prepare(self, copies: Sequence[Copy]) -> NixlHandle:
        near, mine = describe(copies, self.own_memory, source=False)
        far, theirs = describe(copies, self.peer_memory, source=True)
        with ExitStack() as prepared:
            self._register_memory()
            local = self.agent.prep_xfer_dlist(_INITIATOR, near, self._agents.kind)
            prepared.callback(local.release)
            remote = self.agent.prep_xfer_dlist(self.peer, far, self._kind)
            prepared.callback(remote.release)
            request = self.agent.make_prepped_xfer("READ", local, mine, remote, theirs, b"")
        return NixlHandle(self, request)

    def _register_memory(self) -> None:
        """Register the regions that are not yet registered with the agent."""
        taken = {pool: at for pool, at in self.own_memory.items() if self.owner.takes(at.device)}
        memory = not_empty(taken)
        new = {pool: memory[pool] for pool in set(memory) - self._registered}
        if new:
            self.agent.register_memory(rows_of(new), self._agents.kind)
            self._registered |= set(new)

    def check(self) -> None:
        """Raise an error if the link is closed or the peer is lost."""
        if self._lost:
            raise errors.peer_lost("an operation on a link whose connection broke")
        super().check()

    def failed(self, handle: NixlHandle, problem: AtlasError) -> None:
        """Close the link after an operation has failed. The lock must be held.

        NIXL does not report whether all parts of the failed operation have stopped. If the
        connection broke, they have stopped once NIXL has reported the end of every operation.
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
        """Give up the agent, and all operations in flight. A peer that is replying may crash."""
        self.open = False
        with self.lock:
            self._look_at_all()  # operations that have ended need not be given up
            self._end()

    def _close(self) -> None:
        self._end_after(math.inf)

    def _end_after(self, seconds: float) -> None:
        """Give up the agent once no operation is in flight, at the latest after `seconds`.

        If operations are in flight, a thread waits for them.
        """
        if self.posted:
            threading.Thread(target=self._drain, args=[seconds], daemon=True).start()
        else:
            self._end()

    def _drain(self, seconds: float) -> None:
        """Poll until no operation is in flight or the time is over, then give up the agent."""
        deadline = time.monotonic() + seconds
        while self.posted and time.monotonic() < deadline:
            self._look_at_all()
            time.sleep(BETWEEN_LOOKS)
        self._end()

    def _look_at_all(self) -> None:
        for handle in list(self.posted):
            handle.settle()

    def _end(self) -> None:
        """Destroy the agent. Retire it instead if the CPU still works on operations in flight."""
        with self.lock:
            if self.agent is None:
                return
            agent, self.agent = self.agent, None
            handles = self.posted | self._broken
            if self.posted and self._agents.by_cpu:
                _retire(agent, *(handle.take_request() for handle in handles))
                self.retired = True
                self.owner.retired += 1
            else:
                for handle in handles:
                    handle.drop()
            self.posted.clear()
            self._broken.clear()
            board, self.board = self.board, None
            if board is not None:
                board.close()
            del agent, board

    @property
    def over(self) -> bool:
        """Whether the link has given up its agent, by destroying or retiring it."""
        return self.agent is None

    @property
    def ended(self) -> bool:
        """Whether no bytes can arrive anymore: the agent is retired, or fully destroyed."""
        return self.retired or self._below() is None


def _retire(*objects: Any) -> None:
    """Keep objects alive for good, even at interpreter exit."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    log.warning("retired a NIXL agent with %d operations in flight", len(objects) - 1)


class NixlHandle(Handle):
    """A read or write by NIXL."""

    def __init__(self, link: NixlLink, request: Any) -> None:
        self._link, self._request = link, request
        self._arrived = False
        """Whether NIXL has reported the transfer as done."""
        self._problem: AtlasError | None = None
        """The error that NIXL has reported; None if there is none."""

    def start(self) -> None:
        """Start the transfer. An error is raised by `poll`, not here. The lock must be held."""
        with suppress(AtlasError), self._calling():
            if self._link.agent.transfer(self._request) == "DONE":
                self._arrive()

    def _poll(self) -> bool:
        # First check without the lock, which another thread may hold while it starts an operation.
        if self._arrived:
            return True
        with self._link.lock:
            return self._look()

    def _look(self) -> bool:
        """Whether the transfer is done; if so, release its request. The lock must be held."""
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
                raise errors.failed("the state ERR", "See NIXL's log", "A NIXL transfer failed")
        if state != "DONE":
            return False
        self._arrive()
        return True

    def _arrive(self) -> None:
        """Record that the transfer is done, and release its request. The lock must be held."""
        self._link.posted.discard(self)
        self.drop()
        self._arrived = True

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A context for calls to the agent. An error in a call makes the transfer fail."""
        try:
            with translated():
                yield
        except AtlasError as problem:
            self._problem = problem
            self._link.failed(self, problem)
            raise

    def _settle(self) -> bool:
        """Whether NIXL reports the transfer as done, or its agent is destroyed or retired."""
        link = self._link
        if self._arrived:
            return True
        if not link.lock.acquire(blocking=False):
            return False  # a call is in progress, perhaps for this transfer
        try:
            with suppress(AtlasError):
                self._look()
            return self._arrived or link.ended
        finally:
            link.lock.release()

    def take_request(self) -> Any:
        """Return the request and forget it, so that it is not polled anymore."""
        request, self._request = self._request, None
        return request

    def drop(self) -> None:
        """Release NIXL's request. This does not stop the transfer."""
        request = self.take_request()
        with suppress(Exception):
            request.release()
