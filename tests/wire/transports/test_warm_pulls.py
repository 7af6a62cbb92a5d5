"""Pulls of a shape that was pulled before: begun by who asks, and refused as any other is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.routing import scattered
from kvatlas.wire import Session
from kvatlas.wire.channels import no_answer
from kvatlas.wire.client import follow_ups, prepared_shapes
from kvatlas.wire.client import session as session_
from kvatlas.wire.client.fast_path import LaunchedPull
from kvatlas.wire.client.prepared_shapes import PreparedShapes
from kvatlas.wire.client.transfer import TransferPart
from kvatlas.wire.transports.offer_board import PostedOffer
from tests.routing import oracle
from tests.wire.helpers import small
from tests.wire.transports.ends import eventually
from tests.wire.transports.fake_cuda import FakeMachine, node_of

TOKENS = 61


def has_learnt(warm: PreparedShapes, pulls: int) -> bool:
    """Whether so many pulls that went their whole way are learnt from, at last."""
    return bool(eventually(lambda: warm._pulled >= pulls))


class WarmEnds:
    """A source and a target whose session has pulled requests of one shape."""

    def __init__(self, name: str, source: Any, target: Any, session: Session) -> None:
        self.source, self.theirs, _ = source
        self.target, self.pools, self.driver = target
        self.session, self.rng = session, np.random.default_rng(9)
        self.released: list[str] = []
        for turn in range(2):
            self.offer(f"cold {turn}")
            self.pull(f"cold {turn}").wait(20)
            assert has_learnt(self.warm, turn + 1), name
        assert eventually(lambda: self.warm._kept), name
        assert eventually(lambda: len(self.released) == 2)
        self.driver.log.clear()

    @property
    def warm(self) -> PreparedShapes:
        connection = self.session._connections.find(self.source.endpoint)
        assert connection is not None
        return connection.shapes

    def offer(self, request: str, blocks: Any = None, tokens: int = TOKENS) -> None:
        blocks = scattered(self.source.plan, tokens) if blocks is None else blocks
        tell = lambda _, why: self.released.append(why)  # noqa: E731
        self.source.offer(request, blocks, tokens, timeout=30, released=tell)

    def pull(self, request: str, **about: Any) -> Any:
        asked: dict[str, Any] = {
            "destination_blocks": scattered(self.target.plan, TOKENS),
            "tokens": TOKENS,
        }
        return self.session.pull(request, **(asked | about))

    @property
    def acts(self) -> list[str]:
        return [what for what, _ in self.driver.log]


@contextmanager
def warm_ends(name: str = "dense", share: float = 1.0) -> Iterator[WarmEnds]:
    machine, rng = FakeMachine(), np.random.default_rng(4)
    src, dst = small(name), small(name, block_size=32)
    with (
        node_of(src, machine, rng) as source,
        node_of(dst, machine, rng, share) as target,
        Session(target[0], [source[0].endpoint]) as session,
    ):
        yield WarmEnds(name, source, target, session)


def code_of(act: Any) -> Code:
    with pytest.raises(AtlasError) as refused:
        act()
    code: Code = refused.value.code
    return code


def other_blocks(plan: Any, rng: Any, tokens: int) -> dict[int, Any]:
    """As many blocks as `scattered` gives each group, drawn anew; none twice in a pool."""
    tables: dict[int, Any] = {}
    for pool in plan.pools:
        groups = [g for g, one in enumerate(plan.groups) if one.pool == pool.index]
        drawn = rng.permutation(pool.blocks)
        for group in groups:
            count = len(scattered(plan, tokens)[group])
            tables[group], drawn = drawn[:count], drawn[count:]
    return dict(sorted(tables.items()))


@pytest.mark.parametrize("timeout", [None, 5.0, 60.0])
def test_the_waiting_thread_finishes_a_launched_pull_with_any_timeout(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm_ends() as ends:
        monkeypatch.setattr(follow_ups, "_EVERY", 0.5)  # no other thread finishes it before
        finished: list[threading.Thread] = []
        finish = LaunchedPull.finish

        def recorded(self: LaunchedPull, *about: Any) -> bool:
            finished.append(threading.current_thread())
            return finish(self, *about)

        monkeypatch.setattr(LaunchedPull, "finish", recorded)
        ends.offer("r")
        assert ends.pull("r").wait(timeout).ready
        assert finished == [threading.current_thread()]


@pytest.mark.parametrize("name", ["dense", "delta hybrid", "latent", "sliding"])
def test_warm_pulls_of_any_length_move_every_element_between_other_blocks(name: str) -> None:
    with warm_ends(name) as ends:
        src, dst = ends.source.plan, ends.target.plan
        for turn, tokens in enumerate((TOKENS, 1, 17, 48, 17)):
            blocks = other_blocks(src, ends.rng, tokens), other_blocks(dst, ends.rng, tokens)
            move = oracle.Move(src, dst, *blocks, (0, tokens))
            filled = oracle.fill(move, ends.rng)[0].pools
            poison = oracle.Memory(dst, 0, ends.rng)
            for index, pool in ends.theirs.items():
                pool[:] = filled[index]
            for index, pool in poison.pools.items():
                pool[:] = ends.pools[index]
            ends.offer(f"{turn}", blocks[0], tokens)
            ends.driver.log.clear()
            transfer = ends.pull(f"{turn}", destination_blocks=blocks[1], tokens=tokens)
            assert ends.acts[-2:] == ["after_caller", "post"], "launched by who asked"
            assert "record" not in ends.acts
            assert transfer.wait(20).moved == transfer.total
            right, _ = oracle.expected(move, 0, poison)
            for index, pool in ends.pools.items():
                assert np.array_equal(pool, right.beside(index, pool)), tokens


def test_ranks_are_warm_one_by_one_and_make_up_a_request_together() -> None:
    machine, rng = FakeMachine(), np.random.default_rng(4)
    src, dst = small("dense", tp=2), small("dense", block_size=32)
    move = oracle.Move(src, dst, scattered(src, TOKENS), scattered(dst, TOKENS), (0, TOKENS))
    filled = oracle.fill(move, rng)
    with ExitStack() as stack:
        sources = [stack.enter_context(node_of(src, machine, rng, rank=rank)) for rank in range(2)]
        target, pools, driver = stack.enter_context(node_of(dst, machine, rng))
        session = stack.enter_context(Session(target, [node.endpoint for node, _, _ in sources]))
        for rank, (_, theirs, _) in enumerate(sources):
            for index, pool in theirs.items():
                pool[:] = filled[rank].pools[index]
        connections = [session._connections.find(node.endpoint) for node, _, _ in sources]
        poison = oracle.Memory(dst, 0, rng)

        def pull(request: str, *ranks: int) -> tuple[Any, int]:
            """Pull what some ranks offer; the transfer, and how many reads were begun at once."""
            for rank in ranks:
                sources[rank][0].offer(request, move.source_blocks, TOKENS)
            for index, pool in pools.items():
                pool[:] = poison.pools[index]
            driver.log.clear()
            transfer = session.pull(
                request, destination_blocks=move.destination_blocks, tokens=TOKENS
            )
            return transfer, [what for what, _ in driver.log].count("post")

        for turn in range(2):
            assert pull(f"cold {turn}", 0, 1)[0].wait(20).ready
            assert all(one and has_learnt(one.shapes, turn + 1) for one in connections)
        assert eventually(lambda: all(one and one.shapes._kept for one in connections))
        transfer, begun = pull("warm", 0, 1)
        assert begun == 2
        assert transfer.wait(20).moved == transfer.total
        right, _ = oracle.expected(move, 0, poison)
        assert all(np.array_equal(pool, right.beside(index, pool)) for index, pool in pools.items())
        transfer, begun = pull("half", 0)
        assert begun == 1
        assert code_of(transfer.wait) is Code.UNKNOWN_REQUEST
        assert transfer.wait_released(20)


class WarmRanks:
    """Ranks of a source, and a target whose session has pulled requests of one shape from them."""

    def __init__(self, stack: ExitStack, name: str, **source: int) -> None:
        machine, rng = FakeMachine(), np.random.default_rng(4)
        self.source, self.destination = small(name, **source), small(name, block_size=32)
        ranks = range(self.source.ranks)
        made = [
            stack.enter_context(node_of(self.source, machine, rng, rank=rank)) for rank in ranks
        ]
        self.nodes = [node for node, _, _ in made]
        target, _, self.driver = stack.enter_context(node_of(self.destination, machine, rng))
        self.session = Session(target, [node.endpoint for node in self.nodes])
        self.blocks = scattered(self.destination, TOKENS)
        self.released: list[tuple[int, str]] = []
        warm = self.session._connections.find(self.nodes[0].endpoint).shapes  # type: ignore[union-attr]
        for turn in range(2):
            self.pull(f"cold {turn}").wait(20)
            assert has_learnt(warm, turn + 1)
        assert eventually(lambda: warm._kept)
        assert eventually(lambda: len(self.released) == 2 * len(ranks))
        self.released.clear()

    def pull(self, request: str, blocks: Any = None) -> Any:
        """Pull, for the last time, what all ranks offer."""
        for rank, node in enumerate(self.nodes):
            tell = lambda _, why, rank=rank: self.released.append((rank, why))  # noqa: E731
            node.offer(request, scattered(self.source, TOKENS), TOKENS, released=tell)
        self.driver.log.clear()
        blocks = self.blocks if blocks is None else blocks
        return self.session.pull(request, destination_blocks=blocks, tokens=TOKENS, final=True)

    @property
    def begun(self) -> int:
        """How many reads were launched by who asked."""
        return [what for what, _ in self.driver.log].count("after_caller")


def test_a_block_that_only_another_rank_would_fill_fails_the_pull_and_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        ends = WarmRanks(stack, "conv hybrid", pp=2)
        assert eventually(lambda: not ends.session._follow_ups._looking)
        monkeypatch.setattr(follow_ups, "_EVERY", 0.1)  # finished by the end of the session
        transfer = ends.pull("bad", ends.blocks | {1: [10**6] * len(ends.blocks[1])})
        assert ends.begun == 1, "the second rank's blocks alone are wrong"
        closing = threading.Thread(target=ends.session.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert code_of(transfer.wait) in (Code.OUT_OF_RANGE, Code.CANCELLED)
        assert transfer.wait_released(20)


def test_ranks_that_nobody_reads_are_told_although_the_session_ends_at_once() -> None:
    with ExitStack() as stack:
        ends = WarmRanks(stack, "latent", tp=2)
        assert ends.pull("r").wait(20).ready
        assert ends.begun == 1
        ends.session.close()
        assert eventually(lambda: sorted(ends.released) == [(0, "read"), (1, "let_go")])


def test_a_warm_pull_counts_and_lets_go_of_its_offer_afterwards() -> None:
    with warm_ends() as ends:
        before = ends.target.metrics.values["bytes"], ends.target.metrics.outcomes["pull", "ok"]
        ends.offer("r")
        transfer = ends.pull("r").wait(20)
        assert transfer.moved == transfer.total
        assert transfer.released
        assert eventually(lambda: ends.released == ["read"] * 3)
        counted = ends.target.metrics.values["bytes"], ends.target.metrics.outcomes["pull", "ok"]
        assert counted == (before[0] + transfer.total, before[1] + 1)
        ends.offer("unwatched")
        unwatched = ends.pull("unwatched")  # nobody waits for it
        assert eventually(lambda: unwatched.ready and ends.released == ["read"] * 4)


def test_whatever_is_wrong_with_a_request_is_refused_as_if_it_were_the_first() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        blocks = scattered(ends.target.plan, TOKENS)[0]
        most = ends.target.plan.pools[0].blocks
        lies: list[tuple[dict[str, Any], Code]] = [
            ({"destination_blocks": {0: [blocks[0], blocks[0]]}}, Code.TWICE),
            ({"destination_blocks": {0: [blocks[0], most]}}, Code.OUT_OF_RANGE),
            ({"destination_blocks": {0: [-1, blocks[1]]}}, Code.OUT_OF_RANGE),
            ({"destination_blocks": {0: blocks[:1]}}, Code.MISSING_BLOCKS),
            ({"destination_blocks": {0: blocks, 7: blocks}}, Code.OUT_OF_RANGE),
            ({"tokens": TOKENS + 1}, Code.BAD_TOKENS),
            ({"request": "another"}, Code.UNKNOWN_REQUEST),
            ({"source_blocks": {0: [1]}}, Code.UNKNOWN_REQUEST),
        ]
        for lie, code in lies:
            asked = {"request": "r"} | lie
            assert code_of(lambda asked=asked: ends.pull(**asked).wait(20)) is code, lie
            assert "post" not in ends.acts or code is Code.TWICE, lie
            ends.driver.log.clear()
        assert ends.pull("r").wait(20).ready


def test_blocks_that_a_source_does_not_have_are_refused_although_the_copy_was_begun() -> None:
    with warm_ends() as ends:
        count = len(scattered(ends.source.plan, TOKENS)[0])
        for name, block in (("far", 0xFFFFFFFF), ("next", ends.source.plan.pools[0].blocks)):
            ids = np.full(count, block, "<u4").tobytes()
            ends.source.transport.board.post(PostedOffer(name, {0: ids}, 0, TOKENS, None))
            ends.driver.log.clear()
            transfer = ends.pull(name)
            assert ends.acts == ["after_caller", "post"], "launched by who asked"
            assert code_of(transfer.wait) is Code.OUT_OF_RANGE
            assert transfer.wait_released(20)


def test_an_offer_that_is_withdrawn_under_a_warm_copy_delivers_nothing() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        ends.driver.late = True
        transfer = ends.pull("r")
        assert ends.driver.pending, "launched by who asked"
        ends.source.withdraw("r")
        ends.offer("r")  # the same name, and other content
        assert code_of(transfer.wait) is Code.LEASE_EXPIRED
        assert not transfer.released, "the copy still writes"
        ends.driver.finish()
        assert eventually(lambda: transfer.released)


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_blocks_of_a_warm_pull_that_failed_are_kept_until_its_copy_is_over(how: str) -> None:
    with warm_ends() as ends:
        ends.offer("r")
        ends.driver.late = True
        transfer = ends.pull("r", timeout=0.05 if how == "deadline" else 30)
        if how == "cancel":
            transfer.cancel()
        elif how == "close":
            ends.session.close()
        code = Code.DEADLINE if how == "deadline" else Code.CANCELLED
        assert code_of(transfer.wait) is code
        assert not transfer.wait_released(0.05), "the copy still writes"
        ends.driver.finish()
        assert transfer.wait_released(20)
        assert not any(ends.driver.opened.values()) or how != "close"


def test_an_interrupt_of_who_waits_does_not_let_go_of_what_is_written() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        ends.driver.late = True
        transfer = ends.pull("r")
        (posted,) = ends.driver.pending
        look, interrupts = posted.done, [KeyboardInterrupt()]

        def done() -> bool:
            if interrupts:
                raise interrupts.pop()
            return bool(look())

        posted.done = done
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        assert not transfer.wait_released(0.05), "the copy still writes"
        ends.driver.finish()
        assert transfer.wait_released(20)


def test_shapes_in_use_are_kept_and_those_that_were_used_longest_ago_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared_shapes, "_KEPT", 3)
    with warm_ends() as ends:
        (in_use,) = ends.warm._kept
        for tokens in range(1, 9):
            for name, count in ((f"{tokens}", tokens), (f"again {tokens}", TOKENS)):
                ends.offer(name, tokens=count)
                blocks = scattered(ends.target.plan, count)
                assert ends.pull(name, destination_blocks=blocks, tokens=count).wait(20).ready
            assert in_use in ends.warm._kept
        assert [key[0] for key in ends.warm._kept] == [(0, 7), (0, 8), (0, TOKENS)]


def test_a_shape_whose_peers_memory_was_mapped_anew_is_prepared_again() -> None:
    with warm_ends() as ends:
        opened = ends.target.transport.opened
        (mapping,) = opened._open.values()
        with opened._lock:
            opened._unmap(mapping.allocation)  # others were used more often
        for name in ("moved", "again"):
            ends.offer(name)
            ends.driver.log.clear()
            assert ends.pull(name).wait(20).ready
            assert eventually(lambda: ends.warm._kept)
        assert "record" not in ends.acts, "launched by who asked"


def test_what_is_asked_wrongly_is_refused_before_anything_is_copied() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        ends.driver.log.clear()
        for wrong in ({"timeout": "soon"}, {"wait_for_offer": float("nan")}):
            with pytest.raises(AtlasError) as refusal:
                ends.pull("r", **wrong)
            assert refusal.value.code == Code.BAD_QUANTITY
        assert "post" not in ends.acts
        assert ends.pull("r").wait(20).ready


def test_who_cannot_be_given_a_transfer_waits_until_the_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    with warm_ends() as ends:
        ends.offer("r")
        with monkeypatch.context() as broken:
            broken.setattr(ends.session, "_start", fails)
            with pytest.raises(MemoryError):
                ends.pull("r")
        assert ends.acts == ["finished", "after_caller", "post"]
        connection = ends.session._connections.find(ends.source.endpoint)
        assert connection is not None
        assert connection.users == 0
        assert ends.pull("r").wait(20).ready


def test_what_cannot_be_launched_at_once_goes_the_whole_way() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        ends.driver.busy = True  # the source's GPU is not done with the blocks
        transfer = ends.pull("r")
        assert "post" not in ends.acts
        ends.driver.busy = False
        assert transfer.wait(20).ready
        ends.offer("all")
        for about in ({"checksums": False, "layers": tuple(ends.target.plan.layers)},):
            ends.driver.log.clear()
            assert ends.pull("all", **about).wait(20).ready
            assert "record" in ends.acts, about


def test_a_source_that_stalls_once_it_was_read_holds_up_one_end_of_a_session_and_not_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stalled(endpoint: str, _: Any, *, deadline: float) -> Any:
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise no_answer(endpoint)

    monkeypatch.setattr(session_, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(follow_ups, "_TOGETHER", 60.0)  # all in a row
    with warm_ends() as ends:
        monkeypatch.setattr(ends.target.channels, "ask", stalled)
        for number in range(20):
            ends.offer(f"{number}")
            assert ends.pull(f"{number}").wait(20).ready
        begun = time.monotonic()
        ends.session.close()
        assert time.monotonic() - begun < 2
        assert not any(ends.driver.opened.values())


class GoneProcess:
    """A process that has begun to end."""

    alive = False

    def close(self) -> None:
        """Look no more."""


def test_a_source_that_has_gone_confirms_no_warm_pull() -> None:
    with warm_ends() as ends:
        ends.offer("r")
        board: Any = ends.session.link(0).board
        board._process = GoneProcess()
        assert code_of(ends.pull("r").wait) is Code.PEER_LOST


def test_pulls_are_followed_up_as_the_process_ends_and_has_no_more_threads() -> None:
    """A session that is closed at exit waits for whoever looks after its pulls."""
    workers, background = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    follow, done = follow_ups.FollowUps(workers, background), list[str]()
    for _ in range(2):
        part = TransferPart(lambda: done.append("read"))
        follow.add(part, lambda: done.append("told"))
        workers.shutdown()
        background.shutdown(wait=False)
        assert eventually(lambda: done == ["read", "told"])
        closing = threading.Thread(target=follow.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
        done.clear()
