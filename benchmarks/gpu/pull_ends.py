"""The two processes of a pull: caches of a model of 8 billion parameters, and who serves them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvatlas.cache import Cache, allocate
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import scattered
from kvatlas.specs import FullAttention
from kvatlas.wire import Node, Session, make_transport
from kvatlas.wire.sample_server import SAMPLE_IDENTITY

TOKENS = 8192
LAYERS = 32
DEVICE = "cuda:0"
Json = dict[str, Any]
_LAYER = 4_000_000
"""Cycles, some two milliseconds, that a layer of the prefill takes."""
_AHEAD = 20_000_000
"""Cycles, some ten milliseconds, in which a stream is given what is then timed."""


_FINITE = -0x40404041
"""Bits of four bytes without the highest of each exponent: every type then has finite numbers."""


def model(heads: int, cache: str = "auto") -> Model:
    """With 8 heads that of 8 billion parameters; with others a token has as many bytes."""
    spec = FullAttention(heads=heads, head_dim=128, cache=cache)
    depth = LAYERS * 8 // heads
    layers = [Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(depth)]
    return Model(
        name="bench", architecture="Bench", layers=tuple(layers), depth=depth,
        attention_heads=4 * heads, max_len=TOKENS,
    )  # fmt: skip


def planned(
    order: str, heads: int = 8, *, tp: int = 1, block: int = 16, cache: str = "auto"
) -> Plan:
    """Room for the request in scattered blocks."""
    nbytes = int(2.1 * TOKENS * LAYERS * 8 * 512 / tp)
    return plan(
        model(heads, cache), memory=nbytes, tp=tp, layout=order, block_size=block, max_len=TOKENS,
        in_flight=0,
    )  # fmt: skip


def filled(made: Plan, rank: int, seed: int) -> Cache:
    """A cache of random numbers, that the other process can make again."""
    cache = allocate(made, rank=rank, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed + rank)
    for pool in cache.pools.values():
        pool.view(torch.int32).random_(generator=generator).bitwise_and_(_FINITE)
    torch.cuda.synchronize()
    return cache


# -- the process that is read ---------------------------------------------------------------


def source() -> None:
    """Serve plans and offer requests, as told line by line."""
    nodes: list[Node] = []
    said, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        if "plan" in order:
            made = Plan.from_json(order["plan"].encode())
            new = [
                Node(
                    made, rank=rank, memory=filled(made, rank, order["seed"]),
                    transport=make_transport("cuda"), identity=SAMPLE_IDENTITY, **order["about"],
                )
                for rank in range(made.ranks)
            ]  # fmt: skip
            nodes += new
            answer: Json = {"endpoints": [node.endpoint for node in new]}
        elif "prefill" in order:
            said.write("{}\n")
            said.flush()
            prefill(nodes[-1], order["prefill"], layered=order["layered"])
            continue
        else:
            tokens = order["tokens"]
            for node in nodes:
                for request in order["offer"]:
                    node.offer(request, scattered(node.plan, tokens), tokens, timeout=600)
            answer = {}
        said.write(json.dumps(answer) + "\n")
        said.flush()
    for node in nodes:
        node.close()


def prefill(node: Node, request: str, *, layered: bool) -> None:
    """Keep the GPU busy for every layer, and offer what is then there: layer by layer, or whole."""
    about: Json = {"blocks": scattered(node.plan, TOKENS), "tokens": TOKENS, "timeout": 60}
    if layered:
        node.offer(request, **about, layered=True)
    for name in node.plan.layers:
        torch.cuda._sleep(_LAYER)  # type: ignore[no-untyped-call]
        if layered:
            node.layer_written(request, name)
    if not layered:
        node.offer(request, **about)


class Source:
    """That process, from the other side."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.pull_ends"]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **order: Any) -> Json:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: Json = json.loads(self._process.stdout.readline())
        return answer

    def serve(self, made: Plan, seed: int, **about: Any) -> list[str]:
        """Endpoints of the ranks of a plan; `about` is what their nodes are made with."""
        order = {"plan": made.to_json().decode(), "seed": seed, "about": {"buffers": 0} | about}
        endpoints: list[str] = self._ask(**order)["endpoints"]
        return endpoints

    def offer(self, *requests: str, tokens: int = TOKENS) -> None:
        """Offer requests, all of the same blocks."""
        self._ask(offer=list(requests), tokens=tokens)

    def prefill(self, request: str, *, layered: bool) -> None:
        """Begin to compute a request."""
        self._ask(prefill=request, layered=layered)

    def close(self) -> None:
        """Let it end."""
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def source_process() -> Iterator[Source]:
    """Another process on the same GPU."""
    made = Source()
    try:
        yield made
    finally:
        made.close()


# -- the process that reads -----------------------------------------------------------------


def seconds_of(act: Callable[[], Any], stream: Any, repeat: int = 10) -> float:
    """Seconds of what a call puts on a stream, one behind the other: the GPU never waits."""
    act()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
        begin.record()
    for _ in range(repeat):
        act()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeat / 1e3


def grids_of(node: Node, session: Session, rank: int) -> tuple[Any, Any]:
    """A request from one rank: the link, and its runs as sums."""
    peer = next(one for one in session.peers if one.rank == rank)
    blocks = scattered(node.plan, TOKENS), scattered(peer.plan, TOKENS)
    stream: Any = node.stream(peer, *blocks, (0, TOKENS), None, incoming=True)
    return session.link(rank), stream.grids()


def tokens_of(cache: Cache, layer: str, tokens: int) -> torch.Tensor:
    """A request's bytes [tokens, heads, bytes], by views alone."""
    table = torch.tensor(scattered(cache.plan, tokens)[0], device=DEVICE)
    pages = cache[layer].tensor[table]  # blocks, heads, states, bytes
    return pages.permute(0, 2, 1, 3).flatten(0, 1)[:tokens]


def is_right(target: Cache, sources: list[Cache], tokens: int = TOKENS) -> bool:
    """Whether every token of every layer is what the source ranks have, head by head."""
    for name in target:
        there = torch.cat([tokens_of(one, name, tokens) for one in sources], 1)
        if not torch.equal(tokens_of(target, name, tokens), there):
            return False
    return True


if __name__ == "__main__":
    source()
