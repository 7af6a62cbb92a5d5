"""Readers that stop with buffers of two source ranks: others are served, bytes are right."""

from __future__ import annotations

import time
from contextlib import suppress

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
_READERS, _ALL = 2, 4
"""Two readers hold all buffers that a rank has for peers."""
_SLOW = 0.05
"""Seconds that a reader takes longer for each piece, so that there is time to stop it."""
_PROMPT = 12.0
"""Seconds in which another reader must be served, on a machine that is busy."""
_ENDS = {"ready", "deadline", "lease_expired", "buffers_reclaimed", "unknown_request", "peer_lost"}
"""How a pull may end whose process stood still."""
_GIVEN_UP = {"mooncake": {"wire_failed"}}
"""The same where the transport's library gives up reads itself, after 3 s as it is set here."""


class _Scene(SourceRanks):
    """Two source ranks, a reader in this process, and others that are stopped."""

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack, _CAST)
        self.readers = [self._reader(nth) for nth in range(_READERS)]

    def _reader(self, nth: int) -> Child:
        about: Json = {"tokens": self.tokens, "settings": self.wire.settings, "slow": _SLOW}
        return Child().start(self.destination, self.wire.name, 20 + nth, **about | self.node)

    def pulls_beside(self, nth: int, request: str) -> None:
        endpoints = self.endpoints(*_RANKS)
        about: Json = {"way": "pull", "how": "staged", "timeout": SECONDS}
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

    def lent(self) -> list[int]:
        """How many buffers each source rank has lent."""
        return [int(self[role].ask("state")["buffers"]) for role in _RANKS]

    def sources_idle(self) -> bool:
        states = [self[role].ask("state") for role in _RANKS]
        return not any(state["leases"] + state["buffers"] for state in states)

    def close(self) -> list[str]:
        ended = [child.close() for child in self.readers]
        faults = super().close()
        return faults + [fault for code in ended for fault in self.ended(code, "a reader ended {}")]


def stopped_readers(attack: Attack) -> Outcome:
    """Stopped readers keep no buffers from others, and take no other's bytes when they go on."""
    return repeated_in(_Scene(attack), attack, _stopped)


def _stopped(scene: _Scene) -> tuple[list[str], bool]:
    rng, faults = scene.rng, list[str]()
    requests = [scene.name() for _ in range(_READERS + 1)]
    for request in requests:
        scene.offer(request, *_RANKS)
    for nth in range(_READERS):
        scene.pulls_beside(nth, requests[nth])
    waited(lambda: max(scene.lent()) == _ALL, SLACK)
    time.sleep(rng.uniform(0.0, 4 * _SLOW))
    for child in scene.readers:
        child.stop()
    hit = max(scene.lent()) == _ALL
    goes_on = rng.random() < 0.5
    with Session(scene.here.node, scene.endpoints(*_RANKS)) as session:
        transfer = scene.pull(session, requests[-1], how="staged", timeout=_PROMPT)
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
    return faults + scene.nothing_left(), hit


def _ended(scene: _Scene, nth: int) -> list[str]:
    child = scene.readers[nth]
    code = child.heard(SECONDS + 2 * SLACK)["code"]
    if code not in _ENDS | _GIVEN_UP.get(scene.wire.name, set()):
        return [f"a reader that was stopped ended in {code}"]
    about = {"source": scene.source.to_json().decode(), "seed": _SEED}
    if code == "ready" and child.ask("holds", **about)["wrong"]:
        return ["wrong bytes in a stopped reader's pull that is ready"]
    return []
