"""A master of Mooncake Store and clients in processes of their own, on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvatlas.models import CacheIdentity, Model
from kvatlas.tier import MooncakeStore, StoreTier
from tests.planning.models import SMALL
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small, tier_plan

OURS = CacheIdentity(weights="ours", tenant="fleet")
BIG = {"compressed": {"memory": "24MiB"}}
TOKENS = {"compressed": 192}
_MASTER = shutil.which(
    "mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
)
_SECONDS = 30.0


def missing() -> str:
    """Why Mooncake Store cannot be run here; nothing where it can."""
    if _MASTER is None:
        return "mooncake_master is not installed"
    return "" if find_spec("mooncake") else "mooncake is not installed"


def model_of(name: str) -> Model:
    return SMALL[name] if name == "compressed" else MODELS[name]


def world_of(name: str, seed: int = 0) -> World:
    options = {"memory": "96MiB"} if name == "compressed" else {}
    return World(model_of(name), TOKENS.get(name, 100), seed, **options)


class Master:
    """A master on ports of its own, which can be killed and started again."""

    def __init__(self, lease_ms: int = 3000, client_seconds: int = 2) -> None:
        self.lease_ms = lease_ms
        self.client_seconds = client_seconds
        """After which it forgets a client that says nothing, with the objects that it has."""
        self.port, self.web = _free_port(), _free_port()
        self.address, self.pages = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.web}"
        self.start()

    def start(self) -> None:
        assert _MASTER is not None
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.web}"]
        short = [
            f"--default_kv_lease_ttl={self.lease_ms}",
            f"--client_ttl={self.client_seconds}",
            "--put_start_discard_timeout_sec=2",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([_MASTER, *ports, *short], **quiet)  # type: ignore[call-overload]
        try:
            wait_until(lambda: _answers(self.port))
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def store(self, segment: int = 16 << 20) -> MooncakeStore:
        return MooncakeStore(self.address, segment=segment, metrics=self.pages)

    def tier(self, name: str, segment: int = 16 << 20, **options: Any) -> StoreTier:
        return tier_on(self.store(segment), name, **options)


def tier_on(store: MooncakeStore, name: str, **options: Any) -> StoreTier:
    rows = tier_plan(model_of(name), **BIG.get(name, {}))
    return StoreTier(store, rows, OURS, **{"staging": 1 << 20, "timeout": 30.0, **options})


class Peer:
    """A client in a process of its own, told what to do line by line."""

    def __init__(self, master: Master, segment: int = 16 << 20) -> None:
        about = [master.address, master.pages, str(segment)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.tier.mooncake_world", *about]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)

    def tell(self, what: str, name: str, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, name, options]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What it says: other lines are the library's own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the peer has ended")

    def ask(self, what: str, name: str, **options: Any) -> Any:
        self.tell(what, name, **options)
        return self.answer()

    def end(self) -> None:
        """Have it leave the store, and wait for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """A process that stands still meanwhile, as one does that is short of everything."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def running(**options: Any) -> Iterator[Master]:
    master = Master(**options)
    try:
        yield master
    finally:
        master.kill()


def wait_until(there: Any, seconds: float = _SECONDS) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(address: str, pages: str, segment: str) -> None:
    """Do what is asked for: store or check a model's request in a topology."""
    store = MooncakeStore(address, segment=int(segment), metrics=pages)
    tiers: dict[str, StoreTier] = {}
    for line in sys.stdin:
        what, name, options = json.loads(line)
        seed = options.pop("seed", 0)
        if name not in tiers:
            tiers[name] = tier_on(store, name)
        tier = tiers[name]
        world, made = world_of(name, seed), small(model_of(name), **BIG.get(name, {}), **options)
        if what == "store":
            said: Any = [list(one) for one in world.store(tier, made)]
        else:
            world.check(tier, made)
            said = "all bytes are right"
        print("answer " + json.dumps(said), flush=True)
    store.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
