"""A process with the source of transfers in a GPU's memory, told what to do line by line.

`Peer` is the side of whoever tells it, and strikes it.
"""

from __future__ import annotations

import base64
import json
import logging
import select
import subprocess
import sys
import time
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from tests.routing import oracle

Json = dict[str, Any]
PROMPT = 37
"""Tokens of a prompt, as the tiny models of hand-overs have them."""
SLEEP = 1_000_000
"""Cycles of about half a millisecond, for which a stream can be kept busy."""


def move_of(src: Plan, dst: Plan, tokens: int) -> oracle.Move:
    """A request of so many tokens between the blocks that both ends draw for it."""
    return oracle.Move(src, dst, scattered(src, tokens), scattered(dst, tokens), (0, tokens))


def contents_of(move: oracle.Move, seed: int) -> dict[int, dict[int, Any]]:
    """What brute force fills the source with, which anybody can make again."""
    filled = oracle.fill(move, np.random.default_rng(seed))
    return {rank: memory.pools for rank, memory in filled.items()}


class Served:
    """What that process has."""

    def __init__(self) -> None:
        self.ranks: Any = None
        self.contents: Any = None
        self.generating: Any = None

    def answer(self, do: str, about: Json) -> Json:
        answer: Json = getattr(self, f"do_{do}")(**about) or {}
        return answer

    def do_serve(
        self, src: str, dst: str, transport: str, tokens: int, seed: int, **given: Any
    ) -> Json:
        """Serve ranks of a plan; with `convert`, numbers that another format can hold."""
        from tests.gpu.ranks import GpuRanks
        from tests.routing import converting

        plan, other = Plan.from_json(src.encode()), Plan.from_json(dst.encode())
        move = move_of(plan, other, tokens)
        if "convert" in given:
            given["scales"] = converting.scales_of(plan)
            memories, _ = converting.fill_sources(move, np.random.default_rng(seed))
            self.contents = {rank: memory.pools for rank, memory in memories.items()}
        else:
            self.contents = contents_of(move, seed)
        self.ranks = GpuRanks(plan, transport, self.contents, tokens, **given)
        metadata = [node.transport.publish() for node in self.ranks.nodes]
        return {
            "endpoints": self.ranks.endpoints,
            "metadata": [base64.b64encode(one).decode() for one in metadata],
        }

    def do_serve_large(self, src: str, transport: str, tokens: int) -> Json:
        from tests.gpu.ranks import LargeRank

        self.ranks = LargeRank(Plan.from_json(src.encode()), transport, tokens)
        return {"endpoints": self.ranks.endpoints}

    def do_offer(self, request: str, busy: int = 0, **given: Any) -> None:
        """Offer; with `busy`, the bytes only get there after a while, in the order of a stream."""
        import torch

        if busy:
            kept = {
                rank: {index: pool.clone() for index, pool in self.ranks.pools(rank).items()}
                for rank in self.ranks.whole
            }
            for rank in kept:
                for pool in self.ranks.pools(rank).values():
                    pool.fill_(0x5A)
            torch.cuda._sleep(busy * SLEEP)  # type: ignore[no-untyped-call]
            for rank, pools in kept.items():
                for index, pool in self.ranks.pools(rank).items():
                    pool.copy_(pools[index])
        self.ranks.offer(request, **given)

    def do_offer_layers(self, request: str, cycles: int = 20_000_000) -> None:
        """Offer before anything is there, and fill one layer after the other."""
        import torch

        from kvatlas.cache import Cache

        for node in self.ranks.nodes:
            pools = self.ranks.pools(node.rank)
            there = Cache(node.plan, node.rank, {i: pool.clone() for i, pool in pools.items()})
            here = Cache(node.plan, node.rank, pools)
            for pool in pools.values():
                pool.fill_(0x5A)
            node.offer(request, self.ranks.blocks, self.ranks.tokens, layered=True)
            for name in here:
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
                here[name].tensor.copy_(there[name].tensor)
                node.layer_written(request, name)

    def do_prefill(self, model: str, transport: str, **plan: Any) -> Json:
        """Run a prompt on the GPU and offer its cache while the last kernels still run."""
        from tests.gpu.tokens import Generating

        self.generating = Generating(model, transport, **plan)
        first = self.generating.prefill()
        for turn in range(4):
            self.generating.node.offer(f"r{turn}", self.generating.cache.blocks_of(0), PROMPT)
        return {"endpoint": self.generating.node.endpoint, "first": first}

    def do_prefilled(self) -> None:
        """Nobody reads it any more."""
        self.generating.node.close()
        self.generating = None

    def do_push(self, endpoints: list[str], request: str, **given: Any) -> Json:
        from kvatlas.wire import Session

        about = {"source_blocks": self.ranks.blocks, "tokens": self.ranks.tokens} | given
        try:
            for node in self.ranks.nodes:
                with Session(node, endpoints) as session:
                    session.push(request, **about).wait(20)
        except AtlasError as refused:
            return {"code": str(refused.code)}
        return {"code": "ready"}

    def do_withdraw(self, request: str) -> None:
        for node in self.ranks.nodes:
            node.withdraw(request)

    def do_wrong(self) -> Json:
        return {"wrong": self.ranks.wrong(self.contents), "released": self.ranks.released}

    def do_close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None

    def do_free(self) -> None:
        self.ranks.free()
        self.ranks = None


def main() -> None:
    """Do what is told until nobody tells any more."""
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    served, said = Served(), sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = served.answer(order["do"], order["about"])
        except AtlasError as refused:
            answer = {"refused": str(refused.code), "text": str(refused)}
        said.write(json.dumps(answer) + "\n")
        said.flush()


class Peer:
    """That process, from the other side."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, do: str, **about: Any) -> Json:
        self.tell(do, **about)
        return self.heard()

    def tell(self, do: str, **about: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": do, "about": about}) + "\n").encode())
        self.process.stdin.flush()

    def heard(self, seconds: float = 90.0) -> Json:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "the peer says nothing"
        line = self.process.stdout.readline()
        assert line, "the peer has gone"
        said: Json = json.loads(line)
        return said

    def serve(self, src: Plan, dst: Plan, transport: str, tokens: int, **given: Any) -> Json:
        """Have it serve; where it does, and what its transports publish."""
        about: Json = {"seed": 5} | given
        plans: Json = {"src": src.to_json().decode(), "dst": dst.to_json().decode()}
        said = self.ask("serve", **plans, transport=transport, tokens=tokens, **about)
        assert "endpoints" in said, said
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.kill()
            self.process.stdout.close()


def until(true: Any, seconds: float = 10.0) -> bool:
    """Whether something becomes so within some seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


if __name__ == "__main__":
    main()
