"""Routes are compiled and requests bound while no lock is held that others wait for."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import pytest

from kvatlas.routing import Route
from kvatlas.routing.compiler import Compiler
from kvatlas.routing.request import RequestEnds
from kvatlas.wire import Session
from kvatlas.wire.server import offering
from tests.wire.helpers import End, assert_arrived, ends, small

COMPILES = [
    (Route, "__init__"), (Route, "sources"), (Route, "needed_bytes"), (Compiler, "strips"),
]  # fmt: skip
BINDS = [(Route, "stream"), (RequestEnds, "bind"), (offering, "check_tables")]


class Held:
    """Which thread has which lock, and what was compiled or bound meanwhile."""

    def __init__(self) -> None:
        self.locks: dict[int, list[str]] = defaultdict(list)
        self.taken: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.under: set[tuple[str, str]] = set()

    def note(self, what: str) -> None:
        self.called[what] += 1
        self.under |= {(what, lock) for lock in self.locks[threading.get_ident()]}


class Watched:
    """A lock that says who has it."""

    def __init__(self, name: str, held: Held) -> None:
        self._name, self._held, self._lock = name, held, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._held.taken[self._name] += 1
        self._held.locks[threading.get_ident()].append(self._name)

    def __exit__(self, *_: object) -> None:
        self._held.locks[threading.get_ident()].remove(self._name)
        self._lock.release()


def watch(node: Any, held: Held) -> None:
    """Have every lock of a node that answers take note of who has it."""
    node.lock = Watched("node", held)
    node._routes_lock = Watched("routes", held)
    node.leases._lock = Watched("leases", held)
    node._expected._lock = Watched("expected", held)
    node.answers.sessions._lock = Watched("sessions", held)
    grant = node.leases.grant

    def granted(*given: Any, **about: Any) -> Any:
        lease = grant(*given, **about)
        lease.guard = Watched("guard", held)
        return lease

    node.leases.grant = granted


def noting(held: Held, name: str, act: Any) -> Any:
    def noted(*given: Any, **about: Any) -> Any:
        held.note(name)
        return act(*given, **about)

    return noted


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Whatever compiles or binds takes note of the locks that its thread has."""
    made = Held()
    for where, name in COMPILES + BINDS:
        monkeypatch.setattr(where, name, noting(made, name, getattr(where, name)))
    return made


def test_nothing_is_compiled_or_bound_under_a_lock(held: Held) -> None:
    """Whoever asks the node meanwhile would wait for it: a long request took 9 seconds."""
    source = End(small("dense"), 50, seed=1)
    target = End(small("dense", tp=2, layout="BLHNC"), 50, seed=2)
    with ends(source, target):
        for node in source.nodes + target.nodes:
            watch(node, held)
        for how in ("direct", "staged", "coalesced"):
            source.offer(how)
            for rank, node in enumerate(target.nodes):
                with Session(node, source.endpoints) as session:
                    about: Any = {"tokens": 50, "checksums": how != "coalesced", "how": how}
                    session.pull(how, destination_blocks=target.blocks, **about).wait(20)
                assert_arrived(source, target, rank)
        assert [why for _, _, why in source.released] == ["read"] * 3
        expected = [
            node.expect("pushed", target.blocks, 50, source=source.plan, pushers=["end-1"])
            for node in target.nodes
        ]
        with Session(source.nodes[0], target.endpoints) as session:
            session.push("pushed", source_blocks=source.blocks, tokens=50, checksums=True).wait(20)
        assert all(one.ready.wait(10) for one in expected)
    assert not held.under
    assert all(held.called[name] for _, name in COMPILES + BINDS), held.called
    assert set(held.taken) == {"node", "routes", "leases", "expected", "sessions", "guard"}
