"""Peers whose caches were computed with other weights: every transfer is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvatlas import AtlasError
from kvatlas.models import CacheIdentity
from kvatlas.wire import Session
from kvatlas.wire.client.expected import Expected
from tests.attack.claims import SLACK, Attack, Outcome, code_of, repeated_in
from tests.attack.source_ranks import SECONDS, SourceRanks
from tests.identities import OURS
from tests.wire.child import Child, Json

_REFUSED = "different_identity"
_THEIRS = {"weights": "other weights of the same shapes"}
_ADAPTERS = [OURS.for_request(adapter="one"), OURS.for_request(adapter="two")]
_CAST: dict[str, Json] = {
    "rank 0": {"rank": 0, "seed": 1, "name": "prefill"},
    "rank 1": {"rank": 1, "seed": 1, "name": "prefill"},
    "other 0": {"rank": 0, "seed": 2, "name": "prefill", "identity": _THEIRS},
    # Compares nothing itself: the node of this process has to refuse it.
    "other 1": {
        "rank": 1, "seed": 2, "name": "prefill", "identity": _THEIRS, "check_identity": False,
    },
}  # fmt: skip
_OURS = ("rank 0", "rank 1")
_SEEDS = (1, 1)
_MIXED = [("other 0", "rank 1"), ("rank 0", "other 1"), ("other 0", "other 1")]
"""Ranks of a source, of which one or both have other weights."""


def other_weights(attack: Attack) -> Outcome:
    """No byte moves between ranks of different identities, whichever end asks."""
    return repeated_in(SourceRanks(attack, _CAST), attack, _struck)


def _struck(scene: SourceRanks) -> tuple[list[str], bool | None]:
    ways = [_pull, _pulled, _push, _pushed, _adapter_pulled, _adapter_pushed]
    if not scene.wire.aborts:  # a library that aborts as its peer is killed
        ways.append(_restarted)
    return scene.rng.choice(ways)(scene) + scene.nothing_left(), None


def _refused(said: str, what: str) -> list[str]:
    return [] if said == _REFUSED else [f"{what} ended in {said}"]


def _code(act: Callable[[], object]) -> str:
    """The code that an act fails with, or `ready`."""
    try:
        act()
    except AtlasError as refused:
        return str(refused.code)
    return "ready"


def _identity(identity: CacheIdentity | None) -> Json:
    """An identity as it travels to a child."""
    return {} if identity is None else {"identity": msgspec.to_builtins(identity)}


def _pull(scene: SourceRanks) -> list[str]:
    """This node pulls from a source of which a rank has other weights."""
    roles, request = scene.rng.choice(_MIXED), scene.name()
    scene.offer(request, *roles)

    def pull() -> None:
        with Session(scene.here.node, scene.endpoints(*roles)) as session:
            scene.pull(session, request, how=_how(scene), timeout=SECONDS).wait()

    faults = _refused(_code(pull), "a pull from other weights")
    scene.withdraw(request, *roles)
    return faults + scene.unchanged("bytes of other weights were pulled")


def _pulled(scene: SourceRanks) -> list[str]:
    """A rank with other weights pulls from this node."""
    role, request = scene.rng.choice(["other 0", "other 1"]), scene.name()
    scene.here.offer(request)
    where = {"endpoints": [scene.here.node.endpoint], "request": request, "how": _how(scene)}
    code = scene[role].ask("move", way="pull", timeout=SECONDS, **where)["code"]
    faults = _refused(code, "a pull by other weights")
    if scene.here.released:
        faults.append("a pull by other weights ended an offer")
    scene.here.node.withdraw(request)
    return faults + _child_unchanged(scene, role)


def _push(scene: SourceRanks) -> list[str]:
    """This node pushes to ranks of which one or both have other weights."""
    roles, request, here = scene.rng.choice(_MIXED), scene.name(), scene.here
    about = {"source": scene.destination.to_json().decode(), "pushers": [here.node.name]}
    for role in roles:
        scene[role].ask("expect", request=request, **about)

    def push() -> None:
        with Session(here.node, scene.endpoints(*roles)) as session:
            sent: Json = {"source_blocks": here.blocks, "tokens": scene.tokens, "how": _how(scene)}
            session.push(request, timeout=SECONDS, **sent).wait()

    faults = _refused(_code(push), "a push to other weights")
    for role in roles:
        scene[role].ask("forget", request=request)
        faults += _child_unchanged(scene, role)
    return faults


def _pushed(scene: SourceRanks) -> list[str]:
    """A rank with other weights pushes; then ranks with ours do, and the request is ready."""
    role, request = scene.rng.choice(["other 0", "other 1"]), scene.name()
    expected, early = scene.expect(request), scene.rng.random() < 0.5
    if early:
        scene.pushed("rank 0", request)
    faults = _refused(scene.pushed(role, request), "a push by other weights")
    if expected.ready.is_set():
        faults.append("ready with bytes of other weights")
    if not early:
        faults += scene.unchanged("bytes of other weights were pushed")
        scene.pushed("rank 0", request)
    code = scene.pushed("rank 1", request)
    faults += _arrived(scene, expected, f"a push of the same weights ended in {code}")
    scene.here.node.forget(request)
    return faults


def _adapter_pulled(scene: SourceRanks) -> list[str]:
    """A request that was computed with an adapter is pulled for another, then for its own."""
    mine, other = scene.rng.sample([None, *_ADAPTERS], 2)
    request, faults = scene.name(), list[str]()
    scene.offer(request, *_OURS, **_identity(mine))
    with Session(scene.here.node, scene.endpoints(*_OURS)) as session:
        about = {"how": _how(scene), "timeout": SECONDS}
        refused = scene.pull(session, request, identity=other, **about)
        faults += _refused(code_of(refused, SECONDS + SLACK), "a pull for another adapter")
        if not refused.wait_released(SECONDS):  # its blocks are quarantined until then
            faults.append("blocks of a refused pull are not released")
        faults += scene.unchanged("bytes of another adapter were pulled")
        code = code_of(scene.pull(session, request, identity=mine, **about), SECONDS + SLACK)
    if code == "ready":
        faults += scene.holds(_SEEDS, "wrong bytes in a pull that is ready")
    else:
        faults.append(f"a pull for the same adapter ended in {code}")
    scene.withdraw(request, *_OURS)
    return faults


def _adapter_pushed(scene: SourceRanks) -> list[str]:
    """A request that is expected for an adapter is pushed for another, then for its own."""
    mine, other = scene.rng.sample([None, *_ADAPTERS], 2)
    request, faults = scene.name(), list[str]()
    expected = scene.expect(request, identity=mine)
    for role in _OURS:
        code = scene.pushed(role, request, **_identity(other))
        faults += _refused(code, "a push for another adapter")
    faults += scene.unchanged("bytes of another adapter were pushed")
    codes = [scene.pushed(role, request, **_identity(mine)) for role in _OURS]
    told = f"pushes for the same adapter ended in {' and '.join(codes)}"
    faults += _arrived(scene, expected, told)
    scene.here.node.forget(request)
    return faults


def _arrived(scene: SourceRanks, expected: Expected, otherwise: str) -> list[str]:
    """Check the bytes of a request that is ready; `otherwise` is the fault if it is not."""
    if not expected.ready.is_set():
        return [otherwise]
    return scene.holds(_SEEDS, "wrong bytes in a request that is ready")


def _restarted(scene: SourceRanks) -> list[str]:
    """A source rank starts again with other weights, at the endpoint of an open session."""
    rank, request, faults = scene.rng.choice([0, 1]), scene.name(), list[str]()
    role, well = _OURS[rank], _OURS[1 - rank]
    before = scene.start(role)
    with Session(scene.here.node, [before.endpoint, scene[well].endpoint]) as session:
        before.kill()
        before.close()
        now: Child = scene.start(role, seed=2, identity=_THEIRS, listen=before.endpoint)
        try:
            now.ask("offer", request=request)
            scene.offer(request, well)
            transfer = scene.pull(session, request, how=_how(scene), timeout=SECONDS)
            code = code_of(transfer, SECONDS + SLACK)
            if code not in (_REFUSED, "peer_lost"):
                faults.append(f"a pull from a rank with new weights ended in {code}")
            if not transfer.wait_released(SECONDS):
                faults.append("blocks of a refused pull are not released")
        finally:
            with suppress(AssertionError):
                now.close()
    scene.withdraw(request, well)
    # The other rank may have delivered: nothing of it counts, and nothing of new weights is there.
    return faults + scene.pulls(_SEEDS, *_OURS)


def _child_unchanged(scene: SourceRanks, role: str) -> list[str]:
    changed = scene[role].ask("changed")["bytes"]
    return ["bytes moved to a rank with other weights"] if changed else []


def _how(scene: SourceRanks) -> str:
    return scene.rng.choice(["auto", "direct", "staged"])
