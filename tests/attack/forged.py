"""Messages of peers that claim what is not so: what they say changes nothing."""

from __future__ import annotations

from contextlib import ExitStack

from kvatlas.wire import Session, protocol
from tests.attack.claims import Attack, Outcome
from tests.attack.liar import Liar
from tests.attack.plans import source_plan, target_plan
from tests.wire.attacked import code_of
from tests.wire.child import Rank, contents
from tests.wire.helpers import waited


def forged_messages(attack: Attack) -> Outcome:
    """Nobody makes a push ready without its bytes, nor ends an offer that is not for them."""
    src, dst, tokens = source_plan(attack.tokens), target_plan(attack.tokens), attack.tokens
    outcome = Outcome()
    with ExitStack() as stack:
        honest = Rank(src, attack.wire.name, 1, tokens, **attack.wire.node)
        stack.callback(honest.close)
        victim = Rank(dst, attack.wire.name, 7, tokens, **attack.wire.node)
        stack.callback(victim.close)
        liar, stranger = Liar(honest, victim), Liar(honest, victim, name="stranger")
        stack.callback(liar.raw.close)
        stack.callback(stranger.raw.close)
        clean = contents(dst, 7)
        for number in range(attack.tries):
            for lie in (_not_offered, _partly_offered, _elsewhere, _by_another, _as_before):
                request = f"{lie.__name__} {number}"
                expected = victim.node.expect(
                    request, victim.blocks, tokens, source=src, pushers=["node-1"]
                )
                faults = lie(liar, stranger, request)
                if expected.ready.is_set():
                    faults.append(f"{lie.__name__[1:]}: a push without its bytes is ready")
                victim.node.forget(request)
                outcome.add(faults)
                if victim.wrong(clean):
                    outcome.add([f"{lie.__name__[1:]}: bytes have changed"])
                victim.fill(7)
            outcome.add(_not_named(victim, stranger, f"named {number}"))
        with Session(honest.node, [victim.node.endpoint]) as session:
            expected = victim.node.expect(
                "honest", victim.blocks, tokens, source=src, pushers=["node-1"]
            )
            session.push("honest", source_blocks=honest.blocks, tokens=tokens).wait(20)
            outcome.add([] if expected.ready.is_set() else ["an honest push is not ready"])
        if not waited(victim.idle, 10):
            outcome.add(["leases or buffers are left"])
    return outcome


def _refused(said: str, what: str, *codes: str) -> list[str]:
    return [] if said in codes else [f"{what}: {said} instead of {' or '.join(codes)}"]


def _not_offered(liar: Liar, _: Liar, request: str) -> list[str]:
    said = liar.announced_until_over(request)
    return _refused(said, "what is not offered", "unknown_request")


def _partly_offered(liar: Liar, _: Liar, request: str) -> list[str]:
    """Half of the tokens are offered, and all of them announced."""
    honest, part = liar.honest, f"part of {request}"
    honest.node.offer(part, honest.blocks, honest.tokens // 2)
    faults = _refused(liar.announced_until_over(request, offer=part), "half", "bad_tokens")
    half = liar.announce(request, stop=honest.tokens // 2)
    honest.node.withdraw(part)
    return faults + _refused(half, "fewer tokens", "bad_tokens")


def _elsewhere(liar: Liar, _: Liar, request: str) -> list[str]:
    """The announced endpoint is that of another node, of none, or at another host."""
    faults = []
    for endpoint in (liar.victim.node.endpoint, "tcp://192.0.2.1:9", "tcp://x:y", "unix:x"):
        said = liar.announced_until_over(request, endpoint=endpoint, offer=endpoint)
        faults += _refused(said, endpoint, "bad_handshake", "wire_failed")
    said = liar.announced_until_over(request, endpoint="tcp://127.0.0.1:1", offer="no node")
    return faults + _refused(said, "no node", "peer_lost")


def _by_another(liar: Liar, stranger: Liar, request: str) -> list[str]:
    """Neither may announce what the other is named for, nor a process that it is not."""
    faults = _refused(stranger.announce(request), "not named", "unknown_request")
    key = protocol.new_key()
    other = Liar(liar.honest, liar.victim, incarnation=key)
    faults += _refused(other.announced_until_over(request), "another process", "bad_handshake")
    other.raw.close()
    return faults


def _as_before(liar: Liar, _: Liar, request: str) -> list[str]:
    """The messages of a push of protocol version 3."""
    return _refused(code_of(liar.open(request, direction="push")), "old", "unlike_versions")


def _not_named(victim: Rank, stranger: Liar, request: str) -> list[str]:
    """A reader that the offer does not name neither opens it nor ends it."""
    victim.offer(request, readers=["somebody else"])
    faults = _refused(code_of(stranger.open(request)), "not named", "unknown_request")
    faults += _refused(stranger.close(protocol.new_key()), "no lease", "lease_expired")
    if victim.released:
        faults.append("an offer was released by a reader that it does not name")
    victim.node.withdraw(request)
    victim.released.clear()
    return faults
