"""Faults at known moments, inside one process: what fails delivers nothing, and leaves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.route import Copy
from kvatlas.wire import Handle, Session, Transfer
from kvatlas.wire.transport import STAGING
from tests.wire.helpers import Around, End, as_it_is, assert_arrived, ends, pull_all, small, until

Act = Callable[[], Handle]


def pair(src: dict[str, Any] | None = None, dst: dict[str, Any] | None = None) -> tuple[End, End]:
    source = End(small("dense", **src or {}), 50, seed=1)
    return source, End(small("dense", **{"layout": "BLHNC"} | (dst or {})), 50, seed=2)


def failure(transfer: Transfer, seconds: float = 10.0) -> Code:
    """How a transfer ends, which must not be well."""
    with pytest.raises(AtlasError) as refusal:
        transfer.wait(seconds)
    assert transfer.done
    assert not transfer.ready
    return refusal.value.code


def pull(session: Session, target: End, request: str = "r", **about: Any) -> Transfer:
    return session.pull(request, dst_blocks=target.blocks, **{"tokens": 50} | about)


def works(source: End, target: End, **about: Any) -> None:
    """All is as it was: nothing is lent, and the next transfer arrives."""
    until(lambda: all(len(node.leases) == 0 for node in source.nodes))
    source.assert_idle()
    target.assert_idle()
    target.arounds = source.arounds = as_it_is
    source.offer("next")
    pull_all(source, target, "next", **about)


class Gate:
    """Holds the transport's n-th operation until it is opened."""

    def __init__(self, number: int = 0) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.left = number

    def __call__(self, act: Act, copies: Sequence[Copy]) -> Handle:
        del copies
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(20)
        self.left -= 1
        return act()


# -- leases -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["direct", "staged"])
@pytest.mark.parametrize("end", ["expired", "withdrawn"])
def test_a_read_does_not_count_if_the_lease_ended_during_it(how: str, end: str) -> None:
    with ends(*pair()) as (source, target):
        gate = target.arounds = Gate()
        source.offer("r", seconds=0.3 if end == "expired" else 60)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how=how)
            assert gate.reached.wait(5)
            if end == "withdrawn":
                source.nodes[0].withdraw("r")
            until(lambda: source.released == [(0, "r", end)])
            gate.opened.set()
            assert failure(transfer) is Code.LEASE_EXPIRED
        works(source, target)


def test_layers_count_only_while_the_lease_is_held() -> None:
    with ends(*pair()) as (source, target):
        gate = target.arounds = Gate(2)
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, streamed=True)
            assert gate.reached.wait(5)
            until(lambda: len(transfer.layers) == 2)
            source.nodes[0].withdraw("r")
            gate.opened.set()
            assert failure(transfer) is Code.LEASE_EXPIRED
            assert transfer.layers == {"layers.0.attn", "layers.1.attn"}
        works(source, target)


def test_a_long_transfer_renews_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer lasts; the lease is asked for again while bytes are still on their way."""
    monkeypatch.setattr("kvatlas.wire.moving._BATCH", 1000)
    with ends(*pair()) as (source, target):
        source.offer("r")
        (node,) = source.nodes
        add = node.leases.add
        node.leases.add = lambda seconds, **about: add(min(seconds, 0.2), **about)  # type: ignore[method-assign]

        def slowly(act: Act, copies: Sequence[Copy]) -> Handle:
            del copies
            time.sleep(0.02)
            return act()

        target.arounds = slowly
        pull_all(source, target, "r", how="direct")
        works(source, target)


def test_a_request_may_be_expected_and_offered_at_once() -> None:
    """What ends the one does not end the leases of the other."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        source.nodes[0].expect("r", [9, 8, 7, 6], 50, source=target.plan)
        gate = target.arounds = Gate()
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="direct")
            assert gate.reached.wait(5)
            source.nodes[0].forget("r")
            gate.opened.set()
            transfer.wait(10)
        works(source, target)


# -- bytes --------------------------------------------------------------------------------


def spoiled(end: End, pool: int, *, once: bool = True) -> Around:
    """Change a byte of what has just arrived in a pool of the end's first rank."""
    done = threading.Event()

    def around(act: Act, copies: Sequence[Copy]) -> Handle:
        handle = act()
        if copies and copies[0].dst_pool == pool and not (once and done.is_set()):
            done.set()
            at = int(copies[0].dst[0])
            end.nodes[0].pools[pool][at] ^= 0x10
        return handle

    return around


@pytest.mark.parametrize(("how", "pool"), [("direct", 0), ("staged", STAGING)])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_byte_that_changes_on_the_way_is_noticed(how: str, pool: int, way: str) -> None:
    with ends(*pair()) as (source, target):
        if way == "pull":
            source.offer("r")
            target.arounds = spoiled(target, pool)
            with Session(target.nodes[0], source.endpoints) as session:
                transfer = pull(session, target, how=how, checksums=True)
                assert failure(transfer) is Code.CHECKSUM
                assert source.released == []
                pull(session, target, how=how, checksums=True).wait(10)
        else:
            expected = target.nodes[0].expect("r", target.blocks, 50, source=source.plan)
            source.arounds = spoiled(target, pool)
            with Session(source.nodes[0], target.endpoints) as session:
                about: dict[str, Any] = {"src_blocks": source.blocks, "tokens": 50, "how": how}
                assert failure(session.push("r", **about, checksums=True)) is Code.CHECKSUM
                assert not expected.ready.is_set()
                session.push("r", **about, checksums=True).wait(10)
                assert expected.ready.is_set()
        assert_arrived(source, target, 0)
        works(source, target)


def test_without_checksums_it_is_not() -> None:
    """The control: it is the checksums that notice."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        target.arounds = spoiled(target, 0)
        with Session(target.nodes[0], source.endpoints) as session:
            assert pull(session, target, how="direct").wait(10).ready
        with pytest.raises(AssertionError, match="wrong"):
            assert_arrived(source, target, 0)


def test_layers_count_after_their_checksums() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        target.arounds = spoiled(target, 0)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, streamed=True, checksums=True)
            assert failure(transfer) is Code.CHECKSUM
            assert transfer.layers == set()
            again = pull(session, target, streamed=True, checksums=True).wait(10)
            assert again.layers == set(target.plan.layers)


# -- calling off --------------------------------------------------------------------------


class Stuck(Handle):
    """An operation that never ends, and knows whether it was given up."""

    released = False

    def poll(self) -> bool:
        return False

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize("how", ["direct", "staged"])
@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_an_operation_that_never_ends_is_given_up(how: str, end: str) -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        stuck = Stuck()
        posted = threading.Event()

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            del act, copies
            posted.set()
            return stuck

        target.arounds = around
        session = Session(target.nodes[0], source.endpoints)
        begun = time.monotonic()
        transfer = pull(session, target, how=how, seconds=0.4 if end == "deadline" else 30)
        assert posted.wait(5)
        if end == "cancel":
            transfer.cancel()
        if end == "close":
            session.close()
            assert transfer.done
        right = Code.DEADLINE if end == "deadline" else Code.CANCELLED
        assert failure(transfer) is right
        assert stuck.released
        assert time.monotonic() - begun < 5
        session.close()
        works(source, target)


def test_transfers_that_wait_their_turn_end_with_the_session() -> None:
    """More than there are workers: none is left behind that nobody ends."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        gate = target.arounds = Gate()
        session = Session(target.nodes[0], source.endpoints)
        many = [pull(session, target, how="direct") for _ in range(40)]
        assert gate.reached.wait(5)
        closing = threading.Thread(target=session.close)
        closing.start()
        until(lambda: all(one.cancelled for one in many))
        gate.opened.set()
        closing.join(10)
        assert not closing.is_alive()
        assert all(one.done for one in many)
        with pytest.raises(AtlasError) as refusal:
            pull(session, target)
        assert refusal.value.code is Code.PEER_LOST
        source.nodes[0].withdraw("r")
        works(source, target)


@pytest.mark.parametrize("problem", [RuntimeError("broken"), OSError(5, "io")])
def test_a_transport_that_breaks_is_a_coded_failure(problem: Exception) -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")

        def around(act: Act, copies: Sequence[Copy]) -> Handle:
            del act, copies
            raise problem

        target.arounds = around
        with Session(target.nodes[0], source.endpoints) as session:
            assert failure(pull(session, target)) is Code.WIRE_FAILED
            assert target.nodes[0].metrics.outcomes["pull", "wire_failed"] == 1
        works(source, target)


def test_one_rank_that_fails_calls_the_others_off() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        source.nodes[0].offer("r", source.blocks, 50)
        gate = target.arounds = Gate()
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="direct")
            assert gate.reached.wait(5)
            until(lambda: transfer.error is not None)
            gate.opened.set()
            assert failure(transfer) is Code.UNKNOWN_REQUEST
        source.nodes[0].withdraw("r")
        works(source, target)


# -- replicas and restarts ----------------------------------------------------------------


def lost(act: Act, copies: Sequence[Copy]) -> Handle:
    del act, copies
    raise AtlasError(Code.PEER_LOST, "rule", got="gone", hint="hint")


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
            source.nodes[0]._server.close()
            pull(session, target, seconds=1.5).wait(10)
            begun = time.monotonic()
            pull(session, target, "again", seconds=1.5).wait(10)
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
            assert failure(pull(session, target, seconds=0.3)) is Code.DEADLINE
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
                assert failure(pull(session, target, seconds=3)) is Code.PEER_LOST
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
            short = pull(session, target, "short", how="direct", seconds=0.2)
            assert failure(short) is Code.DEADLINE
            gate.opened.set()
            slow.wait(10)
        assert all(link.closed for link in target.nodes[0].transport.links)  # type: ignore[attr-defined]
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
            many = [pull(session, target, f"r{number}") for number in range(12)]
            for one in many:
                one.wait(10)
            assert len(transport.links) == before + 1
        assert all(link.closed for link in transport.links)


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
            Session(target.nodes[0], [*source.endpoints, "tcp://127.0.0.1:1"], seconds=0.3)
        assert refusal.value.code is Code.DEADLINE
        assert time.monotonic() - begun < 5
        assert all(link.closed for link in target.nodes[0].transport.links)  # type: ignore[attr-defined]


# -- pushes -------------------------------------------------------------------------------


def test_only_the_plan_that_is_expected_may_push() -> None:
    """Rank 0 of four has a quarter; it is not rank 0 of two, that has half."""
    target = End(small("dense", layout="BLHNC"), 50, seed=2)
    two = End(small("dense", tp=2), 50, seed=1)
    four = End(small("dense", tp=4), 50, seed=3)
    with ends(target, two, four):
        expected = target.nodes[0].expect("r", target.blocks, 50, source=two.plan)
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
        expected = target.nodes[0].expect("r", target.blocks, 50, source=source.plan)
        about: dict[str, Any] = {"src_blocks": source.blocks, "tokens": 50}
        gate = source.arounds = Gate()
        with Session(source.nodes[0], target.endpoints) as session:
            slow = session.push("r", **about, how="staged")
            assert gate.reached.wait(5)
            source.arounds = as_it_is
            session.push("r", **about).wait(10)
            assert expected.ready.is_set()
            gate.opened.set()
            assert failure(slow) is Code.LEASE_EXPIRED
            assert failure(session.push("r", **about)) is Code.UNKNOWN_REQUEST
        assert_arrived(source, target, 0)
        target.nodes[0].forget("r")
        target.assert_idle()


def test_a_rank_that_pushes_again_has_not_arrived_until_it_is_done() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        expected = target.nodes[0].expect("r", target.blocks, 50, source=source.plan)
        about: dict[str, Any] = {"src_blocks": source.blocks, "tokens": 50, "how": "direct"}
        with (
            Session(source.nodes[0], target.endpoints) as zero,
            Session(source.nodes[1], target.endpoints) as one,
        ):
            zero.push("r", **about).wait(10)
            gate = source.arounds = Gate()
            again = zero.push("r", **about)
            assert gate.reached.wait(5)
            source.arounds = as_it_is
            one.push("r", **about).wait(10)
            assert not expected.ready.is_set(), "rank 0 is writing"
            gate.opened.set()
            again.wait(10)
            assert expected.ready.is_set()
        assert_arrived(source, target, 0)


def test_parts_of_a_push_are_not_the_whole() -> None:
    with ends(*pair()) as (source, target):
        expected = target.nodes[0].expect("r", target.blocks, 50, source=source.plan)
        with Session(source.nodes[0], target.endpoints) as session:
            for about in ({"tokens": (0, 49)}, {"tokens": 50, "layers": ["layers.0.attn"]}):
                session.push("r", src_blocks=source.blocks, **about).wait(10)
                assert not expected.ready.is_set()


def test_blocks_that_are_no_longer_expected_are_not_touched() -> None:
    """Once `forget` returns nothing is scattered into them, however far the push had come."""
    with ends(*pair()) as (source, target):
        target.nodes[0].expect("r", target.blocks, 50, source=source.plan)
        gate = source.arounds = Gate()
        with Session(source.nodes[0], target.endpoints) as session:
            transfer = session.push("r", src_blocks=source.blocks, tokens=50, how="staged")
            assert gate.reached.wait(5)
            target.nodes[0].forget("r")
            gate.opened.set()
            assert failure(transfer) is Code.LEASE_EXPIRED
        target.buffers[0].assert_untouched()
        target.assert_idle()
