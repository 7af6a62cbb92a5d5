"""Everything that takes locks, in many threads that are switched all the time."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from kvatlas import AtlasError
from kvatlas.wire import Session
from tests.attack.claims import Attack, Outcome
from tests.attack.plans import made
from tests.wire.child import Json, Rank
from tests.wire.helpers import waited

_TOKENS, _THREADS = 64, 12
_REQUESTS = [f"request {number}" for number in range(6)]
_UNDERSTOOD = {
    "cancelled", "deadline", "lease_expired", "peer_lost", "twice", "unknown_request",
    "unknown_session", "too_many", "busy", "blocks_in_use",
}  # fmt: skip


def _landing(rng: random.Random, rank: Rank) -> list[int]:
    """Blocks that requests come into: few, so that they are often in use, and never offered."""
    own = list(rank.blocks[0])
    free = [one for one in range(rank.plan.pools[0].blocks) if one not in own]
    first = rng.randrange(len(free) // len(own)) * len(own)
    return free[first : first + len(own)]


class _Crowd:
    """Threads that offer, pull, push, withdraw and forget what they like at two nodes."""

    def __init__(self, ranks: list[Rank], seconds: float, seed: int) -> None:
        self.ranks, self.seed = ranks, seed
        self.until = time.monotonic() + seconds
        self.codes: Counter[str] = Counter()
        self.surprises: list[str] = []
        self.threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(_THREADS)
        ]

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311
        while time.monotonic() < self.until:
            mine, other = rng.sample(self.ranks, 2)
            try:
                with Session(mine.node, [other.node.endpoint], timeout=10) as session:
                    for _ in range(rng.randint(1, 6)):
                        try:
                            self.codes[self._act(rng, session, mine, other)] += 1
                        except AtlasError as refused:
                            self.codes[str(refused.code)] += 1
            except AtlasError as refused:
                self.codes[str(refused.code)] += 1
            except Exception as surprise:
                self.surprises.append(f"{type(surprise).__name__}: {surprise}")

    def _act(self, rng: random.Random, session: Session, mine: Rank, other: Rank) -> str:
        request = rng.choice(_REQUESTS)
        way = rng.choice(["pull", "push", "offer", "withdraw", "expect", "forget", "sweep"])
        how = rng.choice(["direct", "staged", "auto"])
        match way:
            case "pull" | "push":
                about: Json = {"tokens": _TOKENS, "how": how, "timeout": 10}
                if way == "pull":
                    self._quietly(lambda: other.node.offer(request, other.blocks, _TOKENS))
                    transfer = session.pull(
                        request, destination_blocks=_landing(rng, mine), **about
                    )
                else:
                    into = _landing(rng, other)
                    pushed: Json = {"source": mine.plan, "pushers": [mine.node.name]}
                    self._quietly(lambda: other.node.expect(request, into, _TOKENS, **pushed))
                    transfer = session.push(request, source_blocks=mine.blocks, **about)
                if rng.random() < 0.2:
                    transfer.cancel()
                if rng.random() < 0.1:
                    session.close()
                transfer.wait()
            case "offer":
                mine.node.offer(request, mine.blocks, _TOKENS, timeout=rng.choice([0.01, 5.0]))
            case "withdraw":
                mine.node.withdraw(request)
            case "expect":
                into = _landing(rng, mine)
                expected: Json = {"source": other.plan, "pushers": [other.node.name]}
                mine.node.expect(request, into, _TOKENS, **expected)
            case "forget":
                mine.node.forget(request)
            case "sweep":
                mine.node.sweep()
        return f"{way}: ok"

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except AtlasError as refused:
            self.codes[str(refused.code)] += 1


def contended_locks(attack: Attack) -> Outcome:
    """Offers, pulls, pushes, withdrawals and closes in many threads all end; nothing is left."""
    outcome = Outcome()
    before = sys.getswitchinterval()
    for turn in range(max(1, attack.tries // 10)):
        with ExitStack() as stack:
            plans = [made("LBNHC", 16, _TOKENS), made("BHLNC", 32, _TOKENS)]
            ranks = [
                Rank(plan, attack.wire.name, 1 + i, _TOKENS, **attack.wire.node)
                for i, plan in enumerate(plans)
            ]
            crowd = _Crowd(ranks, 3.0, attack.seed + turn)
            sys.setswitchinterval(1e-6)
            try:
                for thread in crowd.threads:
                    thread.start()
                deadline = time.monotonic() + 60
                for thread in crowd.threads:
                    thread.join(max(0.0, deadline - time.monotonic()))
            finally:
                sys.setswitchinterval(before)
            hung = sum(thread.is_alive() for thread in crowd.threads)
            faults = [f"{hung} threads hang"] if hung else []
            faults += sorted(set(crowd.surprises))
            faults += [
                f"a transfer ended in {code}"
                for code in crowd.codes
                if ": ok" not in code and code not in _UNDERSTOOD
            ]
            if not any(crowd.codes[f"{way}: ok"] for way in ("pull", "push")):
                faults.append("nothing has moved")
            for rank in ranks:
                for request in _REQUESTS:
                    rank.node.withdraw(request)
                    rank.node.forget(request)
                if not waited(rank.idle, 15):
                    faults += [f"{what} left" for what, many in rank.left().items() if many]
            outcome.add(faults)
            if hung:
                return outcome  # what hangs would keep its node from closing
            for rank in ranks:
                stack.callback(rank.close)
    return outcome
