"""Messages of peers that claim what is not so: what they say changes nothing."""

from __future__ import annotations

from contextlib import ExitStack

from kvatlas.wire import Session, protocol
from tests.attack.claims import Attack, Outcome
from tests.attack.liar import Liar
from tests.attack.plans import PIECE, source_plan, target_plan
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
            for lie in (_nothing_sent, _half_sent, _out_of_order, _empty_pieces, _by_another):
                request = f"{lie.__name__} {number}"
                expected = victim.node.expect(
                    request, victim.blocks, tokens, source=src, pushers=["node-1"]
                )
                faults = lie(liar, stranger, request)
                if expected.ready.is_set():
                    faults.append(f"{lie.__name__[1:]}: a push without its bytes is ready")
                victim.node.forget(request)
                outcome.add(faults)
                if lie is not _half_sent and victim.wrong(clean):
                    outcome.add([f"{lie.__name__[1:]}: bytes have changed"])
                victim.fill(7)
            outcome.add(_not_named(victim, stranger, f"named {number}"))
        with Session(honest.node, [victim.node.endpoint]) as session:
            expected = victim.node.expect(
                "honest", victim.blocks, tokens, source=src, pushers=["node-1"]
            )
            session.push("honest", src_blocks=honest.blocks, tokens=tokens).wait(20)
            outcome.add([] if expected.ready.is_set() else ["an honest push is not ready"])
        if not waited(victim.idle, 10):
            outcome.add(["leases or buffers are left"])
    return outcome


def _refused(said: str, what: str, *codes: str) -> list[str]:
    return [] if said in codes else [f"{what}: {said} instead of {' or '.join(codes)}"]


def _nothing_sent(liar: Liar, _: Liar, request: str) -> list[str]:
    return _refused(liar.close(liar.open("push", request).lease), "no bytes", "bad_handshake")


def _half_sent(liar: Liar, _: Liar, request: str) -> list[str]:
    lease = liar.open("push", request).lease
    liar.borrow(lease)
    liar.fetch(lease, 0, PIECE)
    return _refused(liar.close(lease), "half of the bytes", "bad_handshake")


def _out_of_order(liar: Liar, _: Liar, request: str) -> list[str]:
    lease = liar.open("push", request).lease
    liar.borrow(lease)
    total = 1 << 62
    last = liar.fetch(lease, total - 1, total)
    faults = _refused(last, "the end first", "bad_handshake", "out_of_range")
    faults += _refused(liar.fetch(lease, PIECE, 2 * PIECE), "a later piece", "bad_handshake")
    faults += _refused(liar.fetch(lease, 0, 2 * PIECE), "too large a piece", "bad_handshake")
    outside = liar.fetch(lease, 0, PIECE, staged_at=1 << 40)
    faults += _refused(outside, "a piece outside", "out_of_bounds", "bad_handshake")
    return faults + _refused(liar.close(lease), "out of order", "bad_handshake", "lease_expired")


def _empty_pieces(liar: Liar, _: Liar, request: str) -> list[str]:
    lease = liar.open("push", request).lease
    liar.borrow(lease)
    for _again in range(8):
        liar.fetch(lease, 0, 0)
    return _refused(liar.close(lease), "empty pieces", "bad_handshake")


def _by_another(liar: Liar, stranger: Liar, request: str) -> list[str]:
    lease = liar.open("push", request).lease
    faults = _refused(stranger.close(lease), "another's lease", "lease_expired")
    faults += _refused(
        stranger.close(lease, liar.session), "another's session", "lease_expired",
        "unknown_session", "bad_handshake",
    )  # fmt: skip
    liar.close(lease)
    return faults


def _not_named(victim: Rank, stranger: Liar, request: str) -> list[str]:
    """A reader that the offer does not name neither opens it nor ends it."""
    victim.offer(request, readers=["somebody else"])
    faults = _refused(code_of(stranger.open("pull", request)), "not named", "unknown_request")
    faults += _refused(stranger.close(protocol.new_key()), "no lease", "lease_expired")
    if victim.released:
        faults.append("an offer was released by a reader that it does not name")
    victim.node.withdraw(request)
    victim.released.clear()
    return faults
