"""A live node, asked anything: a coded answer each time, within its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.errors import Code
from kvatlas.wire import protocol
from tests.wire.attacked import SECONDS, Attacked, code_of, opening
from tests.wire.corpus.make import hello, plan_json, sealed
from tests.wire.helpers import small
from tests.wire.raw import Clock, connected, framed

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
        answer = attacked.raw.tell(sealed(said))
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
        answer = attacked.raw.tell(sealed(hello(plan=json.dumps(made).encode())))
    assert_coded(answer, clock)


@FUZZ
@given(
    tag=st.sampled_from(
        ["keep", "open", "borrow", "renew", "gather", "get_checksums", "close", "announce"]
    ),
    data=st.data(),
)
def test_any_question_is_answered(attacked: Attacked, tag: str, data: st.DataObject) -> None:
    session = attacked.session()
    lease = attacked.open(session).lease
    question: dict[str, Any] = {
        "open": msgspec.to_builtins(opening(session), builtin_types=(bytes,)),
        "keep": {"request": "r", "seconds": 1.0},
        "renew": {"seconds": 1.0}, "close": {"complete": True},
        "gather": {"start": 0, "stop": 99, "buffer": 0},
        "borrow": {"buffers": 1, "seconds": 1.0},
        "get_checksums": {"start": 0, "stop": 99, "piece": 4096},
        "announce": {
            "request": "r", "offer": "o", "endpoint": "tcp://127.0.0.1:1", "start": 0, "stop": 50,
            "seconds": 0.1,
        },
    }[tag]  # fmt: skip
    question = {"type": tag} | question
    if tag != "keep":
        question["session"] = session
    if tag not in ("keep", "open", "announce"):
        question["lease"] = lease
    key = data.draw(st.sampled_from(sorted(question)))
    question[key] = data.draw(ANY | st.dictionaries(st.integers(-1, 3), st.binary(max_size=16)))
    with Clock() as clock:
        answer = attacked.raw.tell(sealed(question))
    assert_coded(answer, clock)
    attacked.raw.ask(protocol.Close(session=session, lease=lease, complete=False))
    attacked.node.leases.drop_all()
    attacked.node.offers["secret"].read_by.clear()


@FUZZ
@given(st.binary(min_size=1, max_size=200))
def test_any_frame_is_answered(attacked: Attacked, some: bytes) -> None:
    with Clock() as clock:
        answer = attacked.raw.tell(framed(some))
    assert_coded(answer, clock)


@FUZZ
@given(st.binary(max_size=64))
def test_any_bytes_end_no_more_than_their_connection(attacked: Attacked, some: bytes) -> None:
    with connected(attacked.node.endpoint) as stranger:
        stranger.sendall(some)
    assert code_of(attacked.raw.tell(framed(b"?"))) == "bad_handshake"


def test_the_node_works_after_the_fuzzing(attacked: Attacked) -> None:
    attacked.works()
    attacked.source.assert_idle()
