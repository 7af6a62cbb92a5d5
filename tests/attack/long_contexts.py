"""Requests of a million tokens over the wire: what they cost beside the pools, byte by byte.

`thin` moves every byte of a model with few heads, between real pools, and compares all of
them. `wide` moves a model of the catalogue between pools of its real size, of which only
addresses exist: one stretch of memory is mapped over and over, and a transport that carries
nothing checks every descriptor. Both run in this process, so what they print is the cost of
both ends. `python -m tests.attack.long_contexts` prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Layer, Model, catalogue
from kvatlas.planning import Plan, plan
from kvatlas.routing import Copy, scattered
from kvatlas.specs import FullAttention
from kvatlas.wire import (
    Handle,
    How,
    Link,
    Memory,
    Node,
    Session,
    Transport,
    make_transport,
    memory_of,
    pools_for,
)
from kvatlas.wire.transports.base import Done

MILLION = 1 << 20
MOST = 256 << 20
"""Bytes beside the pools that both ends together may take."""


def thin_model(longest: int) -> Model:
    spec = FullAttention(heads=2, head_dim=2)
    layers = [Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(2)]
    return Model(
        name="thin", architecture="Small", layers=tuple(layers), depth=2, attention_heads=2,
        max_len=longest,
    )  # fmt: skip


def two_plans(model: Any, tokens: int, memory: str) -> tuple[Plan, Plan]:
    about: dict[str, Any] = {"memory": memory, "max_len": tokens + 64, "in_flight": 0}
    source = plan(model, layout="LBNHC", **about)
    return source, plan(model, layout="BHLNC", block_size=32, **about)


def planned(name: str, tokens: int, *wishes: dict[str, Any]) -> Plan:
    """A plan of a catalogue model with room for such a request, by the first wish that it takes."""
    about: dict[str, Any] = {"max_len": tokens + 64, "in_flight": 0}
    refusal: AtlasError | None = None
    for wish in wishes:
        for memory in (f"{64 << power}GiB" for power in range(7)):
            try:
                made = plan(name, memory=memory, **about, **wish)
                scattered(made, tokens)
            except AtlasError as problem:
                refusal = problem
                if problem.code not in (Code.NOT_ENOUGH_MEMORY, Code.MISSING_BLOCKS):
                    break
            else:
                return made
    assert refusal is not None
    raise refusal


class Peak:
    """The most resident memory that this process had inside, beyond what it had before."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _resident("VmRSS")
        self.begun = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self.begun
        self.nbytes = _resident("VmHWM") - self.before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def thin(tokens: int = MILLION, how: How = "auto", transport: str = "shm") -> dict[str, Any]:
    """Every byte of a long request, with a short request that is pulled beside it."""
    import torch

    from kvatlas.cache import bind

    plans = two_plans(thin_model(tokens + 64), tokens, f"{3 * tokens * 32}")
    nodes, pools, caches = [], [], []
    for number, made in enumerate(plans):
        way = make_transport(transport)
        memory = pools_for(made, 0, way)
        pools.append(memory)
        caches.append(bind(memory, made))
        nodes.append(Node(made, memory=memory_of(memory), transport=way, name=f"node {number}"))
    rng = np.random.default_rng(1)
    for pool in pools[0].values():
        pool[:] = rng.integers(0, 256, pool.size, dtype=np.uint8)
    source, target = nodes
    tables = [scattered(made, tokens) for made in plans]
    used = [set(table[0]) for table in tables]
    free = [
        next(b for b in range(made.pools[0].blocks) if b not in mine)
        for made, mine in zip(plans, used, strict=True)
    ]
    source.offer("long", tables[0], tokens, seconds=600)
    source.offer("short", {0: [free[0]]}, 16, seconds=600)
    waits: list[float] = []
    with Session(target, [source.endpoint]) as session:
        session.pull("short", dst_blocks={0: [free[1]]}, tokens=(0, 8)).wait(30)
        with Peak() as peak:
            moving = session.pull("long", dst_blocks=tables[1], tokens=tokens, seconds=300, how=how)
            while not moving.done:
                begun = time.monotonic()
                session.pull("short", dst_blocks={0: [free[1]]}, tokens=(0, 8)).wait(30)
                waits.append(time.monotonic() - begun)
                time.sleep(0.01)
            moving.wait(300)
    wrong = 0
    for name in plans[0].layers:
        src, dst = (cache[name] for cache in caches)
        for field in ("k", "v"):
            rows = [
                getattr(layer, field)[torch.as_tensor(table[0])]
                .transpose(1, 2)
                .reshape(-1, 4)[:tokens]
                for layer, table in zip((src, dst), tables, strict=True)
            ]
            wrong += int((rows[0].view(torch.int16) != rows[1].view(torch.int16)).sum())
    for node in nodes:
        node.close()
    return {
        "model": "thin", "tokens": tokens, "how": how, "transport": transport,
        "moved": moving.moved, "wrong": wrong, "seconds": round(peak.seconds, 2),
        "beside_pools": peak.nbytes, "short_pulls": len(waits),
        "slowest_short_pull": round(max(waits, default=0.0), 3), "held": wrong == 0
        and moving.moved == tokens * 32 and peak.nbytes <= MOST,
    }  # fmt: skip


# -- pools of which only addresses exist -------------------------------------------------------


class Aliased:
    """Virtual memory of any size over one stretch of real memory."""

    STRETCH = 64 << 20

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // self.STRETCH) * self.STRETCH
        system = ctypes.CDLL(None, use_errno=True)
        system.mmap.restype = ctypes.c_void_p
        system.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        )
        import os

        file = os.memfd_create("aliased")
        os.ftruncate(file, self.STRETCH)
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self.address = system.mmap(None, self.nbytes, 0, reserve, -1, 0)
        shared = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        for at in range(0, self.nbytes, self.STRETCH):
            there = system.mmap(self.address + at, self.STRETCH, 3, shared, file, 0)
            assert there == self.address + at, "the system maps no more"
        os.close(file)
        self._unmap = system.munmap

    def close(self) -> None:
        self._unmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))


class Checking(Transport):
    """Carries nothing: counts what it is told to carry, and holds it to the pools."""

    name: ClassVar[str] = "checking"

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.runs = self.most = 0
        self.lock = threading.Lock()

    def publish(self) -> bytes:
        return b""

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        del metadata
        return _CheckingLink(self, memory)


class _CheckingLink(Link):
    owner: Checking

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        del write
        with self.owner.lock:
            self.owner.nbytes += sum(copy.nbytes for copy in copies)
            self.owner.runs += sum(map(len, copies))
            self.owner.most = max(self.owner.most, sum(map(len, copies)))
        for copy in copies:
            # In the order of the destination and apart: no byte is written twice.
            assert bool((np.diff(copy.dst) >= copy.length[:-1]).all())
        return Done()


def wide(name: str, tokens: int = MILLION) -> dict[str, Any]:
    """A catalogue model at full size: every descriptor is checked, no byte is carried."""
    made = []
    plans = (
        planned(name, tokens, {"layout": "LBNHC"}, {}),
        planned(name, tokens, {"layout": "BHLNC", "block_size": 32}, {"layout": "BHLNC"}, {}),
    )
    for number, small in enumerate(plans):
        rooms = {i: Aliased(pool.nbytes) for i, pool in small.rank_pools(0).items()}
        memory = {
            i: Memory(room.address, small.rank_pools(0)[i].nbytes) for i, room in rooms.items()
        }
        node = Node(
            small, memory=memory, transport=Checking(), name=f"node {number}", buffers=0
        )  # fmt: skip
        made.append((small, node, rooms))
    (src, giver, _), (dst, taker, _) = made
    giver.offer("long", scattered(src, tokens), tokens, seconds=1800)
    with Session(taker, [giver.endpoint]) as session, Peak() as peak:
        moving = session.pull(
            "long", dst_blocks=scattered(dst, tokens), tokens=tokens, seconds=1800, how="direct"
        ).wait(1800)
    way = taker.transport
    assert isinstance(way, Checking)
    wrong = "" if moving.total == way.nbytes == moving.moved else "bytes carried twice or never"
    if peak.nbytes > MOST:
        wrong = f"{peak.nbytes:,} bytes beside the pools"
    for _, node, rooms in made:
        node.close()
        for room in rooms.values():
            room.close()
    return {
        "model": name, "tokens": tokens, "moved": moving.moved, "runs": way.runs,
        "most_at_once": way.most, "seconds": round(peak.seconds, 2), "beside_pools": peak.nbytes,
        "wrong": wrong, "held": not wrong,
    }  # fmt: skip


def in_a_process(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    """`wide` in a process of its own: what it says, or how it ended."""
    command = [sys.executable, "-m", "tests.attack.long_contexts", name, "--alone"]
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "--tokens", str(tokens)], capture_output=True, text=True, check=False,
            timeout=seconds, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        said = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        if said:
            result: dict[str, Any] = json.loads(said[-1])
            return result
        words = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        words = "it takes too long"
    return {
        "model": name, "tokens": tokens, "seconds": round(time.monotonic() - begun, 2),
        "wrong": words[:200], "held": False,
    }  # fmt: skip


def table(results: Iterable[dict[str, Any]]) -> None:
    """What every model took, those that did not hold last."""
    head = f"{'model':34} {'tokens':>9} {'GB':>8} {'descriptors':>13} {'MB beside':>9} {'s':>6}"
    print(head, " wrong")
    for one in sorted(results, key=lambda one: (not one["held"], one["model"])):
        counted = one.get("moved", 0) / 1e9, one.get("runs", 0), one.get("beside_pools", 0) / 1e6
        print(
            f"{one['model']:34} {one['tokens']:9,} {counted[0]:8.2f} {counted[1]:13,} "
            f"{counted[2]:9.1f} {one['seconds']:6.1f}  {one['wrong'] or '-'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="of the catalogue, for descriptors alone, or all")
    parser.add_argument("--tokens", type=int, default=MILLION)
    parser.add_argument("--jobs", type=int, default=1, help="models at once, each in a process")
    parser.add_argument("--seconds", type=float, default=1800, help="for each model, at most")
    parser.add_argument("--alone", action="store_true", help="one model, in this process")
    given = parser.parse_args()
    if given.alone:
        results = [wide(name, given.tokens) for name in given.models]
    elif not given.models:
        results = [thin(given.tokens, how) for how in ("auto", "staged")]
    else:
        names = sorted(catalogue()) if given.models == ["all"] else given.models
        results = []
        with ThreadPoolExecutor(given.jobs) as jobs:
            asked = [jobs.submit(in_a_process, n, given.tokens, given.seconds) for n in names]
            for done in as_completed(asked):
                results.append(done.result())
                print(json.dumps(results[-1]), flush=True)
        table(results)
        return 0 if all(one["held"] for one in results) else 1
    for one in results:
        print(json.dumps(one))
    return 0 if all(one["held"] for one in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
