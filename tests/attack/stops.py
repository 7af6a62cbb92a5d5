"""Processes that stand still in mid-transfer and go on when their blocks are somebody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from kvatlas.copying.memory import STAGING
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Link, Session
from tests.attack.claims import SLACK, Attack, Outcome, Scene, code_of, repeated
from tests.wire.helpers import waited

_RELEASED = 30.0
"""Seconds in which the blocks of a transfer that has failed must be released."""
_LATE = 0.25
"""Seconds that a process has for late bytes once it goes on."""


@contextmanager
def posted() -> Iterator[list[Handle]]:
    """Every read into pools that this process posts meanwhile: staging buffers are kept apart."""
    handles: list[Handle] = []
    read = Link.read

    def noted(link: Link, copies: Sequence[Copy], *about: Any, **given: Any) -> Handle:
        handle = read(link, copies, *about, **given)
        if any(copy.destination_pool != STAGING for copy in copies):
            handles.append(handle)
        return handle

    Link.read = noted  # type: ignore[method-assign, assignment]
    try:
        yield handles
    finally:
        Link.read = read  # type: ignore[method-assign]


def stopped_sources(attack: Attack) -> Outcome:
    """Blocks of a pull whose source was stopped are reused once it is released: no late byte."""
    return repeated(attack, _stopped_source)


def _stopped_source(scene: Scene) -> tuple[list[str], bool]:
    rng, struck = scene.rng, scene.struck
    how, end = rng.choice(["direct", "staged"]), rng.choice(["deadline", "cancel", "close"])
    moment = rng.uniform(0.02, 1.0) * scene.seconds[how]
    request, faults = scene.offered(struck), []
    session = Session(scene.here.node, [struck.endpoint])
    closing = threading.Thread(target=session.close)
    with posted() as handles:
        transfer = scene.pull(session, request, how=how, timeout=moment + 0.5)
        time.sleep(moment)
        struck.stop()
        hit = not transfer.done
        if end == "cancel":
            time.sleep(rng.uniform(0, 0.1))
            begun = time.monotonic()
            transfer.cancel()
            if not transfer.done or time.monotonic() - begun > 0.5:
                faults.append("cancel did not return at once")
        if end == "close":
            closing.start()
        code = code_of(transfer, moment + 0.5 + SLACK)
        if code == "ready":
            faults += scene.holds(1, "wrong bytes in a transfer that said ready")
        elif code not in ("deadline", "cancelled"):
            faults.append(f"a pull from a stopped source ended in {code}")
        if rng.random() < 0.5:
            struck.go_on()  # its blocks are then released without tearing anything down
        released = transfer.wait_released(_RELEASED)
    if not released:
        faults.append(f"not released after {_RELEASED:.0f} s")
    elif not all(handle.settle() for handle in handles):
        faults.append("released before the transport was done")
    else:
        faults += scene.refill(how=rng.choice(["direct", "staged"]))
    struck.go_on()
    with suppress(EOFError, OSError):  # that it died is found out later
        struck.ask("withdraw", request=request)
    time.sleep(_LATE)
    if released and not faults:
        faults += scene.holds(2, "late bytes in reused blocks")
    transfer.wait_released(2 * _RELEASED)
    closing.join() if end == "close" else session.close()
    return faults + scene.nothing_left(), hit


def stopped_pushers(attack: Attack) -> Outcome:
    """Blocks are reused as soon as a push into them is forgotten: no late byte."""
    return repeated(attack, _stopped_pusher)


def _stopped_pusher(scene: Scene) -> tuple[list[str], bool]:
    rng, here, pusher = scene.rng, scene.here, scene.struck
    how, request, faults = rng.choice(["direct", "staged"]), scene.name(), list[str]()
    expected = here.node.expect(
        request, here.blocks, scene.tokens, source=scene.source, pushers=["node-1"]
    )
    asked = here.node.metrics.values["messages"]
    there = {"way": "push", "endpoints": [here.node.endpoint], "request": request}
    pusher.tell("move", **there, how=how, timeout=8.0)
    # Its hello, and what it opens.
    waited(lambda: here.node.metrics.values["messages"] >= asked + 2, SLACK)
    time.sleep(rng.uniform(0.0, 0.7) * scene.seconds["staged"])
    pusher.stop()
    hit = not expected.ready.is_set()
    if not hit:
        faults += scene.holds(1, "wrong bytes in a push that was ready")
    begun = time.monotonic()
    here.node.forget(request)
    if time.monotonic() - begun > SLACK:
        faults.append("forget did not return at once")
    for pool in here.pools.values():
        pool[:] = 0x5A
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.2))
    pusher.go_on()
    code = pusher.heard()["code"]
    if hit and code == "ready":
        faults.append("a push that was forgotten ended well for its pusher")
    time.sleep(_LATE)
    if any(np.any(pool != 0x5A) for pool in here.pools.values()):
        faults.append("late bytes in reused blocks")
    here.fill(here.seed)
    return faults + scene.refill() + scene.nothing_left(), hit
