"""The corpus of bad handshakes: refused with a code, cheaply, and the node works on."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, protocol
from tests.wire import corpus
from tests.wire.attacked import BYTES, SECONDS, Attacked, code_of, greeting
from tests.wire.helpers import End, ends, small
from tests.wire.raw import Clock, Raw

FILES = corpus.expected()


def test_the_corpus_is_all_there() -> None:
    assert {path.stem for path in corpus.HERE.glob("*.z")} == set(FILES)
    assert len(FILES) > 90


@pytest.mark.parametrize("name", FILES)
def test_bad_handshakes_are_refused_cheaply(attacked: Attacked, name: str) -> None:
    some = corpus.frames(name)
    limit = 0.3 if FILES[name] == "nothing" else 10.0
    with Raw(attacked.node.endpoint) as raw, Clock() as clock:
        said = raw.tell(renewed(some), limit)
    assert code_of(said) == FILES[name]
    assert clock.seconds < SECONDS
    assert not any(len(text) > 4096 for text in texts(said))
    # A field that was renamed would be refused too, and for another reason than the file's.
    renamed = any("unknown field" in text for text in texts(said))
    assert renamed == (name in ("unknown_field", "more_in_the_plan"))
    tracemalloc.start()
    try:
        with Raw(attacked.node.endpoint) as raw:
            assert code_of(raw.tell(renewed(some), limit)) == FILES[name]
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


def renewed(some: list[bytes]) -> list[bytes]:
    """The same message with a new nonce, so that it is not refused as said before."""
    if len(some) == 2 and len(some[1]) > 16 and not some[0]:
        return [some[0], protocol.new_key() + some[1][16:]]
    return some


def texts(said: Any) -> list[str]:
    return [said.problem, said.got, said.hint] if isinstance(said, protocol.Refusal) else []


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
        frames = protocol.seal(greeting(), protocol.new_key(), b"s")
        assert isinstance(raw.tell(frames), protocol.Welcome)
        for _ in range(2):
            assert code_of(raw.tell(frames)) == "bad_handshake"


def of(source: End) -> tuple[str, bytes | None]:
    return source.endpoints[0], source.nodes[0].secret


def test_a_message_that_is_not_signed_is_not_remembered() -> None:
    """Else a stranger could make a node forget what it has heard."""
    with ends(End(small("dense"), 50, secret=b"s")) as (source,):
        with Raw(source.endpoints[0], b"s") as raw:
            for _ in range(20):
                assert code_of(raw.tell([bytes(32), protocol.new_key() + b"x"])) == "bad_signature"
        assert not source.nodes[0].server._nonces


def test_what_was_heard_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.rpc._NONCES", 8)
    with ends(End(small("dense"), 50)) as (source,), Raw(source.endpoints[0]) as raw:
        for _ in range(20):
            raw.ask(protocol.Renew(session=bytes(16), lease=bytes(16), seconds=1.0))
        assert len(source.nodes[0].server._nonces) == 8
