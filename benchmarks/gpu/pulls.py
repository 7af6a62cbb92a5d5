"""Pulls between two processes over the transport `cuda`, beside plain copies of the same bytes.

    python -m benchmarks.gpu.pulls [PART...]

- `orders`: tp 2 into tp 1, blocks of 16 into blocks of 32, scattered pages of 32 KiB, 36 pairs of
  orders: bytes read and written per second, as a share of the device's own copy.
- `pages`, `large-pages`: the same bytes in pages of 16 KiB, and of 64 KiB.
- `request`: one request of 8,192 tokens and 1 GiB, from the call until it is ready, control
  messages included, beside a plain copy of its bytes: the median of sessions' medians.
- `beside`: tokens per second of decode attention alone and while pulls and offloads run, by the
  share of the GPU's time and the number of multiprocessors that pulls are given.
- `formats`: the same request converted on the way, fp8 into bf16 and back, beside the plain pull.
- `layers`: a prefill whose layers are read as they are written, or at its end: until they are
  here, and until a decode step over them is done.
- `offload`: the same request into a tier in host memory and back, beside the link.
- `tune`: launch parameters of the copy kernel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.beside import beside
from benchmarks.gpu.ceilings import copy_rate, link_rate
from benchmarks.gpu.cells import ORDERS
from benchmarks.gpu.first_step import layers
from benchmarks.gpu.pull_ends import (
    DEVICE,
    TOKENS,
    Json,
    filled,
    grids_of,
    is_right,
    planned,
    seconds_of,
    source_process,
)
from benchmarks.gpu.pull_formats import formats
from benchmarks.gpu.tables import show
from kvatlas.cache import Cache, allocate
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, make_transport
from kvatlas.wire.sample_server import SAMPLE_IDENTITY

_APART = 0.02
"""Seconds between pulls that are timed one by one."""
_ORDERS_BAR = 0.85
"""Of the device's own copy, at least, for every pair of orders."""
_REQUEST_BAR = 1.3
"""Times a plain copy of its bytes, at most, for requests that follow each other."""
_PULLS = 60
"""Of a session, of which the first ten get it going."""


def orders(copy: float, heads: int = 8) -> None:
    """36 pairs, one rank of two into a rank of its own: GB/s and the share of the copy."""
    rows: list[list[Any]] = []
    shares: list[float] = []
    with source_process() as far:
        served = {order: planned(order, heads, tp=2, block=16) for order in ORDERS}
        endpoints = {order: far.serve(made, 7) for order, made in served.items()}
        for target in ORDERS:
            cache = allocate(planned(target, heads, block=32), device=DEVICE)
            transport = make_transport("cuda", share=1.0)
            with Node(
                cache.plan, memory=cache, transport=transport, buffers=0, identity=SAMPLE_IDENTITY
            ) as node:
                row: list[Any] = [target]
                for order in ORDERS:
                    with Session(node, endpoints[order]) as session:
                        rate, grids = _rate(node, session)
                        shares.append(rate / copy)
                        row.append(f"{rate:,.0f} ({rate / copy:.0%}, {grids})")
                        if order == ORDERS[0] or target == ORDERS[-1]:
                            row[-1] += _checked(node, cache, served[order], session)
                rows.append(row)
            del cache
            torch.cuda.empty_cache()
    title = f"\nPulls by order, pages of {4 * heads} KiB, source across; copy {copy:,.0f} GB/s"
    show(title, ["into", *ORDERS], rows)
    verdict = "ok" if min(shares) >= _ORDERS_BAR else "below"
    print(f"lowest {min(shares):.1%} of the copy, bar {_ORDERS_BAR:.0%}: {verdict}")


def _rate(node: Node, session: Session) -> tuple[float, int]:
    """GB/s read and written, and in how many launches."""
    link, grids = grids_of(node, session, 0)
    nbytes = sum(grid.nbytes for grid in grids)
    seconds = seconds_of(lambda: link.read(grids), link._queue.stream)
    return 2 * nbytes / seconds / 1e9, len(grids)


def _checked(node: Node, cache: Cache, made: Plan, session: Session) -> str:
    for pool in cache.pools.values():
        pool.fill_(0xA5)
    torch.cuda.synchronize()
    for rank in range(made.ranks):
        link, grids = grids_of(node, session, rank)
        link.read(grids).wait(time.monotonic() + 10)
    right = is_right(cache, [filled(made, rank, 7) for rank in range(made.ranks)])
    return "" if right else " WRONG"


def request(copy: float, sessions: int = 3) -> None:
    """Whole pulls by the clock of the host, by share of the GPU's time; the bar is without one."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    plain = 2 * (1 << 30) / copy / 1e6
    for what, apart, given in (
        ("in a row, no limit", 0.0, {"share": 1.0}),
        ("in a row, the default share", 0.0, {}),
        ("20 ms apart, the default share", _APART, {}),
    ):
        with source_process() as far:
            endpoints = far.serve(made, 7)
            transport = make_transport("cuda", **given)
            with Node(
                mine, memory=cache, transport=transport, buffers=0, identity=SAMPLE_IDENTITY
            ) as node:
                taken = []
                for number in range(sessions):
                    names = [f"{what} {number} {i}" for i in range(_PULLS)]
                    far.offer(*names)
                    with Session(node, endpoints) as session:
                        taken.append(_pulled(session, names, apart))
        medians = sorted(statistics.median(one[10:]) for one in taken)
        median, fastest = statistics.median(medians), min(map(min, taken))
        print(
            f"\nA request of 1 GiB, {what}: {median:.3f} ms, {median / plain:.2f} times a plain "
            f"copy ({plain:.3f} ms); {sessions} sessions {medians[0] / plain:.2f} - "
            f"{medians[-1] / plain:.2f} times, fastest {fastest:.3f} ms, first {taken[0][0]:.0f} ms"
        )
        if given:
            verdict = "ok" if median <= _REQUEST_BAR * plain else "over"
            print(f"bar {_REQUEST_BAR:.1f}x: {verdict}")
    print("right:", is_right(cache, [filled(made, 0, 7)]))


def _pulled(session: Session, names: Sequence[str], apart: float) -> list[float]:
    """Milliseconds of each pull, from the call until it is ready."""
    mine, taken = session.node.plan, []
    blocks = {0: np.array(scattered(mine, TOKENS)[0])}
    for name in names:
        begun = _spin(apart)
        session.pull(name, destination_blocks=blocks, tokens=TOKENS).wait()
        taken.append((time.perf_counter() - begun) * 1e3)
    return taken


def _spin(seconds: float) -> float:
    """Be as busy as an engine's thread is for some seconds; the time afterwards."""
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        pass
    return now


def tune() -> None:
    """The kernel alone, on three pairs of orders, by its launch parameters."""
    from kvatlas.copying.address_runs import copy_address_runs, place_starts

    rows = []
    pairs = [("LBNHC", "LBNHC"), ("LBNHC", "BHLNC"), ("BLHNC", "LBNHC")]
    cases = []
    for source_order, target_order in pairs:
        made, mine = planned(source_order), planned(target_order, block=32)
        cases.append((filled(made, 0, 7), allocate(mine, device=DEVICE), made, mine))
    stream = torch.cuda.current_stream()
    for programs in (0, 132, 264, 16):
        for tile, warps, stages in (
            (2048, 1, 1), (4096, 2, 1), (4096, 4, 1), (8192, 4, 1), (8192, 8, 1), (16384, 8, 1),
            (16384, 16, 1), (32768, 16, 1), (65536, 32, 1), (131072, 32, 1),
        ):  # fmt: skip
            rates = []
            for first, second, made, mine in cases:
                from kvatlas.routing import route

                way = route(made, mine).stream(
                    source_rank=0, destination_rank=0, source_blocks=scattered(made, TOKENS),
                    destination_blocks=scattered(mine, TOKENS), tokens=TOKENS,
                )  # fmt: skip
                placed = [
                    (
                        place_starts(g.starts.source, g.starts.destination, DEVICE),
                        (g.source, g.destination, g.length),
                    )
                    for g in way.grids()
                ]
                nbytes = way.nbytes

                def act(first: Any = first, second: Any = second, placed: Any = placed) -> None:
                    for starts, spans in placed:
                        copy_address_runs(
                            first.pools[0].data_ptr(), second.pools[0].data_ptr(), starts, spans,
                            programs=programs, tile=tile, warps=warps, stages=stages,  # noqa: B023
                        )  # fmt: skip

                try:
                    rates.append(f"{2 * nbytes / seconds_of(act, stream, 5) / 1e9:,.0f}")
                except Exception as problem:
                    rates.append(type(problem).__name__)
            rows.append([str(programs or "all"), f"{tile}", f"{warps}", f"{stages}", *rates])
    title = "\nCopy kernel by launch parameters, GB/s read and written"
    show(title, ["programs", "tile", "warps", "stages", *map("->".join, pairs)], rows)


def offload() -> None:
    """A request of 1 GiB into a tier in host memory and back, beside the link's own speed."""
    from kvatlas.tier import Tier

    links = link_rate(to_host=True), link_rate(to_host=False)
    rows = []
    tier = Tier(planned("BLHNC"))
    keys: Any = [f"{number}".encode() for number in range(TOKENS // 16)]
    for order in ORDERS:
        made = planned(order)
        cache, back = filled(made, 0, 7), allocate(made, device=DEVICE)
        about: Json = {"blocks": scattered(made, TOKENS), "tokens": TOKENS, "keys": keys}
        row = [order]
        for turn in range(3):
            tier.metrics.seconds.clear()
            begun = time.perf_counter()
            tier.store(cache.pools, made, **about)
            stored = time.perf_counter()
            tier.fetch(back.pools, made, **about)
            fetched = time.perf_counter()
            tier.drop(keys)
            if turn == 2:
                phases = tier.metrics.seconds
                gib = (1 << 30) / 1e9
                row += [f"{gib / phases['store']:.1f}", f"{gib / (stored - begun):.1f}"]
                row += [f"{gib / phases['fetch']:.1f}", f"{gib / (fetched - stored):.1f}"]
        row.append(str(is_right(back, [cache])))
        rows.append(row)
    tier.close()
    title = f"\nA request of 1 GiB and a tier in host memory, GB/s; link {links[0]:.1f} to the "
    title += f"host, {links[1]:.1f} back"
    head = ["order", "moved out", "whole store", "moved in", "whole fetch", "right"]
    show(title, head, rows)


def main(names: list[str]) -> None:
    """Run what is named, or all but the tuning."""
    copy = copy_rate()
    print(f"device-to-device copy: {copy:,.0f} GB/s read and written")
    parts: dict[str, Callable[[], None]] = {
        "orders": lambda: orders(copy),
        "pages": lambda: orders(copy, heads=4),
        "large-pages": lambda: orders(copy, heads=16),
        "request": lambda: request(copy),
        "formats": lambda: formats(copy),
        "beside": beside,
        "layers": layers,
        "offload": offload,
        "tune": tune,
    }
    for name in names or [one for one in parts if one != "tune"]:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
