"""A replica that stops in the middle of a direct read leaves time and blocks for another one."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

from kvatlas.wire import Session
from kvatlas.wire.client.rank_reads import RankReads
from tests.profiles import DEEP
from tests.wire.child import TOKENS, Child, Rank, contents
from tests.wire.forking import HAS_NIXL
from tests.wire.helpers import until
from tests.wire.processes import SOURCE, TARGET, carry

SECONDS = 10.0
TRANSPORTS = ["tcp", "shm", *["nixl"] * HAS_NIXL]
# Mooncake keeps a core busy while it waits, so that this takes as much time as a file of tests.
TRANSPORTS += ["mooncake"] * (DEEP and importlib.util.find_spec("mooncake") is not None)


CASES = [
    pytest.param(transport, streamed, id=f"{transport}-{'streamed' if streamed else 'whole'}")
    for number, transport in enumerate(TRANSPORTS)
    for streamed in (False, True)
    if DEEP or streamed == (number % 2 == 0)
]


@pytest.mark.parametrize(("transport", "streamed"), CASES)
def test_another_replica_takes_over_a_direct_read(
    transport: str, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Rank(TARGET, transport, seed=7, name="here")
    stalled, well = (Child().start(SOURCE, transport, seed, name=f"n{seed}") for seed in (1, 2))
    right = contents(TARGET, 7)
    carry(SOURCE, TARGET, right, 2)
    about: Any = {"destination_blocks": here.blocks, "tokens": TOKENS, "how": "direct"}
    try:
        for request in ("first", "second"):
            for child in (stalled, well):
                child.ask("offer", request=request)
        with Session(here.node, [stalled.endpoint, well.endpoint]) as session:
            session.pull("first", **about, timeout=30).wait()  # links are warm after this
            stop_at_first_read(monkeypatch, stalled)
            pull = session.pull("second", **about, timeout=SECONDS, streamed=streamed)
            pull.wait(SECONDS)
            assert here.wrong(right) == 0
            assert pull.wait_released(1.0)
            stalled.go_on()
            time.sleep(0.5)
            assert here.wrong(right) == 0, "late bytes"
        until(here.idle, 20)
    finally:
        stalled.close()
        well.close()
        here.close()


def stop_at_first_read(monkeypatch: pytest.MonkeyPatch, child: Child) -> None:
    """Stop a process once this one has its lease, before it reads."""
    read, stopped = RankReads.read, list[Child]()

    def stopping(reads: RankReads, *given: Any, **about: Any) -> None:
        if not stopped:
            stopped.append(child)
            child.stop()
        read(reads, *given, **about)

    monkeypatch.setattr(RankReads, "read", stopping)
