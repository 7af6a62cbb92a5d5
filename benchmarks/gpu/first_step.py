"""A prefill in one process and the first decode step in another, which reads what it computes."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.pull_ends import DEVICE, TOKENS, planned, source_process
from benchmarks.gpu.tables import show
from kvatlas.cache import Cache, allocate
from kvatlas.kernels import attend
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, Transfer, make_transport

_TURNS = 5
"""Of each way, of which the first compiles."""


def layers() -> None:
    """From the beginning of a prefill: layers as they are written, or the request at its end."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    rows, outs = [], []
    with source_process() as far:
        endpoints = far.serve(made, 7)
        with (
            Node(mine, memory=cache, transport=make_transport("cuda"), buffers=0) as node,
            Session(node, endpoints) as session,
        ):
            for turn in range(2 * _TURNS):
                streamed = turn % 2 == 0
                begun = time.perf_counter()
                far.prefill(f"r{turn}", layered=streamed)
                transfer = session.pull(
                    f"r{turn}", dst_blocks=scattered(mine, TOKENS), tokens=TOKENS,
                    streamed=streamed, wait_for_offer=5,
                )  # fmt: skip
                first, out = _step(transfer, cache, streamed=streamed)
                stepped = time.perf_counter()
                transfer.wait(20)
                outs.append(out)
                times = [first - begun, stepped - begun, time.perf_counter() - begun]
                if turn > 1:
                    how = "as written" if streamed else "at the end"
                    rows.append([how, *(f"{seconds * 1e3:.1f}" for seconds in times)])
    head = ["layers", "ms until the first is here", "until a step is done", "until all is read"]
    show("\nA prefill of 32 layers of some 2 ms, read by another process", head, sorted(rows))
    print("steps agree:", all(torch.equal(outs[0], one) for one in outs))


def _step(transfer: Transfer, cache: Cache, *, streamed: bool) -> tuple[float, Any]:
    """One token's attention, layer by layer; when the first layer was there, and what it gave.

    A layer's queries depend on the layer before, as in a model.
    """
    ids = torch.tensor(scattered(cache.plan, TOKENS)[0], dtype=torch.int32, device=DEVICE)
    lengths = torch.full((1,), TOKENS, dtype=torch.int32, device=DEVICE)
    q = torch.linspace(-1, 1, 32 * 128, device=DEVICE).bfloat16().view(1, 32, 128)
    first = 0.0
    for name in cache:
        if streamed:
            transfer.wait_layers([name], 20)
        else:
            transfer.wait(20)
        first = first or time.perf_counter()
        q = attend(cache[name], q, tables=ids[None], lengths=lengths, max_queries=1)
    torch.cuda.current_stream().synchronize()
    return first, q
