"""The corpus of bad handshakes: refused with a code, cheaply, and the node works on."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvatlas.wire import protocol
from tests.wire import corpus
from tests.wire.attacked import BYTES, SECONDS, Attacked, code_of
from tests.wire.raw import Clock, Raw

FILES = corpus.expected()


def test_the_corpus_is_all_there() -> None:
    assert {path.stem for path in corpus.HERE.glob("*.z")} == set(FILES)
    assert len(FILES) > 90


@pytest.mark.parametrize("name", FILES)
def test_bad_handshakes_are_refused_cheaply(attacked: Attacked, name: str) -> None:
    some = corpus.frame(name)
    limit = 0.3 if FILES[name] == "nothing" else 10.0
    with Raw(attacked.node.endpoint) as raw, Clock() as clock:
        said = raw.tell(some, limit)
    assert code_of(said) == FILES[name]
    assert clock.seconds < SECONDS
    assert not any(len(text) > 4096 for text in texts(said))
    # A field that was renamed would be refused too, and for another reason than the file's.
    renamed = any("unknown field" in text for text in texts(said))
    more = ("unknown_field", "more_in_the_plan", "announced_with_more_in_it")
    assert renamed == (name in more)
    tracemalloc.start()
    try:
        with Raw(attacked.node.endpoint) as raw:
            assert code_of(raw.tell(some, limit)) == FILES[name]
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


def texts(said: Any) -> list[str]:
    return [said.problem, said.got, said.hint] if isinstance(said, protocol.Refusal) else []


def test_the_node_works_after_the_corpus(attacked: Attacked) -> None:
    for name in FILES:
        with Raw(attacked.node.endpoint) as raw:
            raw.send(corpus.frame(name))
    attacked.works()
    attacked.source.assert_idle()


def test_the_corpus_is_what_its_script_makes(tmp_path: Path, monkeypatch: Any) -> None:
    from tests.wire.corpus import make

    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (corpus.HERE / path.name).read_bytes(), "make it anew"
