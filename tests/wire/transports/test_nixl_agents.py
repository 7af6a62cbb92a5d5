"""The end of a NIXL agent, which is what proves that nothing comes any more."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport
from kvatlas.wire.fork_safety import OwningProcess
from kvatlas.wire.transports import nixl_link
from kvatlas.wire.transports.nixl_link import NixlHandle, NixlLink
from tests.attack.late_bytes import POOL, in_mid_read
from tests.wire.forking import HAS_NIXL
from tests.wire.transports.ends import OVER_TCP, Peer, eventually
from tests.wire.transports.peer import End


class _Below:
    """What NIXL keeps below its Python interface."""


class _GoneError(RuntimeError):
    """As NIXL calls a peer whose connection broke."""


_GoneError.__name__ = "nixlRemoteDisconnectError"


class _Agent:
    def __init__(self) -> None:
        self.agent = _Below()
        self.state = "gone"
        """Of whatever is posted."""

    def check_xfer_state(self, request: Any) -> str:
        kept = self.agent, request
        if request.state == "fails":
            raise RuntimeError(f"one of {len(kept)} has failed")
        if request.state == "gone":
            raise _GoneError(f"the peer of {len(kept)} has gone")
        return str(request.state)

    transfer = check_xfer_state

    def register_memory(self, rows: Any, kind: str) -> None:
        pass

    def prep_xfer_dlist(self, *_: Any) -> Any:
        return SimpleNamespace(release=lambda: None, agent=self.agent)

    def make_prepped_xfer(self, *_: Any) -> Any:
        if self.state == "unmade":
            raise RuntimeError("no request is made")
        return SimpleNamespace(release=lambda: None, agent=self.agent, state=self.state)


def linked(*, by_cpu: bool = False) -> Any:
    """A link whose agent says of an operation whatever its request has as its state."""
    memory = {0: Memory(4096, 4096)}
    process = OwningProcess("transport")
    owner: Any = SimpleNamespace(memory=memory, name="nixl", open=True, process=process, retired=0)
    owner.marks_travel, owner.takes, owner.check_takes = False, lambda _: True, lambda _: None
    agents: Any = SimpleNamespace(kind="DRAM", by_cpu=by_cpu, make=lambda *_, **__: _Agent())
    peer: Any = SimpleNamespace(agent="peer", kind="DRAM", board=None)
    return NixlLink(owner, agents, peer, memory)


def posted(state: str, link: Any = None) -> Any:
    """An operation of which NIXL says this."""
    link = link or linked()
    request = SimpleNamespace(release=lambda: None, agent=link.agent.agent, state=state)
    handle = NixlHandle(link, request)
    link.posted.add(handle)
    return handle


def test_a_failure_that_is_kept_does_not_keep_the_agent() -> None:
    """Its traceback would, and the memory of the read would never be let go."""
    handle = posted("fails")
    with pytest.raises(AtlasError) as kept:
        handle.poll()
    assert "RuntimeError" in str(kept.value)
    assert handle.settle()


def test_what_fails_as_it_begins_is_held_until_its_agent_has_ended() -> None:
    link = linked(by_cpu=True)
    other, handle = posted("PROC", link), posted("gone", link)
    handle.start()
    with pytest.raises(AtlasError, match="nixlRemoteDisconnectError"):
        handle.poll()
    assert not handle.settle()
    other._request.state = "gone"
    assert eventually(handle.settle)


def test_what_is_over_as_it_begins_does_not_wait_for_what_another_thread_begins() -> None:
    """Between processes of one host NIXL copies while it is called, which may take long."""
    handle = posted("DONE")
    handle.start()
    with ThreadPoolExecutor(1) as another, handle._link.lock:
        assert another.submit(handle.settle).result(10)
        assert another.submit(handle.poll).result(10)
    assert not handle._link.posted


def test_no_failure_to_post_keeps_the_agent() -> None:
    """The frames that it is raised through would, and what else is posted would never settle."""
    at = np.zeros(1, np.int64)
    copies = [Copy(0, 0, at, at, np.full(1, 64))]
    for state in ("unmade", "gone"):
        link = linked()
        link.agent.state = state
        failures = []
        for _ in range(2):
            try:
                link.read(copies).poll()
            except AtlasError as failure:
                failures.append(failure)
        link.close()
        assert len(failures) == 2
        assert link.ended, state


@pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL")
def test_a_connection_that_fails_keeps_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = make_transport("nixl"), make_transport("nixl")
    memory = np.zeros(4096, np.uint8)
    for one in (near, far):
        one.register({0: Memory(memory.ctypes.data, memory.nbytes)})
    agents = list[Any]()

    def lose(self: Any, metadata: Any) -> None:
        agents.append(weakref.ref(self.agent))
        raise _GoneError(f"a peer with {len(metadata)} bytes of metadata")

    monkeypatch.setattr(type(near._agent), "add_remote_agent", lose)  # type: ignore[attr-defined]
    with pytest.raises(AtlasError) as lost:
        near.connect(far.publish(), far.reachable)
    assert lost.value.code == "peer_lost"
    assert [agent() for agent in agents] == [None], "the error keeps the agent alive"
    for one in (near, far):
        one.close()


def test_an_agent_whose_peer_is_gone_is_not_retired_but_ends() -> None:
    """Every operation ends as its connection breaks, so that nothing is left under way."""
    link = linked(by_cpu=True)
    below = weakref.ref(link.agent.agent)
    handles = [posted("gone", link) for _ in range(3)]
    with pytest.raises(AtlasError, match="nixlRemoteDisconnectError"):
        handles[0].poll()
    assert all(eventually(handle.settle) for handle in handles)
    assert (below(), link.retired) == (None, False)
    for handle in handles:
        with pytest.raises(AtlasError):
            handle.poll()


def test_nothing_settles_while_an_operation_over_the_same_connection_is_under_way() -> None:
    link = linked(by_cpu=True)
    ended, other = posted("gone", link), posted("PROC", link)
    with pytest.raises(AtlasError):
        ended.poll()
    assert not eventually(ended.settle, 0.1)
    with pytest.raises(AtlasError):
        link.check()
    other._request.state = "DONE"
    assert eventually(ended.settle)
    assert other.poll()
    assert not link.retired


def test_what_does_not_end_as_its_connection_breaks_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_link, "_BREAKING", 0.05)
    link = linked(by_cpu=True)
    below = weakref.ref(link.agent.agent)
    ended, other = posted("gone", link), posted("PROC", link)
    with pytest.raises(AtlasError):
        ended.poll()
    assert eventually(ended.settle)
    assert other.settle()
    gc.collect()
    assert below() is not None
    assert link.retired


def test_what_another_transfer_saw_to_be_done_is_done() -> None:
    """Who posts on a link settles what is posted there, others' operations too."""
    handle = posted("DONE")
    assert handle.settle()
    assert handle.poll()


def test_what_ends_with_its_agent_is_not_done() -> None:
    handle = posted("PROC")
    assert not handle.settle()
    handle._link.sever()
    assert handle.settle()
    with pytest.raises(AtlasError):
        handle.poll()


def test_an_agent_with_operations_under_way_is_retired_where_it_receives_nothing_uncalled() -> None:
    """UCX would abort the process that destroys it, or the peer that replies to it."""
    link = linked(by_cpu=True)
    below, handle = weakref.ref(link.agent.agent), posted("PROC", link)
    link.sever()
    assert handle.settle()
    gc.collect()
    assert below() is not None
    assert link.retired
    with pytest.raises(AtlasError):
        handle.poll()


def test_what_failed_for_another_reason_may_go_on_and_is_retired() -> None:
    """One part of an operation has failed; NIXL says nothing of the others."""
    for state in ("ERR", "fails"):
        handle = posted(state, linked(by_cpu=True))
        with pytest.raises(AtlasError):
            handle.poll()
        assert handle.settle()
        assert handle._link.retired


@pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL")
def test_sources_that_are_killed_in_mid_read_leave_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in OVER_TCP.settings.items():
        monkeypatch.setenv(name, value)
    near = End(OVER_TCP.name, dict(OVER_TCP.options), {0: POOL})
    opened = []
    for _ in range(2):
        peer = Peer(OVER_TCP, {}, {0: POOL})
        peer.ask("fill", 1)
        link = near.transport.connect(peer.metadata, peer.regions)
        handle = in_mid_read(near, peer, link.read)
        peer.signal(signal.SIGKILL)
        assert eventually(handle.settle, 20)
        peer.end()
        opened.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    near.drop()
    assert opened[-1] == opened[0]


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
def test_a_transport_that_nobody_reads_from_leaves_the_processor_alone() -> None:
    """NIXL's own interface has its thread look for work without a pause: a whole core."""
    transport = make_transport("nixl")
    begun, used = time.monotonic(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1 * (time.monotonic() - begun)
    transport.close()
