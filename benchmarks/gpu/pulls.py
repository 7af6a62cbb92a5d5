"""Pulls between two processes over the transport `cuda`, beside plain copies of the same bytes.

    python -m benchmarks.gpu.pulls [orders] [request] [beside] [layers] [offload] [tune]

- `orders`: tp 2 into tp 1, blocks of 16 into blocks of 32, scattered pages, 36 pairs of orders:
  bytes read and written per second, as a share of the device's own copy.
- `request`: one request of 8,192 tokens and 1 GiB, from the call until it is ready, control
  messages included, beside a plain copy of its bytes.
- `beside`: tokens per second of decode attention alone and while pulls run, by the number of
  multiprocessors that pulls are given.
- `layers`: a prefill whose layers are read as they are written, or at its end.
- `offload`: the same request into a tier in host memory and back, beside the link.
- `tune`: launch parameters of the copy kernel.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.attention import decode
from benchmarks.gpu.ceilings import copy_rate, link_rate
from benchmarks.gpu.cells import ORDERS
from benchmarks.gpu.tables import show
from kvatlas.cache import Cache, allocate
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import scattered
from kvatlas.specs import FullAttention
from kvatlas.wire import Node, Session, make_transport

TOKENS = 8192
LAYERS = 32
DEVICE = "cuda:0"
Json = dict[str, Any]
_LAYER = 4_000_000
"""Cycles, some two milliseconds, that a layer of the prefill takes."""
_APART = 0.02
"""Seconds between pulls that are timed one by one."""
_AHEAD = 20_000_000
"""Cycles, some ten milliseconds, in which a stream is given what is then timed."""


def model(heads: int) -> Model:
    """As many layers as a model of 8 billion parameters has."""
    spec = FullAttention(heads=heads, head_dim=128)
    layers = [Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(LAYERS)]
    return Model(
        name="bench", architecture="Bench", layers=tuple(layers), depth=LAYERS,
        attention_heads=4 * heads, max_len=TOKENS,
    )  # fmt: skip


def planned(order: str, heads: int = 8, *, tp: int = 1, block: int = 16) -> Plan:
    """Room for the request in scattered blocks."""
    nbytes = int(2.1 * TOKENS * LAYERS * heads * 512 / tp)
    return plan(
        model(heads), memory=nbytes, tp=tp, layout=order, block_size=block, max_len=TOKENS,
        in_flight=0,
    )  # fmt: skip


def filled(made: Plan, rank: int, seed: int) -> Cache:
    """A cache of random bytes, that the other process can make again."""
    cache = allocate(made, rank=rank, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed + rank)
    for pool in cache.pools.values():
        pool.view(torch.int32).random_(generator=generator)
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
                    transport=make_transport("cuda"), buffers=0,
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
            for node in nodes:
                for request in order["offer"]:
                    node.offer(request, scattered(node.plan, TOKENS), TOKENS, seconds=600)
            answer = {}
        said.write(json.dumps(answer) + "\n")
        said.flush()
    for node in nodes:
        node.close()


def prefill(node: Node, request: str, *, layered: bool) -> None:
    """Keep the GPU busy for every layer, and offer what is then there: layer by layer, or whole."""
    about: Json = {"blocks": scattered(node.plan, TOKENS), "tokens": TOKENS, "seconds": 60}
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
        command = [sys.executable, "-m", "benchmarks.gpu.pulls", "--source"]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **order: Any) -> Json:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: Json = json.loads(self._process.stdout.readline())
        return answer

    def serve(self, made: Plan, seed: int) -> list[str]:
        """Endpoints of the ranks of a plan."""
        endpoints: list[str] = self._ask(plan=made.to_json().decode(), seed=seed)["endpoints"]
        return endpoints

    def offer(self, *requests: str) -> None:
        """Offer requests, all of the same blocks."""
        self._ask(offer=list(requests))

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


def tokens_of(cache: Cache, layer: str) -> torch.Tensor:
    """A request's bytes [tokens, heads, bytes], by views alone."""
    table = torch.tensor(scattered(cache.plan, TOKENS)[0], device=DEVICE)
    pages = cache[layer].tensor[table]  # blocks, heads, states, bytes
    return pages.permute(0, 2, 1, 3).flatten(0, 1)[:TOKENS]


def is_right(target: Cache, sources: list[Cache]) -> bool:
    """Whether every token of every layer is what the source ranks have, head by head."""
    return all(
        torch.equal(
            tokens_of(target, name), torch.cat([tokens_of(one, name) for one in sources], 1)
        )
        for name in target
    )


def orders(copy: float) -> None:
    """36 pairs, one rank of two into a rank of its own: GB/s and the share of the copy."""
    rows: list[list[Any]] = []
    with source_process() as far:
        served = {order: planned(order, tp=2, block=16) for order in ORDERS}
        endpoints = {order: far.serve(made, 7) for order, made in served.items()}
        for target in ORDERS:
            cache = allocate(planned(target, block=32), device=DEVICE)
            transport = make_transport("cuda")
            with Node(cache.plan, memory=cache, transport=transport, buffers=0) as node:
                row: list[Any] = [target]
                for order in ORDERS:
                    with Session(node, endpoints[order]) as session:
                        row.append(_rate(node, session, copy))
                        if order == ORDERS[0] or target == ORDERS[-1]:
                            row[-1] += _checked(node, cache, served[order], session)
                rows.append(row)
            del cache
            torch.cuda.empty_cache()
    show(f"\nPulls by order, source across; copy {copy:,.0f} GB/s", ["into", *ORDERS], rows)


def _rate(node: Node, session: Session, copy: float) -> str:
    link, grids = grids_of(node, session, 0)
    nbytes = sum(grid.nbytes for grid in grids)
    seconds = seconds_of(lambda: link.read_grids(grids), link._queue.stream)
    rate = 2 * nbytes / seconds / 1e9
    return f"{rate:,.0f} ({rate / copy:.0%}, {len(grids)})"


def _checked(node: Node, cache: Cache, made: Plan, session: Session) -> str:
    for pool in cache.pools.values():
        pool.fill_(0xA5)
    torch.cuda.synchronize()
    for rank in range(made.ranks):
        link, grids = grids_of(node, session, rank)
        link.read_grids(grids).wait(time.monotonic() + 10)
    right = is_right(cache, [filled(made, rank, 7) for rank in range(made.ranks)])
    return "" if right else " WRONG"


def request(copy: float, pulls: int = 40) -> None:
    """Whole pulls by the clock of the host."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    names = [f"r{i}" for i in range(pulls)]
    with source_process() as far:
        endpoints = far.serve(made, 7)
        far.offer(*names)
        transport = make_transport("cuda")
        with Node(mine, memory=cache, transport=transport, buffers=0) as node:
            taken, blocks = [], scattered(mine, TOKENS)
            with Session(node, endpoints) as session:
                for name in names:
                    if name == names[5]:
                        node.metrics.seconds.clear()
                    time.sleep(_APART)
                    begun = time.perf_counter()
                    session.pull(name, dst_blocks=blocks, tokens=TOKENS).wait()
                    taken.append(time.perf_counter() - begun)
            phases = {k: v / (pulls - 5) * 1e3 for k, v in node.metrics.seconds.items()}
        right = is_right(cache, [filled(made, 0, 7)])
    median = statistics.median(taken[5:]) * 1e3
    plain = 2 * (1 << 30) / copy / 1e6
    print(
        f"\nA request of 1 GiB: {median:.2f} ms (fastest {min(taken) * 1e3:.2f}, first "
        f"{taken[0] * 1e3:.0f}), a plain copy {plain:.2f} ms: {median / plain:.2f}x; right: {right}"
    )
    print("  ms by phase:", {name: round(value, 3) for name, value in phases.items()})


def beside() -> None:
    """Decode alone and beside pulls, by multiprocessors."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    spec = FullAttention(heads=8, head_dim=128)
    case = decode(spec, "LBNHC", 16, (64, 4096), 4, 2, {})
    rows = []
    with source_process() as far:
        endpoints = far.serve(made, 7)
        graph = _captured(case)
        alone = _steps(graph, 0.4)
        for count in (0, 1, 2, 4, 8, 16, 32, 64):
            transport = make_transport("cuda", multiprocessors=count)
            with (
                Node(mine, memory=cache, transport=transport, buffers=0) as node,
                Session(node, endpoints) as session,
            ):
                link, grids = grids_of(node, session, 0)
                nbytes = sum(grid.nbytes for grid in grids)
                read = lambda link=link, grids=grids: link.read_grids(grids)  # noqa: E731
                speed = nbytes / seconds_of(read, link._queue.stream, 3)
                pulling = Pulling(link, grids)
                there = _steps(graph, 0.4)
                moved = pulling.stop() * nbytes
            slower = 1 - there / alone
            rows.append([
                str(count or "all"), f"{speed / 1e9:,.0f}", f"{moved / 1e9:,.0f}",
                f"{moved / speed:.0%}", f"{64 * there:,.0f}", f"{slower:.1%}",
                f"{slower * nbytes / moved * 1e3:.2f}",
            ])  # fmt: skip
    title = f"\nDecode of 64 x 4,096 tokens, one layer: {64 * alone:,.0f} tokens/s alone"
    head = ["multiprocessors", "GB/s alone", "GB/s beside", "kept", "tokens/s beside", "slower"]
    head.append("ms of decode that a GiB costs")
    show(title, head, rows)


_STEPS = 16
"""Decode steps in a graph."""


def _captured(case: Any) -> Any:
    """Decode steps as a graph, captured while nothing else runs."""
    for call in case.calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_STEPS // len(case.calls)):
            for call in case.calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _steps(graph: Any, seconds: float) -> float:
    """Decode steps per second."""
    begun, replays = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        graph.replay()
        replays += 1
        torch.cuda.current_stream().synchronize()
    return replays * _STEPS / (time.perf_counter() - begun)


class Pulling:
    """One pull after the other, two at a time, until it is told to stop."""

    def __init__(self, link: Any, grids: Any) -> None:
        self._stop = threading.Event()
        self._done, self._begun = 0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=[link, grids])
        self._thread.start()

    def _run(self, link: Any, grids: Any) -> None:
        before = link.read_grids(grids)
        while not self._stop.is_set():
            after = link.read_grids(grids)
            before.wait(time.monotonic() + 30)
            self._done += 1
            before = after
        before.wait(time.monotonic() + 30)
        self._done += 1

    def stop(self) -> float:
        """Pulls per second since it was made."""
        self._stop.set()
        self._thread.join()
        return self._done / (time.perf_counter() - self._begun)


def tune() -> None:
    """The kernel alone, on three pairs of orders, by its launch parameters."""
    from kvatlas.kernels import copy_address_runs, place_starts

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
                    src_rank=0, dst_rank=0, src_blocks=scattered(made, TOKENS),
                    dst_blocks=scattered(mine, TOKENS), tokens=TOKENS,
                )  # fmt: skip
                placed = [
                    (place_starts(g.starts.src, g.starts.dst, DEVICE), (g.src, g.dst, g.length))
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


def layers() -> None:
    """From the beginning of a prefill until layers are here: as they are written, or at its end."""
    made, mine = planned("LBNHC"), planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    blocks, first = scattered(mine, TOKENS), next(iter(mine.layers))
    rows = []
    with source_process() as far:
        endpoints = far.serve(made, 7)
        transport = make_transport("cuda")
        with (
            Node(mine, memory=cache, transport=transport, buffers=0) as node,
            Session(node, endpoints) as session,
        ):
            for turn in range(6):
                layered = turn % 2 == 0
                begun = time.perf_counter()
                far.prefill(f"r{turn}", layered=layered)
                transfer = session.pull(
                    f"r{turn}", dst_blocks=blocks, tokens=TOKENS, streamed=layered,
                    wait_for_offer=5,
                )  # fmt: skip
                while layered and first not in transfer.layers and not transfer.done:
                    time.sleep(1e-4)
                early = time.perf_counter() - begun
                transfer.wait(20)
                done = time.perf_counter() - begun
                how = "as written" if layered else "at the end"
                rows.append([how, f"{early * 1e3:.1f}" if layered else "", f"{done * 1e3:.1f}"])
    head = ["layers", "ms until the first is here", "ms until all are"]
    show("\nA prefill of 32 layers of some 2 ms, read by another process", head, sorted(rows))


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
        "request": lambda: request(copy),
        "beside": beside,
        "layers": layers,
        "offload": offload,
        "tune": tune,
    }
    for name in names or ["orders", "request", "beside", "layers", "offload"]:
        parts[name]()


if __name__ == "__main__":
    if "--source" in sys.argv:
        source()
    else:
        main(sys.argv[1:])
