"""What is said travels whole and limited; anything else is refused."""

from __future__ import annotations

import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.errors import Code, MissingExtraError
from kvatlas.wire import encoding, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.encoding import raise_refusal, refusal_of
from kvatlas.wire.security import Security

KEY = bytes(range(16))
SOME: list[protocol.Message] = [
    protocol.Open(
        session=KEY, direction="pull", request="r", blocks={0: b""}, start=0, stop=9, seconds=1.0
    ),
    protocol.Keep(request="r", seconds=2.0),
    protocol.Renew(session=KEY, lease=KEY, seconds=2.0),
    protocol.Gather(session=KEY, lease=KEY, start=0, stop=4096, buffer=1),
    protocol.GetChecksums(session=KEY, lease=KEY, start=0, stop=1 << 20, piece=4096),
    protocol.Close(session=KEY, lease=KEY, complete=True),
]


@pytest.mark.parametrize("message", SOME, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_said(message: protocol.Message) -> None:
    assert encoding.decode(encoding.encode(message), protocol.Question) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_coded_refusal(payload: bytes) -> None:
    for kind in (protocol.Question, protocol.Answer):
        with pytest.raises(AtlasError) as refusal:
            encoding.decode(payload, kind)
        assert refusal.value.code is Code.BAD_HANDSHAKE


@given(st.integers(0, 4), st.data())
def test_a_changed_message_is_another_or_a_coded_refusal(n: int, data: st.DataObject) -> None:
    payload = bytearray(encoding.encode(SOME[n]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        said = encoding.decode(bytes(payload), protocol.Question)
    except AtlasError as refused:
        assert refused.code is Code.BAD_HANDSHAKE
    else:
        assert isinstance(said, protocol.Message)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(AtlasError) as refusal:
        encoding.encode(protocol.Checksums(sums=bytes(protocol.MAX_MESSAGE_BYTES)))
    assert refusal.value.code is Code.TOO_MANY


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
    said = refusal_of(AtlasError(code, "rule" * 2000, got={1: 2}, hint="hint"))
    back = encoding.decode(encoding.encode(said), protocol.Answer)
    with pytest.raises(AtlasError) as refusal:
        raise_refusal(back)
    assert refusal.value.code is code


def test_a_refusal_of_a_later_version_is_still_one() -> None:
    said = protocol.Refusal(code="not_yet_thought_of", problem="r", got="g", hint="h")
    with pytest.raises(AtlasError) as refusal:
        raise_refusal(said)
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
            encoding.decode(encoding.encode(message), protocol.Answer)


def test_a_message_holds_no_more_than_its_bytes() -> None:
    """No field allocates what a length in it claims: lengths are those of the message."""
    hollow = msgspec.msgpack.encode({"type": "renew"})[:-5] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(AtlasError) as refusal:
        encoding.decode(hollow, protocol.Question)
    assert refusal.value.code is Code.BAD_HANDSHAKE


def test_without_cryptography_a_secret_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtraError) as refusal:
        Security(bytes(32))
    assert refusal.value.code is Code.MISSING_EXTRA
    assert "kvatlas[wire]" in refusal.value.hint
    assert not Security().protected, "without a secret nothing is needed"


@pytest.mark.parametrize(
    "endpoint", ["nowhere", "tcp://", "tcp://host", "tcp://:5", "tcp://host:99999", "tcp://a/b:1"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        Channels(Security()).ask(endpoint, SOME[1], deadline=time.monotonic() + 10)
    assert refusal.value.code is Code.WIRE_FAILED
