"""Deadlines that hold whoever stands still, and many pulls at once."""

from __future__ import annotations

import time

import numpy as np

from kvatlas.routing import route
from kvatlas.wire import Session
from tests.attack.claims import SLACK, Attack, Outcome, Scene, code_of

_STUCK = 80
_AT_ONCE = 64


def behind_stuck_pulls(attack: Attack) -> Outcome:
    """A pull of one second ends after one second, behind 80 that are stuck."""
    scene, outcome = Scene(attack), Outcome()
    try:
        for _ in range(max(1, attack.tries // 10)):
            requests = [scene.offered(scene.struck) for _ in range(_STUCK + 1)]
            session = Session(scene.here.node, [scene.struck.endpoint])
            scene.struck.stop()
            stuck = [scene.pull(session, one, seconds=30) for one in requests[1:]]
            time.sleep(0.2)
            begun = time.monotonic()
            transfer = scene.pull(session, requests[0], seconds=1)
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
            for request in requests:
                scene.struck.ask("withdraw", request=request)
            outcome.add(faults + scene.refill() + scene.nothing_left())
    finally:
        scene.struck.go_on()
        ended = scene.close()
    if ended:
        outcome.add(ended)
    return outcome


def stalled_replicas(attack: Attack) -> Outcome:
    """A replica that stops in mid-read leaves time for the one that is well."""
    scene, outcome = Scene(attack), Outcome()
    seconds = 12.0
    try:
        for _ in range(max(2, attack.tries // 5)):
            scene.here.fill(7)
            how = scene.rng.choice(["direct", "staged"])
            request = scene.offered(scene.struck)
            scene.well.ask("offer", request=request)
            with Session(scene.here.node, [scene.struck.endpoint, scene.well.endpoint]) as session:
                transfer = scene.pull(session, request, how=how, seconds=seconds)
                time.sleep(scene.rng.uniform(0.02, 0.9) * scene.seconds[how])
                scene.struck.stop()
                hit = not transfer.done
                code = code_of(transfer, seconds + SLACK)
                faults = [] if code == "ready" else [f"the healthy replica was not used: {code}"]
                whose = 2 if hit else 1
                if code == "ready" and scene.here.wrong(scene.right[whose]):
                    # The stopped one may have confirmed just before.
                    faults += scene.holds(1, "wrong bytes in a transfer that said ready")
                    whose = 1
                scene.struck.go_on()
                time.sleep(0.25)
                if code == "ready":
                    faults += scene.holds(whose, "late bytes of the stopped replica")
                transfer.wait_released(20)
            for one in (scene.struck, scene.well):
                one.ask("withdraw", request=request)
            outcome.add(faults + scene.nothing_left(), hit=hit)
    finally:
        scene.struck.go_on()
        ended = scene.close()
    if ended:
        outcome.add(ended)
    return outcome


def many_at_once(attack: Attack) -> Outcome:
    """64 pulls in flight at once finish, right to the byte."""
    scene, outcome = Scene(attack), Outcome()
    blocks = max(1, attack.tokens // 32 // _AT_ONCE)
    tokens = blocks * 32
    moved = route(scene.src, scene.dst)
    try:
        for turn in range(max(1, attack.tries // 10)):
            scene.here.fill(7)
            right = {index: pool.copy() for index, pool in scene.right[7].items()}
            there = scene.right_source
            order = np.random.default_rng(turn).permutation(attack.tokens // 32)
            tables, names = [], []
            for number in range(min(_AT_ONCE, len(order) // blocks)):
                dst = [int(n) for n in order[number * blocks :][:blocks]]
                src = [half for n in dst for half in (2 * n + 1, 2 * n)]
                about = {"src_blocks": {0: src}, "dst_blocks": {0: dst}, "tokens": tokens}
                for copy in moved.bind(src_rank=0, dst_rank=0, **about).copies:
                    runs = zip(copy.src, copy.dst, copy.length, strict=True)
                    for a, b, n in runs:
                        right[copy.dst_pool][b : b + n] = there[copy.src_pool][a : a + n]
                tables.append({0: dst})
                names.append(scene.offered(scene.struck, blocks=src, tokens=tokens))
            with Session(scene.here.node, [scene.struck.endpoint]) as session:
                pulls = [
                    session.pull(name, dst_blocks=table, tokens=tokens, seconds=60)
                    for name, table in zip(names, tables, strict=True)
                ]
                codes = {code_of(pull, 60 + SLACK) for pull in pulls}
            faults = [f"a pull ended in {code}" for code in codes - {"ready"}]
            if not faults and scene.here.wrong(right):
                faults.append("wrong bytes")
            outcome.add(faults + scene.nothing_left())
    finally:
        ended = scene.close()
    if ended:
        outcome.add(ended)
    return outcome
