"""The end of a NIXL agent, which is what proves that nothing comes any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.wire.transports.nixl import NixlHandle, NixlLink


class _Below:
    """What NIXL keeps below its Python interface."""


class _Agent:
    def __init__(self) -> None:
        self.agent = _Below()

    def check_xfer_state(self, request: Any) -> str:
        kept = self.agent, request
        raise RuntimeError(f"the peer of {len(kept)} has gone")


def test_a_failure_that_is_kept_does_not_keep_the_agent() -> None:
    """Its traceback would, and the memory of the read would never be let go."""
    owner: Any = SimpleNamespace(
        memory={}, name="nixl", open=True, make_agent=lambda *_, **__: _Agent()
    )
    link = NixlLink(owner, SimpleNamespace(agent="peer", kind="DRAM"), {})  # type: ignore[arg-type]
    request = SimpleNamespace(release=lambda: None, agent=link.agent.agent)
    handle = NixlHandle(link, request)
    link.posted.add(handle)
    del request
    with pytest.raises(AtlasError) as kept:
        handle.poll()
    assert "RuntimeError" in str(kept.value)
    assert handle.settle()
