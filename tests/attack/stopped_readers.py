"""Readers that stop with buffers of two source ranks: others are served, bytes are right."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from kvatlas.wire import Session
from tests.attack.claims import SLACK, Attack, Outcome, code_of, repeated_in
from tests.attack.source_ranks import SECONDS, SourceRanks
from tests.wire.child import Child, Json
from tests.wire.helpers import waited

_RANKS = ("one 0", "one 1")
_SEED = 1
_CAST: dict[str, Json] = {
    role: {"rank": rank, "seed": _SEED, "name": "one"} for rank, role in enumerate(_RANKS)
}
_READERS = 2
"""Two of them hold all buffers that a rank has for peers."""
_PROMPT = 12.0
"""Seconds in which another reader must be served, on a machine that is busy."""
_ENDS = {"ready", "deadline", "lease_expired", "buffers_reclaimed", "unknown_request", "peer_lost"}
"""How a pull may end whose process stood still."""


class _Scene(SourceRanks):
    """Two source ranks, a reader in this process, and others that are stopped."""

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack, _CAST)
        self.readers = [self._reader(nth) for nth in range(_READERS)]

    def _reader(self, nth: int) -> Child:
        about: Json = {"tokens": self.tokens, "settings": self.wire.settings} | self.node
        return Child().start(self.dst, self.wire.name, 20 + nth, **about)

    def pulls_beside(self, nth: int, request: str) -> None:
        endpoints = self.endpoints(*_RANKS)
        about: Json = {"way": "pull", "how": "staged", "seconds": SECONDS}
        self.readers[nth].tell("move", request=request, endpoints=endpoints, **about)

    def revived(self) -> list[str]:
        faults = super().revived()
        for nth, child in enumerate(self.readers):
            child.go_on()
            with suppress(EOFError, OSError, AssertionError):
                child.hear_all()
                if child.process.is_alive():
                    continue
            faults += self.ended(child.close(), "a reader died by itself ({})")
            self.readers[nth] = self._reader(nth)
        return faults

    def sources_idle(self) -> bool:
        states = [self[role].ask("state") for role in _RANKS]
        return not any(state["leases"] + state["buffers"] for state in states)

    def close(self) -> list[str]:
        ended = [child.close() for child in self.readers]
        faults = super().close()
        return faults + [fault for code in ended for fault in self.ended(code, "a reader ended {}")]


def stopped_readers(attack: Attack) -> Outcome:
    """Stopped readers keep no buffers from others, and take no other's bytes when they go on."""
    scene = _Scene(attack)
    try:
        seconds = min(_timed(scene) for _ in range(3))
    except BaseException:
        scene.close()
        raise
    return repeated_in(scene, attack, partial(_stopped, seconds=seconds))


def _timed(scene: _Scene) -> float:
    request, begun = scene.name(), time.monotonic()
    scene.offer(request, *_RANKS)
    with Session(scene.here.node, scene.endpoints(*_RANKS)) as session:
        scene.pull(session, request, how="staged", seconds=SECONDS).wait()
    return time.monotonic() - begun


def _stopped(scene: _Scene, seconds: float) -> tuple[list[str], bool]:
    rng, faults = scene.rng, list[str]()
    requests = [scene.name() for _ in range(_READERS + 1)]
    for request in requests:
        scene.offer(request, *_RANKS)
    for nth in range(_READERS):
        scene.pulls_beside(nth, requests[nth])
    time.sleep(rng.uniform(0.1, 1.2) * seconds)
    for child in scene.readers:
        child.stop()
    held = [scene[role].ask("state")["buffers"] for role in _RANKS]
    goes_on = rng.random() < 0.5
    with Session(scene.here.node, scene.endpoints(*_RANKS)) as session:
        transfer = scene.pull(session, requests[-1], how="staged", seconds=_PROMPT)
        if goes_on:
            time.sleep(rng.uniform(1.5, 3.0))
            for child in scene.readers:
                child.go_on()
        code = code_of(transfer, _PROMPT + SLACK)
    if code != "ready":
        faults.append(f"a pull beside stopped readers ended in {code}")
    else:
        faults += scene.holds((_SEED, _SEED), "wrong bytes in a pull that is ready")
    for nth, child in enumerate(scene.readers):
        child.go_on()
        faults += _ended(scene, nth)
    if not waited(scene.sources_idle, 15.0):
        faults.append("leases or buffers left at a source")
    for request in requests:
        scene.withdraw(request, *_RANKS)
    return faults + scene.nothing_left(), any(held)


def _ended(scene: _Scene, nth: int) -> list[str]:
    child = scene.readers[nth]
    code = child.heard(SECONDS + 2 * SLACK)["code"]
    if code not in _ENDS:
        return [f"a reader that was stopped ended in {code}"]
    about = {"source": scene.src.to_json().decode(), "seed": _SEED}
    if code == "ready" and child.ask("holds", **about)["wrong"]:
        return ["wrong bytes in a stopped reader's pull that is ready"]
    return []
