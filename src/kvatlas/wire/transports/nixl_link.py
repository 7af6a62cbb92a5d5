"""A NIXL link with a separate agent, whose end proves that no operation is left.

NIXL cannot cancel an operation: a request that was released, or whose peer was removed, still
writes to memory if the peer continues. Only the end of the agent proves that all operations are
over. The link ends its agent as soon as that is safe:
- A closed link lets its operations in flight finish first.
- A link that has lost its peer is closed too: UCX ends all operations of a broken connection, and
  reports that for each one when it is polled.
- A severed link gives up its agent with operations in flight. With RDMA the network card writes on
  its own, so the agent is destroyed. Without RDMA the agent is retired: it has no thread, so
  nothing is received once it is no longer called. It is kept for good, because UCX sometimes aborts
  both a process that destroys such an agent and the peer that was replying to it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from kvatlas.copying.memory import Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors, nixl_metadata
from kvatlas.wire.transports.base import Handle, Link, Transport
from kvatlas.wire.transports.nixl_agents import PEER_LOST, Agents, not_empty, rows_of, translated
from kvatlas.wire.transports.nixl_strided import describe
from kvatlas.wire.transports.offer_board import SeenOffer, open_board

log = logging.getLogger("kvatlas.wire")

BETWEEN_LOOKS = 5e-3
"""Seconds between two polls of operations that no thread waits for."""
_INITIATOR = "NIXL_INIT_AGENT"
_BREAKING = 2.0
"""Seconds in which all operations of a broken connection are seen to have ended."""
_MEETING = 20e-3
"""Seconds in which two idle agents agree on the connections between them."""


class NixlLink(Link):
    """A peer's agent, and this link's own."""

    def __init__(
        self,
        owner: Transport,
        agents: Agents,
        published: nixl_metadata.Published,
        theirs: Mapping[int, Memory],
        ended: Callable[[NixlLink], None],
    ) -> None:
        """`ended` is called once, when the agent is destroyed or retired."""
        super().__init__(owner, theirs)
        self._agents, self._ended = agents, ended
        self.peer, self._kind, self._lost = published.agent, published.kind, False
        self.lock = threading.RLock()
        """Held around every call to the agent, so that none is in progress when it is ended."""
        self.agent: Any = agents.make(f"{owner.name}-{secrets.token_hex(16)}", serves=False)
        self._below = weakref.ref(self.agent.agent)
        self.retired = False
        """Whether the agent is kept for good."""
        self.posted: set[NixlHandle] = set()
        """Operations that are not known to be over."""
        self._broken: set[NixlHandle] = set()
        """Operations that ended when the connection broke; released together with the agent."""
        self._registered: set[int] = set()
        self._board = None if published.board is None else open_board(published.board)
        self.sees_offers = self._board is not None

    def meet(self, metadata: bytes) -> None:
        """Introduce the peer to the agent."""
        with translated():
            self._register_memory()
        try:
            self.agent.add_remote_agent(metadata)
            if rows := not_empty(self.theirs):
                self.agent.prep_xfer_dlist(self.peer, rows_of(rows), self._kind).release()
            # An operation that comes before they agree may need the peer's processor where
            # a later one does not. The agent acts only when it is asked something.
            deadline = time.monotonic() + _MEETING
            while time.monotonic() < deadline:
                self.agent.get_new_notifs()
                time.sleep(1e-3)
        except Exception as problem:
            got = f"{type(problem).__name__}: {problem}"
            # The form is right, so what fails below NIXL is the way to the peer.
            unreachable = type(problem).__name__ in (PEER_LOST, "nixlBackendError")
            raise (errors.peer_lost if unreachable else errors.bad_metadata)(got) from problem

    def find_offer(self, request: str) -> SeenOffer | None:
        """Find an offer on the board of a peer on this host, unless a GPU has yet to write it."""
        board = self._board
        seen = None if board is None else board.find(request)
        return seen if seen is not None and seen.offer.mark is None else None

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        with self.lock:
            self.check()
            self._look_at_all()  # lets go of what was given up and is over by now
            with translated():
                handle = self._prepare(copies, write=write)
            self.posted.add(handle)
            # No frame that a failure keeps may hold what NIXL has made: that keeps the agent.
            try:
                handle.start()
            except BaseException:  # an interrupt: nobody will have the handle, and wait for it
                if not handle.settle():
                    self.sever()
                raise
        return handle

    def _prepare(self, copies: Sequence[Copy], *, write: bool) -> NixlHandle:
        near, mine = describe(copies, self.mine, src=write)
        far, theirs = describe(copies, self.theirs, src=not write)
        with ExitStack() as prepared:
            self._register_memory()
            local = self.agent.prep_xfer_dlist(_INITIATOR, near, self._agents.kind)
            prepared.callback(local.release)
            remote = self.agent.prep_xfer_dlist(self.peer, far, self._kind)
            prepared.callback(remote.release)
            operation = "WRITE" if write else "READ"
            request = self.agent.make_prepped_xfer(operation, local, mine, remote, theirs, b"")
        return NixlHandle(self, request)

    def _register_memory(self) -> None:
        """Tell the agent of regions that it does not know yet."""
        taken = {pool: at for pool, at in self.mine.items() if self.owner.takes(at.device)}
        memory = not_empty(taken)
        new = {pool: memory[pool] for pool in set(memory) - self._registered}
        if new:
            self.agent.register_memory(rows_of(new), self._agents.kind)
            self._registered |= set(new)

    def check(self) -> None:
        """Raise an error if the link is closed or the peer is lost."""
        if self._lost:
            raise errors.peer_lost("a link whose connection broke")
        super().check()

    def failed(self, handle: NixlHandle, problem: AtlasError) -> None:
        """Record a failed operation, which is the link's last. The lock must be held.

        NIXL does not report whether all parts of the operation have stopped. After a broken
        connection they have, once every operation is seen to have ended.
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
        """End all operations in flight now. A peer that is about to reply may crash."""
        self.open = False
        with self.lock:
            self._look_at_all()  # what is over by now need not be given up
            self._end()

    def _close(self) -> None:
        self._end_after(math.inf)

    def _end_after(self, seconds: float) -> None:
        """End the agent in the background, once nothing is in flight or the time is over."""
        if self.posted:
            threading.Thread(target=self._drain, args=[seconds], daemon=True).start()
        else:
            self._end()

    def _drain(self, seconds: float) -> None:
        """Poll until no operation is in flight."""
        deadline = time.monotonic() + seconds
        while self.posted and time.monotonic() < deadline:
            self._look_at_all()
            time.sleep(BETWEEN_LOOKS)
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
            if self.posted and self._agents.by_cpu:
                _retire(agent, *(handle.take_request() for handle in handles))
                self.retired = True
            else:
                for handle in handles:
                    handle.drop()
            self.posted.clear()
            self._broken.clear()
            board, self._board = self._board, None
            if board is not None:
                board.close()
            del agent, board
        self._ended(self)

    @property
    def ended(self) -> bool:
        """Whether nothing can arrive anymore: the agent is retired or destroyed."""
        return self.retired or self._below() is None


def _retire(*objects: Any) -> None:
    """Keep what must never be destroyed, not even when the interpreter ends."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    log.warning("retired a NIXL agent with %d operations in flight", len(objects) - 1)


class NixlHandle(Handle):
    """A transfer that NIXL carries out."""

    def __init__(self, link: NixlLink, request: Any) -> None:
        self._link, self._request = link, request
        self._arrived = False
        """Whether NIXL has reported it as done to the first caller that polled."""
        self._problem: AtlasError | None = None
        """The error that NIXL has reported instead."""

    def start(self) -> None:
        """Start the transfer. Polling reports a failure. The link's lock must be held."""
        with suppress(AtlasError), self._calling():
            if self._link.agent.transfer(self._request) == "DONE":
                self._arrive()

    def _poll(self) -> bool:
        # The lock may be held for as long as another operation takes to begin.
        if self._arrived:
            return True
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
        self._arrive()
        return True

    def _arrive(self) -> None:
        """Give the request back: all is here. The link's lock is held."""
        self._link.posted.discard(self)
        self.drop()
        self._arrived = True

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
        """Whether NIXL reports the transfer as over, or its agent is gone."""
        link = self._link
        if self._arrived:
            return True
        if not link.lock.acquire(blocking=False):
            return False  # a call is under way, perhaps this operation's
        try:
            with suppress(AtlasError):
                self._look()
            return self._arrived or link.ended
        finally:
            link.lock.release()

    def take_request(self) -> Any:
        """Return the request, which is not polled anymore."""
        request, self._request = self._request, None
        return request

    def drop(self) -> None:
        """Release the request to NIXL. This does not end the transfer."""
        request = self.take_request()
        with suppress(Exception):
            request.release()
