"""Requests of a million tokens over the wire: what they cost beside the pools, byte by byte.

`thin` moves every byte of a model with few heads, between real pools, and compares all of
them. `wide` moves a model of the catalogue between pools of its real size, of which only
addresses exist: one stretch of memory is mapped over and over, and a transport that carries
nothing checks every descriptor, and that elements drawn at random go where they belong. Both
run in this process, so what they print is the cost of both ends. `make test-long` runs all of
it; `python -m tests.attack.long_contexts` prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Layer, Model, catalogue
from kvatlas.planning import Plan, plan
from kvatlas.routing import scattered
from kvatlas.specs import FullAttention
from kvatlas.wire import (
    How,
    Memory,
    Node,
    Session,
    Transfer,
    make_transport,
    memory_of,
    pools_for,
)
from tests.attack.address_only import Aliased, Checking, drawn
from tests.identities import OURS
from tests.routing.oracle import Move

MILLION = 1 << 20
MOST = 256 << 20
"""Bytes beside the pools that both ends together may take for a request."""
SHORT_SECONDS = 1.0
"""Seconds that a short pull may take beside long ones; more only where it does so alone.

Behind one of 32,768 tokens it once waited for 1.6 seconds, and for all of the first of four.
"""


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


class ThinPair:
    """Two nodes with pools for some long requests of few bytes a token, and a short one."""

    def __init__(self, tokens: int, transport: str, longs: int) -> None:
        from kvatlas.cache import bind

        self.tokens = tokens
        self.plans = two_plans(thin_model(tokens + 64), tokens, f"{(longs + 2) * tokens * 32}")
        self.nodes, self.caches, self.tables = [], [], []
        rng = np.random.default_rng(1)
        for number, made in enumerate(self.plans):
            way = make_transport(transport)
            pools = pools_for(made, 0, way)
            for pool in pools.values():
                pool[:] = rng.integers(0, 256, pool.size, dtype=np.uint8)
            self.caches.append(bind(pools, made))
            memory = memory_of(pools)
            self.nodes.append(
                Node(made, memory=memory, transport=way, name=f"node {number}", identity=OURS)
            )
            blocks = rng.permutation(made.pools[0].blocks)
            each = -(-tokens // made.block_size)
            self.tables.append([blocks[n * each :][:each] for n in range(longs)] + [blocks[-1:]])
        for number, table in enumerate(self.tables[0][:-1]):
            self.nodes[0].offer(f"long {number}", {0: table}, tokens, timeout=600)
        self.nodes[0].offer("short", {0: self.tables[0][-1]}, 16, timeout=600)

    def pull_short(self, session: Session) -> float:
        """Seconds that a few tokens take."""
        begun = time.monotonic()
        session.pull("short", destination_blocks={0: self.tables[1][-1]}, tokens=(0, 8)).wait(60)
        return time.monotonic() - begun

    def pull_longs(self, session: Session, how: How) -> list[Transfer]:
        """All long requests, under way at once."""
        about: dict[str, Any] = {"tokens": self.tokens, "timeout": 300, "how": how}
        tables = enumerate(self.tables[1][:-1])
        return [
            session.pull(f"long {n}", destination_blocks={0: one}, **about) for n, one in tables
        ]

    def wrong(self) -> int:
        """Elements of all long requests that are not as they are at the source."""
        import torch

        found = 0
        for name, field, number in product(
            self.plans[0].layers, ("k", "v"), range(len(self.tables[0]) - 1)
        ):
            rows = [
                getattr(cache[name], field)[torch.as_tensor(tables[number])]
                .transpose(1, 2)
                .reshape(-1, 4)[: self.tokens]
                .view(torch.int16)
                for cache, tables in zip(self.caches, self.tables, strict=True)
            ]
            found += int((rows[0] != rows[1]).sum())
        return found

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def thin(
    tokens: int = MILLION, how: How = "auto", transport: str = "shm", at_once: int = 1
) -> dict[str, Any]:
    """Every byte of long requests, with a short one that is pulled beside them again and again."""
    pair = ThinPair(tokens, transport, at_once)
    waits: list[float] = []
    with Session(pair.nodes[1], [pair.nodes[0].endpoint]) as session:
        alone = max(pair.pull_short(session) for _ in range(5))
        with Peak() as peak:
            moving = pair.pull_longs(session, how)
            while not all(one.done for one in moving):
                waits.append(pair.pull_short(session))
                time.sleep(0.005)
            moved = [one.wait(300).moved for one in moving]
    wrong, slowest = pair.wrong(), max(waits)
    pair.close()
    waited = slowest > max(SHORT_SECONDS, 20 * alone)
    return {
        "model": "thin", "tokens": tokens, "how": how, "transport": transport, "at_once": at_once,
        "moved": sum(moved), "wrong": wrong, "seconds": round(peak.seconds, 2),
        "beside_pools": peak.nbytes, "short_pulls": len(waits), "short_alone": round(alone, 3),
        "slowest_short_pull": round(slowest, 3), "held": wrong == 0 and not waited
        and moved == [tokens * 32] * at_once and peak.nbytes <= at_once * MOST,
    }  # fmt: skip


def wide(name: str, tokens: int = MILLION, layers: int = 1000) -> dict[str, Any]:
    """A catalogue model at full size: every descriptor is checked, no byte is carried.

    Elements are drawn of so many layers at most.
    """
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
            small, memory=memory, transport=Checking(), name=f"node {number}", buffers=0,
            identity=OURS,
        )  # fmt: skip
        made.append((small, node, rooms))
    (src, giver, _), (dst, taker, _) = made
    tables = scattered(src, tokens), scattered(dst, tokens)
    way = taker.transport
    assert isinstance(way, Checking)
    way.expect(drawn(Move(src, dst, *tables, (0, tokens)), np.random.default_rng(1), layers))
    giver.offer("long", tables[0], tokens, timeout=1800)
    with Session(taker, [giver.endpoint]) as session, Peak() as peak:
        moving = session.pull(
            "long", destination_blocks=tables[1], tokens=tokens, timeout=1800, how="direct"
        ).wait(1800)
    wrong = way.wrong
    if not moving.total == way.nbytes == moving.moved:
        wrong = "bytes carried twice or never"
    if peak.nbytes > MOST:
        wrong = f"{peak.nbytes:,} bytes beside the pools"
    for _, node, rooms in made:
        node.close()
        for room in rooms.values():
            room.close()
    return {
        "model": name, "tokens": tokens, "moved": moving.moved, "runs": way.runs,
        "most_at_once": way.most, "drawn": sum(map(len, way.times.values())),
        "seconds": round(peak.seconds, 2), "beside_pools": peak.nbytes, "wrong": wrong,
        "held": not wrong,
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
        results.append(thin(given.tokens, at_once=4))
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
