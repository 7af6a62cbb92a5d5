"""Processes that use one tier at once, and are killed.

Run as `python -m tests.tier.served_processes clients|servers PATH TRIALS SEED`, or with `together
PATH MODEL...`. It imports once and forks all processes before it has a thread of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.planning import Plan
from kvatlas.tier import Tier, TierClient, TierServer, share_file
from tests.planning.models import SMALL
from tests.tier import killed
from tests.tier.world import BlockTier, World, small, tier_plan

REQUESTS, SECONDS = 3, 60.0
PEER_GONE = (Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.MISSING_BLOCKS)


class Child:
    """A forked process that waits until it is told to begin."""

    def __init__(self, act: Callable[[], None]) -> None:
        read, self._write = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(self._write)
            os.read(read, 1)
            code = 1
            try:
                act()
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        os.close(read)

    def begin(self) -> None:
        os.write(self._write, b"x")

    def kill(self) -> None:
        """End it; it must not have ended by itself before."""
        os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        os.close(self._write)
        assert os.WIFSIGNALED(status), "it ended by itself"

    def join(self) -> None:
        _, status = os.waitpid(self.process, 0)
        assert status == 0, "it failed"


# -- engines of unlike topologies, at once ----------------------------------------------------


def engine(path: Path, name: str, number: int, made: Plan, rank: int, *, stores: bool) -> None:
    """One rank: stores the same requests as all others do, and reads each of them back."""
    model, big = SMALL[name], BIG.get(name, {})
    kept = tier_plan(model, **{"memory": "4MiB", **big})
    with share_file(path, kept, durable=False, timeout=SECONDS) as tier:
        for request in np.random.default_rng(number).permutation(REQUESTS).tolist():
            world = World(model, 100 + 16 * request, seed=request, **big)
            keys = world.keys(tier, salt=f"{request} ")
            if stores:
                held, tables = world.holding(made, rank)
                tier.store(held, made, rank=rank, blocks=tables, tokens=world.tokens, keys=keys)
            until = time.monotonic() + SECONDS
            while tier.match(keys, world.tokens) < world.tokens:
                assert time.monotonic() < until, "what all ranks store is found"
                time.sleep(0.005)
            world.check(tier, made, keys=keys, ranks=[rank])
        # Who serves goes last: the others would find nobody before all is there.
        done = Path(f"{path}.done")
        with done.open("ab") as file:
            file.write(b"x")
        while done.stat().st_size < 4:
            time.sleep(0.01)


BIG = {"compressed": {"memory": "96MiB"}}
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compressed": ({"layout": "BLNHC"}, {"layout": "BLHNC", "block_size": 512}),
}


def together(path: Path, name: str) -> None:
    """Two engines, tp 2 and tp 1 of other blocks and order, and one that only reads."""
    model, big = SMALL[name], BIG.get(name, {})
    usual = {"layout": "LBNHC"}, {"layout": "BHLNC", "block_size": 32}
    one, unlike = UNLIKE.get(name, usual)
    two, other = small(model, tp=2, **one, **big), small(model, **unlike, **big)
    third = small(model, tp=2, pp=1, **big)
    ranks = [(two, 0, True), (two, 1, True), (other, 0, True), (third, 1, False)]
    children = [
        Child(partial(engine, path, name, n, about[0], about[1], stores=about[2]))
        for n, about in enumerate(ranks)
    ]
    for child in children:
        child.begin()
    for child in children:
        child.join()


# -- killed -----------------------------------------------------------------------------------


def work(tier: BlockTier, seed: int) -> None:
    """Store, fetch and drop until killed; every byte that is fetched is held to its name."""
    rng = np.random.default_rng(seed)
    while True:
        name = int(rng.integers(killed.NAMES))
        try:
            if rng.random() < 0.4:
                killed.fetched(tier, name)
                continue
            if rng.random() < 0.1:
                tier.drop(killed.keys(name))
            for rank in rng.permutation(2).tolist():
                killed.store(tier, name, rank)
        except AtlasError as refusal:
            if refusal.code not in PEER_GONE:
                raise


def client_work(path: Path, seed: int) -> None:
    work(TierClient(f"{path}.sock"), seed)


def any_work(path: Path, seed: int) -> None:
    work(share_file(path, durable=False), seed)


def kill_clients(path: Path, trials: int, seed: int) -> None:
    """The server stays, clients are killed: what they had is free, what they stored is right."""
    rng = np.random.default_rng(seed)
    children = [Child(partial(client_work, path, seed + n)) for n in range(trials + 1)]
    with Tier.open(path, killed.kept(), durable=False) as tier, TierServer(tier) as server:
        running: list[Child] = []
        for child in children:
            child.begin()
            running.append(child)
            if len(running) > 1:
                wait(lambda: server.clients == 2)
                time.sleep(float(rng.uniform(0.01, 0.1)))
                running.pop(int(rng.integers(2))).kill()
                wait(lambda: server.clients == 1)
        running.pop().kill()
        wait(lambda: not server.clients and not server._pins)
        index = tier._index
        assert not any(block.pins for block in index._whole.values())
        assert not any(block.writing for block in index._filling.values())
        for pool in tier.plan.pools:
            used = sum(
                block.pool == pool.index
                for block in (*index._whole.values(), *index._filling.values())
            )
            assert index.free(pool.index) + used == pool.blocks, "space comes back"
        found = sum(killed.fetched(tier, name) for name in range(killed.NAMES))
        assert tier.metrics.values["damaged"] == 0
        assert found, "something was stored meanwhile"
    killed.look(path)


def kill_servers(path: Path, trials: int, seed: int) -> None:
    """Any of three processes is killed, the one that serves among them: another takes over."""
    rng = np.random.default_rng(seed)
    Tier.open(path, killed.kept()).close()
    children = [Child(partial(any_work, path, seed + n)) for n in range(trials + 3)]
    running, looks = [], 0
    for child in children:
        child.begin()
        running.append(child)
        if len(running) > 3:
            time.sleep(float(rng.uniform(0.05, 0.2)))
            running.pop(0 if rng.random() < 0.7 else int(rng.integers(3))).kill()
            looks += found(path, rng)
    # The trials mean something, also where processes take their time to take over.
    wait(lambda: looks > 0 or found(path, rng) > 0)
    for child in running:
        child.kill()
    killed.look(path)


def found(path: Path, rng: np.random.Generator) -> int:
    """How many of some names are served now; every byte of them is right."""
    looks = 0
    with suppress(AtlasError), TierClient(f"{path}.sock", timeout=5) as client:
        for name in rng.integers(killed.NAMES, size=6).tolist():
            looks += killed.fetched(client, name)
    return looks


def wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.005)


if __name__ == "__main__":
    act, where, *about = sys.argv[1:]
    if act == "together":
        for name in about:
            together(Path(f"{where}-{name.replace(' ', '-')}"), name)
    else:
        kill = {"clients": kill_clients, "servers": kill_servers}[act]
        kill(Path(where), *map(int, about))
