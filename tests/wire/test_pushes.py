"""Pushes: who may announce one, whom this node reads from, and when all of it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Node, Session, protocol
from kvatlas.wire.client.announced_endpoint import announced_endpoint
from tests.wire.attacked import code_of, opening
from tests.wire.faulty import Stalled, failure, pair, works
from tests.wire.helpers import End, as_it_is, assert_arrived, ends, small, until
from tests.wire.raw import Raw

ABOUT: dict[str, Any] = {"tokens": 50, "how": "staged"}


def expect(source: End, target: End, **about: Any) -> Any:
    given: dict[str, Any] = {"source": source.plan, "pushers": [source.nodes[0].name]}
    return target.nodes[0].expect("r", target.blocks, 50, **given | about)


class Announcer:
    """A peer with the hello of a node, which announces whatever it likes."""

    def __init__(self, node: Node, target: End, **changed: Any) -> None:
        self.raw = Raw(target.endpoints[0], node.secret)
        hello = node.hello(with_plan=True)
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
        self.session = self.raw.ask(protocol.Hello(**fields | changed)).session
        self.node = node

    def announce(self, **changed: Any) -> Any:
        about: dict[str, Any] = {
            "session": self.session, "request": "r", "offer": "not offered",
            "endpoint": self.node.endpoint, "start": 0, "stop": 50, "seconds": 5.0,
        }  # fmt: skip
        return self.raw.ask(protocol.Announce(**about | changed))

    def outcome(self, **changed: Any) -> str:
        """Announce until it is decided, and return the outcome."""
        while True:
            said = self.announce(**changed)
            if not isinstance(said, protocol.Announced) or said.arrived:
                return code_of(said)


@contextmanager
def announcing(node: Node, target: End, **changed: Any) -> Iterator[Announcer]:
    one = Announcer(node, target, **changed)
    with one.raw:
        yield one


def test_only_the_plan_that_is_expected_may_push() -> None:
    """Rank 0 of four has a quarter; it is not rank 0 of two, that has half."""
    target = End(small("dense", layout="BLHNC"), 50, seed=2)
    two = End(small("dense", tp=2), 50, seed=1)
    four = End(small("dense", tp=4), 50, seed=3)
    with ends(target, two, four):
        expected = expect(two, target, pushers=["end-1", "end-3"])
        for node in four.nodes[:2]:
            with Session(node, target.endpoints) as session:
                transfer = session.push("r", source_blocks=four.blocks, tokens=50)
                assert failure(transfer) is Code.UNKNOWN_REQUEST
                assert not node.offers, "a push that was refused is no longer offered"
        assert not expected.ready.is_set()
        target.buffers[0].assert_untouched()
        for node in two.nodes:
            with Session(node, target.endpoints) as session:
                session.push("r", source_blocks=two.blocks, tokens=50).wait(10)
        assert expected.ready.is_set()
        assert_arrived(two, target, 0)


def test_a_newer_push_replaces_a_stalled_one_and_what_has_arrived_stays() -> None:
    source = End(small("dense"), 50, seed=1)
    with ends(source, End(small("dense", layout="BLHNC"), 50, seed=2, buffers=8)) as (_, target):
        expected = expect(source, target)
        stalled = target.arounds = Stalled()
        with Session(source.nodes[0], target.endpoints) as session:
            slow = session.push("r", source_blocks=source.blocks, **ABOUT)
            assert stalled.posted.wait(5)
            target.arounds = as_it_is
            session.push("r", source_blocks=source.blocks, tokens=50, how="direct").wait(10)
            assert expected.ready.is_set()
            assert failure(slow) is Code.LEASE_EXPIRED
            stalled.reads[0].arrive()
            assert_arrived(source, target, 0)
            again = session.push("r", source_blocks=source.blocks, tokens=50)
            assert failure(again) is Code.UNKNOWN_REQUEST
        target.nodes[0].forget("r")
        until(lambda: target.nodes[0].staging.free == 8)


def test_a_replacement_waits_until_an_older_read_cannot_reach_the_blocks() -> None:
    """Without staging buffers a read goes straight to the blocks, and may land at any time."""
    source, second = (End(small("dense"), 50, seed=seed, name="end-1") for seed in (1, 3))
    target = End(small("dense", layout="BLHNC"), 50, seed=2, buffers=0)
    with ends(source, second, target):
        expected = expect(source, target)
        stalled = target.arounds = Stalled()
        with ExitStack() as stack:
            sessions = [
                stack.enter_context(Session(end.nodes[0], target.endpoints))
                for end in (source, second)
            ]
            old = sessions[0].push("r", source_blocks=source.blocks, tokens=50)
            assert stalled.posted.wait(5)
            target.arounds = as_it_is
            new = sessions[1].push("r", source_blocks=second.blocks, tokens=50)
            assert failure(old) is Code.LEASE_EXPIRED
            assert not new.wait_released(0.5)
            assert not expected.ready.is_set()
            stalled.reads[0].arrive()
            new.wait(10)
        assert expected.ready.is_set()
        assert_arrived(second, target, 0)


def test_a_rank_that_has_arrived_is_not_pushed_again() -> None:
    with ends(*pair({"tp": 2}, {"tp": 1})) as (source, target):
        expected = expect(source, target)
        about: dict[str, Any] = {"source_blocks": source.blocks, "tokens": 50, "how": "direct"}
        with (
            Session(source.nodes[0], target.endpoints) as zero,
            Session(source.nodes[1], target.endpoints) as one,
        ):
            zero.push("r", **about).wait(10)
            assert failure(zero.push("r", **about)) is Code.UNKNOWN_REQUEST
            assert not expected.ready.is_set(), "rank 1 has not pushed"
            one.push("r", **about).wait(10)
            assert expected.ready.is_set()
        assert_arrived(source, target, 0)


def test_a_push_has_the_tokens_that_are_expected() -> None:
    with ends(*pair()) as (source, target):
        expected = expect(source, target)
        with Session(source.nodes[0], target.endpoints) as session:
            for tokens in (49, (1, 50), 51):
                pushed = session.push("r", source_blocks=source.blocks, tokens=tokens)
                assert failure(pushed) is Code.BAD_TOKENS
        assert not expected.ready.is_set()
        target.buffers[0].assert_untouched()


def test_a_push_fails_as_a_whole_and_frees_its_blocks() -> None:
    """One of two destination ranks does not expect it."""
    with ends(*pair({}, {"tp": 2})) as (source, target):
        expected = expect(source, target)
        with Session(source.nodes[0], target.endpoints) as session:
            pushed = session.push("r", source_blocks=source.blocks, tokens=50)
            assert failure(pushed) is Code.UNKNOWN_REQUEST
            assert pushed.wait_released(10)
        node = source.nodes[0]
        assert not node.offers
        assert len(node.ledger) == 0
        target.nodes[0].forget("r")
        if not expected.ready.is_set():  # rank 0 may have been faster
            assert len(target.nodes[0].ledger) == 0


def test_blocks_that_are_no_longer_expected_are_not_touched() -> None:
    """Once `forget` returns nothing is scattered into them, however far the push had come."""
    with ends(*pair()) as (source, target):
        expect(source, target)
        stalled = target.arounds = Stalled()
        with Session(source.nodes[0], target.endpoints) as session:
            transfer = session.push("r", source_blocks=source.blocks, **ABOUT)
            assert stalled.posted.wait(5)
            target.nodes[0].forget("r")
            assert len(target.nodes[0].ledger) == 0
            assert failure(transfer) is Code.LEASE_EXPIRED
            for read in stalled.reads:
                read.arrive()
        target.buffers[0].assert_untouched()
        until(lambda: target.nodes[0].staging.free == 4)
        works(source, target)


def test_forget_waits_for_a_copy_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, may_copy = threading.Event(), threading.Event()
    with ends(*pair()) as (source, target):
        node = target.nodes[0]
        deliver = node.deliver

        def slow(*given: Any) -> int:
            copying.set()
            assert may_copy.wait(20)
            return deliver(*given)

        monkeypatch.setattr(node, "deliver", slow)
        expect(source, target)
        with Session(source.nodes[0], target.endpoints) as session:
            transfer = session.push("r", source_blocks=source.blocks, **ABOUT)
            assert copying.wait(5)
            forgetting = threading.Thread(target=node.forget, args=("r",))
            forgetting.start()
            forgetting.join(0.2)
            assert forgetting.is_alive(), "the blocks were freed while bytes were copied to them"
            assert node.ledger.uses() == {"expected": 1}
            may_copy.set()
            assert failure(transfer) is Code.LEASE_EXPIRED
            forgetting.join(5)
        assert node.ledger.uses() == {}


def test_forget_reports_blocks_that_a_read_may_still_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.wire.client.expected._SETTLE_SECONDS", 0.2)
    source = End(small("dense"), 50, seed=1)
    target = End(small("dense", layout="BLHNC"), 50, seed=2, buffers=0)
    with ends(source, target):
        node = target.nodes[0]
        expect(source, target)
        stalled = target.arounds = Stalled()
        with Session(source.nodes[0], target.endpoints) as session:
            session.push("r", source_blocks=source.blocks, tokens=50)
            assert stalled.posted.wait(5)
            with pytest.raises(AtlasError) as refusal:
                node.forget("r")
            assert refusal.value.code is Code.DEADLINE
            assert node.ledger.uses() == {"quarantined": 1}
            stalled.reads[0].arrive()
            until(lambda: node.ledger.uses() == {})


# -- whose word counts ------------------------------------------------------------------------


def test_an_announcement_without_an_offer_is_not_ready() -> None:
    with ends(*pair()) as (source, target):
        expected = expect(source, target)
        with announcing(source.nodes[0], target) as one:
            assert one.outcome() == "unknown_request"
            assert one.outcome() == "unknown_request", "the same announcement has one outcome"
        assert not expected.ready.is_set()
        target.buffers[0].assert_untouched()


def test_only_named_nodes_may_announce() -> None:
    with ends(*pair()) as (source, target):
        expect(source, target, pushers=["somebody else"])
        source.offer("offered")
        with announcing(source.nodes[0], target) as one:
            assert one.outcome(offer="offered") == "unknown_request"
        with announcing(source.nodes[0], target, name="somebody else") as liar:
            assert liar.outcome(offer="offered") == "bad_handshake", "its node has another name"
        target.buffers[0].assert_untouched()


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://10.1.2.3:5", "unix:/x", "tcp://127.0.0.1:99999", "http://127.0.0.1:80", "x" * 512],
)
def test_a_node_connects_to_no_other_host_than_the_announcing_one(endpoint: str) -> None:
    with ends(*pair()) as (source, target):
        expect(source, target)
        with announcing(source.nodes[0], target) as one:
            assert one.outcome(endpoint=endpoint) in ("bad_handshake", "wire_failed")


def test_whoever_announces_the_endpoint_of_another_does_not_end_its_push() -> None:
    """The older push goes on until the newer process was reached and is what it claims to be."""
    with ends(*pair()) as (source, target):
        expected = expect(source, target)
        stalled = target.arounds = Stalled()
        with (
            Session(source.nodes[0], target.endpoints) as session,
            announcing(source.nodes[0], target, incarnation=protocol.new_key()) as liar,
        ):
            honest = session.push("r", source_blocks=source.blocks, **ABOUT)
            assert stalled.posted.wait(5)
            assert liar.outcome() == "bad_handshake"
            assert liar.outcome(offer="other", endpoint="tcp://127.0.0.1:1") == "peer_lost"
            assert not honest.done
            target.arounds = as_it_is
            for read in stalled.reads:
                read.act()
                read._poll = lambda: True  # type: ignore[method-assign]
                read.arrived.set()
            honest.wait(10)
        assert expected.ready.is_set()
        assert_arrived(source, target, 0)


def test_the_outcome_of_a_push_is_known_after_the_request_was_forgotten() -> None:
    with ends(*pair()) as (source, target):
        expected = expect(source, target)
        source.nodes[0].offer("mine", source.blocks, 50, readers=["end-2"])
        with announcing(source.nodes[0], target) as one:
            assert one.outcome(offer="mine") == "announced"
            assert expected.ready.is_set()
            target.nodes[0].forget("r")
            assert one.outcome(offer="mine") == "announced"
            assert one.outcome(offer="another") == "unknown_request"
        assert_arrived(source, target, 0)


def test_pushes_of_one_source_share_a_session() -> None:
    with ends(*pair()) as (source, target):
        with Session(source.nodes[0], target.endpoints) as session:
            for _ in range(3):
                expect(source, target)
                session.push("r", source_blocks=source.blocks, tokens=50).wait(10)
                target.nodes[0].forget("r")
        assert len(source.nodes[0].answers.sessions) == 1


def test_too_many_announcements_of_one_rank_must_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that connects to nothing holds up its own rank alone."""
    release = threading.Event()
    with ends(*pair()) as (source, target):
        expect(source, target)
        connections = target.nodes[0]._expected._connections
        use = connections.use

        def slowly(*given: Any) -> Any:
            assert release.wait(20)
            return use(*given)

        monkeypatch.setattr(connections, "use", slowly)
        with announcing(source.nodes[0], target) as one:
            said = [code_of(one.announce(offer=f"{n}")) for n in range(5)]
        release.set()
        assert said == ["announced"] * 4 + ["busy"]


# -- other versions ---------------------------------------------------------------------------


def test_a_push_of_an_older_version_is_refused_with_a_code() -> None:
    with ends(*pair()) as (source, target):
        expect(source, target)
        with announcing(source.nodes[0], target, version=3) as old:
            said = old.raw.ask(opening(old.session, direction="push", request="r"))
        assert code_of(said) == "unlike_versions"
        assert "Upgrade" in said.hint


def test_a_push_to_an_older_version_is_refused_here() -> None:
    with ends(*pair()) as (source, target):
        expect(source, target)
        with Session(source.nodes[0], target.endpoints) as session:
            known = session._connections.known
            known.update({at: replace(peer, version=3) for at, peer in known.items()})
            with pytest.raises(AtlasError) as refusal:
                session.push("r", source_blocks=source.blocks, tokens=50)
        assert refusal.value.code is Code.UNLIKE_VERSIONS
        assert not source.nodes[0].offers


@pytest.mark.parametrize(
    ("endpoint", "host", "here", "right"),
    [
        ("tcp://0.0.0.0:7", "10.0.0.1", False, "tcp://10.0.0.1:7"),
        ("tcp://[::]:7", "fe80::1", False, "tcp://[fe80::1]:7"),
        ("tcp://0.0.0.0:7", "::ffff:10.0.0.1", False, "tcp://10.0.0.1:7"),
        ("tcp://10.0.0.1:7", "::ffff:10.0.0.1", False, "tcp://10.0.0.1:7"),
        ("tcp://127.0.0.1:7", "10.0.0.1", True, "tcp://127.0.0.1:7"),
        ("unix:///a", "127.0.0.1", True, "unix:///a"),
        ("tcp://127.0.0.1:7", "10.0.0.1", False, ""),
        ("unix:///a", "10.0.0.1", False, ""),
        ("tcp://10.0.0.2:7", "10.0.0.1", True, ""),
    ],
)
def test_endpoints_are_at_the_host_that_announces_them(
    endpoint: str, host: str, here: bool, right: str
) -> None:
    try:
        assert announced_endpoint(endpoint, host, on_this_host=here) == right
    except AtlasError as refused:
        assert (refused.code, right) == (Code.BAD_HANDSHAKE, "")


def test_connections_to_sources_that_have_exited_are_closed() -> None:
    source, target = (End(small("dense"), 50, seed=seed) for seed in (1, 2))
    with ExitStack() as stack:
        stack.enter_context(ends(target))
        with ends(source):
            expect(source, target)
            with Session(source.nodes[0], target.endpoints) as session:
                session.push("r", source_blocks=source.blocks, tokens=50).wait()
            connections = target.nodes[0]._expected._connections
            assert connections.find(source.endpoints[0]) is not None
        until(lambda: connections.find(source.endpoints[0]) is None)
