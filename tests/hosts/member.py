"""One rank of a plan in a process of a host, and `Member`, the side of the tests that controls it.

A source fills its pools with the values of the routing oracle. A destination compares each element
with the oracle's, and every other byte of its pools and of the guards around them with what was
there before.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvatlas import AtlasError
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import Session, Transfer
from kvatlas.wire.client import pull_pipeline
from kvatlas.wire.transports import offer_board
from tests.hosts import namespaces
from tests.hosts.networks import DEVICE
from tests.routing import oracle
from tests.routing.oracle import Bytes, Move
from tests.wire.child import Json, Rank
from tests.wire.forking import forked

READY = "ready"
_BATCH = 128 << 10
"""Bytes that a direct pull reads at once, so that it has several reads."""
_ANSWER_SECONDS = 60.0
_SETTINGS = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}
"""Settings for UCX, which would read from the memory of processes on the same machine."""
_SENT = Path("/sys/class/net", DEVICE, "statistics/tx_bytes")


class Outcome(NamedTuple):
    """How an operation ended."""

    code: str
    """`ready`, or the code of its error."""
    seconds: float
    nbytes: int = 0
    """The bytes of a complete transfer."""
    message: str = ""


class Compared(NamedTuple):
    """A destination's pools, compared with the oracle."""

    missing: int
    """Bytes that differ from what they are after a complete transfer."""
    wrong: int
    """Bytes that are neither as before the transfer nor as after it; damaged guards count."""


# -- in a process of a host ---------------------------------------------------------------------


class _Orders:
    """What the tests can ask of a member. Each method is one order."""

    rank: Rank
    session: Session | None = None
    transfer: Transfer
    begun: float

    def start(self, plan: str, transport: str, seed: int, about: Json) -> str:
        """Start the node, and return its endpoint."""
        self.rank = Rank(Plan.from_json(plan.encode()), transport, seed, **about)
        self.before = {index: pool.copy() for index, pool in self.rank.pools.items()}
        return self.rank.node.endpoint

    def hold(self, destination: str) -> None:
        """Fill the pools of a source with the values that a destination expects."""
        move = self._move(self.rank.plan, Plan.from_json(destination.encode()))
        for elements in oracle.held(move, "source", self.rank.rank):
            elements.write(self.rank.pools[elements.pool])
        self.before = {index: pool.copy() for index, pool in self.rank.pools.items()}

    def offer(self, request: str) -> None:
        self.rank.offer(request, timeout=300.0)

    def withdraw(self, request: str) -> None:
        self.rank.node.withdraw(request)

    def connect(self, endpoints: list[str], seconds: float) -> Outcome:
        """Open a session in place of the last one."""
        self.disconnect()
        begun = time.monotonic()
        try:
            self.session = Session(self.rank.node, endpoints, timeout=seconds)
        except AtlasError as refused:
            return _failed(refused, begun)
        return Outcome(READY, time.monotonic() - begun)

    def disconnect(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def pull(self, request: str, about: Json) -> None:
        """Start a pull of the session. `end` returns its outcome."""
        assert self.session is not None
        self.begun = time.monotonic()
        self.transfer = self.session.pull(
            request, destination_blocks=self.rank.blocks, tokens=self.rank.tokens, **about
        )

    def push(self, request: str, about: Json) -> None:
        """Start a push of the session. `end` returns its outcome."""
        assert self.session is not None
        self.begun = time.monotonic()
        self.transfer = self.session.push(
            request, source_blocks=self.rank.blocks, tokens=self.rank.tokens, **about
        )

    def expect(self, request: str, source: str, pushers: list[str]) -> None:
        """Expect a push. `pushed` returns whether it has arrived."""
        plan = Plan.from_json(source.encode())
        self.expected = self.rank.node.expect(
            request, self.rank.blocks, self.rank.tokens, source=plan, pushers=pushers
        )

    def pushed(self, seconds: float) -> bool:
        return self.expected.ready.wait(seconds)

    def forget(self, request: str) -> None:
        self.rank.node.forget(request)

    def moved(self) -> int:
        """The bytes that the transfer has moved so far."""
        return self.transfer.moved

    def end(self) -> Outcome:
        """Wait for the end of the transfer."""
        try:
            self.transfer.wait()
        except AtlasError as refused:
            return _failed(refused, self.begun)
        return Outcome(READY, time.monotonic() - self.begun, self.transfer.moved)

    def sent(self) -> int:
        """The bytes that the device of this host has sent."""
        return int(_SENT.read_text())

    def released(self, seconds: float) -> bool:
        """Whether the blocks of the transfer can be used again within some seconds."""
        return self.transfer.wait_released(seconds)

    def compare(self, source: str) -> Compared:
        """Compare the pools of a destination with those after a transfer from a source plan."""
        right = {index: pool.copy() for index, pool in self.before.items()}
        move = self._move(Plan.from_json(source.encode()), self.rank.plan)
        for elements in oracle.held(move, "destination", self.rank.rank):
            elements.write(right[elements.pool])
        for index, unused in oracle.unused(move, "destination", self.rank.rank).items():
            right[index] = np.where(unused, self.rank.pools[index], right[index])
        between = {
            index: np.where(pool == self.before[index], right[index], pool)
            for index, pool in self.rank.pools.items()
        }
        return Compared(self.rank.wrong(right), self._different(between, right))

    def _different(self, pools: dict[int, Bytes], right: dict[int, Bytes]) -> int:
        guards = self.rank.wrong(self.rank.pools)
        return guards + sum(int((pools[index] != right[index]).sum()) for index in pools)

    def changed(self) -> int:
        """Bytes of a source's pools that have changed since it was filled."""
        return self.rank.wrong(self.before)

    def wipe(self) -> None:
        """Make the pools as they were before any transfer."""
        for index, pool in self.rank.pools.items():
            pool[:] = self.before[index]

    def left(self) -> Json:
        """What is still leased, lent, quarantined or claimed; all zero if nothing is."""
        return self.rank.left()

    def released_offers(self) -> list[tuple[str, str]]:
        return self.rank.released

    def close(self) -> None:
        self.disconnect()
        self.rank.close()

    def _move(self, source: Plan, destination: Plan) -> Move:
        tokens = self.rank.tokens
        tables = scattered(source, tokens), scattered(destination, tokens)
        return Move(source, destination, *tables, (0, tokens))


def _failed(refused: AtlasError, begun: float) -> Outcome:
    return Outcome(str(refused.code), time.monotonic() - begun, message=str(refused))


def _main(told: Connection, namespace: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    namespaces.enter(namespace)
    os.environ.update(_SETTINGS)
    # Boards of offers are for processes of one host, which is a network namespace here.
    offer_board._namespace = lambda: Path("/proc/self/ns/net").stat().st_ino
    pull_pipeline._BATCH = _BATCH
    orders = _Orders()
    with suppress(EOFError, OSError):
        while True:
            name, given = told.recv()
            try:
                said = getattr(orders, name)(*given)
            except Exception:
                said = RuntimeError(traceback.format_exc())
            told.send(said)
            if name == "close":
                return


# -- in the process of the tests ------------------------------------------------------------------


class Member:
    """One rank in a process of a host."""

    def __init__(self, namespace: str) -> None:
        self.process, self._pipe = forked(_main, namespace)
        self.endpoint = ""

    def tell(self, order: str, *given: Any) -> None:
        """Send an order without waiting for the answer, which `hear` returns."""
        self._pipe.send((order, given))

    def hear(self) -> Any:
        assert self._pipe.poll(_ANSWER_SECONDS), "the member does not answer"
        said = self._pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said

    def ask(self, order: str, *given: Any) -> Any:
        self.tell(order, *given)
        return self.hear()

    def kill(self) -> None:
        """End the process without any clean-up of its own."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """End the process, and check that it ends by itself unless it was killed."""
        if self.process.is_alive():
            with suppress(OSError):
                self.tell("close")
            self.process.join(20)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self._pipe.close()
        assert code in (0, -signal.SIGKILL), f"a member ended with {code}"
