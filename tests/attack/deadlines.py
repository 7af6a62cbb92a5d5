"""Deadlines that hold whoever stands still, and many pulls at once."""

from __future__ import annotations

import time

from kvatlas.copying import copy_request
from kvatlas.routing import route
from kvatlas.wire import Session, Transfer
from tests.attack.claims import SLACK, Attack, Outcome, Scene, code_of, repeated

_STUCK = 66
"""More than a session carries out at once; each fills a block of its own."""
_AT_ONCE = 64


def behind_stuck_pulls(attack: Attack) -> Outcome:
    """A pull of one second ends after one second, behind 66 that are stuck."""
    return repeated(attack, _behind_stuck_pulls, max(1, attack.tries // 10))


def _behind_stuck_pulls(scene: Scene) -> tuple[list[str], None]:
    block = scene.destination.block_size
    request = scene.offered(scene.struck)
    session = Session(scene.here.node, [scene.struck.endpoint])

    def pull(number: int, seconds: float) -> Transfer:
        """Pull the first tokens into a block that no other pull fills."""
        return session.pull(
            request, destination_blocks=[number], tokens=block, timeout=seconds, how="staged"
        )

    scene.struck.stop()
    stuck = [pull(number, 30) for number in range(_STUCK)]
    time.sleep(0.2)
    begun = time.monotonic()
    transfer = pull(_STUCK, 1)
    code = code_of(transfer, 1 + SLACK)
    taken = time.monotonic() - begun
    faults = [] if code == "deadline" else [f"it ended in {code}"]
    if taken > 1.5:
        faults.append("it took longer than 1.5 s")
    for one in stuck:
        one.cancel()
    scene.struck.go_on()
    if not all(one.wait_released(20) for one in (transfer, *stuck)):
        faults.append("pulls were not released after 20 s")
    session.close()
    scene.struck.ask("withdraw", request=request)
    return faults + scene.refill() + scene.nothing_left(), None


def stalled_replicas(attack: Attack) -> Outcome:
    """A replica that stops in mid-read leaves time for the one that is well."""
    return repeated(attack, _stalled_replica, max(2, attack.tries // 4))


def _stalled_replica(scene: Scene) -> tuple[list[str], bool]:
    seconds, how = 12.0, scene.rng.choice(["direct", "staged"])
    scene.here.fill(7)
    request = scene.offered(scene.struck)
    scene.well.ask("offer", request=request)
    with Session(scene.here.node, [scene.struck.endpoint, scene.well.endpoint]) as session:
        transfer = scene.pull(session, request, how=how, timeout=seconds)
        time.sleep(scene.rng.uniform(0.02, 0.9) * scene.seconds[how])
        scene.struck.stop()
        hit = not transfer.done
        code = code_of(transfer, seconds + SLACK)
        faults = [] if code == "ready" else [f"the healthy replica was not used: {code}"]
        # The stopped one may have confirmed just before it stopped.
        whose = 1 if scene.here.wrong(scene.right[2]) else 2
        if code == "ready":
            faults += scene.holds(whose, "wrong bytes in a transfer that said ready")
        scene.struck.go_on()
        time.sleep(0.25)
        if code == "ready" and not faults:
            faults += scene.holds(whose, "late bytes of the stopped replica")
        if not transfer.wait_released(20):
            faults.append("not released after 20 s")
    for one in (scene.struck, scene.well):
        one.ask("withdraw", request=request)
    return faults + scene.nothing_left(), hit


def many_at_once(attack: Attack) -> Outcome:
    """64 pulls in flight at once finish, right to the byte."""
    return repeated(attack, _many_at_once, max(1, attack.tries // 10))


def _many_at_once(scene: Scene) -> tuple[list[str], None]:
    scene.here.fill(7)
    blocks = max(1, scene.tokens // 32 // _AT_ONCE)
    tokens, moved = blocks * 32, route(scene.source, scene.destination)
    right = {index: pool.copy() for index, pool in scene.right[7].items()}
    order = list(range(scene.tokens // 32))
    scene.rng.shuffle(order)
    wanted: list[tuple[str, dict[int, list[int]]]] = []
    for number in range(min(_AT_ONCE, len(order) // blocks)):
        dst = order[number * blocks :][:blocks]
        src = [half for block in dst for half in (2 * block + 1, 2 * block)]
        tables = {"source_blocks": {0: src}, "destination_blocks": {0: dst}}
        copy_request(moved, {0: scene.right_source}, {0: right}, tokens=tokens, **tables)
        wanted.append((scene.offered(scene.struck, blocks=src, tokens=tokens), {0: dst}))
    with Session(scene.here.node, [scene.struck.endpoint]) as session:
        pulls = [
            session.pull(name, destination_blocks=table, tokens=tokens, timeout=60)
            for name, table in wanted
        ]
        codes = {code_of(pull, 60 + SLACK) for pull in pulls}
    faults = [f"a pull ended in {code}" for code in codes - {"ready"}]
    if not faults and scene.here.wrong(right):
        faults.append("wrong bytes")
    return faults + scene.nothing_left(), None
