"""A fleet's tier: storing and loading beside the raw store, and lookups among a million keys."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tier import LAYERS, TOKENS, Moved, dense, planned
from benchmarks.timing import median_ms, show
from kvatlas.planning import plan
from kvatlas.tier import CacheIdentity, HostStore, MooncakeStore, ObjectStore, StoreTier
from kvatlas.tier.stores import Parts

BLOCK = 64
NBYTES = LAYERS * TOKENS * 8 * 128 * 2 * 2
OBJECTS = TOKENS // BLOCK * 8
"""Objects of a request: of 1 MiB each, a head of 64 tokens of 32 layers."""
AT_ONCE = 16
KEYS = 1_000_000
REPEAT = 3
OURS = CacheIdentity(weights="bench")


class RawObjects:
    """As many objects as a request has, of the same size, from and to one stretch of memory."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        size = NBYTES // OBJECTS
        memory = np.random.default_rng(0).integers(0, 256, AT_ONCE * size, dtype=np.uint8)
        store.register(memory)
        self.parts = [memory[n * size : (n + 1) * size] for n in range(AT_ONCE)]

    def _batches(self) -> Iterator[list[tuple[str, Parts]]]:
        for first in range(0, OBJECTS, AT_ONCE):
            yield [(f"raw/{first + n}", [self.parts[n]]) for n in range(AT_ONCE)]

    def put(self) -> None:
        """Store all of them."""
        if not all(all(self.store.put(some)) for some in self._batches()):
            raise SystemExit("the store has no room for the raw objects")

    def get(self) -> None:
        """Read all of them."""
        for some in self._batches():
            self.store.get(some)

    def remove(self) -> None:
        """Remove all of them."""
        self.store.remove([f"raw/{n}" for n in range(OBJECTS)])


def median_s(act: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Median seconds of an act, with something before it that is not counted."""
    taken = []
    for _ in range(1 + REPEAT):
        before()
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))


def measure(name: str, store: ObjectStore) -> list[list[str]]:
    raw = RawObjects(store)
    put = median_s(raw.put, raw.remove)
    get = median_s(raw.get, lambda: None)
    raw.remove()
    rows = []
    for about, (tp, order) in {"BHLNC tp 1": (1, "BHLNC"), "LBNHC tp 2": (2, "LBNHC")}.items():
        made = plan(dense(), memory="1GiB", layout="BHLNC", block_size=BLOCK, max_len=TOKENS)
        tier = StoreTier(store, made, OURS, staging=128 << 20, deadline=60.0)
        moved = Moved(planned(tp, order))
        request = {**moved.request, "keys": [b"%d" % n for n in range(TOKENS // BLOCK)]}

        def save(moved: Moved = moved, tier: StoreTier = tier, request: Any = request) -> None:
            for rank, pools in enumerate(moved.pools):
                stored = tier.store(pools, moved.made, rank=rank, **request)
            if stored.whole != TOKENS // BLOCK:
                raise SystemExit(f"stored {stored}")

        def load(moved: Moved = moved, tier: StoreTier = tier, request: Any = request) -> None:
            for rank, pools in enumerate(moved.pools):
                tier.fetch(pools, moved.made, rank=rank, **request)

        stored = median_s(save, tier.drop_tenant)
        loaded = median_s(load, lambda: None)
        tier.drop_tenant()
        rates = [NBYTES / seconds / 1e9 for seconds in (stored, put, loaded, get)]
        shares = [f"{put / stored:.0%}", f"{get / loaded:.0%}"]
        columns = [f"{rate:.2f}" for rate in rates]
        rows.append([f"{name}, {about}", *columns[:2], shares[0], *columns[2:], shares[1]])
    return rows


def lookups(name: str, store: ObjectStore, keys: int) -> list[str]:
    """Objects per second that are looked for among many, asked for a thousand at a time."""
    one = np.zeros(1, np.uint8)
    for first in range(0, keys, 10_000):
        store.put([(f"kv1/{n}", [one]) for n in range(first, first + 10_000)])
    asked = [f"kv1/{n}" for n in np.random.default_rng(0).integers(0, 2 * keys, 1000)]
    seconds = median_ms(lambda: store.exists(asked)) / 1e3
    store.remove_all("kv1/")
    return [name, f"{keys:,}", f"{len(asked) / seconds:,.0f}"]


@contextmanager
def mooncake(*, apart: bool) -> Iterator[ObjectStore]:
    """A master, and a client whose memory is its own or that of another process."""
    ports = [_free_port() for _ in range(2)]
    command = [str(_master()), f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = subprocess.Popen(command, **quiet)
    address, processes = f"127.0.0.1:{ports[0]}", [master]
    try:
        _wait_for(ports[0])
        if apart:
            peer = [sys.executable, "-m", "benchmarks.fleet", address]
            held = subprocess.Popen(peer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                    stderr=subprocess.DEVNULL)  # fmt: skip
            processes.append(held)
            while held.stdout is not None and "ready" not in held.stdout.readline():
                pass
        store = MooncakeStore(address, segment=0 if apart else 1 << 30)
        yield store
        store.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _master() -> Path | None:
    beside = Path(sys.executable).with_name("mooncake_master")
    found = shutil.which("mooncake_master") or (str(beside) if beside.exists() else None)
    return Path(found) if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit("mooncake_master does not start")


def main() -> None:
    rows = measure("host memory", HostStore(1 << 30))
    asked = [lookups("host memory", HostStore(1 << 30), KEYS)]
    if _master() is None:
        show("Mooncake Store is not installed: nothing was measured on it", [], [])
    else:
        with mooncake(apart=False) as own:
            rows += measure("Mooncake, own memory", own)
            asked.append(lookups("Mooncake, own memory", own, KEYS))
        with mooncake(apart=True) as other:
            rows += measure("Mooncake, another process", other)
    columns = ["a store, and the topology", "store GB/s", "raw put", "of it",
               "load GB/s", "raw get", "of it"]  # fmt: skip
    show(f"A fleet's tier: {TOKENS} tokens in {OBJECTS} objects of 1 MiB", columns, rows)
    show("Looking for objects", ["a store", "objects", "lookups per second"], asked)


def _hold(address: str) -> None:
    """Give memory to a store until nobody wants it any more."""
    store = MooncakeStore(address, segment=1 << 30)
    print("ready", flush=True)
    sys.stdin.readline()
    store.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _hold(sys.argv[1])
    else:
        main()
