"""What is said travels whole, signed and limited; anything else is refused."""

from __future__ import annotations

import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import protocol
from kvatlas.wire.rpc import ask, zmq

KEY = bytes(range(16))
SOME: list[protocol.Message] = [
    protocol.Open(
        session=KEY, direction="pull", request="r", blocks={0: b""}, start=0, stop=9, seconds=1.0
    ),
    protocol.Renew(session=KEY, lease=KEY, seconds=2.0),
    protocol.Gather(session=KEY, lease=KEY, start=0, stop=4096, buffer=1),
    protocol.GetChecksums(session=KEY, lease=KEY, start=0, stop=1 << 20, piece=4096),
    protocol.Close(session=KEY, lease=KEY, complete=True),
]


@pytest.mark.parametrize("message", SOME, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("secret", [None, b"", b"secret"])
def test_a_message_arrives_as_it_was_said(message: protocol.Message, secret: bytes | None) -> None:
    frames = protocol.seal(message, KEY, secret)
    assert protocol.unseal(frames, protocol.Question, secret) == (KEY, message)


@given(st.integers(0, 4), st.data())
def test_a_signed_message_cannot_be_changed(number: int, data: st.DataObject) -> None:
    frames = protocol.seal(SOME[number], KEY, b"secret")
    which = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    changed = bytearray(frames[which])
    changed[at] ^= data.draw(st.integers(1, 255))
    frames[which] = bytes(changed)
    with pytest.raises(AtlasError) as refusal:
        protocol.unseal(frames, protocol.Question, b"secret")
    assert refusal.value.code is Code.BAD_SIGNATURE


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames_are_a_message_or_a_coded_refusal(frames: list[bytes]) -> None:
    for kind in (protocol.Question, protocol.Answer):
        with pytest.raises(AtlasError) as refusal:
            protocol.unseal(frames, kind, None)
        assert refusal.value.code in (Code.BAD_HANDSHAKE, Code.BAD_SIGNATURE)


@given(st.integers(0, 4), st.data())
def test_a_changed_message_is_another_or_a_coded_refusal(n: int, data: st.DataObject) -> None:
    payload = bytearray(protocol.seal(SOME[n], KEY, None)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(16, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, said = protocol.unseal([b"", bytes(payload)], protocol.Question, None)
    except AtlasError as refused:
        assert refused.code is Code.BAD_HANDSHAKE
    else:
        assert isinstance(said, protocol.Message)


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 2**32 - 1), max_size=20)))
def test_block_tables_travel(blocks: dict[int, list[int]]) -> None:
    back = protocol.unpack_tables(protocol.pack_tables(blocks))
    assert {group: ids.tolist() for group, ids in back.items()} == blocks


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5, 4097])
def test_a_block_table_is_whole_numbers(nbytes: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        protocol.unpack_tables({0: bytes(nbytes)})
    assert refusal.value.code is Code.BAD_HANDSHAKE


@pytest.mark.parametrize("code", list(Code))
def test_every_refusal_reaches_the_peer_with_its_code(code: Code) -> None:
    said = protocol.refusal_of(AtlasError(code, "rule" * 2000, got={1: 2}, hint="hint"))
    _, back = protocol.unseal(protocol.seal(said, KEY, None), protocol.Answer, None)
    with pytest.raises(AtlasError) as refusal:
        protocol.raise_refusal(back)
    assert refusal.value.code is code


def test_a_refusal_of_a_later_version_is_still_one() -> None:
    said = protocol.Refusal(code="not_yet_thought_of", problem="r", got="g", hint="h")
    with pytest.raises(AtlasError) as refusal:
        protocol.raise_refusal(said)
    assert refusal.value.code is Code.WIRE_FAILED


def test_questions_and_answers_are_never_taken_for_each_other() -> None:
    """A message that is sent back to its sender means nothing."""
    tags = [
        {kind.__struct_config__.tag for kind in union.__args__}
        for union in (protocol.Question, protocol.Answer)
    ]
    assert not tags[0] & tags[1]
    for message in SOME:
        with pytest.raises(AtlasError):
            protocol.unseal(protocol.seal(message, KEY, None), protocol.Answer, None)


def test_a_message_holds_no_more_than_its_bytes() -> None:
    """No field allocates what a length in it claims: lengths are those of the message."""
    hollow = msgspec.msgpack.encode({"type": "renew"})[:-5] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(AtlasError) as refusal:
        protocol.unseal([b"", KEY + hollow], protocol.Question, None)
    assert refusal.value.code is Code.BAD_HANDSHAKE


def test_without_zeromq_a_wire_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(AtlasError) as refusal:
        zmq()
    assert refusal.value.code is Code.MISSING_EXTRA
    assert "kvatlas[wire]" in refusal.value.hint


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        ask("nowhere", SOME[1], secret=None, deadline=1e18)
    assert refusal.value.code is Code.WIRE_FAILED
