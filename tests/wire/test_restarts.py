"""Replicas that take over, peers that start again, and links that several use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Session
from tests.wire.faulty import (
    Act,
    Gate,
    Stuck,
    failure,
    lost,
    pair,
    pull,
    pull_block,
    spoiled,
    works,
)
from tests.wire.helpers import End, as_it_is, assert_arrived, ends, small


@pytest.mark.parametrize("code", [Code.PEER_LOST, Code.CHECKSUM, Code.UNKNOWN_REQUEST])
def test_another_replica_does_it(code: Code) -> None:
    """Both replicas of a rank hold the same bytes; the first one fails in its own way."""
    source, target = pair()
    second = End(source.plan, 50, seed=1)
    with ends(source, second, target):
        second.offer("r")
        if code is not Code.UNKNOWN_REQUEST:
            source.offer("r")
        first = threading.Lock()

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            if code is Code.UNKNOWN_REQUEST or not first.acquire(blocking=False):
                return act()
            wrong = lost if code is Code.PEER_LOST else spoiled(target, 0)
            return wrong(act, copies)

        target.arounds = around
        with Session(target.nodes[0], source.endpoints + second.endpoints) as session:
            assert [peer.rank for peer in session.peers] == [0, 0]
            transfer = pull(session, target, how="direct", checksums=True).wait(10)
            assert transfer.moved == transfer.total
        assert_arrived(source, target, 0)
        assert second.released == [(0, "r", "read")]
        assert source.released == []
        source.nodes[0].withdraw("r")
        works(source, target)


def test_a_replica_that_is_silent_leaves_time_for_the_others() -> None:
    source, target = pair()
    second = End(source.plan, 50, seed=1)
    with ends(source, second, target):
        second.offer("r")
        second.offer("again")
        with Session(target.nodes[0], source.endpoints + second.endpoints) as session:
            source.nodes[0].server.close()
            pull(session, target, timeout=1.5).wait(10)
            begun = time.monotonic()
            pull(session, target, "again", timeout=1.5).wait(10)
            assert time.monotonic() - begun < 0.7, "who answered comes first the next time"
        assert_arrived(source, target, 0)


def restarted(source: End) -> End:
    """Every rank's node closed, and a new process, as it were, at each endpoint."""
    endpoints = source.endpoints
    source.close()
    return End(source.plan, 50, seed=1, listen=endpoints)


def test_a_peer_that_starts_again_is_met_again() -> None:
    source, target = pair()
    with ends(target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            pull(session, target).wait(10)
            source = restarted(source)
            with ends(source):
                source.offer("r")
                pull(session, target).wait(10)
                assert_arrived(source, target, 0)
                works(source, target)
            assert failure(pull(session, target)) is Code.PEER_LOST
            source = restarted(source)
            with ends(source):
                source.offer("r")
                pull(session, target).wait(10)
                source.assert_idle()


def test_parts_of_two_plans_never_make_up_a_request() -> None:
    """A rank comes back with another plan, in which its share has as many bytes as before.

    Layers 0 and 1 of it and half the heads of all layers: the sum is right, the bytes are not.
    """
    source, target = pair({"pp": 2})
    other = small("dense", tp=2)
    with ends(source, target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            endpoint = source.nodes[0].endpoint
            source.nodes[0].close()
            changed = End(other, 50, seed=3, listen=[endpoint, "tcp://127.0.0.1:0"])
            with ends(changed):
                changed.offer("r")
                assert failure(pull(session, target, timeout=3)) is Code.PEER_LOST
                source.nodes[1].withdraw("r")
                with pytest.raises(AtlasError) as refusal:
                    Session(target.nodes[0], [endpoint, source.nodes[1].endpoint])
                assert refusal.value.code is Code.PEER_LOST
                for buffers in target.buffers:
                    for index, whole in buffers.whole.items():
                        whole[:] = buffers.before[index]
                with Session(target.nodes[0], changed.endpoints) as again:
                    pull(again, target).wait(10)
                assert_arrived(changed, target, 0)


def test_a_failure_does_not_close_the_link_of_others() -> None:
    """One transfer runs into its deadline while another, on the same link, is under way."""
    with ends(*pair()) as (source, target):
        source.offer("slow")
        source.offer("short")
        gate = Gate()
        first = threading.Lock()

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            if first.acquire(blocking=False):
                return gate(act, copies)
            return Stuck()

        target.arounds = around
        with Session(target.nodes[0], source.endpoints) as session:
            slow = pull(session, target, "slow", how="direct")
            assert gate.reached.wait(5)
            short = pull_block(session, 40, "short", how="direct", timeout=0.2)
            assert failure(short) is Code.DEADLINE
            gate.opened.set()
            slow.wait(10)
        assert not any(link.open for link in target.nodes[0].transport.links)  # type: ignore[attr-defined]
        source.nodes[0].withdraw("short")
        works(source, target)


def test_hands_are_shaken_once_for_many_transfers() -> None:
    with ends(*pair()) as (source, target):
        transport: Any = target.nodes[0].transport
        with Session(target.nodes[0], source.endpoints) as session:
            target.arounds = lost
            source.offer("r")
            assert failure(pull(session, target)) is Code.PEER_LOST
            target.arounds = as_it_is
            before = len(transport.links)
            for number in range(12):
                source.offer(f"r{number}")
            many = [pull_block(session, 40 + n, f"r{n}") for n in range(12)]
            for one in many:
                one.wait(10)
            assert len(transport.links) == before + 1
        assert not any(link.open for link in transport.links)


def test_a_session_needs_all_ranks_that_take_part() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        with Session(target.nodes[0], source.endpoints[:1]) as session:
            with pytest.raises(AtlasError) as refusal:
                pull(session, target)
            assert refusal.value.code is Code.NOT_A_SOURCE
        with Session(target.nodes[0], []) as session, pytest.raises(AtlasError) as refusal:
            pull(session, target)
        assert refusal.value.code is Code.PEER_LOST


def test_a_session_that_cannot_be_opened_leaves_no_link() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        begun = time.monotonic()
        with pytest.raises(AtlasError) as refusal:
            Session(target.nodes[0], [*source.endpoints, "tcp://127.0.0.1:1"], timeout=30)
        assert refusal.value.code is Code.PEER_LOST
        assert time.monotonic() - begun < 5
        assert not any(link.open for link in target.nodes[0].transport.links)  # type: ignore[attr-defined]
