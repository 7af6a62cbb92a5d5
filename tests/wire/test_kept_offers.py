"""A reader that connects or makes progress keeps its offer, however slow the machine is."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest

from kvatlas import AtlasError
from kvatlas.copying.memory import Memory
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Link, PeerAccess, Session, encoding, protocol
from kvatlas.wire.client.kept_offers import kept_offer
from tests.wire.faulty import Act, Gate, failure, pair, pull, works
from tests.wire.helpers import assert_arrived, ends, pull_all, until

OFFERED = 1.0
"""Seconds for which a source keeps an offer that no reader asks for."""
READ, PULL = 0.25, 1.0
"""Seconds that one read takes, and fewer seconds than all seven reads of a request take."""


def slow_to_connect(transport: Any, seconds: float) -> None:
    """Have links of a transport take some time to open, as agents of NIXL do on a busy machine."""
    connect = transport._connect

    def slowly(metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        time.sleep(seconds)
        link: Link = connect(metadata, memory)
        return link

    transport._connect = slowly


def slow_to_read(act: Act, copies: Sequence[Copy]) -> Handle:
    del copies
    time.sleep(READ)
    return act()


def very_slow_to_read(act: Act, copies: Sequence[Copy]) -> Handle:
    time.sleep(READ)
    return slow_to_read(act, copies)


def test_an_offer_is_kept_while_its_reader_connects() -> None:
    with ends(*pair()) as (source, target):
        slow_to_connect(target.nodes[0].transport, 2 * OFFERED)
        source.offer("r", timeout=OFFERED)
        with kept_offer(target.nodes[0], source.endpoints, "r", 20.0):
            session = Session(target.nodes[0], source.endpoints)
        with session:
            pull(session, target).wait(10)
        assert_arrived(source, target, 0)
        until(lambda: source.released == [(0, "r", "read")])


def test_without_a_reader_an_offer_ends_when_it_was_to() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r", timeout=OFFERED)
        begun = time.monotonic()
        with kept_offer(target.nodes[0], source.endpoints, "another", 20.0):
            until(lambda: source.released == [(0, "r", "expired")])
        assert time.monotonic() > begun + OFFERED - 0.1


def test_an_offer_ends_once_its_reader_gives_up() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r", timeout=OFFERED)
        with kept_offer(target.nodes[0], source.endpoints, "r", 20.0):
            time.sleep(2 * OFFERED)
            assert not source.released
        until(lambda: source.released == [(0, "r", "expired")])


def test_a_request_that_is_offered_late_is_kept_too() -> None:
    with (
        ends(*pair()) as (source, target),
        kept_offer(target.nodes[0], source.endpoints, "r", 20.0),
    ):
        time.sleep(OFFERED)
        source.offer("r", timeout=OFFERED)
        time.sleep(2 * OFFERED)
        assert not source.released


@pytest.mark.parametrize("how", ["direct", "staged"])
def test_a_pull_that_makes_progress_outlives_its_offer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.wire.client.pull_pipeline._BATCH", 4096)
    with ends(*pair()) as (source, target):
        target.arounds = slow_to_read
        source.offer("r", timeout=PULL)
        begun = time.monotonic()
        pull_all(source, target, "r", how=how)
        assert time.monotonic() > begun + PULL, "the pull is too short for this test"
        until(lambda: source.released == [(0, "r", "read")])
        works(source, target)


def test_a_patient_pull_ends_only_when_no_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.client.pull_pipeline._BATCH", 4096)
    with ends(*pair()) as (source, target):
        target.arounds = slow_to_read
        source.offer("r", timeout=PULL)
        begun = time.monotonic()
        pull_all(source, target, "r", how="direct", timeout=PULL, patient=True)
        assert time.monotonic() > begun + PULL, "the pull is too short for this test"
        source.offer("s")
        gate = target.arounds = Gate()
        with Session(target.nodes[0], source.endpoints) as session:
            asked: dict[str, Any] = {"how": "direct", "timeout": PULL, "patient": True}
            transfer = session.pull("s", destination_blocks=target.blocks, tokens=50, **asked)
            assert gate.reached.wait(5)
            assert failure(transfer) is Code.DEADLINE
            gate.opened.set()
        works(source, target)


def test_layers_of_a_patient_pull_are_awaited_while_bytes_arrive() -> None:
    with ends(*pair()) as (source, target):
        target.arounds = very_slow_to_read
        source.offer("r", timeout=20.0)
        names = list(target.nodes[0].plan.layers)
        patience = 2 * READ * (len(names) - 1)
        with Session(target.nodes[0], source.endpoints) as session:
            asked: dict[str, Any] = {"timeout": patience, "streamed": True, "patient": True}
            transfer = pull(session, target, **asked)
            transfer.wait_layers(names)
            assert time.monotonic() > transfer.begun + patience, "the pull is too short"
            transfer.wait(10)
        assert_arrived(source, target, 0)


def test_no_reader_keeps_an_offer_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.server.offering._LONGEST_OFFER", 2 * OFFERED)
    with ends(*pair()) as (source, target):
        source.offer("r", timeout=OFFERED)
        with kept_offer(target.nodes[0], source.endpoints, "r", 20.0):
            until(lambda: source.released == [(0, "r", "expired")])


def test_only_its_readers_keep_an_offer() -> None:
    """A peer whose key proves another name learns as little as about an offer that is not there."""
    with ends(*pair()) as (source, target):
        node = source.nodes[0]
        source.offer("r", readers=["somebody else"])
        keep = protocol.Keep(request="r", seconds=9.0)
        caller: Any = type("Proved", (), {"names": frozenset({target.nodes[0].name})})()
        with pytest.raises(AtlasError) as refused:
            node.answers(keep, caller)
        assert refused.value.code is Code.UNKNOWN_REQUEST


def test_a_node_that_may_not_read_keeps_no_offer() -> None:
    """Its secret is known, so it may connect; but no offer lasts longer for it."""
    peers = {
        "reader": PeerAccess(bytes(range(32))),
        "pusher": PeerAccess(bytes(range(1, 33)), may_read=False),
    }
    with ends(*pair()) as (source, _):
        node = source.nodes[0]
        node.security._peers = peers
        source.offer("r")
        keep = protocol.Keep(request="r", seconds=9.0)
        for name, known in (("reader", True), ("pusher", False)):
            caller: Any = type("Proved", (), {"names": frozenset({name})})()
            if known:
                assert isinstance(node.answers(keep, caller), protocol.Ok)
                continue
            with pytest.raises(AtlasError) as refused:
                node.answers(keep, caller)
            assert refused.value.code is Code.UNKNOWN_REQUEST


def test_a_source_that_cannot_decode_the_message_is_not_thought_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts the connection of `Keep` as a stranger's, and closes it during the pull."""
    monkeypatch.setattr("kvatlas.wire.rpc._STRANGER_SECONDS", OFFERED)
    known = [kind for kind in get_args(protocol.Question) if kind is not protocol.Keep]
    older = functools.reduce(operator.or_, known)
    greeted, decode = threading.Event(), encoding.decode

    def keeps_nothing() -> bool:
        return not any(thread.name == "kvatlas-keep" for thread in threading.enumerate())

    def by_older(payload: bytes, kind: Any) -> Any:
        if kind is not older:
            return decode(payload, kind)
        try:
            return decode(payload, kind)
        except AtlasError:
            assert greeted.wait(10)  # so that `Hello` has a connection of its own
            raise

    with ends(*pair()) as (source, target):
        node = source.nodes[0]
        welcome = node.answers._welcome

        def slow_welcome(hello: protocol.Hello, caller: Any) -> protocol.Message:
            greeted.set()
            until(keeps_nothing)
            return welcome(hello, caller)

        monkeypatch.setattr(encoding, "decode", by_older)
        monkeypatch.setattr(node.server, "_questions", older)
        monkeypatch.setattr(node.answers, "_welcome", slow_welcome)
        source.offer("r", timeout=20.0)
        with kept_offer(target.nodes[0], source.endpoints, "r", 20.0):
            session = Session(target.nodes[0], source.endpoints)
        with session:
            channels, endpoint = target.nodes[0].channels, source.endpoints[0]
            monitor = channels.monitor(endpoint)  # as a pull has that begins now
            until(lambda: len(node.server._callers) == 1)
            time.sleep(0.1)
            monitor.check()
            pull(session, target, how="direct", timeout=20.0).wait(20)
        assert_arrived(source, target, 0)


def test_a_source_that_does_not_know_the_message_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ends(*pair()) as (source, target):
        node = source.nodes[0]
        monkeypatch.setattr(
            node.answers, "_keep", lambda *_: (_ for _ in ()).throw(protocol.bad_handshake("keep"))
        )
        source.offer("r")
        with kept_offer(target.nodes[0], source.endpoints, "r", 5.0):
            pull_all(source, target, "r")
        until(lambda: not any(t.name == "kvatlas-keep" for t in threading.enumerate()))
