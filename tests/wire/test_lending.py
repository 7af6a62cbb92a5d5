"""Staging buffers for peers: who gets them, who goes first, and who loses them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying.memory import Memory
from kvatlas.wire.leases import Lease, Leases
from kvatlas.wire.server import lending as rules
from kvatlas.wire.server.lending import Lending
from kvatlas.wire.staging import Loan, PeerSegments, StagingBuffers
from kvatlas.wire.transports.base import OnePeerMemory

PIECE = 4096
_keys = itertools.count()


def lease_of(name: str, **given: Any) -> Lease:
    key = next(_keys).to_bytes(16, "little")
    about: dict[str, Any] = {
        "key": key, "session": name.encode().ljust(16), "request": "r",
        "complete": True, "stream": None, "entries": 1,
        "expires": time.monotonic() + 60, "peer": ("here", name),
    }  # fmt: skip
    return Lease(**about | given)


class Buffers:
    """Some buffers, and what is reclaimed."""

    def __init__(self, count: int, *, wiped: bool = False) -> None:
        staging = np.zeros(2 * count * PIECE, np.uint8)
        self.staging = StagingBuffers(staging, PIECE, wiped=wiped)
        self.lending = Lending(self.staging, count)
        self.leases: list[Lease] = []

    @property
    def reclaimed(self) -> list[Lease]:
        return [lease for lease in self.leases if lease.reclaimed]

    def lend(self, lease: Lease, seconds: float = 0.0, count: int = 2) -> bool:
        self.leases.append(lease)
        loan = self.lending.lend(lease, count, seconds)
        if loan is not None:
            assert len(loan.buffers) == count
            assert lease.loan is loan
            lease.asked_at = lease.lent_at
        return loan is not None

    def give_back(self, lease: Lease) -> None:
        assert lease.loan is not None
        lease.over = True
        self.lending.end(lease)


def test_a_peer_alone_uses_all_buffers_and_no_lease_more_than_half() -> None:
    buffers, one, two, three = Buffers(4), *(lease_of("a") for _ in range(3))
    assert buffers.lend(one)
    assert buffers.lend(two)
    assert buffers.lending.lent == 4
    assert not buffers.lend(three)
    buffers.give_back(one)
    loan = buffers.lending.lend(three, 16, 0.0)
    assert loan is not None
    assert len(loan.buffers) == 2
    assert not buffers.reclaimed


def test_a_peer_without_buffers_goes_before_one_that_has_some() -> None:
    buffers, held, later = Buffers(4), [lease_of("a") for _ in range(2)], lease_of("a")
    for lease in held:
        assert buffers.lend(lease)
    got: list[str] = []

    def wait(lease: Lease) -> None:
        assert buffers.lend(lease, 5.0)
        got.append(lease.peer[1])

    threads = [threading.Thread(target=wait, args=[later])]
    threads[0].start()
    time.sleep(0.1)
    newcomer = lease_of("b")
    threads.append(threading.Thread(target=wait, args=[newcomer]))
    threads[1].start()
    time.sleep(0.1)
    buffers.give_back(held[0])
    threads[1].join()
    assert got == ["b"]
    buffers.give_back(held[1])
    threads[0].join()
    assert got == ["b", "a"]
    assert not buffers.reclaimed


def test_a_peer_above_its_share_loses_its_newest_lease_to_one_without_any() -> None:
    buffers, old, new, other = Buffers(4), lease_of("a"), lease_of("a"), lease_of("b")
    for lease in (old, new):
        assert buffers.lend(lease)
        lease.gathered = 1 << 30
    begun = time.monotonic()
    while not buffers.lend(other, 0.2):
        old.asked_at = new.asked_at = old.moved_at = new.moved_at = time.monotonic()
        assert time.monotonic() - begun < 5
    assert buffers.reclaimed == [new]
    assert time.monotonic() - begun >= rules._PATIENCE
    more = lease_of("b")
    assert not buffers.lend(more)  # each has its share now
    assert buffers.reclaimed == [new]


def test_a_lease_that_moves_bytes_keeps_its_buffers_from_its_equals() -> None:
    """Two peers with one lease each would otherwise take the buffers from each other forever."""
    buffers, one, other = Buffers(2), lease_of("a"), lease_of("b")
    assert buffers.lend(one)
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * rules._PATIENCE:
        one.asked_at = one.moved_at = time.monotonic()
        one.gathered += 1 << 30
        assert not buffers.lend(other, 0.2)
    assert not buffers.reclaimed


@pytest.mark.parametrize("why", ["silent", "unused", "stuck", "slow", "none"])
def test_buffers_are_reclaimed_from_leases_without_progress(why: str) -> None:
    buffers, one, other = Buffers(2), lease_of("a"), lease_of("b")
    assert buffers.lend(one)
    now = time.monotonic()
    one.gathered, one.lent_at, one.asked_at, one.moved_at = 1 << 40, now - 60, now, now
    if why == "silent":
        one.asked_at = now - rules._SILENT_SECONDS - 0.1
    elif why == "unused":
        one.gathered, one.lent_at = 0, now - rules._UNUSED_SECONDS - 0.1
    elif why == "stuck":
        one.moved_at = now - rules._STUCK_SECONDS - 0.1
    elif why == "slow":
        one.gathered = 60 * rules._SLOWEST // 2
    assert buffers.lend(other, 0.1) == (why != "none")
    assert buffers.reclaimed == ([] if why == "none" else [one])


def test_buffers_that_are_taken_back_are_wiped_if_peers_must_not_see_them() -> None:
    for wiped in (False, True):
        buffers, one = Buffers(2, wiped=wiped), lease_of("a")
        assert buffers.lend(one)
        for buffer in one.buffers:
            assert one.loan is not None
            one.loan.view(buffer, PIECE)[:] = 7
        buffers.give_back(one)
        assert buffers.staging.memory.any() != wiped


def test_nothing_is_lost_among_many_peers() -> None:
    buffers, stop = Buffers(4), time.monotonic() + 1.5
    served: dict[str, int] = {}

    def act(name: str) -> None:
        rng = random.Random(name)  # noqa: S311
        while time.monotonic() < stop:
            lease = lease_of(name)
            if buffers.lend(lease, 0.2):
                time.sleep(rng.uniform(0, 0.002))
                served[name] = served.get(name, 0) + 1
                buffers.give_back(lease)

    threads = [threading.Thread(target=act, args=[f"peer {n % 6}"]) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffers.lending.lent == 0
    assert buffers.staging.free == 8
    assert len(served) == 6
    assert not buffers.reclaimed


# -- segments -----------------------------------------------------------------------------


class Segments(PeerSegments):
    """Segments of plain memory, and how many exist."""

    def __init__(self, count: int) -> None:
        super().__init__(self._new, PIECE, count)
        self.made = 0
        self.alive: list[Any] = []
        self.fails = False

    def _new(self, nbytes: int) -> OnePeerMemory:
        if self.fails:
            raise MemoryError
        view = np.zeros(nbytes, np.uint8)
        self.made += 1
        self.alive.append(view)

        def end() -> None:
            self.alive = [one for one in self.alive if one is not view]

        return OnePeerMemory(view, Memory(view.ctypes.data, nbytes), b"", end)


@contextmanager
def lent(segments: PeerSegments, session: bytes, count: int = 2) -> Iterator[Loan]:
    loan = segments.lend(session, count)
    yield loan
    segments.take_back(session, loan, keep=True)


def test_a_segment_belongs_to_one_session_until_it_ends() -> None:
    segments = Segments(4)
    with lent(segments, b"a") as first:
        assert first.buffers == (0, 1)
        first.memory[:] = 7
    with lent(segments, b"b") as other:
        assert other.memory is not first.memory
        assert not other.memory.any()
    with lent(segments, b"a") as again:
        assert again.memory is first.memory
    with lent(segments, b"c") as third:  # the least recently used one ends
        assert not third.memory.any()
        assert not any(one is other.memory for one in segments.alive)
    assert segments.exist == sum(map(len, segments.alive)) // PIECE == 4
    segments.end_sessions({b"a"})
    assert segments.exist == 2
    segments.take_back(b"c", segments.lend(b"c", 2), keep=False)
    assert segments.exist == 0
    assert not segments.alive


def test_a_segment_that_cannot_be_made_counts_for_nothing() -> None:
    segments = Segments(2)
    segments.fails = True
    lending, lease = Lending(segments, 2), lease_of("a")
    with pytest.raises(MemoryError):
        lending.lend(lease, 2, 0.0)
    assert (lending.lent, segments.exist) == (0, 0)
    segments.fails = False
    assert lending.lend(lease, 2, 0.0) is not None


# -- leases -------------------------------------------------------------------------------


def test_leases_are_bounded_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.leases._MAX_LEASES_OF_PEER", 3)
    monkeypatch.setattr("kvatlas.wire.leases._MAX_LEASES", 10)
    monkeypatch.setattr("kvatlas.wire.leases._MAX_ENTRIES", 100)
    leases = Leases(lambda _: None)

    def grant(host: str, name: str, entries: int = 1) -> Lease:
        about = lease_of(name, peer=(host, name), entries=entries)
        given = ("session", "request", "complete", "stream", "entries")
        return leases.grant(9.0, peer=about.peer, **{one: getattr(about, one) for one in given})

    held = [grant("one", "a") for _ in range(3)]
    with pytest.raises(AtlasError) as refusal:
        grant("one", "a")
    assert refusal.value.code is Code.BUSY
    assert "a peer with 3 open transfers" in str(refusal.value)
    held += [grant("one", "b") for _ in range(2)]
    with pytest.raises(AtlasError) as refusal:  # half of all for the peers of one host
        grant("one", "c")
    assert refusal.value.code is Code.BUSY
    held.append(grant("two", "a"))
    for lease in held:
        leases.drop(lease)
    assert not leases._counts
    grant("one", "a", 50)
    with pytest.raises(AtlasError) as refusal:  # half of all block table entries
        grant("one", "a")
    assert refusal.value.code is Code.BUSY
    grant("one", "b", 50)
