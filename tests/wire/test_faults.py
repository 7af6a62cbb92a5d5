"""Faults at known moments, inside one process: what fails delivers nothing, and leaves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.copying.memory import STAGING
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Session, protocol
from tests.wire.faulty import Act, Gate, Stuck, failure, pair, pull, pull_block, spoiled, works
from tests.wire.helpers import assert_arrived, ends, pull_all, until

# -- leases -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["direct", "staged"])
@pytest.mark.parametrize("end", ["expired", "withdrawn"])
def test_a_read_does_not_count_if_the_lease_ended_during_it(how: str, end: str) -> None:
    with ends(*pair()) as (source, target):
        gate = target.arounds = Gate()
        source.offer("r", timeout=0.3 if end == "expired" else 60)
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
    monkeypatch.setattr("kvatlas.wire.client.pull_pipeline._BATCH", 1000)
    with ends(*pair()) as (source, target):
        source.offer("r")
        (node,) = source.nodes
        grant = node.leases.grant
        node.leases.grant = lambda seconds, **about: grant(min(seconds, 0.2), **about)  # type: ignore[method-assign]

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
        source.nodes[0].expect("r", [29, 28, 27, 26], 50, source=target.plan, pushers=["end-2"])
        gate = target.arounds = Gate()
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="direct")
            assert gate.reached.wait(5)
            source.nodes[0].forget("r")
            gate.opened.set()
            transfer.wait(10)
        works(source, target)


def test_what_two_threads_land_fails_as_one() -> None:
    """A read that fails is the transfer's failure; once it is released nothing lands any more."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        reads = iter(range(100))

        def failing(act: Act, copies: Sequence[Copy]) -> Handle:
            if copies[0].destination_pool == STAGING and next(reads) == 2:
                raise AtlasError(Code.WIRE_FAILED, got="a read", hint="None")
            time.sleep(0.01)
            return act()

        target.arounds = failing
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how="coalesced")
            assert failure(transfer) is Code.WIRE_FAILED
            assert transfer.wait_released(10)
            assert next(reads) < 6, "the other thread goes on no further"
            before = {index: pool.copy() for index, pool in target.nodes[0].pools.items()}
            time.sleep(0.05)
            for index, pool in target.nodes[0].pools.items():
                assert np.array_equal(pool, before[index])
        works(source, target, how="coalesced")


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["direct", "staged"])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_byte_that_changes_on_the_way_is_noticed(how: str, way: str) -> None:
    """A direct read lands in the blocks; all others land in staging memory."""
    pool = 0 if (how, way) == ("direct", "pull") else STAGING
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
            expected = target.nodes[0].expect(
                "r", target.blocks, 50, source=source.plan, pushers=["end-1"]
            )
            target.arounds = spoiled(target, pool)
            with Session(source.nodes[0], target.endpoints) as session:
                about: dict[str, Any] = {"source_blocks": source.blocks, "tokens": 50, "how": how}
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


# -- calling off ----------------------------------------------------------------------------------


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
        transfer = pull(session, target, how=how, timeout=0.4 if end == "deadline" else 30)
        assert posted.wait(5)
        if end == "cancel":
            transfer.cancel()
        if end == "close":
            session.close()
            assert transfer.done
        right = Code.DEADLINE if end == "deadline" else Code.CANCELLED
        assert failure(transfer) is right
        assert transfer.wait_released(5)
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
        many = [pull_block(session, block, how="direct") for block in range(40)]
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
        target.buffers[0].before = target.buffers[0].copy()  # some blocks were filled
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
        answer = source.nodes[1].server.answer

        def late(question: Any, caller: Any) -> Any:
            """Rank 1 refuses the pull once rank 0 is being read."""
            if isinstance(question, protocol.Open):
                assert gate.reached.wait(5)
            return answer(question, caller)

        source.nodes[1].server.answer = late
        with Session(target.nodes[0], source.endpoints) as session:
            # Rank 1 does not offer it; the wait lets rank 0 begin to read first.
            transfer = pull(session, target, how="direct", wait_for_offer=1.0)
            assert gate.reached.wait(5)
            until(lambda: transfer.error is not None)
            gate.opened.set()
            assert failure(transfer) is Code.UNKNOWN_REQUEST
        source.nodes[0].withdraw("r")
        works(source, target)
