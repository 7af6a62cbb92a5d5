"""Memory that a transport was given is left alone until the transport is done with it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, How, Session, protocol
from kvatlas.wire.quarantine import Quarantine
from tests.wire.attacked import Attacked, code_of, opening
from tests.wire.faulty import Act, Gate, Late, Stalled, failure, pair, pull, pull_block, works
from tests.wire.helpers import (
    End,
    LocalLink,
    as_it_is,
    assert_arrived,
    ends,
    pull_all,
    small,
    until,
)


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_blocks_of_a_direct_read_are_not_released_before_it_is_over(end: str) -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        stalled = target.arounds = Stalled()
        with Session(target.nodes[0], source.endpoints) as session:
            seconds = 0.3 if end == "deadline" else 30.0
            transfer = pull(session, target, how="direct", timeout=seconds)
            assert stalled.posted.wait(5)
            if end == "cancel":
                transfer.cancel()
                assert transfer.done, "cancelling does not wait"
            right = Code.DEADLINE if end == "deadline" else Code.CANCELLED
            assert failure(transfer) is right
            until(lambda: len(target.nodes[0].quarantine) == 1)
            assert not transfer.wait_released(0.2)
            target.buffers[0].assert_untouched()
            stalled.reads[0].arrive()
            assert transfer.wait_released(5)
            assert len(target.nodes[0].quarantine) == 0
        source.nodes[0].withdraw("r")
        works(source, target)


def test_a_transfer_that_has_ended_posts_no_further_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.client.pull_pipeline._BATCH", 8192)
    gate, posted = Gate(), []

    def around(act: Act, copies: Sequence[Copy]) -> Handle:
        posted.append(copies)
        return gate(act, copies)

    with ends(*pair()) as (source, target):
        source.offer("r")
        target.arounds = around
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="direct", timeout=30.0)
            assert gate.reached.wait(5)
            transfer.cancel()
            gate.opened.set()
            assert transfer.wait_released(5)
        assert len(posted) == 1
        source.nodes[0].withdraw("r")
        target.buffers[0].before = target.buffers[0].copy()
        works(source, target)


def test_buffers_of_a_staged_read_are_not_lent_before_it_is_over() -> None:
    """The blocks are only ever written here, so nothing late can reach them."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        node = target.nodes[0]
        stalled = target.arounds = Stalled()
        with Session(node, source.endpoints) as session:
            transfer = pull(session, target, how="staged", timeout=0.3)
            assert stalled.posted.wait(5)
            assert failure(transfer) is Code.DEADLINE
            until(lambda: len(node.quarantine) == 1)
            assert node.staging.free == 2
            assert transfer.wait_released(5), "its blocks were never given to the transport"
            stalled.reads[0].arrive()
            until(lambda: node.staging.free == 4)
            target.buffers[0].assert_untouched()
        source.nodes[0].withdraw("r")
        works(source, target)


def test_nothing_that_is_pushed_arrives_after_forget() -> None:
    """However late: it lands in staging memory, whose buffers nobody else has yet."""
    with ends(*pair()) as (source, target):
        node = target.nodes[0]
        node.expect("r", target.blocks, 50, source=source.plan, pushers=["end-1"])
        stalled = target.arounds = Stalled()
        with Session(source.nodes[0], target.endpoints) as session:
            transfer = session.push("r", source_blocks=source.blocks, tokens=50, timeout=0.5)
            assert stalled.posted.wait(5)
            node.forget("r")
            assert failure(transfer) in (Code.LEASE_EXPIRED, Code.DEADLINE)
            until(lambda: len(node.quarantine) == 1)
            assert node.staging.free == 2
            stalled.reads[0].arrive()
            target.buffers[0].assert_untouched()
            until(lambda: node.staging.free == 4)
        target.buffers[0].assert_untouched()
        works(source, target)


def test_a_link_that_does_not_come_to_rest_is_torn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.quarantine._PATIENCE", 0.1)
    quarantine, over = Quarantine(), threading.Event()
    stuck = Late(lambda: None)  # type: ignore[arg-type, return-value]
    quarantine.hold([stuck], over.set, sever=stuck.arrived.set)
    assert over.wait(5)
    assert len(quarantine) == 0


def test_a_replica_that_stalls_leaves_time_for_another() -> None:
    """Its link is torn down first, so that nothing of it can arrive in the same blocks."""
    source, target = pair()
    other = End(source.plan, 50, seed=1)
    with ends(source, other, target):
        for end in (source, other):
            end.offer("r")
        severed: list[Any] = []
        links = target.nodes[0].transport.links  # type: ignore[attr-defined]

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            del copies
            if severed:
                return act()
            late = Late(act)

            def sever() -> None:
                severed.append(late)
                late.arrived.set()

            for link in links:
                link.sever = sever
            return late

        target.arounds = around
        endpoints = source.endpoints + other.endpoints
        with Session(target.nodes[0], endpoints) as session:
            transfer = pull(session, target, how="direct", timeout=4.0).wait(6)
            assert transfer.ready
            assert transfer.seconds < 3.5
        assert len(severed) == 1
        assert_arrived(source, target, 0)


class GridLink(LocalLink):
    """A link that computes runs itself, so that its lease is renewed during a read."""

    adds = True


def test_a_read_that_outlives_its_session_does_not_reach_a_later_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is connected to again only if the first read can no longer write."""
    monkeypatch.setattr("tests.wire.helpers.LocalLink", GridLink)
    with ends(*pair()) as (source, target):
        source.offer("r")
        stalled = Stalled()
        target.arounds = lambda act, copies: act() if stalled.reads else stalled(act, copies)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="direct", timeout=2.0)
            assert stalled.posted.wait(5)
            source.nodes[0].answers.sessions._open.clear()  # as after seconds without connections
            failure(transfer)
            assert not transfer.wait_released(0.1)
            assert target.nodes[0].ledger.uses() == {"quarantined": 1}
            stalled.reads[0].arrive()
            assert transfer.wait_released(5)
        assert len(stalled.reads) == 1


def test_a_replica_that_stalls_never_had_the_blocks() -> None:
    """Left to choose, a transfer with replicas is staged: the next one need not wait."""
    source = End(small("dense"), 50, seed=1)
    target = End(small("dense", layout="BLHNC"), 50, seed=2, buffers=8)
    other = End(source.plan, 50, seed=1)
    with ends(source, other, target):
        for end in (source, other):
            end.offer("r")
        stalled = Stalled()

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            return act() if stalled.reads else stalled(act, copies)

        target.arounds = around
        with Session(target.nodes[0], source.endpoints + other.endpoints) as session:
            transfer = pull(session, target, timeout=4.0, checksums=True).wait(6)
            assert transfer.ready
            assert transfer.released
        assert target.nodes[0].staging.free == 6
        stalled.reads[0].arrive()
        until(lambda: target.nodes[0].staging.free == 8)
        assert_arrived(source, target, 0)


def test_a_deadline_is_kept_behind_transfers_that_are_stuck() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        stalled = target.arounds = Stalled()
        with Session(target.nodes[0], source.endpoints) as session:
            about: dict[str, Any] = {"how": "direct", "timeout": 20}
            many = [pull_block(session, block, **about) for block in range(70)]
            assert stalled.posted.wait(5)
            begun = time.monotonic()
            with pytest.raises(AtlasError) as refusal:
                pull_block(session, 70, how="direct", timeout=0.3).wait()
            assert refusal.value.code is Code.DEADLINE
            assert time.monotonic() - begun < 3
            for one in many:
                one.cancel()
            target.arounds = as_it_is
            until(lambda: not any(one.cancelled and not one.done for one in many))
            while not all(one.wait_released(0.05) for one in many):
                for read in list(stalled.reads):
                    read.arrived.set()
        source.nodes[0].withdraw("r")
        works(source, target)


# -- whose word counts ------------------------------------------------------------------------


def test_an_offer_is_read_by_those_it_names(attacked: Attacked) -> None:
    node, source = attacked.node, attacked.source
    node.offer("named", source.blocks, 50, readers=["decode"])
    stranger = attacked.session(name="somebody else")
    assert code_of(attacked.open(stranger, request="named")) == "unknown_request"
    named = attacked.session(name="decode")
    opened = attacked.raw.ask(opening(named, request="named"))
    assert code_of(opened) == "opened"
    attacked.raw.ask(protocol.Close(session=named, lease=opened.lease, complete=False))
    node.withdraw("named")
    attacked.works()


# -- locks ------------------------------------------------------------------------------------


@contextmanager
def switching_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_locks_are_taken_in_one_order() -> None:
    """Everything that takes a lock at once, with threads that switch at every chance."""
    source = End(small("dense", 64, memory="8MiB"), 32, seed=1, buffers=8)
    target = End(small("dense", 64, layout="BHLNC", memory="8MiB"), 32, seed=2, buffers=8)
    over = time.monotonic() + 2.0
    ended: list[str] = []

    def requests(number: int) -> None:
        node, blocks = source.nodes[0], [2 * number, 2 * number + 1]
        turn = 0
        with Session(target.nodes[0], source.endpoints) as session:
            while time.monotonic() < over:
                turn += 1
                name = f"{number} {turn}"
                node.offer(name, blocks, 32, timeout=0.05 if turn % 3 else 30)
                about: dict[str, Any] = {"destination_blocks": blocks, "tokens": 32, "timeout": 10}
                moving = session.pull(name, how=get_args(How)[turn // 4 % 4], **about)
                if turn % 4 == 0:
                    node.withdraw(name)
                if turn % 5 == 0:
                    moving.cancel()
                assert moving.wait_released(20), "it hangs"
                node.withdraw(name)
        ended.append("pulled")

    def pushes(number: int) -> None:
        blocks = [2 * number, 2 * number + 1]
        turn = 0
        with Session(source.nodes[0], target.endpoints) as session:
            while time.monotonic() < over:
                turn += 1
                name = f"{number} {turn}"
                target.nodes[0].expect(name, blocks, 32, source=source.plan, pushers=["end-1"])
                about: dict[str, Any] = {"source_blocks": blocks, "tokens": 32, "timeout": 10}
                moving = session.push(name, how=("direct", "staged")[turn % 2], **about)
                if turn % 3 == 0:
                    target.nodes[0].forget(name)
                assert moving.wait_released(20), "it hangs"
                target.nodes[0].forget(name)
        ended.append("pushed")

    with ends(source, target), switching_all_the_time():
        threads = [threading.Thread(target=requests, args=(n,)) for n in range(6)]
        threads += [threading.Thread(target=pushes, args=(n,)) for n in range(6, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert sorted(ended) == ["pulled"] * 6 + ["pushed"] * 4, "a thread hangs"
        until(lambda: len(source.nodes[0].leases) == 0 == len(target.nodes[0].leases))
        source.assert_idle(8)
        target.assert_idle(8)
        source.offer("after")
        target.buffers[0].before = target.buffers[0].copy()
        pull_all(source, target, "after")


def test_many_pulls_wait_for_buffers_rather_than_go_the_slow_way() -> None:
    """Costs say that staging is faster: 64 in flight are all staged, with buffers for two."""
    from kvatlas.routing import Costs

    many, each = 64, 32
    source = End(small("dense", many * each, memory="8MiB"), many * each, seed=1)
    target = End(small("dense", many * each, layout="BHLNC", memory="8MiB"), many * each, seed=2)
    with ends(source, target), Session(target.nodes[0], source.endpoints) as session:
        for n in range(many):
            source.nodes[0].offer(f"r{n}", [2 * n, 2 * n + 1], each)
        costs = Costs(descriptor=1.0)
        moving = [
            session.pull(f"r{n}", destination_blocks=[2 * n, 2 * n + 1], tokens=each, costs=costs)
            for n in range(many)
        ]
        assert all(one.wait(30).ready for one in moving)
        assert "direct" not in target.nodes[0].metrics.seconds
        source.blocks = target.blocks = {0: list(range(2 * many))}
        assert_arrived(source, target, 0)
        source.assert_idle()
        target.assert_idle()


@pytest.mark.parametrize("end", ["here", "there"])
def test_a_short_pull_does_not_wait_for_buffers_that_long_ones_keep(end: str) -> None:
    """It would be a little faster with them, and waits no longer than that is worth."""
    from kvatlas.routing import Costs

    with ends(*pair()) as (source, target):
        source.offer("r")
        lends = (target if end == "here" else source).nodes[0].staging
        kept = lends.acquire(2, for_peer=end == "there")
        costs = Costs(descriptor=1e-5, wire=1e12, copy=1e12 if end == "here" else 1e9)
        with Session(target.nodes[0], source.endpoints) as session:
            done = pull(session, target, costs=costs, timeout=30).wait(40)
            assert done.seconds < 10
        assert "direct" in target.nodes[0].metrics.seconds
        assert_arrived(source, target, 0)
        lends.give_back(kept)
        works(source, target)


@pytest.mark.parametrize("measured", [False, True])
def test_who_waits_for_buffers_leaves_time_to_go_without(*, measured: bool) -> None:
    """Also the first pull over a link, which would measure it with buffers of the peer."""
    from kvatlas.routing import Costs

    with ends(*pair()) as (source, target):
        source.offer("r")
        lends = source.nodes[0].staging
        kept = lends.acquire(2, for_peer=True)
        costs = None if measured else Costs(descriptor=2e-3, wire=1e12, copy=1e12)  # 1.6 s
        with Session(target.nodes[0], source.endpoints) as session:
            pull(session, target, costs=costs, timeout=4).wait(8)
        assert "direct" in target.nodes[0].metrics.seconds
        assert_arrived(source, target, 0)
        lends.give_back(kept)
        works(source, target)
