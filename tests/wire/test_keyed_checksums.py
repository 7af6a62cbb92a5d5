"""Checksums between protected nodes are keyed: who can change bytes cannot keep their checksum."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Session, protocol
from kvatlas.wire.piece_sums import mac_key, piece_sum
from tests.wire.faulty import Act, failure, pull
from tests.wire.helpers import End, assert_arrived, ends, small

SECRET = bytes(range(16))
UNSEEN = np.frombuffer((0x1DB710641).to_bytes(5, "little"), np.uint8)
"""The generator of CRC-32: bytes that are changed by it keep their CRC-32."""


def pair(secret: bytes | None) -> tuple[End, End]:
    source = End(small("dense"), 50, seed=1, secret=secret)
    return source, End(small("dense", layout="BLHNC"), 50, seed=2, secret=secret)


def changed_unseen(end: End) -> Any:
    """Change five bytes in the middle of a run, on their way into the first read of an end."""
    first = [True]

    def change(act: Act, copies: Sequence[Copy]) -> Handle:
        handle = act()
        for copy in copies[:1] if first else ():
            first.clear()
            pools = end.nodes[0].pools
            at = int(copy.destination[0])
            run = pools[copy.destination_pool][at : at + int(copy.length[0])]
            before = zlib.crc32(run.tobytes())
            run[8:13] ^= UNSEEN
            assert zlib.crc32(run.tobytes()) == before
        return handle

    return change


@pytest.mark.parametrize("how", ["direct", "staged", "coalesced"])
@pytest.mark.parametrize("secret", [SECRET, None], ids=["protected", "plain"])
def test_a_change_that_keeps_the_crc_is_detected_with_a_secret(how: str, secret: Any) -> None:
    with ends(*pair(secret)) as (source, target):
        source.offer("r")
        target.arounds = changed_unseen(target)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = pull(session, target, how=how, checksums=True)
            if secret is None:
                assert transfer.wait(10).ready, "CRC-32 detects damage, not an attacker"
                return
            assert failure(transfer) is Code.CHECKSUM
            assert source.released == []
            pull(session, target, how=how, checksums=True).wait(10)
        assert_arrived(source, target, 0)


def test_a_pushed_change_that_keeps_the_crc_is_detected() -> None:
    with ends(*pair(SECRET)) as (source, target):
        expected = target.nodes[0].expect(
            "r", target.blocks, 50, source=source.plan, pushers=["end-1"]
        )
        target.arounds = changed_unseen(target)
        with Session(source.nodes[0], target.endpoints) as session:
            about: dict[str, Any] = {"source_blocks": source.blocks, "tokens": 50}
            assert failure(session.push("r", **about, checksums=True)) is Code.CHECKSUM
            assert not expected.ready.is_set()
            session.push("r", **about, checksums=True).wait(10)
        assert_arrived(source, target, 0)


def test_a_peer_of_version_3_has_no_keyed_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not trusted with less: the pull is refused. Without checksums it goes on."""
    with ends(*pair(SECRET)) as (source, target):
        hello = source.nodes[0].hello

        def older(**about: Any) -> protocol.Hello:
            return msgspec.structs.replace(hello(**about), version=3, oldest=2)

        monkeypatch.setattr(source.nodes[0], "hello", older)
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            with pytest.raises(AtlasError) as refusal:
                pull(session, target, checksums=True).wait(10)
            assert refusal.value.code is Code.UNLIKE_VERSIONS
            pull(session, target).wait(10)
        assert_arrived(source, target, 0)


def test_sums_differ_by_session_lease_and_content() -> None:
    one, two = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    keys = [mac_key(bytes([s]) * 16, bytes([n]) * 16) for s in (1, 2) for n in (1, 2)]
    sums = {piece_sum(piece, key) for piece in (one, two) for key in keys}
    assert len(sums) == 8
