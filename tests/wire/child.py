"""A process with one rank of a plan, told what to do line by line, so that it can be killed.

`python -m tests.wire.child` reads one JSON object a line and answers each with one; what a
transport prints besides is told apart by a mark. `Child` is the other end of that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.plan import Plan
from kvatlas.route import scattered
from kvatlas.wire import Memory, Node, Session
from kvatlas.wire import moving as kvatlas_moving
from kvatlas.wire.node import pools_for
from kvatlas.wire.transports import make

MARK = "child says "
TOKENS = 500
PIECE, SLOTS = 8192, 4
Json = dict[str, Any]


def noise(nbytes: int, *seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Rank:
    """One rank of a plan on the wire, its pools full of bytes that anybody can recompute."""

    def __init__(self, plan: Plan, rank: int, transport: str, seed: int, **given: Any) -> None:
        self.plan, self.seed = plan, seed
        made = make(transport)
        self.pools = pools_for(plan, rank, made)
        for index, pool in self.pools.items():
            pool[:] = noise(pool.nbytes, seed, rank, index)
        memory = {index: Memory(p.ctypes.data, p.nbytes) for index, p in self.pools.items()}
        self.node = Node(
            plan, rank=rank, memory=memory, transport=made, piece=PIECE, slots=SLOTS, **given
        )
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
            "slots": len(self.node._free),
            "registered": self.node.transport.registered,
        }

    def close(self) -> None:
        self.node.close()
        assert self.node.transport.registered == 0


def answer(rank: Rank, asked: Json) -> Json:
    about = asked.get("about", {})
    match asked["do"]:
        case "offer":
            rank.offer(**about)
        case "expect":
            source = Plan.from_json(about.pop("source").encode())
            rank.node.expect(blocks=rank.blocks, tokens=TOKENS, source=source, **about)
        case "ready":
            return {"ready": rank.node.expected[about["request"]].ready.is_set()}
        case "move":
            return moved(rank, **about)
        case "state":
            return rank.state() | {"released": rank.released}
        case "bytes":
            return {"bytes": {i: pool.tobytes().hex() for i, pool in rank.pools.items()}}
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


def main() -> None:
    rank: Rank | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if rank is None:
            batch = asked.pop("batch", None)
            if batch is not None:
                kvatlas_moving._BATCH = batch
            rank = Rank(Plan.from_json(asked.pop("plan").encode()), **asked)
            said: Json = {"endpoint": rank.node.endpoint}
        else:
            said = answer(rank, asked)
        print(MARK + json.dumps(said), flush=True)
    if rank is not None:
        rank.close()


class Child:
    """The process, from the side of whoever tells it what to do."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        paths = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.wire.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.endpoint = ""

    def tell(self, asked: Json) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Json:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                said: Json = json.loads(line.removeprefix(MARK))
                return said
        raise EOFError("the child is gone")

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
        self.process.send_signal(number)

    def kill(self) -> None:
        """As if the machine had gone: nothing is said or given back."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end by itself; it must."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(10) in (0, -signal.SIGKILL)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


if __name__ == "__main__":
    main()
