"""Workers' sides that read from each other, without vLLM: what arrives, and what is told when."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas.copying import copy_request
from kvatlas.engines.vllm import (
    ConnectorSettings,
    describe_engine,
    describe_stage,
    join_stages,
    thread_cores,
)
from kvatlas.engines.vllm.ended_requests import Ended, EndedRequests
from kvatlas.engines.vllm.orders import OfferOrder, PullOrder, RemoteRequest, StepOrders
from kvatlas.engines.vllm.worker_side import WorkerSide
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import route
from kvatlas.wire import Memory
from tests.identities import OURS
from tests.vllm.shapes import Config, FullAttentionSpec, Group, SlidingWindowSpec, vllm_config

LAYERS = [["a.0.attn", "a.1.attn"], ["a.2.attn", "a.3.attn"]]


def make_plan(block: int, tp: int = 1, kv_heads: int = 2) -> Plan:
    heads = max(1, kv_heads // tp)
    groups = [
        Group(FullAttentionSpec(block_size=block, num_kv_heads=heads), LAYERS[0]),
        Group(SlidingWindowSpec(block_size=block, num_kv_heads=heads), LAYERS[1]),
    ]
    return describe_engine(vllm_config(tp=tp, kv_heads=kv_heads), Config(groups, num_blocks=16))


def make_pipeline(block: int, tp: int = 1) -> Plan:
    """Two pipeline stages, each with a layer of every group."""
    kept: dict[str, Any] = {"block_size": block, "num_kv_heads": 2 // tp}
    stages = [
        describe_stage(
            vllm_config(tp=tp),
            Config(
                [
                    Group(FullAttentionSpec(**kept), [LAYERS[0][stage]]),
                    Group(SlidingWindowSpec(**kept), [LAYERS[1][stage]]),
                ]
            ),
        )
        for stage in range(2)
    ]
    return join_stages(stages)


class Ranks:
    """All ranks of an engine, with random bytes in their pools."""

    def __init__(
        self, plan: Plan, seed: int, identity: CacheIdentity | None = OURS, **settings: Any
    ) -> None:
        rng = np.random.default_rng(seed)
        self.plan = plan
        sizes = [next(iter(plan.rank_pools(rank).values())).nbytes for rank in range(plan.ranks)]
        self.pools = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        given = ConnectorSettings.read({"transport": "shm", "piece": 4096, **settings})
        memories = [Memory(pool.ctypes.data, pool.nbytes, owner=pool) for pool in self.pools]
        self.sides = [
            WorkerSide(plan, rank, memory, given, port=0, identity=identity)
            for rank, memory in enumerate(memories)
        ]

    def order(self, *, idle: bool = False, **orders: Any) -> None:
        for one in self.sides:
            one.carry_out(StepOrders(**orders), idle=idle)

    def ended(self, seconds: float = 20.0) -> list[Ended]:
        """What every rank reports, once each has something to report."""
        deadline, found = time.monotonic() + seconds, [Ended() for _ in self.sides]
        while not all(one.sent or one.received for one in found):
            assert time.monotonic() < deadline, found
            for number, one in enumerate(self.sides):
                more = one.take_ended()
                found[number].sent |= more.sent
                found[number].received |= more.received
                found[number].failed |= more.failed
            time.sleep(0.002)
        return found

    def remote(self, tokens: int) -> RemoteRequest:
        endpoints = tuple(one.endpoint for one in self.sides)
        return RemoteRequest(version=1, request="p/1", tokens=tokens, endpoints=endpoints)

    def close(self) -> None:
        for one in self.sides:
            one.close()


@contextmanager
def engines(*made: Ranks) -> Iterator[None]:
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.close)
        yield


SRC, DST = ((1, 2, 3), (-1, 5, 6)), ((8, 9), (3, 4))


def offer(tokens: int = 149) -> OfferOrder:
    return OfferOrder("p", "p/1", SRC, tokens)


def pull(source: Ranks, start: int = 0, stop: int = 149) -> PullOrder:
    return PullOrder("d", source.remote(149), DST, start, stop)


def test_requests_are_read_between_engines_of_unlike_ranks_and_blocks() -> None:
    for plans in (
        (make_plan(64, 2), make_plan(128)),
        (make_plan(64), make_plan(128, 2)),
        (make_pipeline(64), make_plan(128)),
        (make_plan(64), make_pipeline(128)),
        (make_pipeline(64, 2), make_plan(128)),
        (make_pipeline(64), make_pipeline(128, 2)),
    ):
        source, target = Ranks(plans[0], 1), Ranks(plans[1], 2)
        with engines(source, target):
            right = [pool.copy() for pool in target.pools]
            copy_request(
                route(source.plan, target.plan),
                {rank: {0: pool} for rank, pool in enumerate(source.pools)},
                {rank: {0: pool} for rank, pool in enumerate(right)},
                source_blocks=dict(enumerate(SRC)), destination_blocks=dict(enumerate(DST)),
                tokens=149,
            )  # fmt: skip
            target.order(pulls=[pull(source)])  # before it is offered: it is waited for
            time.sleep(0.05)
            source.order(offers=[offer()])
            assert target.ended() == [Ended(received={"d"})] * target.plan.ranks
            assert source.ended() == [Ended(sent={"p"})] * source.plan.ranks
            for got, wanted in zip(target.pools, right, strict=True):
                assert np.array_equal(got, wanted)
            counts = target.sides[0].take_counts()
            assert (counts.pulls, counts.failures) == (1, 0)
            assert counts.nbytes > 0


def test_every_rank_is_told_also_those_that_nobody_reads() -> None:
    """One kv head at tp 2: the second rank holds a replica, and vLLM waits for both."""
    source, target = Ranks(make_plan(64, 2, 1), 1), Ranks(make_plan(128, 1, 1), 2)
    with engines(source, target):
        source.order(offers=[offer()])
        target.order(let_go=[source.remote(149)])
        assert source.ended() == [Ended(sent={"p"})] * 2
        source.order(offers=[offer()])
        target.order(pulls=[pull(source)])
        assert target.ended() == [Ended(received={"d"})]
        assert source.ended() == [Ended(sent={"p"})] * 2


def test_a_part_that_is_read_gives_the_whole_back() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2)
    with engines(source, target):
        source.order(offers=[offer()])
        target.order(pulls=[pull(source, start=128)])
        assert target.ended() == [Ended(received={"d"})]
        assert source.ended() == [Ended(sent={"p"})]


def sibling(source: Ranks, index: int) -> PullOrder:
    """A read of the whole offer that leaves it to others."""
    tables = ((2 * index, 2 * index + 1), (8 + 2 * index, 9 + 2 * index))
    return PullOrder(f"{index}_d", source.remote(149), tables, 0, 149, final=False)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_siblings_all_read_one_offer_which_then_ends(transport: str) -> None:
    for plans in ((make_plan(64, 2), make_plan(128)), (make_pipeline(64), make_pipeline(128))):
        source, target = (
            Ranks(plan, seed, transport=transport) for seed, plan in enumerate(plans, 1)
        )
        with engines(source, target):
            right = [pool.copy() for pool in target.pools]
            source.order(offers=[offer()])
            for index in range(3):
                copy_request(
                    route(source.plan, target.plan),
                    {rank: {0: pool} for rank, pool in enumerate(source.pools)},
                    {rank: {0: pool} for rank, pool in enumerate(right)},
                    source_blocks=dict(enumerate(SRC)),
                    destination_blocks=dict(enumerate(sibling(source, index).tables)),
                    tokens=149,
                )
                target.order(pulls=[sibling(source, index)])
                ended = Ended(received={f"{index}_d"})
                assert target.ended() == [ended] * target.plan.ranks
            assert all(one.node.offers for one in source.sides), "it may be read again"
            for got, wanted in zip(target.pools, right, strict=True):
                assert np.array_equal(got, wanted)
            begun = time.monotonic()
            target.order(release_soon=[source.remote(149)])
            assert source.ended() == [Ended(sent={"p"})] * source.plan.ranks
            assert time.monotonic() < begun + 10


def test_a_late_sibling_keeps_the_offer() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2)
    with engines(source, target):
        source.order(offers=[offer()])
        target.order(pulls=[sibling(source, 0)])
        target.ended()
        target.order(release_soon=[source.remote(149)])
        target.order(keep=["p/1"])
        time.sleep(2.5)
        assert source.sides[0].node.offers
        target.order(pulls=[sibling(source, 1)])
        assert target.ended() == [Ended(received={"1_d"})]
        target.order(release_soon=[source.remote(149)])
    # The engine that closes releases what waits.
    assert source.sides[0].take_ended() == Ended(sent={"p"})


def test_a_sibling_that_fails_leaves_the_offer_to_the_others() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2)
    with engines(source, target):
        source.order(offers=[offer()])
        target.order(pulls=[sibling(source, 0)], cancelled=["0_d"])
        assert target.ended() == [Ended(received={"0_d"}, failed={"0_d"})]
        target.order(pulls=[sibling(source, 1)])
        assert target.ended() == [Ended(received={"1_d"})]


def test_caches_of_other_weights_are_read_only_if_both_ends_accept_it() -> None:
    theirs = CacheIdentity(weights="other weights")
    for (ours_checked, theirs_checked), read in (
        ((True, True), False),
        ((True, False), False),
        ((False, True), False),
        ((False, False), True),
    ):
        source = Ranks(make_plan(64), 1, check_identity=ours_checked)
        target = Ranks(make_plan(128), 2, theirs, check_identity=theirs_checked)
        with engines(source, target):
            before = target.pools[0].copy()
            source.order(offers=[offer()])
            target.order(pulls=[pull(source)])
            failed = set() if read else {"d"}
            assert target.ended() == [Ended(received={"d"}, failed=failed)]
            assert np.array_equal(target.pools[0], before) != read


def test_what_fails_is_reported_as_failed_and_given_back() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2, wait_for_offer=0.1)
    with engines(source, target):
        before = [pool.copy() for pool in target.pools]
        source.order(offers=[offer(tokens=100)])
        target.order(pulls=[pull(source)])  # more tokens than there are
        assert target.ended() == [Ended(received={"d"}, failed={"d"})]
        assert source.ended() == [Ended(sent={"p"})]
        target.order(pulls=[pull(source)])  # offered no more
        assert target.ended() == [Ended(received={"d"}, failed={"d"})]
        assert np.array_equal(target.pools[0], before[0])
        assert target.sides[0].take_counts().failures == 2


def test_an_engine_that_is_gone_fails_its_requests_and_is_found_again() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2, wait_for_offer=0.1)
    port = int(source.sides[0].endpoint.rpartition(":")[2])
    with engines(target):
        source.order(offers=[offer()])
        target.order(pulls=[pull(source)])
        assert target.ended() == [Ended(received={"d"})]
        order = pull(source)
        source.close()
        target.order(pulls=[order])
        assert target.ended() == [Ended(received={"d"}, failed={"d"})]
        # Another engine at the same place, with other blocks.
        source = Ranks(make_plan(32), 3, ports=port)
        with engines(source):
            assert source.remote(149).endpoints == order.remote.endpoints
            blocks = ((1, 2, 3, 4, 5), (-1, -1, 6, 7, 8))
            source.order(offers=[OfferOrder("p", "p/1", blocks, 149)])
            target.order(pulls=[order])
            assert target.ended() == [Ended(received={"d"})]


def test_an_engine_that_does_not_answer_fails_all_who_wait_at_once() -> None:
    """One after the other they would wait for minutes."""
    target = Ranks(make_plan(128), 2, pull_seconds=1.0)
    with engines(target), socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        remote = RemoteRequest(version=1, request="p/1", tokens=149, endpoints=(endpoint,))
        orders = [PullOrder(f"d{number}", remote, DST, 0, 149) for number in range(16)]
        begun, found = time.monotonic(), Ended()
        target.order(pulls=orders)
        while len(found.failed) < len(orders):
            assert time.monotonic() < begun + 10, found
            found.failed |= target.sides[0].take_ended().failed
            time.sleep(0.01)


def test_an_idle_engine_waits_a_moment_for_what_it_reads_and_no_longer() -> None:
    """Its thread would look again and again, and keep those who read from it."""
    ended = EndedRequests()
    threading.Timer(0.05, ended.arrived, ("d",), {"failed": False}).start()
    assert ended.take() == Ended()
    assert ended.take(20.0) == Ended(received={"d"})
    target = Ranks(make_plan(128), 2)
    with engines(target):
        (side,) = target.sides
        begun = time.monotonic()
        for _ in range(1000):
            assert side.take_ended(idle=True) == Ended(), "nothing is being read"
        assert time.monotonic() < begun + 1.5
        for idle, threads in ((True, 2), (False, 1)):
            side.carry_out(StepOrders(), idle=idle)
            assert side.node.scatter_threads == threads, "an engine that computes needs its cores"


def test_an_offer_that_nobody_reads_expires() -> None:
    source = Ranks(make_plan(64, 2), 1, lease_seconds=0.2)
    with engines(source):
        source.order(offers=[offer()])
        assert source.ended() == [Ended(sent={"p"})] * 2
        assert source.sides[0].take_counts().expired == 1


def test_an_offer_that_cannot_be_is_given_up_at_once() -> None:
    source = Ranks(make_plan(64), 1)
    with engines(source):
        source.order(offers=[OfferOrder("p", "p/1", ((1,), (-1,)), 149)])
        assert source.ended() == [Ended(sent={"p"})]


def test_a_request_that_is_aborted_is_reported_and_given_back() -> None:
    source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2, wait_for_offer=30)
    with engines(source, target):
        target.order(pulls=[pull(source)])
        time.sleep(0.05)
        target.order(cancelled=["d", "unknown"])
        assert target.ended(5) == [Ended(received={"d"}, failed={"d"})]
        target.order(pulls=[pull(source)], cancelled=["d"])
        assert target.ended(5) == [Ended(received={"d"}, failed={"d"})]
        source.order(offers=[offer()])
        target.order(let_go=[source.remote(149)])
        assert source.ended() == [Ended(sent={"p"})]


@pytest.mark.skipif(len(os.sched_getaffinity(os.getppid())) < 2, reason="needs two cores")
def test_threads_that_move_bytes_leave_the_cores_that_vllm_computes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM binds a CPU worker's thread to its cores; threads made later would share them."""
    before, free = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    engine = SimpleNamespace(pid=os.getppid())
    monkeypatch.setattr(thread_cores, "parent_process", lambda: engine)
    bound, own = {min(before)}, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for by_vllm in (True, False):
        if by_vllm:
            monkeypatch.setenv("OMP_PLACES", str(bound))
        else:
            monkeypatch.delenv("OMP_PLACES")
        known = {thread.native_id for thread in threading.enumerate()}
        os.sched_setaffinity(0, bound)
        try:
            source, target = Ranks(make_plan(64), 1), Ranks(make_plan(128), 2)
            with engines(source, target):
                source.order(offers=[offer()])
                target.order(pulls=[pull(source)])
                assert target.ended() == [Ended(received={"d"})]
                made = {thread.native_id or 0 for thread in threading.enumerate()} - known
                reading = {
                    thread.native_id or 0
                    for thread in threading.enumerate()
                    if thread.name.startswith("kvatlas-vllm")
                }
                behind = {os.getpriority(os.PRIO_PROCESS, one) - own for one in reading}
                assert behind == {5}, "an engine that computes comes first"
                assert made > reading
                for idle in (False, True, False):
                    target.order(idle=idle)
                    allowed = free if idle else free - bound
                    for one in made:
                        cores = os.sched_getaffinity(one)
                        if not by_vllm:
                            assert cores == bound
                        elif one in reading:
                            assert cores == allowed, "they keep off its cores while it computes"
                        else:
                            assert cores >= free - bound
            assert os.sched_getaffinity(0) == bound, "vLLM's own thread stays where it is"
            assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
        finally:
            os.sched_setaffinity(0, before)
