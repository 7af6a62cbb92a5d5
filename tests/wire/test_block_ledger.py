"""One owner per block: conflicting uses are refused, and claims end when they must."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session
from kvatlas.wire.block_ledger import BlockClaim, BlockLedger, Use
from tests.planning.models import SMALL
from tests.wire.faulty import Gate, Stalled, failure, pair, pull
from tests.wire.helpers import End, as_it_is, assert_arrived, ends, small

EXCLUSIVE: tuple[Use, ...] = ("filling", "expected")


def in_use(act: Any, *given: Any, **about: Any) -> str:
    """The error of an operation whose blocks are in use."""
    with pytest.raises(AtlasError) as refusal:
        act(*given, **about)
    assert refusal.value.code is Code.BLOCKS_IN_USE
    return str(refusal.value.got)


def one_pull(session: Session, block: int, request: str = "r", **about: Any) -> Any:
    return session.pull(request, destination_blocks=[block], tokens=(0, 16), **about)


Step = tuple[str, Use, int, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "release", "quarantine"]),
        st.sampled_from(["offered", *EXCLUSIVE]),
        st.integers(0, 5),
        st.lists(st.integers(0, 7), unique=True, max_size=4),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_claim_is_granted_exactly_when_no_other_conflicts(steps: list[Step]) -> None:
    """Compared with a plain list of claims, after every step."""
    ledger = BlockLedger(small("dense"), 0)
    held: list[tuple[BlockClaim, set[int], bool]] = []
    for do, use, number, ids in steps:
        if do == "claim":
            shared = use == "offered"
            free = all(not (own & set(ids)) or (shared and both) for _, own, both in held)
            try:
                claim = ledger.claim(use, "r", {0: np.array(ids, np.int64)})
            except AtlasError as refusal:
                assert refusal.code is Code.BLOCKS_IN_USE
                assert not free
            else:
                assert free
                held.append((claim, set(ids), shared))
        elif held:
            claim, _, _ = held[number % len(held)]
            if do == "release":
                claim.release()
                claim.release()  # has no effect
                held = [one for one in held if one[0] is not claim]
            else:
                claim.quarantine()
        assert len(ledger) == len(held)
    for claim, _, _ in held:
        claim.release()
    ledger.claim("filling", "all of them", {0: np.arange(8)})


def test_the_error_names_the_blocks_the_use_and_the_request() -> None:
    with ends(*pair()) as (source, target):
        target.nodes[0].offer("held", [4, 9], 20)
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            got = in_use(session.pull, "r", destination_blocks=[3, 9, 4, 2], tokens=50)
            assert got == "blocks [9, 4] of pool 0, offered as 'held'"


def test_two_pulls_into_the_same_blocks_do_not_both_run() -> None:
    with ends(*pair({"tp": 2})) as (source, target):
        for request in ("r", "other"):
            source.offer(request)
        gate = target.arounds = Gate()
        with Session(target.nodes[0], source.endpoints) as session:
            first = pull(session, target, how="direct")
            assert gate.reached.wait(5)
            in_use(pull, session, target, "other")
            in_use(target.nodes[0].offer, "mine", target.blocks, 50)
            about: dict[str, Any] = {"source": source.plan, "pushers": ["end-1"]}
            in_use(target.nodes[0].expect, "pushed", target.blocks, 50, **about)
            in_use(session.push, "mine", source_blocks=target.blocks, tokens=50)
            gate.opened.set()
            first.wait(10)
        assert_arrived(source, target, 0)
        assert len(target.nodes[0].ledger) == 0


def test_pulls_of_other_threads_and_sessions_see_one_ledger() -> None:
    """Of many pulls into one block at the same moment exactly one runs."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        gate = target.arounds = Gate()
        won, lost = [], []
        with (
            Session(target.nodes[0], source.endpoints) as one,
            Session(target.nodes[0], source.endpoints) as two,
        ):
            start = threading.Barrier(8)

            def compete(session: Session) -> None:
                start.wait()
                try:
                    won.append(one_pull(session, 5, how="direct"))
                except AtlasError as refusal:
                    lost.append(refusal.code)

            threads = [threading.Thread(target=compete, args=(s,)) for s in (one, two) * 4]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            assert lost == [Code.BLOCKS_IN_USE] * 7
            gate.opened.set()
            won[0].wait(10)
            one_pull(two, 5).wait(10)


def test_blocks_before_the_first_pulled_token_may_be_offered() -> None:
    """A shared prefix stays readable while the rest of a request is pulled after it."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        target.nodes[0].offer("prefix", target.blocks[0][:1], 16)
        with Session(target.nodes[0], source.endpoints) as session:
            pull(session, target, tokens=(16, 50)).wait(10)
            in_use(pull, session, target, tokens=(15, 50))
        target.nodes[0].withdraw("prefix")


def test_offers_share_blocks_until_the_last_of_them_ends() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        node = target.nodes[0]
        node.offer("one", target.blocks, 50)
        node.offer("two", target.blocks, 50)
        with Session(node, source.endpoints) as session:
            in_use(pull, session, target)
            node.withdraw("one")
            in_use(pull, session, target)
            node.withdraw("two")
            pull(session, target).wait(10)
        assert_arrived(source, target, 0)


def test_blocks_of_a_failed_pull_are_quarantined_until_it_is_released() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        node = target.nodes[0]
        stalled = target.arounds = Stalled()
        with Session(node, source.endpoints) as session:
            late = pull(session, target, how="direct", timeout=0.3)
            assert failure(late) is Code.DEADLINE
            assert node.ledger.uses() == {"quarantined": 1}
            assert "quarantined by 'r'" in in_use(pull, session, target)
            in_use(node.offer, "mine", target.blocks, 50)
            target.arounds = as_it_is
            for read in list(stalled.reads):
                read.arrive()
            assert late.wait_released(10)
            pull(session, target).wait(10)
        assert_arrived(source, target, 0)


def test_expected_blocks_are_free_again_once_they_are_ready_or_forgotten() -> None:
    with ends(*pair()) as (source, target):
        node = target.nodes[0]
        about: dict[str, Any] = {"source": source.plan, "pushers": ["end-1"]}
        node.expect("r", target.blocks, 50, **about)
        in_use(node.expect, "again", target.blocks, 50, **about)
        with Session(source.nodes[0], target.endpoints) as session:
            session.push("r", source_blocks=source.blocks, tokens=50).wait(10)
        node.offer("r", target.blocks, 50)
        node.withdraw("r")
        node.expect("never", target.blocks, 50, **about)
        node.forget("never")
        assert len(node.ledger) == 0


def test_refused_pulls_and_pushes_leave_no_claim() -> None:
    with ends(*pair()) as (source, target):
        node = target.nodes[0]
        with Session(node, source.endpoints) as session:
            for blocks in ([3, 2, 1, 10**6], [3, 2, 1, 1], [3], [3, 2, 1, -1]):
                with pytest.raises(AtlasError):
                    session.pull("r", destination_blocks=blocks, tokens=50)
            with pytest.raises(AtlasError):
                session.pull("r", destination_blocks=target.blocks, tokens=50, how="by pigeon")  # type: ignore[arg-type]
            with pytest.raises(AtlasError):
                session.push("r", source_blocks=[1], tokens=50)
            assert failure(pull(session, target)) is Code.UNKNOWN_REQUEST
        with pytest.raises(AtlasError):
            pull(session, target)
        assert len(node.ledger) == 0


def refused_blocks(ledger: BlockLedger, pool: int, blocks: int) -> set[int]:
    """The blocks of a pool that cannot be claimed, tried one by one."""
    taken = set()
    for block in range(blocks):
        try:
            ledger.claim("filling", "probe", {pool: np.array([block])}).release()
        except AtlasError:
            taken.add(block)
    return taken


@pytest.mark.parametrize("tokens", [(0, 100), (37, 100), (96, 100)])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_exactly_the_blocks_that_a_pull_writes_are_claimed(
    name: str, tokens: tuple[int, int]
) -> None:
    """Found by the bytes that change, in pools whose blocks are contiguous."""
    made = small(name, 128, memory="4MiB", layout="BLHNC")
    source, target = End(made, 100, seed=1), End(made, 100, seed=2)
    with ends(source, target):
        source.offer("r")
        (node,) = target.nodes
        gate = target.arounds = Gate()
        with Session(node, source.endpoints) as session:
            running = pull(session, target, tokens=tokens, how="direct")
            assert gate.reached.wait(5)
            claimed = {p.index: refused_blocks(node.ledger, p.index, p.blocks) for p in made.pools}
            gate.opened.set()
            running.wait(10)
        buffers = target.buffers[0]
        before = buffers.pools_of(buffers.before)
        for pool in made.pools:
            changed = (buffers.pools[pool.index] != before[pool.index]).reshape(pool.blocks, -1)
            assert set(np.flatnonzero(changed.any(axis=1)).tolist()) == claimed[pool.index]
        assert len(node.ledger) == 0
