"""Pushes: who may write, until when, and when all of it is there."""

from __future__ import annotations

import threading
from typing import Any

from kvatlas.errors import Code
from kvatlas.wire import Session
from kvatlas.wire.leases import Leases
from tests.wire.faulty import Gate, failure, pair
from tests.wire.helpers import End, as_it_is, assert_arrived, ends, small, until


def test_only_the_plan_that_is_expected_may_push() -> None:
    """Rank 0 of four has a quarter; it is not rank 0 of two, that has half."""
    target = End(small("dense", layout="BLHNC"), 50, seed=2)
    two = End(small("dense", tp=2), 50, seed=1)
    four = End(small("dense", tp=4), 50, seed=3)
    with ends(target, two, four):
        expected = target.nodes[0].expect(
            "r", target.blocks, 50, source=two.plan, pushers=["end-1", "end-3"]
        )
        for node in four.nodes[:2]:
            with Session(node, target.endpoints) as session:
                transfer = session.push("r", src_blocks=four.blocks, tokens=50)
                assert failure(transfer) is Code.UNKNOWN_REQUEST
        assert not expected.ready.is_set()
        target.buffers[0].assert_untouched()
        for node in two.nodes:
            with Session(node, target.endpoints) as session:
                session.push("r", src_blocks=two.blocks, tokens=50).wait(10)
        assert expected.ready.is_set()
        assert_arrived(two, target, 0)


def test_what_has_arrived_is_not_written_again() -> None:
    with ends(*pair()) as (source, target):
        expected = target.nodes[0].expect(
            "r", target.blocks, 50, source=source.plan, pushers=["end-1"]
        )
        about: dict[str, Any] = {"src_blocks": source.blocks, "tokens": 50}
        gate = target.arounds = Gate()
        with Session(source.nodes[0], target.endpoints) as session:
            slow = session.push("r", **about, how="staged")
            assert gate.reached.wait(5)
            target.arounds = as_it_is
            session.push("r", **about, how="direct").wait(10)
            assert expected.ready.is_set()
            gate.opened.set()
            assert failure(slow) is Code.LEASE_EXPIRED
            assert failure(session.push("r", **about)) is Code.UNKNOWN_REQUEST
        assert_arrived(source, target, 0)
        target.nodes[0].forget("r")
        until(lambda: target.nodes[0].staging.free == 4)
        target.assert_idle()


def test_a_rank_that_has_arrived_is_not_pushed_again() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        expected = target.nodes[0].expect(
            "r", target.blocks, 50, source=source.plan, pushers=["end-1"]
        )
        about: dict[str, Any] = {"src_blocks": source.blocks, "tokens": 50, "how": "direct"}
        with (
            Session(source.nodes[0], target.endpoints) as zero,
            Session(source.nodes[1], target.endpoints) as one,
        ):
            zero.push("r", **about).wait(10)
            assert failure(zero.push("r", **about)) is Code.UNKNOWN_REQUEST
            assert not expected.ready.is_set(), "rank 1 has not pushed"
            one.push("r", **about).wait(10)
            assert expected.ready.is_set()
        assert_arrived(source, target, 0)


def test_parts_of_a_push_are_not_the_whole() -> None:
    with ends(*pair()) as (source, target):
        expected = target.nodes[0].expect(
            "r", target.blocks, 50, source=source.plan, pushers=["end-1"]
        )
        with Session(source.nodes[0], target.endpoints) as session:
            for about in ({"tokens": (0, 49)}, {"tokens": 50, "layers": ["layers.0.attn"]}):
                session.push("r", src_blocks=source.blocks, **about).wait(10)
                assert not expected.ready.is_set()


def test_blocks_that_are_no_longer_expected_are_not_touched() -> None:
    """Once `forget` returns nothing is scattered into them, however far the push had come."""
    with ends(*pair()) as (source, target):
        target.nodes[0].expect("r", target.blocks, 50, source=source.plan, pushers=["end-1"])
        gate = target.arounds = Gate()
        with Session(source.nodes[0], target.endpoints) as session:
            transfer = session.push("r", src_blocks=source.blocks, tokens=50, how="staged")
            assert gate.reached.wait(5)
            target.nodes[0].forget("r")
            gate.opened.set()
            assert failure(transfer) is Code.LEASE_EXPIRED
        target.buffers[0].assert_untouched()
        until(lambda: target.nodes[0].staging.free == 4)
        target.assert_idle()


def test_every_thread_that_ends_a_lease_waits_for_its_last_copy() -> None:
    """A sweep and `forget` end a lease at once: neither returns while a piece is copied."""
    leases = Leases(lambda _: None)
    lease = leases.grant(
        10.0, session=b"s", request="r", direction="push", peer_rank=0, complete=True,
        stream=None, entries=1,
    )  # fmt: skip
    threads = [
        threading.Thread(target=leases.drop_all),
        threading.Thread(target=leases.drop_request, args=("r", "push")),
        threading.Thread(target=leases.drop, args=(lease,)),
    ]
    with lease.guard:  # a piece is being copied
        for thread in threads:
            thread.start()
            thread.join(0.1)
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert len(leases) == 0
