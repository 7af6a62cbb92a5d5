"""A process with one rank of a plan, told what to do, so that it can be killed.

`Child` is the side of whoever tells it what to do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from kvatlas import AtlasError
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import (
    Handle,
    Node,
    Session,
    make_transport,
    memory_of,
    pools_for,
    random_bytes,
)
from kvatlas.wire.client import direct
from tests.wire.forking import forked

TOKENS = 500
PIECE, BUFFERS = 8192, 4
Json = dict[str, Any]


class Rank:
    """One rank of a plan on the wire, its pools full of bytes that anybody can recompute."""

    def __init__(self, plan: Plan, rank: int, transport: str, seed: int, **given: Any) -> None:
        self.plan, self.seed = plan, seed
        made = make_transport(transport)
        self.pools = pools_for(plan, rank, made)
        for index, pool in self.pools.items():
            pool[:] = random_bytes(pool.nbytes, seed, rank, index)
        self.node = Node(
            plan, rank=rank, memory=memory_of(self.pools), transport=made, piece=PIECE,
            buffers=BUFFERS, **given,
        )  # fmt: skip
        self.blocks = scattered(plan, TOKENS)
        self.released: list[tuple[str, str]] = []

    def offer(self, request: str, seconds: float = 60.0) -> None:
        self.node.offer(
            request, self.blocks, TOKENS, seconds=seconds,
            released=lambda request, why: self.released.append((request, why)),
        )  # fmt: skip

    def state(self) -> Json:
        """What must be as it was once nothing is under way."""
        return {
            "leases": len(self.node.leases),
            "buffers": self.node.staging.free,
            "registered": self.node.transport.registered,
        }

    def close(self) -> None:
        self.node.close()
        assert self.node.transport.registered == 0


def answer(rank: Rank, order: Json) -> Json:
    about = order.get("about", {})
    match order["do"]:
        case "offer":
            rank.offer(**about)
        case "expect":
            source = Plan.from_json(about.pop("source").encode())
            rank.node.expect(blocks=rank.blocks, tokens=TOKENS, source=source, **about)
        case "move":
            return moved(rank, **about)
        case "state":
            return rank.state() | {"released": rank.released}
    return {}


def moved(rank: Rank, way: str, endpoints: list[str], **about: Any) -> Json:
    try:
        with Session(rank.node, endpoints, seconds=5) as session:
            about |= {"tokens": TOKENS}
            if way == "pull":
                session.pull(dst_blocks=rank.blocks, **about).wait(20)
            else:
                session.push(src_blocks=rank.blocks, **about).wait(20)
    except AtlasError as refused:
        return {"code": str(refused.code)}
    return {"code": "ok"}


def slow_down(seconds: float) -> None:
    """Let every operation of the transport take longer, so that there is time to strike."""
    wait = Handle.wait

    def slowly(handle: Handle, *given: Any) -> None:
        time.sleep(seconds)
        wait(handle, *given)

    if seconds:
        Handle.wait = slowly  # type: ignore[method-assign, assignment]


def main(told: Connection) -> None:
    """Be one rank until nobody tells it anything any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(told.recv_bytes())
    direct._BATCH = order.pop("batch", direct._BATCH)
    slow_down(order.pop("slow", 0.0))
    rank = Rank(Plan.from_json(order.pop("plan").encode()), **order)
    said: Json = {"endpoint": rank.node.endpoint}
    while True:
        try:
            told.send_bytes(json.dumps(said).encode())
            order = json.loads(told.recv_bytes())
        except (EOFError, OSError):
            return rank.close()
        said = answer(rank, order)


class Child:
    """The process, from the side of whoever tells it what to do."""

    def __init__(self) -> None:
        self.process, self._pipe = forked(main)
        self.endpoint = ""

    def tell(self, order: Json) -> None:
        self._pipe.send_bytes(json.dumps(order).encode())

    def heard(self) -> Json:
        assert self._pipe.poll(30), "the child says nothing"
        said: Json = json.loads(self._pipe.recv_bytes())
        return said

    def start(self, plan: Plan, transport: str, seed: int, rank: int = 0, **given: Any) -> Child:
        self.tell(
            {"plan": plan.to_json().decode(), "transport": transport, "seed": seed, "rank": rank}
            | given
        )
        self.endpoint = str(self.heard()["endpoint"])
        return self

    def ask(self, do: str, **about: Any) -> Json:
        self.tell({"do": do, "about": about})
        return self.heard()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As if the machine had gone: nothing is said or given back."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Let it end by itself; it must, unless it was killed."""
        self._pipe.close()
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self.process.join(15)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        assert code in (0, -signal.SIGKILL), f"the child did not end by itself: {code}"
