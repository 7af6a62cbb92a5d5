"""`python -m tests.attack.soak --seconds 3600`: eight nodes, random transfers, random faults.

Nodes are processes, in groups that share a transport; one keeps a tier in a file. They are
killed and started again, stopped, slowed down, cut off, and the tier's disk fills up. At the
end no byte may be wrong, and nothing may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.attack.left_open import Open, RetiredAgents
from tests.attack.plans import MEETING_ABORT, WIRES, Wire, installed
from tests.attack.proxy import Proxy
from tests.attack.soak_node import LANDING, OWN, log_of, main
from tests.wire.child import Json
from tests.wire.forking import forked

NODES = 8
"""Beside the one that keeps a tier."""
_AT_ONCE = 3
"""Transfers of a node at a time."""
_ENDED_BY_UCX = "ended by UCX, as a peer died"
_DRAIN = 90.0
"""Seconds in which everything must end once there are no more faults."""
_KILLED = range(NODES // 2, NODES + 1)
"""Nodes that are killed now and then; what the others leak adds up."""
Then = Callable[[Json | None], None]
"""Called with an answer, or with None where the node has died before it."""


class Worker:
    """A node's process, which may be started again."""

    def __init__(self, number: int, wire: Wire | None, folder: str, *, behind_proxy: bool) -> None:
        self.number, self.wire, self.folder = number, wire, folder
        self.proxy = Proxy() if behind_proxy else None
        self.free_slots = set(LANDING)
        self.restarts = 0
        self.start()

    def start(self) -> None:
        self.waiting: dict[int, Then] = {}
        self.stopped_until, self.started = 0.0, False
        self.free_slots = set(LANDING)
        self.process, self.pipe = forked(main, self.number, self.wire, self.folder)
        self._own_endpoint = ""

    @property
    def endpoint(self) -> str:
        return self.proxy.endpoint if self.proxy else self._own_endpoint

    def said_hello(self, endpoint: str) -> None:
        self.started, self._own_endpoint = True, endpoint
        if self.proxy:
            self.proxy.target = endpoint

    def last_words(self) -> str:
        """How it says that it crashed, as far as it does."""
        lines = log_of(self.folder, self.number).read_text(errors="replace").splitlines()
        fatal = [line for line in lines if "Fatal" in line or "Assertion" in line]
        return fatal[0].rpartition("]")[2].strip()[:120] if fatal else ""

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


class Soak:
    """All nodes, what they are doing, and what came of it."""

    def __init__(self, seed: int, folder: str, labels: list[str], nodes: int = NODES) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        wires = [WIRES[label] for label in labels if installed(WIRES[label])]
        self.groups: dict[str, list[Worker]] = {wire.label: [] for wire in wires}
        for number in range(nodes):
            wire = wires[number % len(wires)]
            worker = Worker(number, wire, folder, behind_proxy=number % 2 == 0)
            self.groups[wire.label].append(worker)
        self.tier = Worker(NODES, None, folder, behind_proxy=False)
        self.workers = [one for group in self.groups.values() for one in group] + [self.tier]
        self.codes: Counter[str] = Counter()
        self.by_wire: dict[str, Counter[str]] = {label: Counter() for label in self.groups}
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()
        self.left_open: list[Json] = []
        """What nodes had open when they were closed, beside what is explained."""
        self._agents: dict[str, RetiredAgents] = {}
        self.orders = 0
        self.disk_full_until = 0.0
        self.fault_at = 0.0
        self.under_way = 0

    # -- talking to nodes -------------------------------------------------------------------

    def tell(self, worker: Worker, do: str, then: Then, **about: Any) -> None:
        self.orders += 1
        worker.waiting[self.orders] = then
        order = {"id": self.orders, "do": do, "about": about}
        try:
            worker.pipe.send_bytes(json.dumps(order).encode())
        except OSError:
            self._gone(worker)

    def listen(self, seconds: float) -> None:
        """Hear what nodes say; start those again that are gone."""
        pipes = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(pipes), seconds):
            worker = pipes[pipe]
            try:
                said = json.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                self._gone(worker)
                continue
            if "endpoint" in said:
                worker.said_hello(said["endpoint"])
                continue
            if "surprise" in said:
                self.surprises[said["surprise"]] += 1
            self.counts["wrong bytes"] += said.get("wrong", 0)
            self.counts["never released"] += said.get("stuck", 0)
            then = worker.waiting.pop(said["id"], None)
            if then is not None:
                then(said)

    def _gone(self, worker: Worker) -> None:
        """A node has died: whoever waits for it is told, and it is started again."""
        worker.process.join(30)  # it gives its memory back first, on whatever processor is free
        code, label = worker.process.exitcode, self._label(worker)
        if code == -signal.SIGABRT and label == "nixl" and MEETING_ABORT in worker.last_words():
            self.counts[_ENDED_BY_UCX] += 1
        elif code != -signal.SIGKILL:
            self.surprises[f"a node died ({label}, {code}): {worker.last_words()}"] += 1
        waiting, worker.restarts = worker.waiting, worker.restarts + 1
        worker.pipe.close()
        worker.start()
        for then in waiting.values():
            then(None)

    def _label(self, worker: Worker) -> str:
        return "tier" if worker.wire is None else worker.wire.label

    # -- transfers --------------------------------------------------------------------------

    def transfer(self) -> None:
        """Begin a transfer somewhere, if a node has room for one."""
        if self.rng.random() < 0.15:
            return self._use_tier()
        label = self.rng.choice(list(self.groups))
        group = [worker for worker in self.groups[label] if worker.started]
        if len(group) < 2:
            return None
        source, target = self.rng.sample(group, 2)
        if len(target.free_slots) <= len(LANDING) - _AT_ONCE:
            return None
        slot = self.rng.choice(sorted(target.free_slots))
        target.free_slots.discard(slot)
        self.under_way += 1
        begin = self._pull if self.rng.random() < 0.6 else self._push
        begin(label, source, target, slot, f"request {self.orders} {self.rng.random()}")
        return None

    def _about(self) -> Json:
        return {
            "how": self.rng.choice(["direct", "staged", "auto"]),
            "checksums": self.rng.random() < 0.3,
            "timeout": self.rng.choice([0.3, 2.0, 10.0]),
        }

    def _pull(self, label: str, source: Worker, target: Worker, slot: int, request: str) -> None:
        source_slot, life = self.rng.choice(OWN), target.restarts
        cancel = self.rng.choice([0.0] * 8 + [0.01, 0.1])

        def offered(said: Json | None) -> None:
            if said is None or target.restarts != life:
                return self._ended(label, target, slot, life, "source died")
            self.tell(
                target, "pull", pulled, request=request, slot=slot, source=source.number,
                source_slot=source_slot, endpoint=source.endpoint, cancel=cancel,
                keep=self.rng.random() < 0.7, about=self._about(),
            )  # fmt: skip
            return None

        def pulled(said: Json | None) -> None:
            code = "target died" if said is None else said.get("code", "surprise")
            self._ended(label, target, slot, life, code)
            self.tell(source, "withdraw", lambda _: None, request=request)

        self.tell(source, "offer", offered, request=request, slot=source_slot, timeout=30.0)

    def _push(self, label: str, source: Worker, target: Worker, slot: int, request: str) -> None:
        source_slot, life = self.rng.choice(OWN), target.restarts
        given_up = self.rng.choice([0.0] * 3 + [0.05, 0.2])

        def expected(said: Json | None) -> None:
            if said is None:
                return self._ended(label, target, slot, life, "target died")
            self.tell(
                source, "push", pushed, request=request, slot=source_slot, target=target.number,
                endpoint=target.endpoint, keep=self.rng.random() < 0.7, about=self._about(),
            )  # fmt: skip
            if given_up:
                self.later.append((time.monotonic() + given_up, lambda: forget("forgotten")))
            return None

        def pushed(said: Json | None) -> None:
            forget("source died" if said is None else said.get("code", "surprise"))

        done: list[str] = []

        def forget(code: str) -> None:
            if done:
                return None
            done.append(code)
            if target.restarts != life:
                return self._ended(label, target, slot, life, "target died")

            def forgotten(said: Json | None) -> None:
                ready = said is not None and said.get("ready")
                if code == "ready" and said is not None and not ready:
                    self.surprises["a push was ready at its source only"] += 1
                self._ended(label, target, slot, life, "ready" if ready else code)

            self.tell(
                target, "forget", forgotten, request=request, slot=slot, source=source.number,
                source_slot=source_slot,
            )  # fmt: skip
            return None

        self.tell(target, "expect", expected, request=request, slot=slot, source=source.number)

    later: list[tuple[float, Callable[[], None]]]

    def _ended(self, label: str, target: Worker, slot: int, life: int, code: str) -> None:
        if code == "blocks_in_use":  # slots are reused only after they were released
            self.surprises["blocks of a slot that was released are in use"] += 1
        self.codes[code] += 1
        self.by_wire[label][code] += 1
        self.under_way -= 1
        if target.restarts == life:
            target.free_slots.add(slot)

    def _use_tier(self) -> None:
        if not self.tier.started or len(self.tier.waiting) > 2:
            return
        do = self.rng.choice(["store", "fetch", "fetch"])
        source, slot = self.rng.randrange(NODES), self.rng.choice(OWN)
        self.tell(self.tier, do, self._tier_ended, source=source, slot=slot)

    def _tier_ended(self, said: Json | None) -> None:
        self.counts["tier: " + ("died" if said is None else said.get("code", "surprise"))] += 1

    # -- faults -----------------------------------------------------------------------------

    def strike(self) -> None:
        """Now and then, one fault."""
        now = time.monotonic()
        if now < self.fault_at:
            return
        self.fault_at = now + self.rng.uniform(0.2, 1.5)
        worker = self.rng.choice([one for one in self.workers if one.started] or self.workers)
        fault = self.rng.choice(["kill", "stop", "stop", "slow", "cut", "cut", "disk"])
        match fault:
            case "kill" if worker.number in _KILLED:
                worker.signal(signal.SIGKILL)
            case "stop" if worker.stopped_until == 0:
                worker.signal(signal.SIGSTOP)
                worker.stopped_until = now + self.rng.choice([0.05, 0.5, 3.0])
            case "slow":
                self._slow_down(worker, now)
            case "cut":
                proxies = [one.proxy for one in self.workers if one.proxy]
                self.counts["connections cut"] += self.rng.choice(proxies).cut()
            case "disk" if self.tier.started and now > self.disk_full_until:
                self.disk_full_until = now + self.rng.uniform(0.5, 3.0)
                self.tell(self.tier, "disk", lambda _: None, full=True)
                lift = lambda: self.tell(self.tier, "disk", lambda _: None, full=False)  # noqa: E731
                self.later.append((self.disk_full_until, lift))
            case _:
                return
        self.faults[fault] += 1

    def _slow_down(self, worker: Worker, now: float) -> None:
        """A second in which it runs half of the time."""
        life = worker.restarts
        for burst in range(20):
            number = signal.SIGCONT if burst % 2 else signal.SIGSTOP

            def act(number: signal.Signals = number) -> None:
                if worker.restarts == life and not worker.stopped_until:
                    worker.signal(number)

            self.later.append((now + burst * 0.05, act))

    def tick(self) -> None:
        """What was put off is done, and what was stopped goes on."""
        now = time.monotonic()
        due = [act for when, act in self.later if when <= now]
        self.later = [(when, act) for when, act in self.later if when > now]
        for act in due:
            act()
        for worker in self.workers:
            if worker.stopped_until and worker.stopped_until <= now:
                worker.stopped_until = 0.0
                worker.signal(signal.SIGCONT)

    # -- the whole --------------------------------------------------------------------------

    def run(self, seconds: float, progress: Callable[[float, Soak], None]) -> None:
        self.later = []
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            progress(time.monotonic() - begun, self)
            self.listen(0.02)
            self.tick()
            self.strike()
            self.transfer()
        self._drain()
        self._count_what_is_left()

    def _drain(self) -> None:
        """No more faults: everything that was begun must end."""
        for worker in self.workers:
            worker.stopped_until = 0.0
            worker.signal(signal.SIGCONT)
        deadline = time.monotonic() + _DRAIN
        while time.monotonic() < deadline:
            self.listen(0.05)
            self.tick()
            if not self.later and not any(worker.waiting for worker in self.workers):
                break
        self.counts["orders without an answer"] += sum(len(one.waiting) for one in self.workers)

    def _count_what_is_left(self) -> None:
        self._ask_all("state", lambda _worker, _said: None)  # closes all sessions
        self._ask_all("state", self._count)
        self._ask_all("end", self._count_open)
        for worker in self.workers:
            self._end(worker)

    def _ask_all(self, do: str, then: Callable[[Worker, Json], None]) -> None:
        """The same of every node, once nothing is under way."""
        left = list(self.workers)

        def answered(worker: Worker, said: Json | None) -> None:
            left.remove(worker)
            if said is None or "surprise" in said:
                self.surprises[f"a node died ({self._label(worker)}), told at the end: {do}"] += 1
            else:
                then(worker, said)

        for worker in self.workers:
            self.tell(worker, do, partial(answered, worker))
        deadline = time.monotonic() + _DRAIN
        while left and time.monotonic() < deadline:
            self.listen(0.1)
        self.counts["orders without an answer"] += len(left)

    def _count(self, _: Worker, said: Json) -> None:
        for what in ("leases", "buffers", "quarantine", "claims"):
            self.counts[f"leaked {what}"] += said[what]

    def _count_open(self, worker: Worker, said: Json) -> None:
        """A node that was closed has nothing open but the agents that it had to keep."""
        explained = self._explained(worker, said["retired"])
        for what, known in explained.items():
            self.counts[f"leaked {what}"] += max(0, said[what] - known)
        left = {what: said[what] for what in explained}
        if any(left.values()):
            about = {"node": worker.number, "transport": self._label(worker)}
            retired = {"retired agents": said["retired"]}
            self.left_open.append(about | {"left": left, "explained": explained} | retired)

    def _explained(self, worker: Worker, retired: int) -> Open:
        """What so many agents hold that were retired, as measured in this very run."""
        if not retired or worker.wire is None:
            return {"descriptors": 0, "segments": 0}
        label = worker.wire.label
        if label not in self._agents:
            self._agents[label] = RetiredAgents(worker.wire)
        return self._agents[label].hold(retired)

    def _end(self, worker: Worker) -> None:
        worker.pipe.close()
        worker.process.join(15)
        if worker.process.exitcode != 0:
            code = worker.process.exitcode
            self.surprises[f"a node did not close well ({self._label(worker)}, {code})"] += 1
            worker.process.kill()
            worker.process.join()
        if worker.proxy:
            worker.proxy.close()

    @property
    def ok(self) -> bool:
        zero = [what for what in self.counts if _must_be_zero(what)]
        explained = self.counts[_ENDED_BY_UCX] <= self.faults["kill"]
        return explained and not self.surprises and not any(self.counts[what] for what in zero)

    def as_json(self) -> Json:
        return {
            "ok": self.ok,
            "transfers": self.codes.total(),
            "codes": dict(self.codes),
            "by transport": {label: dict(codes) for label, codes in self.by_wire.items()},
            "faults": dict(self.faults),
            "restarts": sum(worker.restarts for worker in self.workers),
            "counts": dict(self.counts),
            "left open": self.left_open,
            "surprises": dict(self.surprises),
        }


def _must_be_zero(what: str) -> bool:
    return what.startswith(("wrong", "leaked", "never", "orders"))


def table(soak: Soak) -> Table:
    """All of it, what must be zero in red where it is not."""
    shown = Table(title="Soak", show_header=False)
    shown.add_row("transfers", str(soak.codes.total()))
    for label, codes in soak.by_wire.items():
        said = ", ".join(f"{many} {code}" for code, many in codes.most_common())
        shown.add_row(f"  {label}", said)
    shown.add_row("faults", ", ".join(f"{many} {what}" for what, many in soak.faults.items()))
    shown.add_row("restarts", str(sum(worker.restarts for worker in soak.workers)))
    for what, many in sorted(soak.counts.items()):
        style = ("[bold red]" if many else "[green]") if _must_be_zero(what) else "[default]"
        shown.add_row(what, f"{style}{many}[/]")
    for one in soak.left_open:
        who = f"left open by node {one['node']} ({one['transport']})"
        left, known = one["left"], one["explained"]
        words = ", ".join(f"{left[what]} {what} ({known[what]} explained)" for what in left)
        shown.add_row(who, f"{words}: {one['retired agents']} agents retired")
    for what, many in soak.surprises.items():
        shown.add_row("[bold red]surprise[/]", f"{what} ({many})")
    return shown


def cli() -> int:
    """Run it; not 0 where a byte was wrong or something is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    lasting = [label for label, wire in WIRES.items() if not wire.dies_with_reader]
    parser.add_argument("--transports", nargs="*", choices=lasting, default=lasting)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=bool(options.json))
    console.print(f"seed {options.seed}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=console) as progress,
    ):
        soak = Soak(options.seed, folder, options.transports)
        task = progress.add_task("soak", total=options.seconds)

        def show(done: float, now: Soak) -> None:
            words = f"{now.codes.total()} transfers, {now.faults.total()} faults"
            progress.update(task, completed=done, description=words)

        soak.run(options.seconds, show)
    console.print(table(soak))
    if options.json:
        print(json.dumps(soak.as_json(), indent=2))
    return 0 if soak.ok else 1


if __name__ == "__main__":
    sys.exit(cli())
