"""Pushes that are announced again: no peer takes away what another rank has delivered."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvatlas.wire import protocol
from tests.attack.claims import Attack, Outcome, repeated_in
from tests.attack.liar import Liar
from tests.attack.plans import source_plan
from tests.attack.source_ranks import LATE, SECONDS, SourceRanks
from tests.wire.attacked import code_of
from tests.wire.child import Json, Rank
from tests.wire.helpers import waited

_CAST: dict[str, Json] = {
    "rank 0": {"rank": 0, "seed": 1, "name": "prefill"},
    "again": {"rank": 0, "seed": 2, "name": "spare"},
    "rank 1": {"rank": 1, "seed": 3, "name": "prefill"},
}
_SEEDS = (1, 3)


@dataclass
class _Crowd:
    """Peers that announce pushes and offer nothing."""

    outsiders: list[Liar]
    """Peers that the expectation does not name, and a named one with another plan."""
    duplicates: list[Liar]
    """Peers with a permitted name that claim to be rank 0."""

    def refused(self, liars: list[Liar], request: str) -> list[str]:
        """Have each announce the request, whole and in part; all must be refused."""
        faults = []
        for liar in liars:
            said = [liar.announce(request, **part) for part in _PARTS]
            said += [code_of(liar.open(request))]
            faults += [f"a message was answered with {one}" for one in said if one != _REFUSED]
        return faults


_REFUSED = "unknown_request"
_PARTS: list[dict[str, Any]] = [{}, {"stop": 32}, {"start": 32}]


def opened_again(attack: Attack) -> Outcome:
    """An arrival stands, and if all pushers were told that they arrived the request is ready."""
    with ExitStack() as stack:
        scene = SourceRanks(attack, _CAST)
        try:
            crowd = _gather(scene, stack)
            seconds = scene.typical_push("rank 0")
        except BaseException:
            scene.close()
            raise
        strike = partial(_opened_again, crowd=crowd, seconds=seconds)
        return repeated_in(scene, attack, strike)


def _gather(scene: SourceRanks, stack: ExitStack) -> _Crowd:
    """Begin the sessions of the crowd, with hellos of real ranks of this process."""
    tokens, here = scene.tokens, scene.here
    about: dict[str, Any] = {"tokens": tokens} | scene.wire.node
    one = Rank(scene.source, scene.wire.name, 4, rank=0, name="prefill", **about)
    stack.callback(one.close)
    alone = Rank(source_plan(tokens), scene.wire.name, 5, name="prefill", **about)
    stack.callback(alone.close)
    outsiders = [Liar(one, here, name="stranger"), Liar(one, here, name="x"), Liar(alone, here)]
    key = protocol.new_key()
    duplicates = [Liar(one, here), Liar(one, here, name="spare"), Liar(one, here, incarnation=key)]
    for liar in (*outsiders, *duplicates):
        stack.callback(liar.raw.close)
    return _Crowd(outsiders, duplicates)


def _opened_again(
    scene: SourceRanks, crowd: _Crowd, seconds: float
) -> tuple[list[str], bool | None]:
    rng, request = scene.rng, scene.name()
    expected = scene.expect(request)
    faults = crowd.refused(crowd.outsiders, request)
    if rng.random() < 0.5:  # a push of rank 0 without an offer
        rng.choice(crowd.duplicates).announce(request)
    hammered = [*crowd.outsiders, *(crowd.duplicates if rng.random() < 0.3 else [])]
    with _Hammer(hammered, request):
        code = scene.pushed("rank 0", request)
    fenced = code == "lease_expired" and len(hammered) > len(crowd.outsiders)
    if fenced:  # by a permitted peer of the same rank, before it had arrived
        code = scene.pushed("rank 0", request)
    if code != "ready" or 0 not in expected.arrived:
        faults.append(f"rank 0 was told {code} and has arrived: {0 in expected.arrived}")
    faults += crowd.refused([*crowd.outsiders, *crowd.duplicates], request)
    again = scene.pushed("again", request, checksums=rng.random() < 0.5)
    if again != _REFUSED:
        faults.append(f"a rank that had arrived was pushed again: {again}")
    with _Hammer([*crowd.outsiders, *crowd.duplicates], request) as hammer:
        time.sleep(rng.uniform(0.0, 1.0) * seconds)
        last = scene.pushed("rank 1", request)
    faults += [f"an announcement was answered with {one}" for one in hammer.said - {_REFUSED}]
    if (last, 0 in expected.arrived) != ("ready", True):
        faults.append(f"rank 1 was told {last}, rank 0 has arrived: {0 in expected.arrived}")
    if not waited(expected.ready.is_set, 2.0):
        faults.append("not ready although both ranks were told that they arrived")
    else:
        faults += scene.holds(_SEEDS, "wrong bytes in a request that is ready")
    faults += crowd.refused([*crowd.outsiders, *crowd.duplicates], request)
    if expected.ready.is_set() and rng.random() < 0.2:
        time.sleep(LATE)
        faults += scene.holds(_SEEDS, "late bytes in a request that is ready")
    scene.here.node.forget(request)
    return faults + scene.nothing_left(), None


class _Hammer:
    """A thread that announces a request again and again, as each of some peers."""

    def __init__(self, liars: list[Liar], request: str) -> None:
        self.liars, self.request = liars, request
        self.said: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.is_set():
            for liar in self.liars:
                self.said.add(liar.announce(self.request))
            time.sleep(0.001)

    def __enter__(self) -> _Hammer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SECONDS)
