"""Nodes exchange caches only if the same weights and settings computed them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity
from kvatlas.wire import Node, Session, protocol
from tests.identities import OURS
from tests.wire.attacked import Attacked, code_of, greeting
from tests.wire.corpus.make import hello
from tests.wire.faulty import failure
from tests.wire.helpers import Buffers, End, Local, assert_arrived, ends, pull_all, small
from tests.wire.raw import framed

TUNED = CacheIdentity(weights="a fine-tune of the same shape")
ADAPTED = OURS.for_request(adapter="support-bot")


def two(src: dict[str, Any], dst: dict[str, Any]) -> tuple[End, End]:
    """Two source ranks and one destination of one model."""
    source = End(small("dense", tp=2), 50, seed=1, **src)
    return source, End(small("dense", layout="BLHNC"), 50, seed=2, **dst)


def refused(node: Node, endpoints: list[str]) -> AtlasError:
    with pytest.raises(AtlasError) as refusal:
        Session(node, endpoints).close()
    return refusal.value


@pytest.mark.parametrize(
    "other",
    [
        TUNED,
        CacheIdentity(weights=OURS.weights, config="another RoPE base"),
        CacheIdentity(weights=OURS.weights, salt="another tenant's"),
        ADAPTED,
    ],
    ids=["weights", "config", "salt", "adapter"],
)
def test_another_identity_is_refused_in_both_directions(other: CacheIdentity) -> None:
    with ends(*two({}, {"identity": other})) as (source, target):
        source.offer("r")
        for node, endpoints in (
            (target.nodes[0], source.endpoints),
            (source.nodes[1], target.endpoints),
        ):
            error = refused(node, endpoints)
            assert error.code is Code.DIFFERENT_IDENTITY
            assert "check_identity=False" in error.hint
        target.buffers[0].assert_untouched()


def test_the_error_names_both_weights() -> None:
    with ends(*two({}, {"identity": TUNED})) as (source, target):
        error = refused(target.nodes[0], source.endpoints)
        assert OURS.weights in str(error.got)
        assert TUNED.weights in str(error.got)


def test_a_salt_is_compared_but_not_shown() -> None:
    salted = [CacheIdentity(weights="w", salt=salt) for salt in ("first secret", "second secret")]
    with ends(*two({"identity": salted[0]}, {"identity": salted[1]})) as (source, target):
        error = refused(target.nodes[0], source.endpoints)
        assert error.code is Code.DIFFERENT_IDENTITY
        assert "secret" not in str(error)


def test_both_ends_may_accept_any_identity() -> None:
    anyone: dict[str, Any] = {"check_identity": False}
    for src, dst in (({}, anyone), (anyone, {"identity": TUNED})):
        with ends(*two(src, dst | {"identity": TUNED})) as (source, target):
            assert refused(target.nodes[0], source.endpoints).code is Code.DIFFERENT_IDENTITY
    with ends(*two(anyone, anyone | {"identity": None})) as (source, target):
        source.offer("r")
        pull_all(source, target, "r", checksums=True)


def test_a_node_needs_an_identity_unless_it_accepts_any() -> None:
    made = small("dense")
    about: dict[str, Any] = {"memory": Buffers(made, 0).memory}
    wrong: list[Any] = [None, "the weights", {"weights": "w"}]
    for identity in wrong:
        with pytest.raises(AtlasError) as refusal:
            Node(made, transport=Local(), identity=identity, **about)
        assert refusal.value.code is Code.BAD_CONFIG
    Node(made, transport=Local(), check_identity=False, **about).close()


def test_a_request_with_an_adapter_is_read_by_requests_with_that_adapter() -> None:
    with ends(*two({}, {})) as (source, target):
        source.offer("r", identity=ADAPTED)
        with Session(target.nodes[0], source.endpoints) as session:
            about: dict[str, Any] = {"destination_blocks": target.blocks, "tokens": 50}
            for wrong in (None, OURS.for_request(adapter="another"), TUNED):
                transfer = session.pull("r", **about, identity=wrong)
                assert failure(transfer) is Code.DIFFERENT_IDENTITY
                assert transfer.wait_released(10)
            target.buffers[0].assert_untouched()
            session.pull("r", **about, identity=ADAPTED).wait(10)
        assert_arrived(source, target, 0)


@pytest.mark.parametrize("lenient", ["source", "target"])
def test_one_end_that_compares_identities_is_enough(lenient: str) -> None:
    about: list[dict[str, Any]] = [
        {"check_identity": lenient == end} for end in ("target", "source")
    ]
    with ends(*two(*about)) as (source, target):
        source.offer("r", identity=ADAPTED)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = session.pull("r", destination_blocks=target.blocks, tokens=50)
            assert failure(transfer) is Code.DIFFERENT_IDENTITY
            assert transfer.wait_released(10)
        kinds: dict[str, Any] = {"source": source.plan, "pushers": ["end-1"]}
        target.nodes[0].expect("p", target.blocks, 50, **kinds, identity=ADAPTED)
        with Session(source.nodes[0], target.endpoints) as session:
            pushed = session.push("p", source_blocks=source.blocks, tokens=50)
            assert failure(pushed) is Code.DIFFERENT_IDENTITY
        target.buffers[0].assert_untouched()


def test_a_push_with_an_adapter_is_expected_with_that_adapter() -> None:
    with ends(*two({}, {})) as (source, target):
        about: dict[str, Any] = {"source": source.plan, "pushers": ["end-1"]}
        expected = target.nodes[0].expect("r", target.blocks, 50, **about, identity=ADAPTED)
        for node in source.nodes:
            with Session(node, target.endpoints) as session:
                pushed: dict[str, Any] = {"source_blocks": source.blocks, "tokens": 50}
                assert failure(session.push("r", **pushed)) is Code.DIFFERENT_IDENTITY
                session.push("r", **pushed, identity=ADAPTED).wait(10)
        assert expected.ready.is_set()
        assert_arrived(source, target, 0)


def test_a_peer_of_the_version_before_identities_is_refused_and_understands_why(
    attacked: Attacked,
) -> None:
    said = attacked.raw.ask(greeting(version=2, oldest=2, identity=None))
    assert code_of(said) == "different_identity"


def test_a_node_that_accepts_any_identity_answers_an_older_peer_in_its_version() -> None:
    made = small("dense", tp=2)
    with ends(End(made, 50, check_identity=False)) as (end,):
        attacked = Attacked(end, end)
        welcome = attacked.raw.ask(greeting(version=2, oldest=2, identity=None))
        assert isinstance(welcome, protocol.Welcome)
        assert welcome.hello.identity is None, "version 2 refuses an unknown field"
        attacked.raw.close()


def test_a_hello_with_a_malformed_identity_is_refused(attacked: Attacked) -> None:
    for identity in ({"weights": ""}, {"weights": "w" * 2000}, {"weights": 7}, {"salt": "s"}):
        said = attacked.raw.tell(framed(msgspec.msgpack.encode(hello(identity=identity))))
        assert code_of(said) == "bad_handshake", identity
    attacked.works()
