"""Sessions: nobody ends that of another, and who has gone leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, protocol
from kvatlas.wire.encoding import BusyError
from tests.wire.attacked import Attacked, code_of, greeting, opening
from tests.wire.faulty import failure, pair, pull
from tests.wire.helpers import ends, until
from tests.wire.raw import Raw

SESSIONS = "kvatlas.wire.server.sessions."


class Victim:
    """A peer with a session and a lease, on a connection of its own."""

    def __init__(self, attacked: Attacked) -> None:
        self.raw = Raw(attacked.node.endpoint)
        self.session = self.raw.ask(greeting(name="victim")).session
        self.lease = self.raw.ask(opening(self.session, seconds=500.0)).lease

    def renew(self) -> str:
        question = protocol.Renew(session=self.session, lease=self.lease, seconds=5.0)
        return code_of(self.raw.ask(question))

    def leave(self) -> None:
        self.raw.ask(protocol.Close(session=self.session, lease=self.lease, complete=False))
        self.raw.close()


@pytest.fixture
def victim(attacked: Attacked) -> Iterator[Victim]:
    made = Victim(attacked)
    yield made
    made.leave()
    attacked.source.assert_idle()


def test_a_hello_in_the_name_of_another_ends_nothing(attacked: Attacked, victim: Victim) -> None:
    for number in range(8):
        attacked.session(name="victim", incarnation=bytes([number]) * 16)
    assert victim.renew() == "ok"


def test_thousands_of_hellos_end_nobodys_session(attacked: Attacked, victim: Victim) -> None:
    hello = greeting()
    for number in range(1100):
        said = attacked.raw.ask(msgspec.structs.replace(hello, name=f"stranger {number}"))
        assert code_of(said) == "welcome"
    assert victim.renew() == "ok"
    assert len(attacked.node.server.answer.sessions) < 200  # type: ignore[attr-defined]


def test_too_many_sessions_are_busy_for_who_asks(
    attacked: Attacked, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SESSIONS + "_MAX_OF_ONE", len(attacked.node.server.answer.sessions) + 1)  # type: ignore[attr-defined]
    with Raw(attacked.node.endpoint) as raw:
        assert code_of(raw.ask(greeting(name="the last one"))) == "welcome"
        said = raw.ask(greeting(name="one more"))
        assert code_of(said) == "busy"
        assert said.retry > 0
    assert victim.renew() == "ok"


def test_who_says_the_same_again_has_the_same_session(attacked: Attacked) -> None:
    """So that a process which connects again and again leaves no sessions behind."""
    assert attacked.session(name="again") == attacked.session(name="again")
    with Raw(attacked.node.endpoint) as raw:
        assert raw.ask(greeting(name="again")).session != attacked.session(name="again")


def test_a_session_ends_soon_after_its_last_connection(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SESSIONS + "_GRACE_SECONDS", 0.2)
    gone, kept = Victim(attacked), Victim(attacked)
    lease = protocol.Renew(session=kept.session, lease=kept.lease, seconds=5.0)
    with Raw(attacked.node.endpoint) as another:
        assert code_of(another.ask(lease)) == "ok"
        gone.raw.close()
        kept.raw.close()
        until(lambda: len(attacked.node.leases) == 1)
        assert code_of(another.ask(lease)) == "ok", "it has another connection"
        assert code_of(another.ask(opening(gone.session))) == "unknown_session"
    until(lambda: len(attacked.node.leases) == 0)
    attacked.source.assert_idle()


def test_a_process_that_starts_again_leaves_nothing_of_its_last_run(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are gone: the leases need not wait until that has been so for long."""
    monkeypatch.setattr(SESSIONS + "_GRACE_SECONDS", 600.0)
    gone = Victim(attacked)
    gone.raw.close()

    def met_again() -> bool:
        attacked.session(name="victim", incarnation=bytes([9]) * 16)
        return len(attacked.node.leases) == 0

    until(met_again)
    assert code_of(attacked.open(gone.session)) == "unknown_session"
    attacked.source.assert_idle()


def test_unlike_ends_are_told_what_is_unlike(attacked: Attacked) -> None:
    said = attacked.raw.ask(greeting(version=protocol.VERSION + 1, oldest=protocol.VERSION + 1))
    assert (said.code, f"with version {protocol.VERSION}" in said.hint) == ("unlike_versions", True)
    said = attacked.raw.ask(greeting(version=1, oldest=1))
    assert (said.code, "with version 1" in said.hint) == ("unlike_versions", True)
    said = attacked.raw.ask(greeting(transport="pigeon"))
    assert (said.code, "transport" in said.hint) == ("bad_handshake", True)
    assert "version" not in said.hint


def test_a_busy_peer_is_asked_again_within_the_deadline() -> None:
    with ends(*pair()) as (source, target):
        answer = source.nodes[0].server.answer
        refusals = [BusyError("enough to do", 0.05) for _ in range(3)]

        def at_first_busy(question: Any, caller: Any) -> Any:
            if isinstance(question, protocol.Open) and refusals:
                raise refusals.pop()
            return answer(question, caller)

        source.nodes[0].server.answer = at_first_busy
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            pull(session, target).wait(10)
        assert not refusals


def test_logs_of_both_ends_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvatlas.wire")
    with ends(*pair()) as (source, target):
        source.offer("one that works")
        with Session(target.nodes[0], source.endpoints) as session:
            pull(session, target, "one that works").wait(10)
            assert failure(pull(session, target, "one\nthat fails")) is Code.UNKNOWN_REQUEST
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("lease granted request='one that works'") for line in said)
    assert any(line.startswith("rejected message=open request='one\\nthat fails'") for line in said)
    assert any(line.startswith("transfer failed request='one\\nthat fails'") for line in said)
    assert not any("\n" in line for line in said)


def test_an_unknown_session_is_begun_anew() -> None:
    """A node whose sessions have ended is met again by those who had them."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            sessions: Any = source.nodes[0].server.answer.sessions  # type: ignore[attr-defined]
            with sessions._lock:
                sessions._open.clear()
            pull(session, target).wait(10)


def test_a_node_that_is_closed_asks_nobody() -> None:
    with ends(*pair()) as (source, target):
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            target.nodes[0].close()
            with pytest.raises(AtlasError):
                pull(session, target).wait(10)
