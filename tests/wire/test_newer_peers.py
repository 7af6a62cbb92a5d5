"""Peers of a newer protocol version that still understands this one: they may say more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, encoding, protocol
from kvatlas.wire.protocol import VERSION
from tests.wire.helpers import End, assert_arrived, ends, small
from tests.wire.test_hostile_servers import told

Json = dict[str, Any]


def welcome(node: Any, **more: Any) -> Json:
    """The welcome of a node, as a mapping, with more in its hello."""
    said = protocol.Welcome(hello=node.hello(with_plan=True), session=bytes(16))
    known: Json = msgspec.msgpack.decode(encoding.encode(said))
    known["hello"] |= more
    return known


def code_of(said: Json) -> Code:
    with pytest.raises(AtlasError) as refused:
        encoding.decode(msgspec.msgpack.encode(said), protocol.Answer)
    return refused.value.code


def test_a_newer_server_that_says_more_is_understood() -> None:
    """Over a real connection: only its first answer differs from that of this version."""
    source = End(small("dense", layout="BLHNC"), 50, seed=1)
    target = End(small("dense"), 50, seed=2)
    with ends(source, target):
        node, real = source.nodes[0], encoding.encode

        def newer(message: protocol.Message) -> bytes:
            payload = real(message)
            if not isinstance(message, protocol.Welcome):
                return payload
            said = msgspec.msgpack.decode(payload) | {"more": [1, {"a": 2}]}
            said["hello"] |= {"version": VERSION + 1, "more": {"b": None}}
            return msgspec.msgpack.encode(said)

        source.offer("r")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoding, "encode", newer)
            session = Session(target.nodes[0], [node.endpoint])
        with session:
            assert [peer.version for peer in session.peers] == [VERSION + 1]
            session.pull("r", destination_blocks=target.blocks, tokens=50).wait(10)
        assert_arrived(source, target, 0)


def test_unknown_fields_are_those_of_newer_versions_alone() -> None:
    end = End(small("dense"), 50)
    with ends(end):
        node = end.nodes[0]
        decoded = encoding.decode(
            msgspec.msgpack.encode(welcome(node, version=VERSION + 1, more=1) | {"more": 1}),
            protocol.Answer,
        )
        assert isinstance(decoded, protocol.Welcome)
        assert decoded.hello.name == node.name
        assert code_of(welcome(node, more=1)) is Code.BAD_HANDSHAKE
        assert code_of(welcome(node) | {"more": 1}) is Code.BAD_HANDSHAKE
        newer = {"version": VERSION + 1, "more": 1}
        assert code_of(welcome(node, **newer, rank=-1)) is Code.BAD_HANDSHAKE
        assert code_of(welcome(node, **newer) | {"session": b"short"}) is Code.BAD_HANDSHAKE
        only_newer = {"version": VERSION + 1, "oldest": VERSION + 1, "more": 1}
        assert code_of(welcome(node, **only_newer)) is Code.UNLIKE_VERSIONS


def test_a_server_of_newer_versions_alone_is_named_as_such() -> None:
    end = End(small("dense"), 50)
    with ends(end):
        about = {"version": VERSION + 2, "oldest": VERSION + 1, "more": 1}
        payload = msgspec.msgpack.encode(welcome(end.nodes[0], **about))
        frame = len(payload).to_bytes(4, "big") + payload
        with told(lambda _: frame) as endpoint, pytest.raises(AtlasError) as refused:
            Session(end.nodes[0], [endpoint], timeout=5)
        assert refused.value.code is Code.UNLIKE_VERSIONS
