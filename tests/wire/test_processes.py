"""Faults between real processes, over real transports.

Whatever happens to the other process, a transfer ends by its deadline, is ready only with
every byte, and leaves no lease, no slot and no registration; the next one works.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from kvatlas import AtlasError
from kvatlas.route import route, scattered
from kvatlas.wire import Session, Transfer
from kvatlas.wire.moving import Moving
from tests.wire.child import HAS_NIXL, SLOTS, TOKENS, Child, Rank, noise
from tests.wire.helpers import small, until

DEEP = settings().max_examples >= 10_000
POINTS = 1000 if DEEP else 10
"""Moments at which something is killed, over all transports."""
SECONDS = 3.0
SLACK = 4.0
"""Seconds past its deadline after which a transfer counts as hanging: the machine may be busy."""

SOURCE = small("dense", 512, layout="LBNHC", memory="4MiB")
TARGET = small("dense", 512, layout="BHLNC", block_size=32, memory="4MiB")
SMALL_BATCH = 32 << 10

TRANSPORTS = ["shm", *["nixl"] * HAS_NIXL]
over = pytest.mark.parametrize("here", TRANSPORTS, indirect=True, scope="module")
"""Over every transport."""
mostly = pytest.mark.parametrize(
    "here", TRANSPORTS if DEEP else ["shm"], indirect=True, scope="module"
)
"""Over one, and over the others where there is time: what happens is above transports."""


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """Many operations a transfer, so that there is something to interrupt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvatlas.wire.moving._BATCH", SMALL_BATCH)
        yield


class Children:
    """Processes to be killed; the next one always starts beside the test."""

    def __init__(self) -> None:
        self.spare = Child()
        self.used: list[Child] = []

    def take(self, plan: Any, transport: str, seed: int, **given: Any) -> Child:
        child, self.spare = self.spare, Child()
        self.used.append(child)
        return child.start(plan, transport, seed, batch=SMALL_BATCH, **given)

    def end(self) -> None:
        """All that were used, some of which may be stopped or dead."""
        used, self.used = self.used, []
        for child in used:
            child.close()


@pytest.fixture(scope="module")
def spares() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()
    made.spare.kill()
    made.spare.close()


@pytest.fixture
def children(spares: Children) -> Iterator[Children]:
    yield spares
    spares.end()


class Here:
    """The rank of this process, and what is right for it."""

    def __init__(self, transport: str, plan: Any) -> None:
        self.transport = transport
        self.rank = Rank(plan, 0, transport, seed=7, name="here")
        self.node, self.blocks = self.rank.node, self.rank.blocks
        self.clean = {index: pool.copy() for index, pool in self.rank.pools.items()}
        self.idle = self.rank.state()

    def pull(self, session: Session, request: str = "r", **about: Any) -> Transfer:
        about = {"seconds": SECONDS} | about
        return session.pull(request, dst_blocks=self.blocks, tokens=TOKENS, **about)

    def wipe(self) -> None:
        for index, pool in self.rank.pools.items():
            pool[:] = self.clean[index]

    def assert_has(self, source: Any, seed: int) -> None:
        """Every byte of a source plan's request is here, and nothing else has changed."""
        right = {index: pool.copy() for index, pool in self.clean.items()}
        carry(source, self.node.plan, right, seed)
        for index, pool in self.rank.pools.items():
            assert np.array_equal(pool, right[index])

    def settled(self, seconds: float = SECONDS + SLACK) -> None:
        """Nothing is lent to anyone any more, and as much is registered as at first."""
        until(lambda: self.rank.state() == self.idle, seconds)


def carry(source: Any, target: Any, into: dict[int, Any], seed: int) -> None:
    """A request as the route says, from bytes that are made again here."""
    way = route(source, target)
    for rank in way.sources(0):
        there = {p.index: noise(p.nbytes, seed, rank, p.index) for p in source.pools}
        for copy in way.bind(
            src_rank=rank, dst_rank=0, src_blocks=scattered(source, TOKENS),
            dst_blocks=scattered(target, TOKENS), tokens=TOKENS,
        ).copies:  # fmt: skip
            for a, b, n in zip(copy.src, copy.dst, copy.length, strict=True):
                into[copy.dst_pool][b : b + n] = there[copy.src_pool][a : a + n]


@pytest.fixture(scope="module")
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    """One node for all that happens over a transport: what leaks, adds up."""
    made = Here(request.param, TARGET)
    yield made
    made.settled()
    made.rank.close()


def outcome(transfer: Transfer, begun: float) -> str:
    """How it ended, which it must in time."""
    try:
        transfer.wait(begun + SECONDS + SLACK - time.monotonic())
    except AtlasError as refused:
        assert transfer.done, "it hangs"
        assert not transfer.ready
        return str(refused.code)
    return "ok"


def works(here: Here, child: Child, plan: Any = SOURCE, seed: int = 1) -> None:
    """A transfer after all that: right to the byte, and nothing is left of it."""
    here.wipe()
    child.ask("offer", request="next")
    with Session(here.node, [child.endpoint]) as session:
        here.pull(session, "next", seconds=20, checksums=True).wait(20)
    here.assert_has(plan, seed)
    here.settled()
    state = child.ask("state")
    assert (state["leases"], state["slots"]) == (0, SLOTS)
    assert ["next", "read"] in state["released"]


LOST = {"deadline", "peer_lost", "wire_failed"}


class Slow:
    """Makes this node's operations take longer, and says when the n-th has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, number: int = 1) -> None:
        self.reached = threading.Event()
        self.left = number
        wait = Moving._wait

        def slowly(moving: Moving, handle: Any) -> None:
            self.left -= 1
            if self.left <= 0:
                self.reached.set()
            time.sleep(seconds)
            wait(moving, handle)

        monkeypatch.setattr(Moving, "_wait", slowly)


# -- the source -----------------------------------------------------------------------------


@mostly
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_the_source_is_killed_before_the_read(here: Here, children: Children, how: str) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with Session(here.node, [child.endpoint]) as session:
        child.kill()
        begun = time.monotonic()
        assert outcome(here.pull(session, how=how, seconds=0.6), begun) in LOST
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
        transfer = here.pull(session, how=how, seconds=0.8)
        assert slow.reached.wait(5)
        child.kill()
        assert outcome(transfer, begun) in LOST
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
        close = Moving._close

        def killing(moving: Moving, *, whole: bool) -> None:
            if child.process.is_alive():
                child.kill()
            close(moving, whole=whole)

        patch.setattr(Moving, "_close", killing)
        begun = time.monotonic()
        transfer = here.pull(session, how="direct", seconds=0.8)
        assert outcome(transfer, begun) in LOST
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
        child.signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert outcome(here.pull(session, how=how, seconds=0.7), begun) == "deadline"
        child.signal(signal.SIGCONT)
        here.pull(session, how=how, seconds=10).wait(15)
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
            both[0].signal(signal.SIGSTOP)
        here.pull(session, seconds=SECONDS).wait(SECONDS + SLACK)
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
    child.ask("offer", request="r", seconds=0.3)
    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:
        Slow(patch, 0.06)
        begun = time.monotonic()
        transfer = here.pull(session, how="direct")
        assert outcome(transfer, begun) == "lease_expired"
    assert child.ask("state")["released"] == [["r", "expired"]]
    works(here, child)


@mostly
def test_a_byte_that_changes_on_the_way(
    here: Here, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children.take(SOURCE, here.transport, 1, name="source")
    child.ask("offer", request="r")
    with monkeypatch.context() as patch, Session(here.node, [child.endpoint]) as session:
        move = Moving._move

        def spoiled(moving: Moving, copies: Any, *rest: Any) -> None:
            move(moving, copies, *rest)
            here.node.pools[copies[0].dst_pool][copies[0].dst[-1]] ^= 1

        patch.setattr(Moving, "_move", spoiled)
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
        "seconds": 1.0,
    }  # fmt: skip
    child = children.take(SOURCE, here.transport, 3, name="reader", slow=0.05)
    child.tell({"do": "move", "about": about})
    until(lambda: len(here.node.leases) > 0)
    child.signal(number)
    here.settled()
    assert here.rank.released == []
    again = children.take(SOURCE, here.transport, 3, name="reader")
    assert again.ask("move", **about | {"seconds": 10.0}) == {"code": "ok"}
    assert here.rank.released == [("kept", "read")]
    here.rank.released.clear()
    here.settled()


@mostly
def test_a_reader_that_starts_again_frees_what_it_had(here: Here, children: Children) -> None:
    """Its last run's lease would have lasted; its name says that it is gone."""
    here.rank.offer("kept")
    child = children.take(SOURCE, here.transport, 3, name="reader", slow=0.05)
    about: dict[str, Any] = {
        "way": "pull", "endpoints": [here.node.endpoint], "how": "staged", "seconds": 50.0,
    }  # fmt: skip
    child.tell({"do": "move", "about": about | {"request": "kept"}})
    until(lambda: len(here.node.leases) > 0)
    child.kill()
    again = children.take(SOURCE, here.transport, 3, name="reader")
    again.ask("move", **about | {"request": "unheard of"})
    here.settled(2.0)
    here.node.withdraw("kept")
    here.rank.released.clear()


@over
@pytest.mark.parametrize("how", ["direct", "staged"])
def test_the_source_of_a_push_is_killed(here: Here, children: Children, how: str) -> None:
    """Nothing is ready here, whatever had been written; the next push is."""
    here.wipe()
    expected = here.node.expect("pushed", here.blocks, TOKENS, source=SOURCE)
    about: dict[str, Any] = {
        "way": "push", "endpoints": [here.node.endpoint], "request": "pushed", "how": how,
        "seconds": 1.0,
    }  # fmt: skip
    child = children.take(SOURCE, here.transport, 1, name="pusher", slow=0.05)
    child.tell({"do": "move", "about": about})
    until(lambda: len(here.node.leases) > 0)
    child.kill()
    here.settled()
    assert not expected.ready.is_set()
    again = children.take(SOURCE, here.transport, 1, name="pusher")
    assert again.ask("move", **about | {"seconds": 10.0}) == {"code": "ok"}
    assert expected.ready.is_set()
    here.assert_has(SOURCE, 1)
    here.node.forget("pushed")
    here.settled()


# -- any moment -----------------------------------------------------------------------------


@over
@pytest.mark.parametrize("point", range(POINTS // len(TRANSPORTS)))
def test_killed_at_any_moment(here: Here, children: Children, point: int) -> None:
    """A transfer of some kind, and the other process dies at some moment of it."""
    rng = random.Random(f"{point} {here.transport}")  # noqa: S311
    way = rng.choice(["pull", "push", "pulled", "pushed"])
    how = rng.choice(["direct", "staged", "auto"])
    checksums, stop = rng.random() < 0.3, rng.random() < 0.2
    moment = rng.random() ** 2 * (0.12 if how == "staged" else 0.03)
    child = children.take(SOURCE, here.transport, 1, name="other")
    here.wipe()
    about: dict[str, Any] = {"how": how, "seconds": 1.0, "checksums": checksums}
    there = about | {"endpoints": [here.node.endpoint], "request": "r"}

    def strike() -> None:
        time.sleep(moment)
        child.signal(signal.SIGSTOP if stop else signal.SIGKILL)

    striking = threading.Thread(target=strike)
    if way in ("pull", "push"):
        if way == "pull":
            child.ask("offer", request="r")
        else:
            child.ask("expect", request="r", source=TARGET.to_json().decode())
        with Session(here.node, [child.endpoint]) as session:
            begun = time.monotonic()
            if way == "pull":
                transfer = here.pull(session, **about)
            else:
                transfer = session.push("r", src_blocks=here.blocks, tokens=TOKENS, **about)
            striking.start()
            said = outcome(transfer, begun)
        if way == "pull" and said == "ok":
            here.assert_has(SOURCE, 1)
        assert said in LOST | {"ok", "lease_expired", "unknown_session"}
    else:
        if way == "pulled":
            here.rank.offer("r")
        else:
            expected = here.node.expect("r", here.blocks, TOKENS, source=SOURCE)
        child.tell({"do": "move", "about": there | {"way": way.removesuffix("ed")}})
        until(lambda: here.node.metrics.values["messages"] > 0)
        striking.start()
        striking.join()
        here.settled()
        if way == "pushed":
            if expected.ready.is_set():
                here.assert_has(SOURCE, 1)
            here.node.forget("r")
        else:
            here.node.withdraw("r")
            assert [why for _, why in here.rank.released] in (["withdrawn"], ["read"])
            here.rank.released.clear()
    striking.join()
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="other"))
