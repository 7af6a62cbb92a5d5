"""Operations that want the same blocks of a node: one owns them, the others are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvatlas import AtlasError
from kvatlas.wire import Session, Transfer
from tests.attack.claims import SLACK, Attack, Outcome, code_of, repeated_in
from tests.attack.source_ranks import LATE, SECONDS, SourceRanks
from tests.attack.stops import posted
from tests.wire.child import Json

_IN_USE = "blocks_in_use"
_PAIRS = {"one": ("one 0", "one 1"), "two": ("two 0", "two 1")}
_SEEDS = {"one": (1, 1), "two": (2, 2)}
_CAST: dict[str, Json] = {
    f"{pair} {rank}": {"rank": rank, "seed": _SEEDS[pair][rank], "name": pair}
    for pair in _PAIRS
    for rank in (0, 1)
}
_ALL_HOW = ("auto", "direct", "staged")


def pulls_at_once(attack: Attack) -> Outcome:
    """Of two pulls into the same blocks one is refused, or they come one after the other."""
    return repeated_in(SourceRanks(attack, _CAST), attack, _two_pulls)


def owned_blocks(attack: Attack) -> Outcome:
    """Blocks that are offered or expected are not pulled into, and keep their bytes."""
    return repeated_in(SourceRanks(attack, _CAST), attack, _owned)


def quarantined_blocks(attack: Attack) -> Outcome:
    """Blocks of a pull that failed are neither filled nor offered before they are released."""
    scene = SourceRanks(attack, _CAST)
    try:
        seconds = {how: _typical(scene, how) for how in ("direct", "staged")}
    except BaseException:
        scene.close()
        raise
    return repeated_in(scene, attack, partial(_quarantined, seconds=seconds))


def _typical(scene: SourceRanks, how: str) -> float:
    """Seconds that a pull takes when nothing is wrong."""
    taken = []
    with Session(scene.here.node, scene.endpoints(*_PAIRS["one"])) as session:
        for _ in range(3):
            request = scene.name()
            scene.offer(request, *_PAIRS["one"])
            begun = time.monotonic()
            scene.pull(session, request, how=how, timeout=SECONDS).wait()
            taken.append(time.monotonic() - begun)
    return min(taken)


class _Attempt:
    """A pull that a thread begins at the same moment as others act."""

    def __init__(self, pull: Callable[[], Transfer], start: threading.Barrier) -> None:
        self._pull, self._start = pull, start
        self.transfer: Transfer | None = None
        self.code = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._start.wait()
        try:
            self.transfer = self._pull()
        except AtlasError as refused:
            self.code = str(refused.code)
            return
        self.code = code_of(self.transfer, SECONDS + SLACK)

    def join(self) -> None:
        self._thread.join()

    @property
    def span(self) -> tuple[float, float]:
        """When it began and ended."""
        assert self.transfer is not None
        return self.transfer.begun, self.transfer.begun + self.transfer.seconds


def _two_pulls(scene: SourceRanks) -> tuple[list[str], bool]:
    """Two sessions pull two requests from two sources into the same blocks at once."""
    rng, here, faults = scene.rng, scene.here, list[str]()
    requests = {pair: scene.name() for pair in _PAIRS}
    for pair, roles in _PAIRS.items():
        scene.offer(requests[pair], *roles)
    with (
        Session(here.node, scene.endpoints(*_PAIRS["one"])) as one,
        Session(here.node, scene.endpoints(*_PAIRS["two"])) as two,
    ):
        sessions, start = {"one": one, "two": two}, threading.Barrier(2)
        attempts = {
            pair: _Attempt(partial(scene.pull, sessions[pair], requests[pair],
                                   how=rng.choice(_ALL_HOW), timeout=SECONDS), start)
            for pair in _PAIRS
        }  # fmt: skip
        for attempt in attempts.values():
            attempt.join()
        faults += _one_owner(scene, attempts)
        loser = next((pair for pair, one in attempts.items() if one.code == _IN_USE), None)
        if loser and not faults:  # the blocks are free again: the same pull is served now
            again = scene.pull(sessions[loser], requests[loser], timeout=SECONDS)
            code = code_of(again, SECONDS + SLACK)
            faults += _served(scene, loser, code)
    for pair, roles in _PAIRS.items():
        scene.withdraw(requests[pair], *roles)
    return faults + scene.nothing_left(), loser is not None


def _one_owner(scene: SourceRanks, attempts: dict[str, _Attempt]) -> list[str]:
    """Check the outcomes of two pulls, and the bytes of the one that ended last."""
    codes = {pair: attempt.code for pair, attempt in attempts.items()}
    ready = [pair for pair, code in codes.items() if code == "ready"]
    if not ready or set(codes.values()) - {"ready", _IN_USE}:
        return [f"two pulls ended in {' and '.join(sorted(codes.values()))}"]
    ready.sort(key=lambda pair: attempts[pair].span)
    faults = scene.holds(_SEEDS[ready[-1]], "bytes of two sources in a pull that is ready")
    if len(ready) == 2 and attempts[ready[0]].span[1] > attempts[ready[1]].span[0]:
        faults.append("two pulls filled the same blocks at the same time")
    return faults


def _owned(scene: SourceRanks) -> tuple[list[str], bool | None]:
    """Blocks are offered or expected, and pulled into, offered or expected once more."""
    rng, node = scene.rng, scene.here.node
    own, request = scene.name(), scene.name()
    scene.offer(request, *_PAIRS["one"])
    with Session(node, scene.endpoints(*_PAIRS["one"])) as session:
        if rng.random() < 0.3:
            return _offered_at_once(scene, session, own, request) + scene.nothing_left(), None
        use = rng.choice(["offered", "expected"])
        if use == "offered":
            scene.here.offer(own)
        else:
            scene.expect(own, pushers=["two"])
        faults = []
        for what, act in _conflicts(scene, session, request, use):
            faults += _must_be_in_use(act, f"{what} of {use} blocks")
        faults += scene.unchanged(f"bytes of {use} blocks have changed")
        if use == "offered":
            node.withdraw(own)
        else:
            faults += _pushed_by_two(scene, own)
        code = code_of(scene.pull(session, request, timeout=SECONDS), SECONDS + SLACK)
    faults += _served(scene, "one", code)
    scene.withdraw(request, *_PAIRS["one"])
    return faults + scene.nothing_left(), None


def _served(scene: SourceRanks, pair: str, code: str) -> list[str]:
    """Check a pull into free blocks: it is ready, with every byte of its source."""
    if code != "ready":
        return [f"a pull into free blocks ended in {code}"]
    return scene.holds(_SEEDS[pair], "wrong bytes in a pull that is ready")


def _pushed_by_two(scene: SourceRanks, request: str) -> list[str]:
    """The push that the blocks are expected for arrives, and they are free."""
    codes = [scene.pushed(role, request) for role in _PAIRS["two"]]
    if set(codes) == {"ready"}:
        faults = scene.holds(_SEEDS["two"], "wrong bytes in a push that is ready")
    else:
        faults = [f"the pushes that are expected ended in {' and '.join(codes)}"]
    scene.here.node.forget(request)
    return faults


def _conflicts(
    scene: SourceRanks, session: Session, request: str, use: str
) -> list[tuple[str, Callable[[], object]]]:
    """Operations that need blocks which something else uses: all of them, or one."""
    rng, node, tokens = scene.rng, scene.here.node, scene.tokens
    blocks, few = scene.here.blocks, 2 * scene.destination.groups[0].block
    own = list(blocks[0])
    free = [one for one in range(scene.destination.pools[0].blocks) if one not in own]
    mixed = [rng.choice(free), rng.choice(own)]
    rng.shuffle(mixed)
    about: dict[str, Any] = {"timeout": SECONDS, "how": rng.choice(_ALL_HOW)}
    source: dict[str, Any] = {"source": scene.source, "pushers": ["one"]}
    found: list[tuple[str, Callable[[], object]]] = [
        ("a pull", lambda: scene.pull(session, request, **about)),
        ("a checked pull", lambda: scene.pull(session, request, checksums=True, timeout=SECONDS)),
        ("a pull", lambda: session.pull(request, destination_blocks=mixed, tokens=few, **about)),
        ("an expectation", lambda: node.expect("again", blocks, tokens, **source)),
        ("an expectation", lambda: node.expect("again", mixed, few, **source)),
    ]
    if use != "offered":  # blocks are part of any number of offers
        found += [
            ("an offer", lambda: node.offer("again", blocks, tokens)),
            ("an offer", lambda: node.offer("again", mixed, few)),
        ]
    rng.shuffle(found)
    return found


def _must_be_in_use(act: Callable[[], object], what: str) -> list[str]:
    try:
        act()
    except AtlasError as refused:
        return [] if refused.code == _IN_USE else [f"{what} ended in {refused.code}"]
    return [f"{what} was accepted"]


def _offered_at_once(scene: SourceRanks, session: Session, own: str, request: str) -> list[str]:
    """An offer and a pull want the blocks at once: an offer never shows a pull's bytes."""
    start = threading.Barrier(2)
    attempt = _Attempt(partial(scene.pull, session, request, timeout=SECONDS), start)
    start.wait()
    time.sleep(scene.rng.choice([0.0, 0.0, scene.rng.uniform(0.0, 0.03)]))
    try:
        scene.here.offer(own)
        offered = time.monotonic()
        seen = {index: pool.copy() for index, pool in scene.here.pools.items()}
    except AtlasError as refused:
        offered, seen = 0.0, {}
        faults = [] if refused.code == _IN_USE else [f"an offer ended in {refused.code}"]
    else:
        faults = []
    attempt.join()
    if seen and scene.here.wrong(seen):
        faults.append("bytes of an offer have changed")
    if seen and attempt.code == "ready" and offered < attempt.span[1]:
        faults.append("blocks were offered while a pull filled them")
    if attempt.code not in ("ready", _IN_USE) or (attempt.code == _IN_USE and not seen):
        faults.append(f"a pull and an offer at once: the pull ended in {attempt.code}")
    scene.here.node.withdraw(own)
    scene.withdraw(request, *_PAIRS["one"])
    return faults


def _quarantined(scene: SourceRanks, seconds: dict[str, float]) -> tuple[list[str], bool]:
    """A source rank is stopped during a pull, which fails; its blocks are wanted at once."""
    rng, node, request = scene.rng, scene.here.node, scene.name()
    how = rng.choice(["direct", "staged", "staged"])
    role = rng.choice(_PAIRS["one"])
    scene.offer(request, *_PAIRS["one"])
    instead = scene.name()
    scene.offer(instead, *_PAIRS["two"])  # now, so that the blocks are wanted at once after it
    with (
        Session(node, scene.endpoints(*_PAIRS["one"])) as session,
        Session(node, scene.endpoints(*_PAIRS["two"])) as other,
        posted() as handles,
    ):
        transfer = scene.pull(session, request, how=how, timeout=SECONDS)
        time.sleep(rng.uniform(0.02, 0.9) * seconds[how])
        scene[role].stop()
        time.sleep(rng.uniform(0.0, 0.02))
        transfer.cancel()
        if transfer.ready:
            scene[role].go_on()
            faults = scene.holds(_SEEDS["one"], "wrong bytes in a pull that is ready")
            hit = False
        else:
            goes_on = time.monotonic() + rng.choice([0.0, rng.uniform(0.0, 0.5)])
            refill = partial(scene.pull, other, instead, timeout=SECONDS)
            faults, hit = _wanted(scene, transfer, scene[role].go_on, goes_on, refill)
            if not all(handle.settle() for handle in handles):
                faults.append("blocks were reused before the transport was done")
        transfer.wait_released(SECONDS)
    scene.withdraw(request, *_PAIRS["one"])
    scene.withdraw(instead, *_PAIRS["two"])
    if not faults and not transfer.ready:
        time.sleep(LATE)
        faults += scene.holds(_SEEDS["two"], "late bytes in reused blocks")
    return faults + scene.nothing_left(), hit


def _wanted(
    scene: SourceRanks,
    failed: Transfer,
    go_on: Callable[[], None],
    goes_on: float,
    refill: Callable[[], Transfer],
) -> tuple[list[str], bool]:
    """Ask for the blocks of a failed pull until they are free, then fill them from elsewhere.

    Returns what was wrong, and whether a claim was refused while they were quarantined.
    """
    refused = False
    deadline = time.monotonic() + 2 * SECONDS
    faults: list[str] = []
    while not faults and time.monotonic() < deadline:
        if time.monotonic() > goes_on:
            go_on()
        released = failed.released
        code = _claimed(scene)
        if code == _IN_USE:
            refused = True
            if released:
                faults.append("blocks that are released are still in use")
            time.sleep(0.005)
            continue
        if code != "ready":
            faults.append(f"a claim of quarantined blocks ended in {code}")
        elif not failed.wait_released(0.2):
            faults.append("quarantined blocks were claimed before they were released")
        break
    else:
        faults.append("blocks of a failed pull are never released")
    go_on()
    if not faults:
        faults += _served(scene, "two", code_of(refill(), SECONDS + SLACK))
    return faults, refused


def _claimed(scene: SourceRanks) -> str:
    """Try to offer the blocks, or to expect a push into them; `ready` if that is accepted."""
    node, own = scene.here.node, scene.name()
    try:
        if scene.rng.random() < 0.5:
            scene.here.offer(own)
            node.withdraw(own)
        else:
            scene.expect(own)
            node.forget(own)
    except AtlasError as refused:
        return str(refused.code)
    return "ready"
