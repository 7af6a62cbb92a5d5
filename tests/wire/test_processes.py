"""Faults between real processes, over real transports.

Whatever happens to the other process, a transfer ends by its deadline, is ready only with
every byte, and leaves no lease, no buffer and no registration; the next one works.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvatlas.routing import route
from kvatlas.wire import Handle, Session, protocol
from kvatlas.wire.client.rank_lease import RankLease
from tests.wire.child import TOKENS
from tests.wire.helpers import small, until
from tests.wire.processes import (
    SECONDS,
    SLACK,
    SOURCE,
    TARGET,
    Children,
    Here,
    Slow,
    mostly,
    outcome,
    over,
    works,
)

# -- the source -----------------------------------------------------------------------------


@mostly
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_the_source_is_killed_before_the_read(here: Here, children: Children, how: str) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with Session(here.node, [child.endpoint]) as session:
        child.kill()
        begun = time.monotonic()
        assert outcome(here.pull(session, how=how, timeout=20), begun) == "peer_lost"
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="source"))


@over
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_the_source_is_killed_during_the_read(
    here: Here, children: Children, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with Session(here.node, [child.endpoint]) as session, monkeypatch.context() as patch:
        slow = Slow(patch, 0.02, number=3)
        begun = time.monotonic()
        transfer = here.pull(session, how=how, timeout=20)
        assert slow.reached.wait(5)
        child.kill()
        assert outcome(transfer, begun) == "peer_lost"
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="source"))


@mostly
def test_the_source_is_killed_before_it_confirms(
    here: Here, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes have arrived, and nobody can say any more that they were still the right ones."""
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:

        def killing(lease: RankLease, *, complete: bool) -> None:
            if child.process.is_alive():
                child.kill()
            close(lease, complete=complete)

        close = RankLease.close
        patch.setattr(RankLease, "close", killing)
        begun = time.monotonic()
        transfer = here.pull(session, how="direct", timeout=20)
        assert outcome(transfer, begun) == "peer_lost"
        assert transfer.moved == transfer.total
    here.assert_has(SOURCE, 1)
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="source"))


@mostly
def test_the_source_is_killed_after_the_read(here: Here, children: Children) -> None:
    here.wipe()
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with Session(here.node, [child.endpoint]) as session:
        transfer = here.pull(session).wait(10)
        child.kill()
        assert transfer.ready
        here.assert_has(SOURCE, 1)
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="source"))


@over
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_a_stalled_source_is_given_up_and_met_again(
    here: Here, children: Children, how: str
) -> None:
    here.wipe()
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with Session(here.node, [child.endpoint]) as session:
        child.stop()
        begun = time.monotonic()
        first = here.pull(session, how=how, timeout=0.7)
        assert outcome(first, begun) == "deadline"
        child.signal(signal.SIGCONT)
        assert first.wait_released(20)
        here.pull(session, how=how, timeout=10).wait(15)
    here.assert_has(SOURCE, 1)
    until(lambda: child.ask("state")["leases"] == 0)
    works(here, child)


@over
def test_a_source_that_comes_back_with_another_plan(here: Here, children: Children) -> None:
    """Under the same name and at the same endpoint: the session ends, a new one works."""
    here.wipe()
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    other = small("dense", 512, layout="BLHNC", block_size=64, memory="4MiB")
    with Session(here.node, [child.endpoint]) as session:
        endpoint = child.endpoint
        child.kill()
        again = children.take(other, here.transport, 2, name="source", listen=endpoint)
        assert again.endpoint == endpoint
        again.ask("offer", request="r")
        begun = time.monotonic()
        assert outcome(here.pull(session), begun) == "peer_lost"
        for index, pool in here.rank.pools.items():
            assert np.array_equal(pool, here.clean[index])
    works(here, again, other, seed=2)


@mostly
@pytest.mark.parametrize("fault", ["killed", "stopped", "without the request"])
def test_another_replica_takes_over(here: Here, children: Children, fault: str) -> None:
    here.wipe()
    both = [children.take(SOURCE, here.transport, 1, name=f"replica {n}") for n in (0, 1)]
    both[1].ask("offer", request="r")
    if fault != "without the request":
        both[0].ask("offer", request="r")
    with Session(here.node, [child.endpoint for child in both]) as session:
        if fault == "killed":
            both[0].kill()
        if fault == "stopped":
            both[0].stop()
        here.pull(session, timeout=SECONDS).wait(SECONDS + SLACK)
    here.assert_has(SOURCE, 1)
    assert both[1].ask("state")["released"] == [["r", "read"]]
    here.settled()
    works(here, both[1])


@over
def test_a_lease_that_ends_during_the_read(
    here: Here, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport reads on and says that all is well; the source does not."""
    child = children.take(SOURCE, here.transport, 1, name="source")
    wait = Handle.wait

    def once_expired(handle: Handle, *given: Any) -> None:
        until(lambda: child.ask("state")["released"] == [["r", "expired"]])
        wait(handle, *given)

    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:
        session.link(0)  # which takes its time on a busy machine, and none of the offer's
        patch.setattr(Handle, "wait", once_expired)
        child.ask("offer", request="r", timeout=1.0)
        begun = time.monotonic()
        transfer = here.pull(session, how="direct", timeout=6)
        assert outcome(transfer, begun) == "lease_expired"
    works(here, child)


@mostly
def test_a_byte_that_changes_on_the_way(
    here: Here, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:
        needs = route(SOURCE, TARGET).needs(
            destination_rank=0, destination_blocks=here.blocks, tokens=TOKENS
        )

        def spoiling(endpoint: str, message: Any, *kinds: Any, **given: Any) -> Any:
            if isinstance(message, protocol.GetChecksums):
                for pool, (starts, _) in needs.items():
                    here.node.pools[pool][starts[-1]] ^= 1
            return ask(endpoint, message, *kinds, **given)

        ask = here.node.channels.ask
        patch.setattr(here.node.channels, "ask", spoiling)
        begun = time.monotonic()
        assert outcome(here.pull(session, checksums=True), begun) == "checksum"
    works(here, child)


@mostly
def test_a_transfer_that_is_called_off(
    here: Here, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:
        slow = Slow(patch, 0.05, number=2)
        begun = time.monotonic()
        transfer = here.pull(session, how="direct")
        assert slow.reached.wait(5)
        transfer.cancel()
        assert outcome(transfer, begun) in ("cancelled", "ok")
    until(lambda: child.ask("state")["leases"] == 0)
    works(here, child)


# -- the destination ------------------------------------------------------------------------


@mostly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_destination_is_lost_during_the_read(
    here: Here, children: Children, number: signal.Signals
) -> None:
    """This node is the source: the lease ends, the offer stays, another reader gets it."""
    here.rank.offer("kept")
    about: dict[str, Any] = {
        "way": "pull", "endpoints": [here.node.endpoint], "request": "kept", "how": "staged",
        "timeout": 1.0,
    }  # fmt: skip
    child = children.take(SOURCE, here.transport, 3, name="reader", slow=0.05)
    child.tell("move", **about)
    until(lambda: len(here.node.leases) > 0)
    child.signal(number)
    here.settled()
    assert here.rank.released == []
    again = children.take(SOURCE, here.transport, 3, name="reader")
    assert again.ask("move", **about | {"timeout": 10.0}) == {"code": "ready"}
    assert here.rank.released == [("kept", "read")]
    here.rank.released.clear()
    here.settled()


@mostly
def test_a_reader_that_starts_again_frees_what_it_had(here: Here, children: Children) -> None:
    """Its last run's lease would have lasted; its connections are gone, and so is the lease."""
    here.rank.offer("kept")
    child = children.take(SOURCE, here.transport, 3, name="reader", slow=0.05)
    about: dict[str, Any] = {
        "way": "pull", "endpoints": [here.node.endpoint], "how": "staged", "timeout": 50.0,
    }  # fmt: skip
    child.tell("move", **about | {"request": "kept"})
    until(lambda: len(here.node.leases) > 0)
    child.kill()
    again = children.take(SOURCE, here.transport, 3, name="reader")
    again.ask("move", **about | {"request": "unheard of"})
    here.settled(2.0)
    here.node.withdraw("kept")
    here.rank.released.clear()


@over
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_the_source_of_a_push_is_killed(
    here: Here, children: Children, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ready here, whatever had been written; the next push is."""
    here.wipe()
    reading, killed, wait = threading.Event(), threading.Event(), Handle.wait

    def slowly(handle: Handle, *given: Any) -> None:
        reading.set()
        assert killed.wait(20)
        wait(handle, *given)

    monkeypatch.setattr(Handle, "wait", slowly)
    expected = here.node.expect("pushed", here.blocks, TOKENS, source=SOURCE, pushers=["pusher"])
    about: dict[str, Any] = {
        "way": "push", "endpoints": [here.node.endpoint], "request": "pushed", "how": how,
        "timeout": 10.0,
    }  # fmt: skip
    child = children.take(SOURCE, here.transport, 1, name="pusher")
    child.tell("move", **about)
    assert reading.wait(20)
    child.kill()
    killed.set()
    here.settled()
    (announced,) = expected.current[0]
    assert announced.transfer.wait_released(20)
    assert not expected.ready.is_set()
    again = children.take(SOURCE, here.transport, 1, name="pusher")
    assert again.ask("move", **about) == {"code": "ready"}
    assert expected.ready.is_set()
    here.assert_has(SOURCE, 1)
    here.node.forget("pushed")
    here.settled()
