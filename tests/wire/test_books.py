"""Leases, transfers and metrics by themselves, in every order of events."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Metrics, Transfer
from kvatlas.wire.leases import Leases
from kvatlas.wire.offers import Offer
from kvatlas.wire.transports.handles import Done, Handle

KEY = bytes(range(16))
REFUSAL = AtlasError(Code.PEER_LOST, "rule", got="got", hint="hint")

# -- leases -------------------------------------------------------------------------------


def lease_of(leases: Leases, seconds: float = 60.0, **about: Any) -> Any:
    given: dict[str, Any] = {
        "session": KEY, "request": "r", "complete": True, "stream": None, "entries": 0,
    }  # fmt: skip
    return leases.grant(seconds, **given | about)


def test_a_lease_is_found_by_its_own_session_while_it_is_held() -> None:
    ended: list[Any] = []
    leases = Leases(ended.append)
    held, over = lease_of(leases), lease_of(leases, 0.0)
    assert leases.find(held.key, KEY) is held
    for key, session in ((held.key, bytes(16)), (over.key, KEY), (bytes(16), KEY)):
        with pytest.raises(AtlasError) as refusal:
            leases.find(key, session)
        assert refusal.value.code is Code.LEASE_EXPIRED
    leases.sweep()
    assert ended == [over]
    leases.renew(held, 0.0)
    assert held.left > 50
    leases.drop(held)
    leases.drop(held)
    assert ended == [over, held]
    assert len(leases) == 0


def test_leases_of_an_offer_end_with_it_alone() -> None:
    leases = Leases(lambda _: None)
    first, second = (Offer("r", {}, 0, 0, 1.0) for _ in range(2))
    lease_of(leases, part_of=first)
    alone, other = lease_of(leases), lease_of(leases, part_of=second)
    leases.drop_part(first)
    assert len(leases) == 2
    assert all(leases.find(kept.key, KEY) is kept for kept in (alone, other))
    leases.drop_all({bytes(16)})
    assert len(leases) == 2
    leases.drop_all({KEY})
    assert len(leases) == 0


def test_leases_are_bounded_in_number_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.leases._MAX_LEASES", 3)
    monkeypatch.setattr("kvatlas.wire.leases._MAX_ENTRIES", 10)
    leases = Leases(lambda _: None)
    first = lease_of(leases, entries=6)
    with pytest.raises(AtlasError) as refusal:
        lease_of(leases, entries=6)
    assert refusal.value.code is Code.TOO_MANY
    leases.drop(first)
    for host in "abc":
        lease_of(leases, peer=(host, "peer"))
    with pytest.raises(AtlasError) as refusal:
        lease_of(leases, peer=("d", "peer"))
    assert refusal.value.code is Code.TOO_MANY


def test_a_lease_does_not_end_while_bytes_are_copied_for_it() -> None:
    ended = threading.Event()
    leases = Leases(lambda _: ended.set())
    lease = lease_of(leases)
    with lease.guard:
        ending = threading.Thread(target=leases.drop, args=(lease,))
        ending.start()
        assert not ended.wait(0.05)
        with pytest.raises(AtlasError):
            leases.find(lease.key, KEY)
    ending.join(5)
    assert ended.is_set()


def test_every_thread_that_ends_a_lease_waits_for_its_copy() -> None:
    ended: list[Any] = []
    leases = Leases(ended.append)
    held = Offer("r", {}, 0, 0, 1.0)
    lease = lease_of(leases, part_of=held)
    drops = [
        lambda: leases.drop(lease),
        lambda: leases.drop_part(held),
        lambda: leases.drop_all({KEY}),
    ]
    with lease.guard:
        threads = [threading.Thread(target=drop) for drop in drops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.05)
            assert thread.is_alive(), "it returned while the copy was in progress"
    for thread in threads:
        thread.join(5)
    assert ended == [lease]
    assert len(leases) == 0


# -- transfers ----------------------------------------------------------------------------

STEPS = ["ok", "fail", "cancelled"]


@pytest.mark.parametrize("outcome", list(itertools.product(STEPS, repeat=3)))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_transfer_is_ready_exactly_when_every_rank_has_delivered(
    outcome: tuple[str, ...], order: tuple[int, ...]
) -> None:
    """The first failure ends it; its blocks are left alone once every rank has left them."""
    transfer = Transfer("r", (4, 5, 6), 30, 60)
    called_off = AtlasError(Code.CANCELLED, "rule", got="got", hint="hint")
    first: AtlasError | None = None
    for _ in order:
        transfer.use()
    for step, rank in enumerate(order):
        assert transfer.done is (first is not None)
        assert not transfer.ready
        if outcome[rank] == "ok":
            transfer.add(4 + rank, 10)
            transfer.finished(4 + rank)
        else:
            error = REFUSAL if outcome[rank] == "fail" else called_off
            transfer.failed(4 + rank, error)
            first = first or error
        transfer.leave()
        assert transfer.done is (step == 2 or first is not None)
        assert transfer.ready is (step == 2 and first is None)
        assert transfer.released is (step == 2)
        if first:
            with pytest.raises(AtlasError) as refusal:
                transfer.check_cancelled()
            assert refusal.value.code is Code.CANCELLED
    if first:
        with pytest.raises(AtlasError) as refusal:
            transfer.wait(1)
        assert refusal.value is first
    else:
        assert transfer.wait(1).moved == 30


def test_a_deadline_ends_a_transfer_whatever_its_ranks_wait_for() -> None:
    transfer = Transfer("r", (0,), 30, 0.05)
    transfer.use()
    with pytest.raises(AtlasError) as refusal:
        transfer.wait()
    assert refusal.value.code is Code.DEADLINE
    assert transfer.done
    assert not transfer.wait_released(0.01), "a rank may still write to its blocks"
    transfer.finished(0)
    transfer.leave()
    assert transfer.wait_released(0)
    assert not transfer.ready


def test_too_few_bytes_are_never_ready() -> None:
    transfer = Transfer("r", (0, 1), 30, 60)
    transfer.add(0, 10)
    transfer.finished(0)
    transfer.add(1, 10)
    transfer.finished(1)
    assert transfer.done
    assert not transfer.ready
    with pytest.raises(AtlasError) as refusal:
        transfer.wait(1)
    assert refusal.value.code is Code.WIRE_FAILED


def test_a_rank_that_starts_over_counts_from_nothing() -> None:
    transfer = Transfer("r", (0,), 30, 60)
    transfer.add(0, 20)
    transfer.add_layer(0, "a")
    transfer.restart(0)
    assert (transfer.moved, transfer.layers) == (0, set())
    transfer.add(0, 30)
    transfer.finished(0)
    assert transfer.ready


def test_a_transfer_of_no_ranks_is_over_at_once_and_others_wait() -> None:
    assert Transfer("r", (), 0, 60).wait(0).ready
    with pytest.raises(AtlasError) as refusal:
        Transfer("r", (0,), 0, 60).wait(0.01)
    assert refusal.value.code is Code.DEADLINE


def test_layers_are_those_of_every_rank() -> None:
    transfer = Transfer("r", (0, 1), None, 60)
    transfer.add_layer(0, "a")
    assert transfer.layers == set()
    transfer.add_layer(1, "a")
    transfer.add_layer(1, "b")
    assert transfer.layers == {"a"}


def test_a_handle_that_never_ends_is_given_up() -> None:
    class Never(Handle):
        def _poll(self) -> bool:
            return False

    Done().wait(0.0)
    with pytest.raises(AtlasError) as refusal:
        Never().wait(0.0)
    assert refusal.value.code is Code.DEADLINE


# -- metrics and the channel --------------------------------------------------------------


def test_metrics_are_what_prometheus_reads() -> None:
    metrics = Metrics()
    with ThreadsOf(8) as threads:
        threads.run(lambda: counted(metrics))
    with pytest.raises(ValueError, match="x"), metrics.phase("open"):
        raise ValueError("x")
    metrics.ended("pull", "ok")
    metrics.ended("pull", "deadline")
    assert metrics.values == {"bytes": 12000, "descriptors": 4000}
    assert metrics.seconds["open"] > 0
    line = re.compile(r'^(# TYPE \w+ counter|\w+(\{\w+="\w+"(,\w+="\w+")*\})? [0-9.]+)$')
    text = metrics.prometheus()
    assert text.endswith("\n")
    assert all(line.match(one) for one in text.splitlines())
    assert 'kvatlas_wire_transfers_total{direction="pull",outcome="deadline"} 1' in text


def counted(metrics: Metrics) -> None:
    for _ in range(500):
        metrics.add(bytes=3, descriptors=1)


class ThreadsOf:
    """The same thing in several threads at once."""

    def __init__(self, many: int) -> None:
        self.many = many

    def __enter__(self) -> ThreadsOf:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, act: Any) -> None:
        threads = [threading.Thread(target=act) for _ in range(self.many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
