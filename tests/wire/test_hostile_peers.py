"""Peers that mean harm, against a live node: refused with a code, cheaply, and it works on.

A message may cost a second of the processor and 64 MiB, whatever it claims. After each
attack the node serves an honest peer.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session
from kvatlas.wire import messages as say
from tests.wire import corpus
from tests.wire.corpus.make import hello, plan_json, sealed
from tests.wire.helpers import End, ends, pull_all, small
from tests.wire.raw import Clock, Raw

SECONDS = 1.0
BYTES = 64 << 20

FILES = corpus.expected()


class Attacked:
    """A node that is attacked, an honest peer of it, and a session of the attacker."""

    def __init__(self, source: End, target: End) -> None:
        self.source, self.target = source, target
        self.node = source.nodes[0]
        self.raw = Raw(self.node.endpoint, self.node.secret)
        self.rounds = 0

    def session(self, **changed: Any) -> bytes:
        welcome = self.raw.ask(greeting(**changed))
        assert isinstance(welcome, say.Welcome)
        return welcome.session

    def open(self, session: bytes, **changed: Any) -> Any:
        return self.raw.ask(opening(session, **changed))

    def works(self) -> None:
        """An honest peer gets its bytes, and everything is as it was."""
        self.rounds += 1
        self.source.offer(f"honest {self.rounds}")
        pull_all(self.source, self.target, f"honest {self.rounds}", how="staged", checksums=True)
        for buffers in self.target.buffers:
            for index, whole in buffers.whole.items():
                whole[:] = buffers.before[index]


def greeting(**changed: Any) -> say.Hello:
    return msgspec.convert(hello(**changed), say.Hello)


def opening(session: bytes, **changed: Any) -> say.Open:
    about: dict[str, Any] = {
        "session": session, "way": "pull", "request": "secret", "start": 0, "stop": 50,
        "blocks": say.pack({0: [3, 2, 1, 0]}), "seconds": 5.0, "slots": 2,
    }  # fmt: skip
    return say.Open(**about | changed)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    source = End(small("dense", layout="BLHNC"), 50, seed=1)
    target = End(small("dense", tp=2), 50, seed=2)
    with ends(source, target):
        source.nodes[0].offer("secret", source.blocks, 50, seconds=600)
        made = Attacked(source, target)
        yield made
        made.raw.close()


def code_of(said: Any) -> str:
    if said is None:
        return "nothing"
    return said.code if isinstance(said, say.Refusal) else str(said.__struct_config__.tag)


# -- the corpus ---------------------------------------------------------------------------


def test_the_corpus_is_all_there() -> None:
    assert {path.stem for path in corpus.HERE.glob("*.z")} == set(FILES)
    assert len(FILES) > 90


@pytest.mark.parametrize("name", FILES)
def test_bad_handshakes_are_refused_cheaply(attacked: Attacked, name: str) -> None:
    some = corpus.frames(name)
    limit = 0.3 if FILES[name] == "nothing" else 10.0
    for measured in (False, True):
        with Raw(attacked.node.endpoint) as raw, Clock() as clock:
            if measured:
                tracemalloc.start()
            try:
                said = raw.tell(renewed(some), limit)
                peak = tracemalloc.get_traced_memory()[1] if measured else 0
            finally:
                tracemalloc.stop()
        assert code_of(said) == FILES[name]
        assert peak < BYTES
    if not measured:
        assert clock.seconds < SECONDS
    assert not any(len(text) > 4096 for text in texts(said))


def renewed(some: list[bytes]) -> list[bytes]:
    """The same message with a new nonce, so that it is not refused as said before."""
    if len(some) == 2 and len(some[1]) > 16 and not some[0]:
        return [some[0], say.new_key() + some[1][16:]]
    return some


def texts(said: Any) -> list[str]:
    return [said.rule, said.got, said.hint] if isinstance(said, say.Refusal) else []


def test_the_node_works_after_the_corpus(attacked: Attacked) -> None:
    for name in FILES:
        with Raw(attacked.node.endpoint) as raw:
            raw.send(corpus.frames(name))
    attacked.works()
    attacked.source.assert_idle()


def test_the_corpus_is_what_its_script_makes(tmp_path: Path, monkeypatch: Any) -> None:
    from tests.wire.corpus import make

    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (corpus.HERE / path.name).read_bytes(), "make it anew"


# -- signatures and replays ---------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), [(b"a", b"b"), (b"a", None), (None, b"b")])
def test_ends_that_share_no_secret_refuse_each_other(ours: bytes | None, theirs: Any) -> None:
    source = End(small("dense"), 50, secret=ours)
    target = End(small("dense"), 50, secret=theirs)
    with ends(source, target), pytest.raises(AtlasError) as refusal:
        Session(target.nodes[0], source.endpoints, seconds=5)
    assert refusal.value.code is Code.BAD_SIGNATURE


def test_a_message_is_heard_once() -> None:
    with ends(End(small("dense"), 50, secret=b"s")) as (source,), Raw(*of(source)) as raw:
        frames = say.seal(greeting(), say.new_key(), b"s")
        assert isinstance(raw.tell(frames), say.Welcome)
        for _ in range(2):
            assert code_of(raw.tell(frames)) == "bad_handshake"


def of(source: End) -> tuple[str, bytes | None]:
    return source.endpoints[0], source.nodes[0].secret


def test_a_message_that_is_not_signed_is_not_remembered() -> None:
    """Else a stranger could make a node forget what it has heard."""
    with ends(End(small("dense"), 50, secret=b"s")) as (source,):
        with Raw(source.endpoints[0], b"s") as raw:
            for _ in range(20):
                assert code_of(raw.tell([bytes(32), say.new_key() + b"x"])) == "bad_signature"
        assert not source.nodes[0]._server._seen


def test_what_was_heard_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.channel._REMEMBERED", 8)
    with ends(End(small("dense"), 50)) as (source,), Raw(source.endpoints[0]) as raw:
        for _ in range(20):
            raw.ask(say.Renew(session=bytes(16), lease=bytes(16), seconds=1.0))
        assert len(source.nodes[0]._server._seen) == 8


# -- sessions and leases of others --------------------------------------------------------


def test_sessions_that_were_never_opened_are_unknown(attacked: Attacked) -> None:
    key = say.new_key()
    for question in (
        opening(key),
        say.Renew(session=key, lease=key, seconds=1.0),
        say.Gather(session=key, lease=key, start=0, stop=1, slot=0),
        say.Sums(session=key, lease=key, start=0, stop=1, piece=4096),
        say.Close(session=key, lease=key, whole=True),
    ):
        assert code_of(attacked.raw.ask(question)) == "unknown_session"


def test_leases_of_other_sessions_are_out_of_reach(attacked: Attacked) -> None:
    mine, other = attacked.session(), attacked.session(rank=1)
    lease = attacked.open(mine).lease
    for question in (
        say.Renew(session=other, lease=lease, seconds=1.0),
        say.Gather(session=other, lease=lease, start=0, stop=1, slot=0),
        say.Sums(session=other, lease=lease, start=0, stop=1, piece=4096),
        say.Close(session=other, lease=lease, whole=True),
        say.Close(session=mine, lease=other, whole=True),
    ):
        assert code_of(attacked.raw.ask(question)) == "lease_expired"
    assert len(attacked.node.leases) == 1
    assert code_of(attacked.raw.ask(say.Close(session=mine, lease=lease, whole=False))) == "fine"
    attacked.source.assert_idle()


OPENINGS: list[tuple[str, dict[str, Any]]] = [
    ("unknown_request", {"request": "another"}),
    ("unknown_request", {"way": "push"}),
    ("bad_tokens", {"stop": 51}),
    ("bad_tokens", {"start": 30, "stop": 20}),
    ("bad_tokens", {"stop": 2**62}),
    ("missing_blocks", {"blocks": {}}),
    ("missing_blocks", {"blocks": say.pack({0: [1]})}),
    ("out_of_range", {"blocks": say.pack({0: [0, 1, 2, 2**32 - 1]})}),
    ("out_of_range", {"blocks": say.pack({0: [0, 1, 2, 512]})}),
    ("out_of_range", {"blocks": say.pack({0: [0, 1, 2, 3], 7: [0]})}),
    ("twice", {"blocks": say.pack({0: [1, 1, 2, 3]})}),
    ("bad_handshake", {"blocks": {0: bytes(15)}}),
    ("bad_handshake", {"blocks": {0: bytes(16)}, "peer_blocks": {0: bytes(2)}}),
    ("unknown_request", {"peer_blocks": say.pack({0: [0, 1, 2, 3]})}),
    ("unknown_layer", {"layers": ("layers.9.attn",)}),
]
LIMITS: list[dict[str, Any]] = [
    {"seconds": 0.0}, {"seconds": -1.0}, {"seconds": 1e9}, {"seconds": float("nan")},
    {"slots": -1}, {"slots": 17}, {"start": -1}, {"stop": 2**62 + 1}, {"way": "steal"},
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


def test_a_piece_lies_in_a_slot_of_the_lease(attacked: Attacked) -> None:
    session = attacked.session()
    opened = attacked.open(session)
    free = (set(range(4)) - set(opened.slots)).pop()
    slot = opened.slots[0]
    before = attacked.node.staging.copy()
    for start, stop, into in (
        (0, 10, free), (0, 10, 1024), (0, 4097, slot), (10, 0, slot), (0, 2**62, slot),
        (2**62, 0, slot),
    ):  # fmt: skip
        question = say.Gather(
            session=session, lease=opened.lease, start=start, stop=stop, slot=into
        )
        assert code_of(attacked.raw.ask(question)) == "bad_handshake"
    far = say.Gather(session=session, lease=opened.lease, start=2**61, stop=2**61 + 4096, slot=slot)
    assert code_of(attacked.raw.ask(far)) == "fine", "nothing is there, so nothing is gathered"
    assert np.array_equal(attacked.node.staging, before)
    attacked.raw.ask(say.Close(session=session, lease=opened.lease, whole=False))
    attacked.source.assert_idle()


def test_checksums_cost_no_more_than_their_span(attacked: Attacked) -> None:
    session = attacked.session()
    lease = attacked.open(session).lease
    for start, stop, piece, code in (
        (0, say.SUMMED + 1, 4096, "bad_handshake"), (9, 0, 4096, "bad_handshake"),
        (0, 4096, 1, "bad_handshake"), (0, 4096, 1 << 31, "bad_handshake"),
        (0, say.SUMMED, 1 << 30, "summed"), (2**62 - 1, 2**62, 4096, "summed"),
    ):  # fmt: skip
        tracemalloc.start()
        try:
            said = attacked.raw.ask(
                say.Sums(session=session, lease=lease, start=start, stop=stop, piece=piece)
            )
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert code_of(said) == code
        assert peak < BYTES
    attacked.raw.ask(say.Close(session=session, lease=lease, whole=False))


def test_a_reader_that_reads_nothing_releases_nothing_it_should_not(attacked: Attacked) -> None:
    """One rank of two, or a part of the tokens, or some layers, are not all of it."""
    for changed in ({"stop": 49}, {"start": 1}, {"layers": ("layers.0.attn",)}, {}):
        session = attacked.session()
        lease = attacked.open(session, **changed).lease
        attacked.raw.ask(say.Close(session=session, lease=lease, whole=True))
        again = say.Close(session=session, lease=lease, whole=True)
        assert code_of(attacked.raw.ask(again)) == "lease_expired"
    assert "secret" in attacked.node.offers
    attacked.node.offers["secret"].readers.clear()


def test_sessions_are_bounded_and_the_oldest_leave_nothing(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.wire.answers._SESSIONS", 4)
    used, idle = attacked.session(), attacked.session()
    kept = attacked.open(used).lease
    lost = attacked.open(idle).lease
    for _ in range(3):
        attacked.session()
        said = attacked.raw.ask(say.Renew(session=used, lease=kept, seconds=1.0))
        assert code_of(said) == "fine", "who is heard from stays"
    said = attacked.raw.ask(say.Renew(session=idle, lease=lost, seconds=1.0))
    assert code_of(said) == "unknown_session"
    assert len(attacked.node.leases) == 1
    attacked.raw.ask(say.Close(session=used, lease=kept, whole=False))
    attacked.source.assert_idle()


def test_a_process_that_starts_again_leaves_nothing_of_its_last_run(attacked: Attacked) -> None:
    first = attacked.session(run=bytes(16))
    attacked.open(first)
    other = attacked.session(run=bytes(16), name="somebody else")
    theirs = attacked.open(other).lease
    attacked.session(run=bytes([1]) * 16)
    assert code_of(attacked.open(first)) == "unknown_session"
    assert len(attacked.node.leases) == 1
    attacked.raw.ask(say.Close(session=other, lease=theirs, whole=False))
    attacked.source.assert_idle()


def test_plans_and_routes_of_strangers_are_bounded(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.wire.node._ROUTES", 4)
    monkeypatch.setattr("kvatlas.wire.peers._PLANS", 4)
    for number in range(8):
        made = plan_json(small("dense", tp=2))
        made["reasons"] = [f"plan {number}"]
        attacked.session(plan=json.dumps(made).encode())
    assert len(attacked.node._routes) == 4
    assert len(attacked.node.plans._known) == 4
    attacked.works()


def test_layers_in_every_combination_are_not_all_kept(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route keeps what it has compiled, but not for every subset that a peer can name."""
    monkeypatch.setattr(sys.modules["kvatlas.route.route"], "_SHEETS", 6)
    session = attacked.session()
    for number in range(1, 16):
        layers = tuple(f"layers.{i}.attn" for i in range(4) if number >> i & 1)
        opened = attacked.open(session, layers=layers)
        attacked.raw.ask(say.Close(session=session, lease=opened.lease, whole=False))
    assert max(len(made._sheets) for made in attacked.node._routes.values()) == 6
    attacked.works()


# -- floods -------------------------------------------------------------------------------


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_peer_that_never_listens_fills_no_memory(attacked: Attacked) -> None:
    """Large questions, sent as fast as they go, answers never read."""
    gc.collect()
    before = resident()
    text = b"", bytes(16) + bytes(1 << 20)
    sockets: list[Any] = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(4)]
    sent = 0
    try:
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 1)
            socket.setsockopt(zmq.SNDBUF, 1 << 16)
            socket.connect(attacked.node.endpoint)
        for _ in range(200):
            for socket in sockets:
                if socket.poll(5, zmq.POLLOUT):
                    socket.send_multipart(text)
                    sent += 1
    finally:
        for socket in sockets:
            socket.close()
    assert sent > 100
    assert resident() - before < 4 * BYTES
    attacked.works()


# -- fuzzing ------------------------------------------------------------------------------

LEAVES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**62, 2**63 - 1, 10**9])
    | st.text(max_size=20) | st.binary(max_size=40)
)  # fmt: skip
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)  # fmt: skip
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def assert_coded(said: Any, clock: Clock) -> None:
    """An answer, or a refusal that is no defect of the node."""
    assert said is not None
    assert code_of(said) != Code.WIRE_FAILED
    assert clock.seconds < SECONDS


@FUZZ
@given(change=st.tuples(st.sampled_from(sorted(hello())), ANY))
def test_any_hello_is_answered(attacked: Attacked, change: tuple[str, Any]) -> None:
    said = hello()
    said[change[0]] = change[1]
    with Clock() as clock:
        answer = attacked.raw.tell([b"", say.new_key() + msgspec.msgpack.encode(said)])
    assert_coded(answer, clock)


def paths(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if way:
        yield way
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*way, key))


JSON_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)  # fmt: skip
HYBRID = plan_json(small("delta hybrid", tp=2))
DENSE = plan_json(small("dense", tp=2))


@FUZZ
@given(data=st.data())
def test_any_plan_is_answered(attacked: Attacked, data: st.DataObject) -> None:
    """Plans with some of their values replaced, their hash right."""
    made = json.loads(json.dumps(data.draw(st.sampled_from([HYBRID, DENSE]))))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(list(paths(made))))
        inner: Any = made
        for key in way:
            inner = inner[key]
        small_change = isinstance(inner[last], int) and data.draw(st.booleans())
        near = st.integers(-3, 70) | st.sampled_from([2**31, 2**62, 10**9, 4096])
        inner[last] = data.draw(near if small_change else JSON_ANY)
    with Clock() as clock:
        frames = sealed(hello(plan=json.dumps(made).encode()))
        answer = attacked.raw.tell([b"", say.new_key() + frames[1][16:]])
    assert_coded(answer, clock)


@FUZZ
@given(tag=st.sampled_from(["open", "renew", "gather", "sums", "close"]), data=st.data())
def test_any_question_is_answered(attacked: Attacked, tag: str, data: st.DataObject) -> None:
    session = attacked.session()
    lease = attacked.open(session).lease
    question: dict[str, Any] = {
        "open": msgspec.to_builtins(opening(session), builtin_types=(bytes,)),
        "renew": {"seconds": 1.0}, "close": {"whole": True},
        "gather": {"start": 0, "stop": 99, "slot": 0},
        "sums": {"start": 0, "stop": 99, "piece": 4096},
    }[tag]  # fmt: skip
    question = {"say": tag, "session": session} | question
    if tag != "open":
        question["lease"] = lease
    key = data.draw(st.sampled_from(sorted(question)))
    question[key] = data.draw(ANY | st.dictionaries(st.integers(-1, 3), st.binary(max_size=16)))
    with Clock() as clock:
        answer = attacked.raw.tell([b"", say.new_key() + msgspec.msgpack.encode(question)])
    assert_coded(answer, clock)
    attacked.raw.ask(say.Close(session=session, lease=lease, whole=False))
    attacked.node.leases.drop_all()
    attacked.node.offers["secret"].readers.clear()


@FUZZ
@given(st.lists(st.binary(max_size=64), min_size=1, max_size=4))
def test_any_frames_are_answered(attacked: Attacked, some: list[bytes]) -> None:
    with Clock() as clock:
        answer = attacked.raw.tell(some)
    assert_coded(answer, clock)


def test_the_node_works_after_the_fuzzing(attacked: Attacked) -> None:
    attacked.works()
    attacked.source.assert_idle()
