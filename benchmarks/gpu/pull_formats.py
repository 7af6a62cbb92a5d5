"""Pulls whose content changes its format on the way, beside the plain pull of the same request."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.pull_ends import (
    DEVICE,
    LAYERS,
    TOKENS,
    Source,
    filled,
    grids_of,
    planned,
    seconds_of,
    source_process,
    tokens_of,
)
from benchmarks.gpu.tables import show
from kvatlas.cache import Cache, allocate
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, make_transport
from kvatlas.wire.sample_server import SAMPLE_IDENTITY

_PULLS, _FIRST = 30, 8
"""Of a session, of which the first get it going."""
_LAYERS = [f"layers.{number}.attn" for number in range(LAYERS)]
_SCALES: dict[str, Any] = {
    "fp8": {name: (0.3 + number / 64, 0.4) for number, name in enumerate(_LAYERS)}, "auto": None
}  # fmt: skip
"""Of K and V, unlike from layer to layer, as they are calibrated."""
_NAMES = {"fp8": "fp8", "auto": "bf16"}
_TYPES = {"fp8": torch.float8_e4m3fn, "auto": torch.bfloat16}
_BAR = 0.8
"""Of the device's own copy, by bytes moved."""


def formats(copy: float) -> None:
    """The kernel by bytes moved, and whole pulls: as they are, cast on the way, and staged."""
    with source_process() as far:
        rows = [
            _pulled(far, pair, orders, copy)
            for pair in (("auto", "auto"), ("fp8", "auto"), ("auto", "fp8"))
            for orders in (("LBNHC", "LBNHC"), ("LBNHC", "BHLNC"))
        ]
    head = ["from", "into", "GiB read + written", "kernel GB/s", "of the copy", "pull ms"]
    head += ["GB/s by bytes moved", "staged ms", "right"]
    show(f"\nA request of 8,192 tokens by format; copy {copy:,.0f} GB/s", head, rows)
    shares = [float(row[4].rstrip("%")) / 100 for row in rows if "fp8" in row[0] + row[1]]
    verdict = "ok" if min(shares) >= _BAR else "below"
    print(f"lowest {min(shares):.1%} of the copy, bar {_BAR:.0%}: {verdict}")


def _pulled(far: Source, pair: tuple[str, str], orders: tuple[str, str], copy: float) -> list[str]:
    made = planned(orders[0], cache=pair[0])
    mine = planned(orders[1], block=32, cache=pair[1])
    plain, about = pair[0] == pair[1], [dict[str, Any](), dict[str, Any]()]
    if not plain:
        named = "->".join(_NAMES[one] for one in pair)
        about = [{"convert": named, "scales": _SCALES[one], "buffers": 4} for one in pair]
    endpoints = far.serve(made, 7, **about[0])
    cache = allocate(mine, device=DEVICE)
    transport = make_transport("cuda", share=1.0)
    with Node(
        mine, memory=cache, transport=transport, identity=SAMPLE_IDENTITY, **about[1]
    ) as node:
        names = [f"{pair} {orders} {number}" for number in range(_PULLS)]
        far.offer(*names)
        with Session(node, endpoints) as session:
            link, grids = grids_of(node, session, 0)
            written = sum(grid.nbytes for grid in grids)
            moved = written + sum(_read_bytes(grid) for grid in grids)
            rate = moved / seconds_of(lambda: link.read(grids), link._queue.stream) / 1e9
            for pool in cache.pools.values():
                pool.fill_(0xA5)
            for name in names[:_FIRST]:
                _pull(session, name)
            time.sleep(1.0)  # what is prepared is so beside everything else
            taken = [_pull(session, name) for name in names[_FIRST:-1]]
            right = _is_right(cache, filled(made, 0, 7), pair)
            staged = ""
            if not plain and orders[0] != orders[1]:
                staged = f"{_pull(session, names[-1], how='staged') * 1e3:.1f}"
    median = statistics.median(taken)
    return [
        f"{_NAMES[pair[0]]} {orders[0]}", f"{_NAMES[pair[1]]} {orders[1]}",
        f"{moved / (1 << 30):.2f}", f"{rate:,.0f}", f"{rate / copy:.1%}", f"{median * 1e3:.3f}",
        f"{moved / median / 1e9:,.0f}", staged, str(right),
    ]  # fmt: skip


def _read_bytes(grid: Any) -> int:
    read: int = grid.nbytes
    return read if grid.cast is None else read // grid.cast.target.item * grid.cast.source.item


def _pull(session: Session, name: str, **how: Any) -> float:
    blocks = {0: np.array(scattered(session.node.plan, TOKENS)[0])}
    begun = time.perf_counter()
    session.pull(name, destination_blocks=blocks, tokens=TOKENS, **how).wait(20)
    return time.perf_counter() - begun


def _is_right(target: Cache, source: Cache, pair: tuple[str, str]) -> bool:
    """Whether every number is what codecs make of the source's."""
    for name in target:
        there = tokens_of(source, name, TOKENS)
        if pair[0] != pair[1]:
            # As tensors, for K and V: a number that divides is inverted first.
            scales = [(_SCALES[one] or {}).get(name, (1.0, 1.0)) for one in pair]
            factor, divisor = torch.tensor(scales, device=DEVICE).repeat_interleave(128, 1)
            exact = there.contiguous().view(_TYPES[pair[0]]).float() * factor / divisor
            there = exact.to(_TYPES[pair[1]]).view(torch.uint8)
        if not torch.equal(tokens_of(target, name, TOKENS), there):
            return False
    return True
