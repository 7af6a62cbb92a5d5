"""Peers that were welcomed and mean harm: they get what their lease says, and no more."""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.wire import encoding, protocol
from tests.wire.attacked import BYTES, SECONDS, Attacked, code_of, opening
from tests.wire.corpus.make import plan_json
from tests.wire.helpers import small
from tests.wire.raw import Clock, connected, framed

# -- sessions and leases of others --------------------------------------------------------


def test_sessions_that_were_never_opened_are_unknown(attacked: Attacked) -> None:
    key = protocol.new_key()
    for question in (
        opening(key),
        protocol.Renew(session=key, lease=key, seconds=1.0),
        protocol.Borrow(session=key, lease=key, buffers=1, seconds=1.0),
        protocol.Gather(session=key, lease=key, start=0, stop=1, buffer=0),
        protocol.Announce(
            session=key,
            request="r",
            offer="o",
            endpoint="tcp://127.0.0.1:1",
            start=0,
            stop=1,
            seconds=1.0,
        ),
        protocol.GetChecksums(session=key, lease=key, start=0, stop=1, piece=4096),
        protocol.Close(session=key, lease=key, complete=True),
    ):
        assert code_of(attacked.raw.ask(question)) == "unknown_session"


def test_leases_of_other_sessions_are_out_of_reach(attacked: Attacked) -> None:
    mine, other = attacked.session(), attacked.session(rank=1)
    lease = attacked.open(mine).lease
    for question in (
        protocol.Renew(session=other, lease=lease, seconds=1.0),
        protocol.Borrow(session=other, lease=lease, buffers=1, seconds=1.0),
        protocol.Gather(session=other, lease=lease, start=0, stop=1, buffer=0),
        protocol.GetChecksums(session=other, lease=lease, start=0, stop=1, piece=4096),
        protocol.Close(session=other, lease=lease, complete=True),
        protocol.Close(session=mine, lease=other, complete=True),
    ):
        assert code_of(attacked.raw.ask(question)) == "lease_expired"
    assert len(attacked.node.leases) == 1
    assert (
        code_of(attacked.raw.ask(protocol.Close(session=mine, lease=lease, complete=False))) == "ok"
    )
    attacked.source.assert_idle()


OPENINGS: list[tuple[str, dict[str, Any]]] = [
    ("unknown_request", {"request": "another"}),
    ("unlike_versions", {"direction": "push"}),
    ("bad_tokens", {"stop": 51}),
    ("bad_tokens", {"start": 30, "stop": 20}),
    ("bad_tokens", {"stop": 2**62}),
    ("missing_blocks", {"blocks": {}}),
    ("missing_blocks", {"blocks": protocol.pack_tables({0: [1]})}),
    ("out_of_range", {"blocks": protocol.pack_tables({0: [0, 1, 2, 2**32 - 1]})}),
    ("out_of_range", {"blocks": protocol.pack_tables({0: [0, 1, 2, 512]})}),
    ("out_of_range", {"blocks": protocol.pack_tables({0: [0, 1, 2, 3], 7: [0]})}),
    ("twice", {"blocks": protocol.pack_tables({0: [1, 1, 2, 3]})}),
    ("bad_handshake", {"blocks": {0: bytes(15)}}),
    ("bad_handshake", {"blocks": {0: bytes(16)}, "peer_blocks": {0: bytes(2)}}),
    ("unknown_request", {"peer_blocks": protocol.pack_tables({0: [0, 1, 2, 3]})}),
    ("unknown_layer", {"layers": ("layers.9.attn",)}),
]
LIMITS: list[dict[str, Any]] = [
    {"seconds": 0.0}, {"seconds": -1.0}, {"seconds": 1e9}, {"seconds": float("nan")},
    {"start": -1}, {"stop": 2**62 + 1}, {"direction": "steal"},
    {"request": ""}, {"request": "x" * 257}, {"blocks": {65536: b""}}, {"blocks": {-1: b""}},
    {"layers": ("x" * 257,)}, {"layers": ("x",) * 16385},
]  # fmt: skip


@pytest.mark.parametrize(("code", "changed"), OPENINGS)
def test_openings_are_held_against_the_plan(
    attacked: Attacked, code: str, changed: dict[str, Any]
) -> None:
    session = attacked.session()
    with Clock() as clock:
        assert code_of(attacked.open(session, **changed)) == code
    assert clock.seconds < SECONDS
    attacked.source.assert_idle()


@pytest.mark.parametrize("changed", LIMITS)
def test_numbers_and_lengths_have_limits(attacked: Attacked, changed: dict[str, Any]) -> None:
    session = attacked.session()
    assert code_of(attacked.open(session, **changed)) == "bad_handshake"
    attacked.source.assert_idle()


def test_a_piece_lies_in_a_buffer_of_the_lease(attacked: Attacked) -> None:
    session = attacked.session()
    opened = attacked.open(session)
    for wrong in ({"buffers": 0}, {"buffers": 17}, {"seconds": -1.0}, {"seconds": 1e9}):
        assert code_of(attacked.borrow(session, opened.lease, **wrong)) == "bad_handshake"
    lent = attacked.borrow(session, opened.lease).buffers
    assert attacked.borrow(session, opened.lease).buffers == lent, "a lease borrows once"
    free = (set(range(4)) - set(lent)).pop()
    buffer = lent[0]
    before = attacked.node.staging.memory.copy()
    for start, stop, into in (
        (0, 10, free), (0, 10, 1024), (0, 4097, buffer), (10, 0, buffer), (0, 2**62, buffer),
        (2**62, 0, buffer),
    ):  # fmt: skip
        question = protocol.Gather(
            session=session, lease=opened.lease, start=start, stop=stop, buffer=into
        )
        assert code_of(attacked.raw.ask(question)) == "bad_handshake"
    far = protocol.Gather(
        session=session, lease=opened.lease, start=2**61, stop=2**61 + 4096, buffer=buffer
    )
    assert code_of(attacked.raw.ask(far)) == "out_of_range"
    assert np.array_equal(attacked.node.staging.memory, before)
    attacked.raw.ask(protocol.Close(session=session, lease=opened.lease, complete=False))
    attacked.source.assert_idle()


def test_a_delayed_duplicate_of_a_gather_does_not_reach_a_buffer_that_is_read(
    attacked: Attacked,
) -> None:
    session = attacked.session()
    lease = attacked.open(session).lease
    buffers = attacked.borrow(session, lease).buffers
    staging = attacked.node.staging

    def gather(piece: int) -> str:
        span = {"start": 4096 * piece, "stop": 4096 * (piece + 1)}
        about: dict[str, Any] = {"buffer": buffers[piece % 2], **span}
        said = attacked.raw.ask(protocol.Gather(session=session, lease=lease, **about))
        return code_of(said)

    assert [gather(piece) for piece in (0, 1, 2, 2)] == ["ok"] * 4, "the last piece may be repeated"
    before = staging.view(buffers[0], 4096).copy()
    assert gather(0) == "bad_handshake"
    assert np.array_equal(staging.view(buffers[0], 4096), before)
    attacked.raw.ask(protocol.Close(session=session, lease=lease, complete=False))
    attacked.works()


def test_checksums_cost_no_more_than_their_span(attacked: Attacked) -> None:
    session = attacked.session()
    lease = attacked.open(session).lease
    longest = protocol.MAX_CHECKSUM_SPAN
    for start, stop, piece, code in (
        (0, longest + 1, 4096, "bad_handshake"), (9, 0, 4096, "bad_handshake"),
        (0, 4096, 1, "bad_handshake"), (0, 4096, 1 << 31, "bad_handshake"),
        (0, longest, 1 << 30, "out_of_range"), (2**62 - 1, 2**62, 4096, "out_of_range"),
        (0, 4096, 1 << 30, "checksums"),
    ):  # fmt: skip
        tracemalloc.start()
        try:
            said = attacked.raw.ask(
                protocol.GetChecksums(
                    session=session, lease=lease, start=start, stop=stop, piece=piece
                )
            )
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert code_of(said) == code
        assert peak < BYTES
    attacked.raw.ask(protocol.Close(session=session, lease=lease, complete=False))


def test_a_reader_that_reads_nothing_releases_nothing_it_should_not(attacked: Attacked) -> None:
    """One rank of two, or a part of the tokens, or some layers, are not all of it."""
    for changed in ({"stop": 49}, {"start": 1}, {"layers": ("layers.0.attn",)}, {}):
        session = attacked.session()
        lease = attacked.open(session, **changed).lease
        attacked.raw.ask(protocol.Close(session=session, lease=lease, complete=True))
        again = protocol.Close(session=session, lease=lease, complete=True)
        assert code_of(attacked.raw.ask(again)) == "lease_expired"
    assert "secret" in attacked.node.offers
    attacked.node.offers["secret"].read_by.clear()


def test_who_was_sent_nothing_has_read_nothing(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where peers reach no pool, the source itself knows what a reader can have."""
    monkeypatch.setattr(attacked.node.transport, "shared", "staging")
    node, raw = attacked.node, attacked.raw
    why: list[tuple[str, str]] = []
    node.offer("counted", attacked.source.blocks, 50, released=lambda *n: why.append(n))
    for rank in (0, 1):
        session = attacked.session(rank=rank)
        whole = [0, 1, 2, 3]
        for pieces in ([], whole[:3], whole[1:], [0] * 4, whole[::-1], whole):
            lease = attacked.open(session, request="counted").lease
            total = node.leases.find(lease, session).stream.nbytes
            assert 3 * 4096 < total <= 4 * 4096
            buffer = attacked.borrow(session, lease).buffers[0]
            for piece in pieces:
                start, stop = 4096 * piece, min(total, 4096 * piece + 4096)
                about = {"start": start, "stop": stop, "buffer": buffer}
                said = raw.ask(protocol.Gather(session=session, lease=lease, **about))
                assert code_of(said) == "ok"
            assert not why
            said = raw.ask(protocol.Close(session=session, lease=lease, complete=True))
            assert code_of(said) == ("ok" if pieces is whole else "bad_handshake")
    assert why == [("counted", "read")]
    attacked.source.assert_idle()


def test_who_was_seen_to_read_nothing_lets_go(attacked: Attacked) -> None:
    """A word about what was never posted ends an offer, but is no word of a reader."""
    why: list[tuple[str, str]] = []
    attacked.node.offer("told", attacked.source.blocks, 50, released=lambda *n: why.append(n))
    for rank in (0, 1):
        session = attacked.session(rank=rank)
        attacked.raw.ask(protocol.Release(session=session, request="told", read=True))
    assert why == [("told", "let_go")]


def test_plans_and_routes_of_strangers_are_bounded(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.wire.server.node_state._MAX_ROUTES", 4)
    monkeypatch.setattr("kvatlas.wire.handshake_checks._MAX_PLANS", 4)
    for number in range(8):
        made = plan_json(small("dense", tp=2))
        made["reasons"] = [f"plan {number}"]
        attacked.session(plan=json.dumps(made).encode())
    assert len(attacked.node.routes) == 4
    assert len(attacked.node.peer_plans) == 4
    attacked.works()


def test_layers_in_every_combination_are_not_all_kept(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route keeps what it has compiled, but not for every subset that a peer can name."""
    monkeypatch.setattr(sys.modules["kvatlas.routing.compiled_route"], "_MOST_COMPILED", 6)
    session = attacked.session()
    for number in range(1, 16):
        layers = tuple(f"layers.{i}.attn" for i in range(4) if number >> i & 1)
        opened = attacked.open(session, layers=layers)
        attacked.raw.ask(protocol.Close(session=session, lease=opened.lease, complete=False))
    assert max(len(made._compiled._pairs) for made in attacked.node.routes.values()) == 6
    attacked.works()


# -- floods -------------------------------------------------------------------------------


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_questions_wait_where_they_come_from(attacked: Attacked) -> None:
    """Large ones, sent as fast as they go while the node is busy, its answers never read."""
    gc.collect()
    before = resident()
    session = attacked.session()
    large = framed(encoding.encode(opening(session, blocks={0: bytes(1 << 20)})))
    callers = [connected(attacked.node.endpoint) for _ in range(4)]
    sent = 0
    try:
        with attacked.node.lock:
            for caller in callers:
                caller.settimeout(0.1)
                with suppress(TimeoutError):
                    while sent < 1000 << 20:
                        sent += caller.send(large)
            assert 4 << 20 < sent < 4 * 40 << 20
            assert resident() - before < 4 * BYTES
    finally:
        for caller in callers:
            caller.close()
    attacked.works()
