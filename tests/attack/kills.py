"""Processes that are killed at random moments: no wrong byte, and nothing is left of them."""

from __future__ import annotations

import threading
import time

from kvatlas.wire import Session
from tests.attack.claims import SLACK, Attack, Outcome, Scene, code_of
from tests.attack.left_open import Open, RetiredAgents, open_things, unused_segments
from tests.wire.helpers import waited

_SECONDS = 6.0
"""Seconds that a transfer with a process that is killed has."""
_WARM = 3
"""Tries until libraries have opened what they keep open."""
_NOISE = 4
"""Descriptors and mappings that come and go."""


def killed_peers(attack: Attack) -> Outcome:
    """Whoever is killed leaves no wrong byte, no lease, buffer, descriptor or segment behind."""
    unused = unused_segments()
    scene, outcome = Scene(attack), Outcome(noted=attack.noted)
    spare, opened = scene.start_source(1), list[Open]()
    scene.struck.kill()
    scene.struck.close()
    scene.struck = spare
    try:
        for _ in range(attack.tries):
            spare = scene.start_source(1)
            faults, hit = _killed(scene)
            scene.struck.close()
            scene.struck = spare
            outcome.add(faults + scene.refill() + scene.nothing_left(), hit=hit)
            opened.append(open_things())
    finally:
        retired = scene.here.transport.retired
        explained = RetiredAgents(scene.wire).hold(retired) if retired else {}
        leaks = _leaks(opened, unused, explained)
        leaks += scene.close()
        outcome.aborts += scene.aborts
    if leaks:
        outcome.add(leaks)
    return outcome


def _killed(scene: Scene) -> tuple[list[str], bool]:
    rng, here, struck = scene.rng, scene.here, scene.struck
    read_by_others = [] if scene.wire.dies_with_reader else ["pulled"]
    way = rng.choice(["pull", "pull", "pushed", *read_by_others])
    how = rng.choice(["direct", "staged"])
    moment = rng.uniform(0.02, 1.0) * scene.seconds["staged" if way == "pushed" else how]
    here.fill(here.seed)
    there = {"endpoints": [here.node.endpoint], "how": how, "timeout": _SECONDS}
    faults: list[str] = []
    if way == "pull":
        request = scene.offered(struck)
        with Session(here.node, [struck.endpoint]) as session:
            striking = threading.Timer(moment, struck.kill)
            transfer = scene.pull(session, request, how=how, timeout=_SECONDS)
            striking.start()
            code = code_of(transfer, _SECONDS + SLACK)
            striking.join()
            if code == "hangs" or not transfer.wait_released(_SECONDS + SLACK):
                faults.append("a pull from a killed source hangs")
        if code == "ready":
            return faults + scene.holds(1, "wrong bytes in a transfer that said ready"), False
        return faults, True
    request = scene.name()
    asked = here.node.metrics.values["messages"]
    if way == "pulled":
        here.offer(request)
    else:
        expected = here.node.expect(
            request, here.blocks, scene.tokens, source=scene.source, pushers=["node-1"]
        )
    struck.tell("move", way=way.removesuffix("ed"), request=request, **there)
    waited(lambda: here.node.metrics.values["messages"] >= asked + 2, SLACK)
    time.sleep(moment)
    struck.kill()
    if way == "pushed":
        ready = expected.ready.is_set()
        if ready:
            faults += scene.holds(1, "wrong bytes in a push that was ready")
        here.node.forget(request)
        return faults, not ready
    read = bool(here.released)
    here.node.withdraw(request)
    if [why for _, why in here.released] not in (["read"], ["withdrawn"]):
        faults.append("an offer was not released once")
    here.released.clear()
    return faults + scene.holds(7, "an offer's blocks have changed"), not read


def _leaks(opened: list[Open], unused: set[str], explained: Open) -> list[str]:
    """What more is open at the end than after the first few tries, and than is explained."""
    faults = []
    settled = opened[_WARM:]
    for what in opened[0] if len(settled) > 2 * _WARM else ():
        before = max(one[what] for one in settled[:_WARM])
        more = min(one[what] for one in settled[-_WARM:]) - before - explained.get(what, 0)
        if more > _NOISE + len(settled) // 10:
            faults.append(f"{more} {what} leaked in {len(settled)} tries")
    # Only those that stay unused: other processes of this host create and map segments meanwhile.
    left = unused_segments() - unused
    if not waited(lambda: not left & unused_segments(), 5):
        faults.append("shared memory that nobody uses is left")
    return faults
