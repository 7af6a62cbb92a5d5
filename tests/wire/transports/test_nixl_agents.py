"""The end of a NIXL agent, which is what proves that nothing comes any more."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.wire.transports.nixl import NixlHandle, NixlLink


class _Below:
    """What NIXL keeps below its Python interface."""


class _Agent:
    def __init__(self, state: str) -> None:
        self.agent, self._state = _Below(), state

    def check_xfer_state(self, request: Any) -> str:
        kept = self.agent, request
        if self._state == "gone":
            raise RuntimeError(f"the peer of {len(kept)} has gone")
        return self._state


def posted(state: str, *, by_cpu: bool = False) -> NixlHandle:
    """An operation of which NIXL says this."""
    owner: Any = SimpleNamespace(
        memory={}, name="nixl", open=True, links=set(), by_cpu=by_cpu,
        make_agent=lambda *_, **__: _Agent(state),
    )  # fmt: skip
    link = NixlLink(owner, SimpleNamespace(agent="peer", kind="DRAM"), {})  # type: ignore[arg-type]
    handle = NixlHandle(link, SimpleNamespace(release=lambda: None, agent=link.agent.agent))
    link.posted.add(handle)
    return handle


def test_a_failure_that_is_kept_does_not_keep_the_agent() -> None:
    """Its traceback would, and the memory of the read would never be let go."""
    handle = posted("gone")
    with pytest.raises(AtlasError) as kept:
        handle.poll()
    assert "RuntimeError" in str(kept.value)
    assert handle.settle()


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
    handle = posted("PROC", by_cpu=True)
    below = weakref.ref(handle._link.agent.agent)
    handle._link.sever()
    assert handle.settle()
    gc.collect()
    assert below() is not None
    with pytest.raises(AtlasError):
        handle.poll()
