"""A rank of a plan with guarded pools, in this process or in one that is stopped and killed.

`Child` is the side of whoever tells that process what to do, and strikes it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.copying.run_bounds import Bytes
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import Handle, Node, Session, make_transport, memory_of
from kvatlas.wire.client import pull_pipeline
from kvatlas.wire.sample_server import random_bytes
from tests.identities import OURS
from tests.wire.forking import forked, forked_idler, until_stopped
from tests.wire.helpers import waited

TOKENS = 500
GUARD, GUARDED = 4096, 0xA5
Json = dict[str, Any]


def contents(of: Plan, seed: int, rank: int = 0) -> dict[int, Bytes]:
    """What the pools of a rank are filled with, which anybody can make again."""
    pools = of.rank_pools(rank)
    return {index: random_bytes(pool.nbytes, seed, rank, index) for index, pool in pools.items()}


class Rank:
    """One rank of a plan on the wire; its pools lie between guard bytes."""

    def __init__(
        self,
        plan: Plan,
        transport: str,
        seed: int,
        tokens: int = TOKENS,
        *,
        rank: int = 0,
        options: Json | None = None,
        **given: Any,
    ) -> None:
        self.plan, self.seed, self.tokens, self.rank = plan, seed, tokens, rank
        self.transport = make_transport(transport, **options or {})
        self.whole: dict[int, Bytes] = {}
        self.fill(seed)
        about: Json = {
            "piece": 8192,
            "buffers": 4,
            "name": f"node-{seed}",
            "identity": OURS,
        } | given
        self._buffers = about["buffers"]
        self.node = Node(
            plan, rank=rank, memory=memory_of(self.pools), transport=self.transport, **about
        )
        self.blocks = scattered(plan, tokens)
        self.released: list[tuple[str, str]] = []

    @property
    def pools(self) -> dict[int, Bytes]:
        return {index: whole[GUARD:-GUARD] for index, whole in self.whole.items()}

    def fill(self, seed: int) -> None:
        """Random bytes that anybody can make again, between guards."""
        for index, pool in contents(self.plan, seed, self.rank).items():
            if index not in self.whole:
                self.whole[index] = self.transport.allocate(pool.nbytes + 2 * GUARD)
                self.whole[index][:] = GUARDED
            self.pools[index][:] = pool

    def wrong(self, right: dict[int, Bytes]) -> int:
        """Bytes of its pools that are not as they should be, and of the guards around them."""
        found = 0
        for index, whole in self.whole.items():
            if not np.array_equal(self.pools[index], right[index]):
                found += int((self.pools[index] != right[index]).sum())
            found += sum(int((guard != GUARDED).sum()) for guard in (whole[:GUARD], whole[-GUARD:]))
        return found

    def offer(self, request: str, timeout: float = 60.0, **given: Any) -> None:
        def noted(request: str, why: str) -> None:
            self.released.append((request, why))

        about: Json = {"blocks": self.blocks, "tokens": self.tokens} | given
        self.node.offer(request, timeout=timeout, released=noted, **about)

    def left(self) -> Json:
        """What is still lent, leased or under way: all zero where nothing is."""
        return {
            "leases": len(self.node.leases),
            "buffers": self._buffers - self.node.staging.free,
            "quarantine": len(self.node.quarantine),
            "claims": len(self.node.ledger) - len(self.node.offers),
        }

    def idle(self) -> bool:
        """Whether nothing is."""
        return not any(self.left().values())

    def close(self) -> None:
        self.node.close()
        assert self.transport.registered == 0


# -- in a process of its own --------------------------------------------------------------


def _answer(rank: Rank, order: Json) -> Json:
    about = _with_identity(order["about"])
    match order["do"]:
        case "offer":
            rank.offer(**about)
        case "withdraw":
            rank.node.withdraw(**about)
        case "expect":
            source = Plan.from_json(about.pop("source").encode())
            rank.node.expect(blocks=rank.blocks, tokens=rank.tokens, source=source, **about)
        case "move":
            return _moved(rank, **about)
        case "forget":
            rank.node.forget(**about)
        case "state":
            return rank.left() | {"released": rank.released}
        case "holds":
            return {"wrong": _wrong_after(rank, **about)}
        case "changed":
            return {"bytes": rank.wrong(contents(rank.plan, rank.seed, rank.rank))}
    return {}


def _wrong_after(rank: Rank, source: str, seed: int) -> int:
    """Bytes that are not as they should be after a pull from a source of one rank."""
    from tests.attack.plans import after

    plan = Plan.from_json(source.encode())
    return rank.wrong(after(plan, seed, rank.plan, rank.seed, rank.tokens))


def _with_identity(about: Json) -> Json:
    """Make the identity of an order, which travels as JSON, a `CacheIdentity` again."""
    given = about.get("identity")
    return about if given is None else about | {"identity": CacheIdentity(**given)}


def _moved(rank: Rank, way: str, endpoints: list[str], **about: Any) -> Json:
    about |= {"tokens": rank.tokens}
    try:
        with Session(rank.node, endpoints, timeout=5) as session:
            if way == "pull":
                session.pull(destination_blocks=rank.blocks, **about).wait()
            else:
                session.push(source_blocks=rank.blocks, **about).wait()
    except AtlasError as refused:
        return {"code": str(refused.code)}
    return {"code": "ready"}


def _slow_down(seconds: float) -> None:
    """Let every operation of the transport take longer, so that there is time to strike."""
    wait = Handle.wait

    def slowly(handle: Handle, *given: Any) -> None:
        time.sleep(seconds)
        wait(handle, *given)

    if seconds:
        Handle.wait = slowly  # type: ignore[method-assign, assignment]


def _fork_when_told(note: str) -> None:
    """Fork a process that does nothing for each line in a pipe, and write its number to a file.

    A thread does it: a signal handler would fork in the middle of any call of the main thread, and
    wait forever for locks that this thread holds, such as those of `concurrent.futures`.
    """

    def fork() -> None:
        while True:
            Path(f"{note}.wanted").read_bytes()  # returns once whoever wrote to it has closed it
            Path(note).write_text(str(forked_idler()))

    threading.Thread(target=fork, daemon=True).start()


def main(told: Connection) -> None:
    """Be one rank until nobody tells it anything any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    faulthandler.enable()
    try:
        order = json.loads(told.recv_bytes())
    except (EOFError, OSError):
        return None
    os.environ.update(order.pop("settings", {}))
    pull_pipeline._BATCH = order.pop("batch", pull_pipeline._BATCH)
    _slow_down(order.pop("slow", 0.0))
    _fork_when_told(order.pop("fork_note"))
    if "secret" in order:
        order["secret"] = bytes.fromhex(order["secret"])
    rank = Rank(Plan.from_json(order.pop("plan").encode()), **_with_identity(order))
    said: Json = {"endpoint": rank.node.endpoint}
    while True:
        try:
            told.send_bytes(json.dumps(said).encode())
            order = json.loads(told.recv_bytes())
        except (EOFError, OSError):
            return rank.close()
        said = _answer(rank, order)


class Child:
    """That process, from the side of whoever tells it what to do and strikes it."""

    def __init__(self) -> None:
        self.process, self._pipe = forked(main)
        self._endpoint = ""
        self._folder = TemporaryDirectory()
        self._note = Path(self._folder.name) / "forked"
        os.mkfifo(f"{self._note}.wanted")
        self._due = 0
        """Answers to orders that nobody has heard yet."""

    def start(self, plan: Plan, transport: str, seed: int, **given: Any) -> Child:
        """Have it be this rank; nobody waits for it before it is needed."""
        about = {"plan": plan.to_json().decode(), "transport": transport, "seed": seed}
        self._send(about | {"fork_note": str(self._note)} | given)
        return self

    @property
    def endpoint(self) -> str:
        if not self._endpoint:
            self._endpoint = self.heard()["endpoint"]
        return self._endpoint

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return int(self.process.pid)

    def _send(self, order: Json) -> None:
        self._pipe.send_bytes(json.dumps(order).encode())

    def tell(self, do: str, **about: Any) -> None:
        assert self.endpoint
        self._send({"do": do, "about": about})
        self._due += 1

    def heard(self, seconds: float = 40.0) -> Json:
        assert self._pipe.poll(seconds), "the child says nothing"
        said: Json = json.loads(self._pipe.recv_bytes())
        self._due = max(0, self._due - 1)
        return said

    def hear_all(self) -> None:
        """Receive every answer that is still due, after a test that ended before it."""
        while self._due:
            self.heard()

    def ask(self, do: str, **about: Any) -> Json:
        self.tell(do, **about)
        return self.heard()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """It stands still when this returns, all its threads."""
        self.signal(signal.SIGSTOP)
        until_stopped(self.pid)

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)

    def fork(self) -> int:
        """Have it fork a child that does nothing. Returns the number of that child."""
        self._note.unlink(missing_ok=True)
        Path(f"{self._note}.wanted").write_text("once")
        if waited(lambda: self._note.exists() and self._note.read_text() != "", 10):
            return int(self._note.read_text())
        self.signal(signal.SIGABRT)  # it prints where each of its threads is
        raise AssertionError("it does not fork")

    def kill(self) -> None:
        """As if the machine had gone: nothing is said or given back."""
        self.process.kill()
        self.process.join()

    def close(self) -> int:
        """Let it end by itself; how it did, which is 0, or -9 where it was killed."""
        self._pipe.close()
        if self.process.is_alive():
            self.go_on()
        self.process.join(15)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.process.close()
        self._folder.cleanup()
        return -1 if code is None else int(code)
