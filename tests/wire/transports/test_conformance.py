"""What every transport does alike, between two processes, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvatlas.copying.memory import STAGING
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory
from kvatlas.wire.transports.errors import MAX_METADATA_BYTES
from tests.wire.transports.conftest import Far, other_end
from tests.wire.transports.ends import Kind, Peer, eventually, expected, scattered, soon
from tests.wire.transports.peer import SIZES, End

ROUNDS = [(1, "mixed"), (7, "long"), (40, "alike"), (300, "alike"), (200, "mixed"), (60, "long")]


def one(src: int, dst: int, length: int, source_pool: int = 0, destination_pool: int = 0) -> Copy:
    return Copy(source_pool, destination_pool, np.array([src]), np.array([dst]), np.array([length]))


@pytest.mark.parametrize(("most", "lengths"), ROUNDS)
def test_scattered_reads(far: Far, near: End, most: int, lengths: str) -> None:
    rng = np.random.default_rng(most)
    link = near.transport.connect(far.metadata, far.regions)
    there = far.fill(int(rng.integers(1000)))
    near.fill(int(rng.integers(1000)))
    here = near.bytes.copy()
    copies = scattered(rng, SIZES, most, lengths=lengths)
    handle = link.read(copies)
    handle.wait(soon())
    handle.release()
    want = expected(there, here, copies, near.offsets)
    assert np.array_equal(near.bytes, want)
    assert np.array_equal(far.held(), there)
    assert not np.array_equal(want, here)
    link.close()


def test_many_short_runs(far: Far, near: End, kind: Kind) -> None:
    count = 1_500 if kind.name == "mooncake" else 2_400
    at = np.random.default_rng(3).permutation(2_400)[:count] * 8
    copies = [Copy(0, STAGING, at * 15, at, np.broadcast_to(np.int64(8), count))]
    there = far.fill(5)
    near.fill(6)
    want = expected(there, near.bytes, copies, near.offsets)
    link = near.transport.connect(far.metadata, far.regions)
    link.read(copies).wait(soon())
    assert np.array_equal(near.bytes, want)
    link.close()


def test_many_links_and_operations_at_once(
    kind: Kind, far: Far, near: End, near_options: dict[str, Any]
) -> None:
    second = other_end(kind, near_options, "second")
    links = [near.transport.connect(p.metadata, p.regions) for p in (far, second, far, second)]
    there = [far.fill(1), second.fill(2)]
    near.fill(3)
    want, handles = near.bytes.copy(), []
    for turn in range(12):
        copies = [one(turn * 900, turn * 5_000 + 11, 4_900, source_pool=1)]
        handles.append(links[turn % 4].read(copies))
        want = expected(there[turn % 2], want, copies, near.offsets)
    for handle in reversed(handles):
        handle.wait(soon())
        handle.release()
    assert np.array_equal(near.bytes, want)
    for link in links[:3]:
        link.close()
    links[3].read([one(0, 0, 100)]).wait(soon())  # its peer's other link is closed
    links[3].close()
    second.end()


def test_nothing_to_copy_is_done(far: Far, near: End) -> None:
    link = near.transport.connect(far.metadata, far.regions)
    nothing = np.zeros(0, dtype=np.int64)
    for copies in ([], [Copy(0, 0, nothing, nothing, nothing)]):
        handle = link.read(copies)
        handle.wait(soon(1))
        handle.release()
        handle.release()
    link.close()


@pytest.mark.parametrize(
    "bad",
    [
        one(-1, 0, 8),
        one(0, -1, 8),
        one(SIZES[0] - 7, 0, 8),
        one(0, SIZES[0] - 7, 8),
        one(0, 0, 0),
        one(0, 0, -4),
        one(2**62, 0, 8),
        one(0, 0, 8, source_pool=7),
        one(0, 0, 8, destination_pool=7),
        one(0, 0, SIZES[0] + 1),
    ],
)
def test_what_leaves_a_region_is_refused(far: Far, near: End, bad: Copy) -> None:
    link = near.transport.connect(far.metadata, far.regions)
    there, here = far.fill(1), near.bytes.copy()
    with pytest.raises(AtlasError) as refusal:
        link.read([one(0, 0, 4), bad])
    assert refusal.value.code is Code.OUT_OF_BOUNDS
    assert np.array_equal(near.bytes, here)
    assert np.array_equal(far.held(), there)
    link.close()


def test_metadata_from_outside(far: Far, near: End) -> None:
    good, rng = far.metadata, np.random.default_rng(0)
    bad = [good[:stop] for stop in rng.integers(0, len(good), 20).tolist()]
    bad += [b"", b"\x00", good + b"\x00", good * 2, b"x" * (MAX_METADATA_BYTES + 1)]
    bad += [rng.bytes(int(size)) for size in rng.integers(1, 400, 40)]
    bad += [
        b"\x82\xa4type\xa6pigeon",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
    ]
    for metadata in bad:
        with pytest.raises(AtlasError) as refusal:
            near.transport.connect(metadata, far.regions)
        assert refusal.value.code in (Code.BAD_HANDSHAKE, Code.PEER_LOST), metadata
    for place in rng.integers(0, len(good), 30).tolist():
        flipped = bytearray(good)
        flipped[place] ^= 1 << int(rng.integers(8))
        try:
            near.transport.connect(bytes(flipped), far.regions).close()
        except AtlasError as problem:
            assert problem.code in (Code.BAD_HANDSHAKE, Code.PEER_LOST)
    link = near.transport.connect(good, far.regions)
    link.read([one(0, 0, 64)]).wait(soon())
    link.close()


@pytest.mark.parametrize("change", ["grown", "moved", "unknown"])
def test_regions_that_the_peer_does_not_have(far: Far, near: End, change: str) -> None:
    """Refused before a byte moves, or by the peer, which then still serves."""
    region = far.regions[0]
    wrong: dict[int, Memory] = {
        "grown": {0: dataclasses.replace(region, nbytes=1 << 33)},
        "moved": {0: dataclasses.replace(region, address=region.address + (1 << 40))},
        "unknown": {9: Memory(1 << 45, 4096)},
    }[change]
    if far.metadata and near.transport.name == "shm" and change == "moved":
        pytest.skip("a peer's addresses mean nothing in shared memory")
    pool = next(iter(wrong))
    with pytest.raises(AtlasError) as refusal:
        _connect_and_read(near, far.metadata, wrong, one(wrong[pool].nbytes - 64, 0, 64, pool))
    assert refusal.value.code in (Code.BAD_HANDSHAKE, Code.WIRE_FAILED)
    link = near.transport.connect(far.metadata, far.regions)
    eventually(lambda: _reads(link))
    link.read([one(0, 0, 64)]).wait(soon())
    link.close()


def _connect_and_read(end: End, metadata: bytes, regions: dict[int, Memory], copy: Copy) -> None:
    link = end.transport.connect(metadata, regions)
    try:
        link.read([copy]).wait(soon())
    finally:
        link.close()


def _reads(link: Any) -> bool:
    try:
        link.read([one(0, 0, 64)]).wait(soon())
    except AtlasError:
        return False
    return True


def test_a_region_is_registered_once(near: End) -> None:
    with pytest.raises(AtlasError) as refusal:
        near.transport.register({5: Memory(1 << 20, 1), 0: near.regions[0]})
    assert refusal.value.code is Code.TWICE
    assert near.transport.registered == len(SIZES)


def test_closing_gives_everything_back(kind: Kind, near_options: dict[str, Any], far: Far) -> None:
    end = End(kind.name, near_options, SIZES)
    link = end.transport.connect(far.metadata, far.regions)
    handle = link.read([one(0, 0, 64)])
    handle.wait(soon())
    assert end.transport.registered == len(SIZES)
    link.close()
    link.close()
    with pytest.raises(AtlasError) as refusal:
        link.read([one(0, 0, 64)])
    assert refusal.value.code in (Code.WIRE_FAILED, Code.PEER_LOST)
    assert end.close() == 0
    handle.release()
    for act in (
        lambda: end.transport.connect(far.metadata, far.regions),
        lambda: end.transport.register(end.regions),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.WIRE_FAILED
    assert end.transport.registered == 0
    end.drop()


def test_a_released_operation_is_not_done(far: Far, near: End) -> None:
    link = near.transport.connect(far.metadata, far.regions)
    handle = link.read([one(0, 0, 64)])
    handle.release()
    try:
        assert handle.poll()  # over before it was given up
    except AtlasError as refusal:
        assert refusal.code is Code.CANCELLED
    link.close()


def test_a_peer_that_closed_holds_nothing(
    kind: Kind, near_options: dict[str, Any], near: End
) -> None:
    gone = other_end(kind, near_options, "closing")
    link = near.transport.connect(gone.metadata, gone.regions)
    link.read([one(0, 0, 64)]).wait(soon())
    assert gone.close() == 0
    gone.end()
    if isinstance(gone, Peer):
        assert gone.process.exitcode == 0
    with pytest.raises(AtlasError) as refusal:
        link.read([one(0, 0, 64)]).wait(soon())
    assert refusal.value.code in (Code.PEER_LOST, Code.WIRE_FAILED)
    link.close()
