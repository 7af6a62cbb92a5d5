"""Faults of a real Mooncake Store between what is found and what is loaded, 100 times each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvatlas.tier import MooncakeStore, StoreTier
from tests.profiles import DEEP
from tests.tier.lying_store import fetched, until
from tests.tier.mooncake_world import (
    Master,
    Peer,
    missing,
    model_of,
    running,
    stopped,
    wait_until,
    world_of,
)
from tests.tier.world import small

TIMES = 100
ROWS = 7
SECONDS = 0.5
WHY = missing() or ("" if DEEP else "run by make test-fleet")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
DENSE, SRC = model_of("dense"), small(model_of("dense"), tp=2, layout="LBNHC")
DST = small(DENSE, block_size=32)


def objects_of(tier: StoreTier, store: MooncakeStore) -> list[str]:
    """The objects that a tier has stored."""
    return sorted(store.names(tier.namespace.prefix))


def stored(tier: StoreTier, seed: int) -> None:
    """All rows of a request are in the store, whatever it had."""
    wait_until(lambda: world_of("dense", seed).store(tier, SRC)[-1].whole == ROWS)


@contextmanager
def fleet(**options: int) -> Iterator[tuple[Master, StoreTier, MooncakeStore]]:
    """A master, a tier, and another client of the same store."""
    with (
        running(**options) as master,
        master.tier("dense") as tier,
        closing(master.store(0)) as other,
    ):
        yield master, tier, other


def test_an_object_that_is_removed_between_lookup_and_load_is_a_miss() -> None:
    world, rng = world_of("dense"), np.random.default_rng(0)
    with fleet() as (_, tier, other):
        for _ in range(TIMES):
            stored(tier, 0)
            gone = str(rng.choice(objects_of(tier, other)))
            tier.misses.clear()
            assert not fetched(world, tier, DST, lambda: other.remove([gone]))  # noqa: B023
            assert tier.misses == {"gone": 1}
            assert until(tier.idle)
        stored(tier, 0)
        assert fetched(world, tier, DST)


def test_objects_that_a_full_store_evicts_between_lookup_and_load_are_a_miss() -> None:
    world, filler, number = world_of("dense"), np.zeros(1 << 20, np.uint8), 0
    with fleet(lease_ms=10) as (_, tier, other):
        other.register(filler)

        def fill() -> None:
            nonlocal number
            for _ in range(24):
                time.sleep(0.002)  # nothing goes that was asked for a moment ago
                number += 1
                other.put([(f"kv1/filler/{number}", [filler])])

        gone = tries = 0
        while gone < TIMES:
            tries += 1
            assert tries < 5 * TIMES, "nothing is ever evicted"
            stored(tier, 0)
            tier.misses.clear()
            if not fetched(world, tier, DST, fill):
                assert set(tier.misses) <= {"gone", "incomplete", "absent", "failed"}
                gone += 1
            assert until(tier.idle)
        other.remove_all("kv1/filler/")
        stored(tier, 0)
        assert fetched(world, tier, DST)


def test_an_object_with_a_flipped_bit_is_a_miss_and_stored_again() -> None:
    world, rng = world_of("dense"), np.random.default_rng(0)
    with fleet() as (_, tier, other):
        for _ in range(TIMES):
            stored(tier, 0)
            name = str(rng.choice(objects_of(tier, other)))
            found = np.zeros(other.size(name), np.uint8)
            other.register(found)
            assert other.get([(name, [found])]) == [found.nbytes]
            found[rng.integers(found.nbytes)] ^= 1 << rng.integers(8)
            assert other.remove([name]) == 1
            assert other.put([(name, [found])]) == [True]
            tier.misses.clear()
            assert not fetched(world, tier, DST)
            assert tier.misses == {"damaged": 1}
            assert not other.exists([name])[0], "it was removed"
        stored(tier, 0)
        assert fetched(world, tier, DST)


def test_two_processes_that_write_the_same_keys_at_once_leave_right_rows() -> None:
    world = world_of("dense")
    with fleet() as (master, tier, other):
        peer = Peer(master)
        try:
            assert peer.ask("store", "dense", tp=4)[-1][0] == ROWS
            for turn in range(TIMES):
                tier.drop_tenant()
                tier.misses.clear()
                peer.tell("store", "dense", tp=1 + turn % 2)
                world.store(tier, SRC)
                peer.answer()
                assert tier.match(world.keys(tier), world.tokens) == world.tokens
                assert fetched(world, tier, DST)
                assert not tier.misses
                assert len(objects_of(tier, other)) == ROWS * 4, "none is there twice"
            peer.end()
        finally:
            peer.kill()


@pytest.mark.parametrize("whom", ["the master", "who has the bytes"])
def test_a_process_that_stands_still_is_a_miss_by_the_deadline(whom: str) -> None:
    world = world_of("dense")
    # On a busy machine it may stand still for seconds, and shall not be given up meanwhile.
    with running(client_seconds=60) as master:
        peer = Peer(master)
        try:
            assert peer.ask("store", "dense", tp=2)[-1][0] == ROWS
            with master.tier("dense", segment=0) as tier:
                assert fetched(world, tier, DST)
                for _ in range(TIMES):
                    tier.misses.clear()
                    tier.timeout = SECONDS
                    with stopped(master.process if whom == "the master" else peer.process):
                        begun = time.monotonic()
                        assert not fetched(world, tier, DST)
                        assert time.monotonic() - begun < 20 * SECONDS
                        assert tier.misses == {"late": 1}
                    tier.timeout = 30.0
                    wait_until(lambda: tier.idle() and fetched(world, tier, DST))
            peer.end()
        finally:
            peer.kill()
