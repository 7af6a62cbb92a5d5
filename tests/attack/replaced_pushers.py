"""A rank that is stopped during its push, and replaced: its bytes do not come back later."""

from __future__ import annotations

import time
from functools import partial

from kvatlas.wire.client.expected import Expected
from tests.attack.claims import Attack, Outcome, repeated_in
from tests.attack.source_ranks import LATE, SECONDS, SourceRanks
from tests.wire.child import Json
from tests.wire.helpers import waited

_FIRST, _REPLACEMENT, _OTHER = 1, 2, 3
"""Seeds of the stopped process, of the one that replaces it, and of rank 1."""
_PIECE = 1 << 18
"""Bytes of a piece: so few that a push takes many, and a stop comes between two of them."""
_CAST: dict[str, Json] = {
    "first": {"rank": 0, "seed": _FIRST, "name": "prefill"},
    "same name": {"rank": 0, "seed": _REPLACEMENT, "name": "prefill"},
    "other name": {"rank": 0, "seed": _REPLACEMENT, "name": "spare"},
    "rank 1": {"rank": 1, "seed": _OTHER, "name": "prefill"},
}


def replaced_pushers(attack: Attack) -> Outcome:
    """A request is ready with the bytes of one process per rank, never with bytes of two."""
    scene = SourceRanks(attack, _CAST, piece=_PIECE)
    try:
        seconds = scene.typical_push("first")
    except BaseException:
        scene.close()
        raise
    return repeated_in(scene, attack, partial(_replaced, seconds=seconds))


def _replaced(scene: SourceRanks, seconds: float) -> tuple[list[str], bool]:
    rng, request = scene.rng, scene.name()
    spare = rng.choice(["same name", "other name"])
    expected = scene.expect(request)
    codes: dict[str, str] = {}
    steps = [spare, "continue", "rank 1"]
    in_order = rng.random() < 0.4  # each after the one before has ended
    if not in_order:
        rng.shuffle(steps)
    if rng.random() < 0.25:  # rank 1 before all others
        steps.remove("rank 1")
        codes["rank 1"] = scene.pushed("rank 1", request)
    scene.push("first", request, checksums=rng.random() < 0.5)
    if rng.random() < 0.9:  # else it may be stopped before it has opened the push
        scene.wait_for_push(request, 0)
    time.sleep(rng.uniform(0.0, 0.7) * seconds)
    scene["first"].stop()
    hit = 0 not in expected.arrived
    for step in steps:
        patience = 0.0 if in_order else rng.random()
        _take(scene, step, request, codes, patience, seconds)
    faults = _ready_bytes(scene, expected)
    for role in ("first", spare, "rank 1"):
        if role not in codes:
            codes[role] = scene[role].heard()["code"]
    time.sleep(LATE)
    faults += _told(scene, expected, codes["first"], codes[spare])
    scene.here.node.forget(request)
    return faults + scene.nothing_left(), hit


def _take(
    scene: SourceRanks,
    step: str,
    request: str,
    codes: dict[str, str],
    patience: float,
    seconds: float,
) -> None:
    """Take one of the steps after the stop, and wait for its end, for a while or not at all."""
    if step == "continue":
        scene["first"].go_on()
    else:
        scene.push(step, request, checksums=True)
    if patience < 0.4 and step != "continue":
        codes[step] = scene[step].heard()["code"]
    elif patience < 0.8:
        time.sleep(scene.rng.uniform(0.0, 1.0) * seconds)


def _ready_bytes(scene: SourceRanks, expected: Expected) -> list[str]:
    """Wait until the request is ready, and look at its bytes at once."""
    if not waited(expected.ready.is_set, SECONDS):
        return ["not ready although both ranks pushed"]
    return [] if _process(scene) else ["bytes of two processes in a request that is ready"]


def _process(scene: SourceRanks) -> int:
    """The seed of the process whose bytes rank 0's part consists of; 0 if of none alone."""
    for seed in (_FIRST, _REPLACEMENT):
        if not scene.here.wrong(scene.right((seed, _OTHER))):
            return seed
    return 0


def _told(scene: SourceRanks, expected: Expected, first: str, replacement: str) -> list[str]:
    """Compare the outcomes that the two processes were told with the bytes that are there."""
    if not expected.ready.is_set():
        return [f"ended in {first} and {replacement}"]
    whose, faults = _process(scene), list[str]()
    if not whose:
        faults.append("late bytes in a request that is ready")
    if first == replacement == "ready":
        faults.append("two processes of one rank were told that they arrived")
    if replacement == "ready" and whose == _FIRST:
        faults.append("bytes of the stopped process where its replacement arrived")
    if first == "ready" and whose == _REPLACEMENT:
        faults.append("bytes of the replacement where the first arrived")
    return faults
