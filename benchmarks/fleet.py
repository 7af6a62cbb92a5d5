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
from kvatlas.models import CacheIdentity
from kvatlas.planning import plan
from kvatlas.tier import HostStore, MooncakeStore, ObjectStore, StoreTier
from kvatlas.tier.stores import Parts

BLOCK = 64
NBYTES = LAYERS * TOKENS * 8 * 128 * 2 * 2
OBJECTS = TOKENS // BLOCK * 8
"""Objects of a request: of 1 MiB each, a head of 64 tokens of 32 layers."""
AT_ONCE = 16
KEYS = 1_000_000
REPEAT = 5
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


class RawClient(RawObjects):
    """The same by Mooncake's own client, called as it is."""

    def __init__(self, store: MooncakeStore) -> None:
        super().__init__(store)
        self._client = store.client

    def _listed(self) -> Iterator[tuple[list[str], list[int], list[int]]]:
        for some in self._batches():
            parts = [own[0] for _, own in some]
            places = [part.ctypes.data for part in parts]
            yield [name for name, _ in some], places, [part.nbytes for part in parts]

    def put(self) -> None:
        """Store all of them."""
        if any(answer for some in self._listed() for answer in self._client.batch_put_from(*some)):
            raise SystemExit("the store has no room for the raw objects")

    def get(self) -> None:
        """Read all of them."""
        for some in self._listed():
            self._client.batch_get_into(*some)


class StoredRequest:
    """A request of one topology that a tier stores and loads."""

    def __init__(self, store: ObjectStore, tp: int, order: str) -> None:
        rows = plan(dense(), memory="1GiB", layout="BHLNC", block_size=BLOCK, max_len=TOKENS)
        self.tier = StoreTier(store, rows, OURS, staging=128 << 20, timeout=60.0)
        self.moved = Moved(planned(tp, order))
        self.request = {**self.moved.request, "keys": [b"%d" % n for n in range(TOKENS // BLOCK)]}

    def put(self) -> None:
        """All ranks store."""
        for rank, pools in enumerate(self.moved.pools):
            stored = self.tier.store(pools, self.moved.made, rank=rank, **self.request)
        if stored.whole != TOKENS // BLOCK:
            raise SystemExit(f"stored {stored}")

    def get(self) -> None:
        """All ranks load."""
        for rank, pools in enumerate(self.moved.pools):
            self.tier.fetch(pools, self.moved.made, rank=rank, **self.request)

    def remove(self) -> None:
        """Forget all of it."""
        self.tier.drop_tenant()


def seconds_of(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def measure(name: str, store: ObjectStore) -> list[list[str]]:
    """Medians of all that is compared, by turns: what else the machine does is in all of them."""
    raw = RawClient(store) if isinstance(store, MooncakeStore) else RawObjects(store)
    acts: dict[str, Any] = {"raw": raw}
    if isinstance(store, MooncakeStore):
        acts["the same objects, by threads that stand back"] = RawObjects(store)
    acts["BHLNC tp 1"] = StoredRequest(store, 1, "BHLNC")
    acts["LBNHC tp 2"] = StoredRequest(store, 2, "LBNHC")
    taken: dict[str, list[tuple[float, float]]] = {about: [] for about in acts}
    for _ in range(1 + REPEAT):
        for about, act in acts.items():
            taken[about].append((seconds_of(act.put), seconds_of(act.get)))
            act.remove()
    medians = {about: np.median(times[1:], axis=0) for about, times in taken.items()}
    put, get = medians.pop("raw")
    rows = []
    for about, (stored, loaded) in medians.items():
        rates = [f"{NBYTES / seconds / 1e9:.2f}" for seconds in (stored, put, loaded, get)]
        shares = [f"{put / stored:.0%}", f"{get / loaded:.0%}"]
        rows.append([f"{name}, {about}", *rates[:2], shares[0], *rates[2:], shares[1]])
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
