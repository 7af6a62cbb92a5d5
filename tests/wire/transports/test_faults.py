"""Peers that are killed or stand still: a coded refusal in time, and the next transfer works."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Handle, Link
from tests.wire.transports.conftest import in_its_settings, other_end
from tests.wire.transports.ends import KINDS, OVER_TCP, Kind, Peer, soon
from tests.wire.transports.peer import SIZES, End

LOST = (Code.PEER_LOST, Code.WIRE_FAILED)
BIG = {0: 64 << 20}
REMOTE = [kind for kind in (*KINDS, OVER_TCP) if kind.remote]


@pytest.fixture(scope="module", params=REMOTE, ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield from in_its_settings(request.param)


@pytest.fixture
def near_options(kind: Kind) -> dict[str, Any]:
    return dict(kind.options)


@pytest.fixture
def near(kind: Kind) -> Iterator[End]:
    made = End(kind.name, dict(kind.options), SIZES)
    yield made
    assert made.close() == 0
    made.drop()


def runs(count: int, size: int) -> list[Copy]:
    """Scattered, so that no transport makes one run of them."""
    rng = np.random.default_rng(1)
    src, dst = (rng.permutation(count) * size for _ in range(2))
    return [Copy(0, 0, src, dst, np.full(count, size))]


def refused(act: Callable[[], Any], *codes: Code, within: float = 15) -> None:
    start = time.monotonic()
    with pytest.raises(AtlasError) as refusal:
        act()
    assert refusal.value.code in codes, refusal.value
    assert time.monotonic() - start < within


def works(kind: Kind, near: End) -> None:
    """A new peer is served by the same transport, all bytes right."""
    peer = other_end(kind, {}, "next")
    there = peer.fill(77)
    link = near.transport.connect(peer.metadata, peer.regions)
    link.read([Copy(0, 0, np.array([5]), np.array([9]), np.array([250_000]))]).wait(soon())
    at = near.offsets[0]
    assert np.array_equal(near.bytes[at + 9 : at + 250_009], there[at + 5 : at + 250_005])
    link.close()
    peer.end()


def connect_and_read(near: End, peer: Peer) -> None:
    link = near.transport.connect(peer.metadata, peer.regions)
    try:
        link.read(runs(20, 10_000)).wait(soon(10))
    finally:
        link.close()


def test_killed_before_and_after(kind: Kind, near: End, fresh_far: Callable[..., Peer]) -> None:
    """One peer is gone before anybody connects, one between two reads."""
    if kind is OVER_TCP:
        pytest.skip("as over any other way of NIXL")
    early, late = fresh_far(), fresh_far()
    early.signal(signal.SIGKILL)
    refused(lambda: connect_and_read(near, early), *LOST)
    there = late.fill(4)
    link = near.transport.connect(late.metadata, late.regions)
    copy = Copy(0, 0, np.array([0]), np.array([100]), np.array([200_000]))
    link.read([copy]).wait(soon())
    late.signal(signal.SIGKILL)
    at = near.offsets[0]
    assert np.array_equal(near.bytes[at + 100 : at + 200_100], there[at : at + 200_000])
    refused(lambda: link.read([copy]).wait(soon(10)), *LOST)
    link.close()
    works(kind, near)


def test_killed_during(kind: Kind, fresh_far: Callable[..., Peer]) -> None:
    size = 8 << 10 if kind.name != "mooncake" else 64 << 10
    near, peer = End(kind.name, dict(kind.options), BIG), fresh_far(BIG)
    link = near.transport.connect(peer.metadata, peer.regions)
    link.read(runs(4, size)).wait(soon())
    # Past its first calls and far from done, on any machine: it is asked again and again.
    timer = threading.Timer(0.1, lambda: peer.signal(signal.SIGKILL))
    timer.start()
    guard = near.bytes[: near.offsets[0]].copy()
    refused(lambda: _until_it_fails(link, size), *LOST, within=20)
    timer.join()
    assert np.array_equal(near.bytes[: near.offsets[0]], guard)
    link.close()
    assert near.close() == 0
    near.drop()


def _until_it_fails(link: Link, size: int) -> None:
    deadline = soon(15)
    while time.monotonic() < deadline:
        handle = link.read(runs(BIG[0] // size, size))
        try:
            handle.wait(deadline)
        finally:
            handle.release()


def test_a_peer_that_stands_still(kind: Kind, near: End, fresh_far: Callable[..., Peer]) -> None:
    """Where its processor takes part, the deadline holds; elsewhere it is not even noticed."""
    peer = fresh_far()
    there = peer.fill(9)
    link = near.transport.connect(peer.metadata, peer.regions)
    link.read(runs(1, 100)).wait(soon())
    copy = Copy(0, 0, np.array([0]), np.array([0]), np.array([300_000]))
    if kind.needs_peer:
        peer.signal(signal.SIGSTOP)
        start = time.monotonic()
        handle = link.read([copy])
        refused(lambda: handle.wait(soon(0.5)), Code.DEADLINE)
        assert time.monotonic() - start < 5
    else:
        handle = _read_unnoticed(link, peer, copy)
        at = near.offsets[0]
        assert np.array_equal(near.bytes[at : at + 300_000], there[at : at + 300_000])
    handle.release()
    peer.signal(signal.SIGKILL)
    link.close()


def _read_unnoticed(link: Link, peer: Peer, copy: Copy) -> Handle:
    """A read from a peer that stands still.

    Until both ends have agreed on the way, which takes as long as the machine is busy, a
    read needs the peer: it then goes on, and another one is tried.
    """
    for _ in range(10):
        peer.signal(signal.SIGSTOP)
        handle = link.read([copy])
        try:
            handle.wait(soon(1))
        except AtlasError as refusal:
            assert refusal.code is Code.DEADLINE
            peer.signal(signal.SIGCONT)
            handle.wait(soon())
            handle.release()
        else:
            return handle
    raise AssertionError("every read needs the peer")


def test_closing_beside_a_peer_that_stands_still(
    kind: Kind, fresh_far: Callable[..., Peer]
) -> None:
    near, peer = End(kind.name, dict(kind.options), SIZES), fresh_far()
    link = near.transport.connect(peer.metadata, peer.regions)
    peer.signal(signal.SIGSTOP)
    start = time.monotonic()
    try:
        handle = link.read(runs(20, 10_000))
        handle.wait(soon(0.3))
        handle.release()
    except AtlasError as problem:
        assert problem.code is Code.DEADLINE
    assert near.close() == 0
    assert time.monotonic() - start < 15
    peer.signal(signal.SIGKILL)
    near.drop()
