"""A prefill in one process and the first decode step in another, which reads what it computes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.pull_ends import (
    DEVICE,
    TOKENS,
    Json,
    filled,
    planned,
    prefill,
    source_process,
)
from benchmarks.gpu.tables import show
from kvatlas.cache import Cache, allocate
from kvatlas.kernels import attend
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, Transfer, make_transport
from kvatlas.wire.sample_server import SAMPLE_IDENTITY

_TURNS = 5
"""Of each way, of which the first compiles."""


def layers() -> None:
    """From the beginning of a prefill: layers as they are written, or the request at its end."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    rows: list[list[str]] = []
    outs: list[Any] = []
    with Node(
        mine, memory=cache, transport=make_transport("cuda"), buffers=0, identity=SAMPLE_IDENTITY
    ) as node:
        with source_process() as far:
            endpoints = far.serve(made, 7)
            rows += _turns("another process", far.prefill, node, cache, endpoints, outs)
        about: Json = {"memory": filled(made, 0, 7), "transport": make_transport("cuda")}
        with Node(made, **about, buffers=0, identity=SAMPLE_IDENTITY) as near:
            side: Any = torch.cuda.Stream

            def begin(request: str, *, layered: bool) -> None:
                with torch.cuda.stream(side()):
                    prefill(near, request, layered=layered)

            rows += _turns("this process", begin, node, cache, [near.endpoint], outs)
    head = ["prefill in", "layers", "ms until the first is here", "until a step is done"]
    show("\nA prefill of 32 layers of some 2 ms, and the first step of a decode", head, rows)
    print("steps agree:", all(torch.equal(outs[0], one) for one in outs))


def _turns(
    where: str, begin: Callable[..., None], node: Node, cache: Cache, endpoints: list[str],
    outs: list[Any],
) -> list[list[str]]:  # fmt: skip
    """Both ways in turn, against a prefill that `begin` begins; medians.

    Processes take a GPU in turns of some milliseconds, streams of one process share it.
    """
    taken: dict[str, list[tuple[float, float]]] = {"as written": [], "at the end": []}
    blocks = scattered(node.plan, TOKENS)
    with Session(node, endpoints) as session:
        for turn in range(2 * _TURNS):
            streamed = turn % 2 == 0
            begun = time.perf_counter()
            begin(f"{where} {turn}", layered=streamed)
            transfer = session.pull(
                f"{where} {turn}", destination_blocks=blocks, tokens=TOKENS, streamed=streamed,
                wait_for_offer=5,
            )  # fmt: skip
            first, out = _step(transfer, cache, streamed=streamed)
            stepped = time.perf_counter()
            transfer.wait(20)
            outs.append(out)
            if turn > 1:
                way = "as written" if streamed else "at the end"
                taken[way].append((first - begun, stepped - begun))
    return [
        [where, way, *(f"{statistics.median(some) * 1e3:.1f}" for some in zip(*own, strict=True))]
        for way, own in taken.items()
    ]


def _step(transfer: Transfer, cache: Cache, *, streamed: bool) -> tuple[float, Any]:
    """One token's attention, layer by layer; when the first layer was there, and what it gave.

    A layer's queries depend on the layer before, as in a model.
    """
    ids = torch.tensor(scattered(cache.plan, TOKENS)[0], dtype=torch.int32, device=DEVICE)
    lengths = torch.full((1,), TOKENS, dtype=torch.int32, device=DEVICE)
    one = torch.ones_like(lengths)
    q = torch.linspace(-1, 1, 32 * 128, device=DEVICE).bfloat16().view(1, 32, 128)
    first = 0.0
    for name in cache:
        if streamed:
            transfer.wait_layers([name], 20)
        else:
            transfer.wait(20)
        first = first or time.perf_counter()
        about: Json = {"tables": ids[None], "lengths": lengths, "queries": one, "max_queries": 1}
        q = attend(cache[name], q, **about)
    torch.cuda.current_stream().synchronize()
    return first, q
