"""Killed processes whose forked children live on: their peers notice as if there were none."""

from __future__ import annotations

import os
import signal
import time

from kvatlas.wire import Session
from tests.attack.claims import SLACK, Attack, Outcome, Scene, code_of
from tests.wire.helpers import waited

_SECONDS = 30.0
"""Seconds that a transfer has. The death of its peer must end it much sooner."""
_NOTICED = 1.5
"""Seconds in which a pull notices that its source has died."""
_LEASES_BACK = 6.0
"""Seconds in which a dead reader's leases end; its session outlives its connections by 3 s."""


def forked_children(attack: Attack) -> Outcome:
    """A killed process is noticed at once, although a forked child has inherited its sockets."""
    scene, outcome = Scene(attack), Outcome(noted=attack.noted)
    try:
        for _ in range(max(2, attack.tries // 4)):
            scene.struck.close()
            scene.struck = scene.start_source(1)
            source = scene.rng.random() < 0.5
            faults = _killed_source(scene) if source else _killed_reader(scene)
            scene.struck.kill()
            outcome.add(faults + scene.refill() + scene.nothing_left())
    finally:
        ended = scene.close()
        outcome.aborts += scene.aborts
    if ended:
        outcome.add(ended)
    return outcome


def _killed_source(scene: Scene) -> list[str]:
    """The source of a pull is killed while the pull waits for a layer."""
    request = scene.offered(scene.struck, layered=True)
    with Session(scene.here.node, [scene.struck.endpoint]) as session:
        transfer = scene.pull(session, request, streamed=True, timeout=_SECONDS)
        waited(lambda: scene.struck.ask("state")["leases"] == 1, SLACK)
        child = scene.struck.fork()
        try:
            scene.struck.kill()
            begun = time.monotonic()
            code = code_of(transfer, _SECONDS)
            taken = time.monotonic() - begun
        finally:
            os.kill(child, signal.SIGKILL)
        faults = [] if code == "peer_lost" else [f"a pull from a killed source ended in {code}"]
        if taken > _NOTICED:
            faults.append(f"the death of a source was noticed after more than {_NOTICED} s")
        if not transfer.wait_released(SLACK):
            faults.append("blocks were not released")
    return faults


def _killed_reader(scene: Scene) -> list[str]:
    """A reader is killed while it has a lease of this process."""
    here, struck, request = scene.here, scene.struck, scene.name()
    here.offer(request, layered=True)
    there = {"endpoints": [here.node.endpoint], "request": request, "timeout": _SECONDS}
    struck.tell("move", way="pull", streamed=True, **there)
    waited(lambda: here.left()["leases"] == 1, SLACK)
    child = struck.fork()
    try:
        struck.kill()
        back = waited(here.idle, _LEASES_BACK)
    finally:
        os.kill(child, signal.SIGKILL)
    here.node.withdraw(request)
    here.released.clear()
    return [] if back else ["the lease of a killed reader went on"]
