"""One Mooncake Store, two processes of unlike topologies: every byte, also when things die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.tier import MooncakeStore, open_store
from tests.profiles import DEEP
from tests.tier.lying_store import fetched
from tests.tier.mooncake_world import Master, Peer, missing, model_of, running, wait_until, world_of
from tests.tier.world import small

TIMES = 100 if DEEP else 1
WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
deep = pytest.mark.skipif(not DEEP, reason="run by make test-fleet")
FIVE = ("dense", "sliding", "latent", "delta hybrid", "compressed")


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with running() as made:
        yield made


def test_a_process_of_another_topology_loads_what_one_has_stored(master: Master) -> None:
    peer = Peer(master)
    try:
        for name in FIVE if DEEP else FIVE[::3]:
            big = name == "compressed"
            order = {"tp": 2, "layout": "BLNHC" if big else "LBNHC"}
            assert peer.ask("store", name, **order)[-1][0] > 0
            with master.tier(name) as tier:
                unlike = {"memory": "24MiB", "block_size": 512} if big else {"block_size": 32}
                world_of(name).check(tier, small(model_of(name), **unlike))
                assert not tier.misses
        peer.end()
    finally:
        peer.kill()


def test_what_a_store_answers(master: Master) -> None:
    store, wanted = master.store(), np.arange(5000, dtype=np.uint64).view(np.uint8)
    store.register(wanted)
    assert store.put([("kv1/a/b", [wanted[:64], wanted[64:]])]) == [True]
    assert store.put([("kv1/a/b", [wanted[:100]])]) == [True]
    assert store.size("kv1/a/b") == wanted.nbytes
    got = np.zeros_like(wanted)
    store.register(got)
    assert store.get([("kv1/a/b", [got[:10], got[10:]]), ("kv1/no", [got[:9]])]) == [40_000, -1]
    assert np.array_equal(got, wanted)
    for size in (100, 39_999):
        assert store.get([("kv1/a/b", [got[:size]])]) == [40_000]
    some = np.zeros(64, np.uint8)
    assert store.ranges("kv1/a/b", [(8, some)]) == 64
    assert np.array_equal(some, wanted[8:72])
    assert (store.ranges("kv1/no", [(0, some)]), store.size("kv1/no")) == (-1, -1)
    assert store.exists(["kv1/a/b", "kv1/no"]) == [True, False]
    assert "kv1/a/b" in list(store.names("kv1/a/"))
    assert store.capacity().total >= 16 << 20
    assert store.remove(["kv1/a/b", "kv1/no"]) == 1
    store.put([("kv1/a/c", [wanted]), ("kv1/ab", [wanted])])
    assert store.remove_all("kv1/a/") == 1
    assert store.exists(["kv1/a/c", "kv1/ab"]) == [False, True]
    store.close()


@deep
def test_a_client_killed_while_it_puts_leaves_whole_rows_or_none() -> None:
    """What was in the memory of the one that died is gone; what remains is right."""
    world, made = world_of("dense", 5), small(model_of("dense"))
    rng = np.random.default_rng(0)
    with running() as master, master.tier("dense") as tier:
        killed = tries = 0
        while killed < TIMES:
            tries += 1
            assert tries < 5 * TIMES, "it is never killed before it has stored all"
            tier.drop_tenant()
            tier.misses.clear()
            peer = Peer(master)
            peer.tell("store", "dense", seed=5, tp=4)
            wait_until(lambda: tier.match(world.keys(tier), 100) > 0 or "incomplete" in tier.misses)
            time.sleep(max(0.0, float(rng.random()) / 10 - 0.05))
            peer.kill()
            killed += tier.match(world.keys(tier), 100) < 100
            fetched(world, tier, made)
        # The master says for a while that what the dead one had is there.
        wait_until(lambda: world.store(tier, made)[-1].whole == 7 and fetched(world, tier, made))


def test_a_master_that_is_killed_is_a_miss_and_one_that_is_back_serves_again() -> None:
    world, made = world_of("dense"), small(model_of("dense"))
    with running() as master, master.tier("dense", timeout=10.0) as tier:
        for _ in range(TIMES):
            wait_until(lambda: world.store(tier, made)[-1].whole == 7)
            assert fetched(world, tier, made)
            master.kill()
            tier.misses.clear()
            assert tier.match(world.keys(tier), 100) == 0
            assert tier.misses == {"failed": 1}
            assert not fetched(world, tier, made)
            master.start()


@deep
def test_a_full_store_evicts_and_what_is_found_is_right() -> None:
    made, filler = small(model_of("dense")), np.zeros(1 << 20, np.uint8)
    with running() as master, master.tier("dense") as tier, closing(master.store(0)) as other:
        refused = seed = 0
        while refused < TIMES:  # a store that is full has room for some rows all the same
            assert seed < 20 * TIMES, "the store was never full"
            world, seed = world_of("dense", seed), seed + 1
            tier.drop_tenant()
            other.put([(f"kv1/filler/{seed}-{n}", [filler]) for n in range(20)])
            stored = world.store(tier, made)[-1]
            refused += stored.no_room > 0
            found = fetched(world, tier, made)
            assert stored.whole == 7 or not found
        other.remove_all("kv1/filler/")
        wait_until(lambda: world.store(tier, made)[-1].whole == 7)
        assert fetched(world, tier, made)


def test_a_store_without_its_master_is_refused_when_it_is_opened() -> None:
    with running() as master:
        master.kill()
        with pytest.raises(AtlasError):
            master.store()


def test_drop_removes_every_row_of_a_key_and_sends_no_pattern_to_the_master(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dense", "sliding"):
        world, made = world_of(name), small(model_of(name))
        with master.tier(name) as tier:
            store = tier._traffic.store
            tier.drop_tenant()
            world.store(tier, made)
            rows = [one for one in store.names() if "marks" not in one]
            with monkeypatch.context() as patch:
                patch.setattr(type(store), "remove_all", None)
                assert tier.drop(world.keys(tier)) == len(rows) > 0
            assert [one for one in store.names() if "marks" not in one] == []


def test_replicas_survive_the_death_of_a_holder() -> None:
    with running() as master:
        holders, content = [Peer(master) for _ in range(2)], np.arange(200, dtype=np.uint8)
        try:
            for holder in holders:
                holder.ask("store", "dense")
            about = {"segment": 0, "metrics": master.pages}
            store = MooncakeStore(master.address, replicas=2, **about)  # type: ignore[arg-type]
            names = [f"kv1/{number}" for number in range(8)]
            assert store.put([(name, [content]) for name in names]) == [True] * 8
            holders[0].kill()
            into = np.zeros(200, np.uint8)

            def all_read() -> bool:
                try:
                    return store.get([(name, [into]) for name in names]) == [200] * 8
                except AtlasError:  # the master has not noticed yet
                    return False

            wait_until(all_read)
            assert np.array_equal(into, content)
            store.close()
        finally:
            for holder in holders:
                holder.kill()


def test_replicas_are_refused_by_other_stores(tmp_path: Path) -> None:
    for where in ("host://?replicas=2", f"folder://{tmp_path}?replicas=2"):
        with pytest.raises(AtlasError) as refusal:
            open_store(where)
        assert refusal.value.code is Code.CONTRADICTORY
