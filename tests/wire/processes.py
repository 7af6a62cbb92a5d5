"""A node of this process, others in processes that are killed, and what must be true after."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.routing import route, scattered
from kvatlas.wire import Handle, Session, Transfer
from kvatlas.wire.sample_server import random_bytes
from tests.profiles import DEEP
from tests.wire.child import TOKENS, Child, Rank
from tests.wire.forking import HAS_NIXL
from tests.wire.helpers import small, until

POINTS = 1000 if DEEP else 10
"""Moments at which something is killed, over all transports."""
SECONDS = 3.0
SLACK = 4.0
"""Seconds past its deadline after which a transfer counts as hanging: the machine may be busy."""
SETTLED = 10.0 + SLACK
"""Seconds after which nothing is lent any more: a link that does not rest is torn down after 10."""

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
            code = child.close()
            assert code in (0, -signal.SIGKILL), f"the child did not end by itself: {code}"


class Here:
    """The rank of this process, and what is right for it."""

    def __init__(self, transport: str, plan: Any) -> None:
        self.transport = transport
        self.rank = Rank(plan, transport, seed=7, name="here")
        self.node, self.blocks = self.rank.node, self.rank.blocks
        self.clean = {index: pool.copy() for index, pool in self.rank.pools.items()}
        self.registered = self.rank.transport.registered

    def pull(self, session: Session, request: str = "r", **about: Any) -> Transfer:
        about = {"timeout": SECONDS} | about
        return session.pull(request, destination_blocks=self.blocks, tokens=TOKENS, **about)

    def wipe(self) -> None:
        for index, pool in self.rank.pools.items():
            pool[:] = self.clean[index]

    def assert_has(self, source: Any, seed: int) -> None:
        """Every byte of a source plan's request is here, and nothing else has changed."""
        right = {index: pool.copy() for index, pool in self.clean.items()}
        carry(source, self.node.plan, right, seed)
        for index, pool in self.rank.pools.items():
            assert np.array_equal(pool, right[index])

    def settled(self, seconds: float = SETTLED) -> None:
        """Nothing is lent to anyone any more, and as much is registered as at first."""
        until(lambda: not self.rank.left()["leases"] + self.rank.left()["buffers"], seconds)
        assert self.rank.transport.registered == self.registered


def carry(source: Any, target: Any, into: dict[int, Any], seed: int) -> None:
    """A request as the route says, from bytes that are made again here."""
    way = route(source, target)
    for rank in way.sources(0):
        there = {p.index: random_bytes(p.nbytes, seed, rank, p.index) for p in source.pools}
        for copy in way.bind(
            source_rank=rank, destination_rank=0, source_blocks=scattered(source, TOKENS),
            destination_blocks=scattered(target, TOKENS), tokens=TOKENS,
        ).copies:  # fmt: skip
            for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True):
                into[copy.destination_pool][b : b + n] = there[copy.source_pool][a : a + n]


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
        here.pull(session, "next", timeout=20, checksums=True).wait(20)
    here.assert_has(plan, seed)
    here.settled()
    state = child.ask("state")
    assert (state["leases"], state["buffers"]) == (0, 0)
    assert ["next", "read"] in state["released"]


class Slow:
    """Makes this node's operations take longer, and says when the n-th has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, number: int = 1) -> None:
        self.reached = threading.Event()
        self.left = number
        wait = Handle.wait

        def slowly(handle: Handle, *given: Any) -> None:
            self.left -= 1
            if self.left <= 0:
                self.reached.set()
            time.sleep(seconds)
            wait(handle, *given)

        monkeypatch.setattr(Handle, "wait", slowly)
