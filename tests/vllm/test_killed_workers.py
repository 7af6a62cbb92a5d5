"""Workers' sides that are killed before, during and after a read: nothing wrong, nothing held."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from kvatlas.copying import copy_request
from kvatlas.engines.vllm.ended_requests import Ended
from kvatlas.engines.vllm.orders import OfferOrder, PullOrder
from kvatlas.routing import route
from tests.vllm.test_worker_side import (
    DST,
    SRC,
    Ranks,
    engines,
    make_plan,
)
from tests.vllm.worker_process import SEED, SMALL, KillableWorker

PIECES = 60
"""At least, of a request: each is asked for by a message."""
TIMES = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 2


class Reader:
    """A rank of this process, and what a read may change of it."""

    def __init__(self) -> None:
        self.ranks = Ranks(make_plan(128), 2, wait_for_offer=0.2, **SMALL)
        (self.side,), (self.pool,) = self.ranks.sides, self.ranks.pools
        self.before = self.pool.copy()
        self.right = self.pool.copy()
        plan = make_plan(64)
        pool = np.random.default_rng(SEED).integers(0, 256, plan.pools[0].nbytes, np.uint8)
        copy_request(
            route(plan, self.ranks.plan), {0: {0: pool}}, {0: {0: self.right}},
            source_blocks=dict(enumerate(SRC)), destination_blocks=dict(enumerate(DST)), tokens=149,
        )  # fmt: skip

    def read(self, order: PullOrder, strike: Callable[[], None] = lambda: None) -> bool:
        """Whether a request has arrived; its bytes are right then, and no others ever change."""
        self.pool[:] = self.before
        self.ranks.order(pulls=[order])
        strike()
        (ended,) = self.ranks.ended()
        arrived = not ended.failed
        assert ended == Ended(received={order.request_id}, failed=ended.failed)
        if arrived:
            assert np.array_equal(self.pool, self.right)
        else:
            others = self.before == self.right
            assert np.array_equal(self.pool[others], self.before[others])
        assert not self.side._pulls
        self.settled()
        return arrived

    def moved(self, name: str) -> int:
        """How much of a request is here."""
        pull = self.side._pulls.get(name)
        return 0 if pull is None or pull.transfer is None else pull.transfer.moved

    def settled(self) -> None:
        """Nothing of this rank is lent to anybody."""
        node, deadline = self.side.node, time.monotonic() + 20
        while len(node.leases) or len(node.quarantine) or node.staging.free < SMALL["buffers"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)


@contextmanager
def killable(block: int = 64) -> Iterator[KillableWorker]:
    made = KillableWorker(block)
    try:
        yield made
    finally:
        made.close()


def test_sources_that_are_killed_before_during_and_after_a_read() -> None:
    reader, struck = Reader(), 0
    with engines(reader.ranks):
        for turn in range(4 * TIMES):
            with killable() as source:
                order = source.offer(f"after {turn}")
                assert reader.read(order)
                if turn < TIMES:
                    order = source.offer(f"before {turn}")
                    source.kill()
                    assert not reader.read(order)
                    continue
                order = source.offer(f"during {turn}")

                def strike(order: PullOrder = order, source: KillableWorker = source) -> None:
                    while not reader.moved(order.request_id):
                        assert reader.side._pulls, "it has ended"
                        time.sleep(0.0005)
                    source.kill()

                struck += not reader.read(order, strike)
            if struck == TIMES:
                break
        assert struck == TIMES
        counts = reader.side.take_counts()
        assert counts.failures == TIMES + struck


def test_sources_that_are_killed_the_moment_a_read_has_ended() -> None:
    """What has arrived stays, nothing of the dead is waited for, and the next source is read."""
    reader = Reader()
    with engines(reader.ranks):
        for turn in range(TIMES):
            with killable() as source:
                order = source.offer(f"after {turn}")

                def strike(order: PullOrder = order, source: KillableWorker = source) -> None:
                    pull = reader.side._pulls[order.request_id]
                    while pull.transfer is None or not pull.transfer.done:
                        time.sleep(0.0005)
                    source.kill()

                assert reader.read(order, strike), "all of it had been confirmed"
                reader.ranks.order(let_go=[order.remote])
                assert np.array_equal(reader.pool, reader.right)
                reader.settled()
        counts = reader.side.take_counts()
        assert (counts.pulls, counts.failures) == (TIMES, 0)


def test_readers_that_are_killed_in_the_middle_of_a_read() -> None:
    source = Ranks(make_plan(64), SEED, **SMALL)
    (side,), before = source.sides, source.pools[0].copy()
    with engines(source):
        for turn in range(TIMES):
            name = f"read {turn}"
            with killable(128) as reader:
                source.order(offers=[OfferOrder(name, name, SRC, 149)])
                told = msgspec.structs.replace(source.remote(149), request=name)
                heard = side.node.metrics.values["messages"]
                reader.pull(PullOrder(name, told, DST, 0, 149))
                while side.node.metrics.values["messages"] < heard + PIECES // 3:
                    time.sleep(0.0005)
                reader.kill()
            (ended,) = source.ended()
            assert ended == Ended(sent={name}), "after its lease at the latest"
            assert not side._offered
            assert not len(side.node.leases)
        assert np.array_equal(source.pools[0], before)
