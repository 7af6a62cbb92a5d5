"""A node with guarded pools, in this process or in one that can be stopped and killed."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import Bytes, Node, Session, make_transport, memory_of
from tests.attack.left_open import open_things
from tests.attack.plans import Wire, contents
from tests.wire.forking import forked, until_stopped

GUARD, GUARDED = 4096, 0xA5
PIECE, BUFFERS = 1 << 20, 8
Json = dict[str, Any]


class Rank:
    """One rank of a plan on the wire; its pools lie between guard bytes."""

    def __init__(
        self, plan: Plan, wire: str, seed: int, tokens: int, *, rank: int = 0, **given: Any
    ) -> None:
        self.plan, self.seed, self.tokens, self.rank = plan, seed, tokens, rank
        self.transport = make_transport(wire)
        self.whole: dict[int, Bytes] = {}
        self.fill(seed)
        about: Json = {"piece": PIECE, "buffers": BUFFERS, "name": f"node-{seed}"} | given
        self.node = Node(
            plan, rank=rank, memory=memory_of(self.pools), transport=self.transport, **about
        )
        self.blocks = scattered(plan, tokens)
        self.released: list[tuple[str, str]] = []

    @property
    def pools(self) -> dict[int, Bytes]:
        return {index: whole[GUARD:-GUARD] for index, whole in self.whole.items()}

    def fill(self, seed: int) -> None:
        """Random bytes that anybody can make again, between guards."""
        for index, pool in contents(self.plan, seed, self.rank).items():
            if index not in self.whole:
                self.whole[index] = self.transport.allocate(pool.nbytes + 2 * GUARD)
                self.whole[index][:] = GUARDED
            self.pools[index][:] = pool

    def wrong(self, right: dict[int, Bytes]) -> int:
        """Bytes of its pools that are not as they should be, and of the guards around them."""
        found = 0
        for index, whole in self.whole.items():
            if not np.array_equal(self.pools[index], right[index]):
                found += int((self.pools[index] != right[index]).sum())
            found += sum(int((guard != GUARDED).sum()) for guard in (whole[:GUARD], whole[-GUARD:]))
        return found

    def offer(self, request: str, seconds: float = 60.0, **given: Any) -> None:
        def noted(request: str, why: str) -> None:
            self.released.append((request, why))

        about: Json = {"blocks": self.blocks, "tokens": self.tokens} | given
        self.node.offer(request, seconds=seconds, released=noted, **about)

    def left(self) -> Json:
        """What is still lent, leased or under way: all zero where nothing is."""
        return {
            "leases": len(self.node.leases),
            "buffers": BUFFERS - self.node.staging.free,
            "quarantine": len(self.node.quarantine),
        }

    def close(self) -> None:
        self.node.close()
        assert self.transport.registered == 0


# -- in a process of its own --------------------------------------------------------------


def _moved(rank: Rank, way: str, endpoints: list[str], about: Json) -> Json:
    about |= {"tokens": rank.tokens}
    try:
        with Session(rank.node, endpoints, seconds=5) as session:
            if way == "pull":
                session.pull(dst_blocks=rank.blocks, **about).wait()
            else:
                session.push(src_blocks=rank.blocks, **about).wait()
    except AtlasError as refused:
        return {"code": str(refused.code)}
    return {"code": "ready"}


def _answer(rank: Rank, order: Json) -> Json:
    about = order["about"]
    match order["do"]:
        case "offer":
            rank.offer(**about)
        case "withdraw":
            rank.node.withdraw(**about)
        case "move":
            return _moved(rank, about.pop("way"), about.pop("endpoints"), about)
        case "state":
            return rank.left() | open_things() | {"released": rank.released}
    return {}


def main(told: Connection, plan: bytes, wire: Wire, given: Json) -> None:
    """Be one rank until nobody tells it anything any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(wire.settings)
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    faulthandler.enable()
    rank = Rank(Plan.from_json(plan), wire.name, **given)
    said: Json = {"endpoint": rank.node.endpoint}
    while True:
        try:
            told.send_bytes(json.dumps(said).encode())
            order = json.loads(told.recv_bytes())
        except (EOFError, OSError):
            return rank.close()
        said = _answer(rank, order)


class Far:
    """That process, from the side of whoever tells it what to do and strikes it."""

    def __init__(self, wire: Wire, plan: Plan, *, seed: int, tokens: int, **given: Any) -> None:
        self.seed = seed
        about = {"seed": seed, "tokens": tokens} | given
        self.process, self._pipe = forked(main, plan.to_json(), wire, about)
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        if not self._endpoint:
            self._endpoint = self.heard()["endpoint"]
        return self._endpoint

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return int(self.process.pid)

    def tell(self, do: str, **about: Any) -> None:
        assert self.endpoint
        self._pipe.send_bytes(json.dumps({"do": do, "about": about}).encode())

    def heard(self, seconds: float = 40.0) -> Json:
        assert self._pipe.poll(seconds), "the other process says nothing"
        said: Json = json.loads(self._pipe.recv_bytes())
        return said

    def ask(self, do: str, **about: Any) -> Json:
        self.tell(do, **about)
        return self.heard()

    def stop(self) -> None:
        """It stands still when this returns, all its threads."""
        os.kill(self.pid, signal.SIGSTOP)
        until_stopped(self.pid)

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> int:
        """Let it end by itself; how it did, which is 0, or -9 where it was killed."""
        self._pipe.close()
        if self.process.is_alive():
            self.go_on()
        self.process.join(15)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        return -1 if code is None else int(code)


def waited(true: Any, seconds: float) -> bool:
    """Whether something becomes so within some seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
