"""Long requests beside short ones: nobody waits while a long one is worked out."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvatlas.routing import Route
from kvatlas.wire import Session
from tests.attack.long_contexts import ThinPair
from tests.wire.helpers import until

LONG = 1 << 15


def test_two_long_pulls_at_once_hold_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stand still at the source while their bytes are worked out; then every byte arrives."""
    bind, worked_out, go_on = Route.stream, list[str](), threading.Event()

    def slowly(way: Route, **about: Any) -> Any:
        if about["tokens"] == (0, LONG):
            worked_out.append(threading.current_thread().name)
            assert go_on.wait(60)
        return bind(way, **about)

    monkeypatch.setattr(Route, "stream", slowly)
    pair = ThinPair(LONG, "shm", 2)
    with Session(pair.nodes[1], [pair.nodes[0].endpoint]) as session:
        moving = pair.pull_longs(session, "auto")
        until(lambda: len(worked_out) == 2, 20)
        assert set(worked_out) == {"kvatlas-answers"}, "by the source, before it has answered"
        for _ in range(3):
            pair.pull_short(session)
        assert not any(one.done for one in moving)
        go_on.set()
        assert [one.wait(60).moved for one in moving] == [LONG * 32] * 2
    assert pair.wrong() == 0
    pair.close()
