"""A store that lies, loses, stalls or fails is a miss with a reason: never a wrong byte."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import CacheIdentity, Model
from kvatlas.tier import HostStore, StoreTier, prefix_keys
from kvatlas.tier.namespaces import row_format
from kvatlas.tier.opening import rows_of
from kvatlas.tier.row_objects import RowObjects
from tests.profiles import DEEP
from tests.tier.lying_store import LyingStore, fetched, until
from tests.tier.test_store_topologies import OURS, tier_in
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small, tier_plan

TIMES = 100 if DEEP else 5
MODEL = MODELS["dense"]
LOADING = {
    "bytes flipped": "damaged",
    "another size": "damaged",
    "another object": "damaged",
    "nothing is read": "damaged",
    "evicted before get": "gone",
    "get raises": "failed",
    "get answers too few": "failed",
    "exists raises": "failed",
    "exists answers too few": "failed",
}
STORING = ("put dies", "put says no", "put says yes", "put answers too few", "exists raises")
REALLY_STORED = ("put answers too few", "put dies")
"""Where rows may be whole though the store says otherwise: what counts is what is there."""
STALLS = ("get stalls", "exists stalls", "put stalls")


def test_a_store_that_lies_while_loading_is_a_miss() -> None:
    world, src, dst = World(MODEL, 70), small(MODEL, tp=2), small(MODEL, layout="LBNHC")
    store = LyingStore()
    with tier_in(store, MODEL) as tier:
        for fault, reason in LOADING.items():
            for time_ in range(TIMES):
                world.store(tier, src)  # also what was damaged, and so removed
                tier.misses.clear()
                store.random = np.random.default_rng(time_)
                store.fault = fault
                assert not fetched(world, tier, dst), fault
                assert set(tier.misses) == {reason}, fault
                store.fault = ""
                assert until(tier.idle), fault
        world.store(tier, src)
        assert fetched(world, tier, dst)


def test_a_store_that_fails_while_storing_has_whole_rows_or_none() -> None:
    world, src, dst = World(MODEL, 70), small(MODEL, tp=2), small(MODEL, layout="LBNHC")
    store = LyingStore()
    with tier_in(store, MODEL) as tier:
        for fault in STORING:
            for time_ in range(TIMES):
                store.remove_all("")
                store.random = np.random.default_rng(time_)
                store.fault = fault
                stored = world.store(tier, src)
                assert all(one.whole == 0 or fault in REALLY_STORED for one in stored), fault
                store.fault = ""
                assert fetched(world, tier, dst) == (tier.match(world.keys(tier), 70) == 70)
                assert until(tier.idle), fault
            assert world.store(tier, src)[-1].whole == 5, fault
            assert fetched(world, tier, dst), fault


@pytest.mark.parametrize("fault", STALLS)
def test_a_store_that_stalls_is_a_miss_by_the_deadline(fault: str) -> None:
    world, made = World(MODEL, 70), small(MODEL)
    for _ in range(TIMES if DEEP else 1):
        store = LyingStore()
        with tier_in(store, MODEL, timeout=30.0) as tier:
            if fault != "put stalls":
                world.store(tier, made)
            store.fault, tier.timeout = fault, 1.0
            begun = time.monotonic()
            if fault == "put stalls":
                assert world.store(tier, made)[0].no_room == 5
            else:
                assert not fetched(world, tier, made)
                assert tier.misses["late"] == 1
            assert time.monotonic() - begun < 20
            assert fault == "exists stalls" or not tier.idle(), "late calls keep their memory"
            store.fault = ""
            store.stalled.set()
            assert until(tier.idle)
            tier.timeout = 30.0
            world.store(tier, made)
            assert fetched(world, tier, made)


def test_questions_do_not_pile_up_behind_a_store_that_hangs() -> None:
    world, store = World(MODEL, 70), LyingStore()
    with tier_in(store, MODEL) as tier:
        store.fault, tier.timeout = "exists stalls", 0.01
        for _ in range(20):
            assert tier.match(world.keys(tier), 70) == 0
        assert tier.misses == {"late": 20}
        assert not tier._traffic.calls._waiting
        store.fault, tier.timeout = "", 30.0
        store.stalled.set()
        world.store(tier, small(MODEL))
        assert fetched(world, tier, small(MODEL))


def test_a_full_store_forgets_and_never_mixes_up() -> None:
    """Room for a third of the rows: what is found is right, and what is not is absent."""
    made, store = small(MODEL), HostStore(20_000)
    worlds = [World(MODEL, 48, seed=seed) for seed in range(TIMES)]
    with tier_in(store, MODEL) as tier:
        for world in worlds:
            salted = {
                i: [b"%d" % id(world) + k for k in row] for i, row in world.keys(tier).items()
            }
            world.store(tier, made, keys=salted)
            room = store.capacity()
            assert room.used <= room.total
            if tier.match(salted, 48) == 48:
                world.check(tier, made, keys=salted)


def test_two_writers_of_one_key_at_once() -> None:
    world, src, store = World(MODEL, 96), small(MODEL, tp=2), LyingStore()
    with tier_in(store, MODEL) as one, tier_in(store, MODEL) as two:
        for _ in range(TIMES):
            writers = [
                threading.Thread(target=world.store, args=(tier, src)) for tier in (one, two)
            ]
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
            assert fetched(world, one, small(MODEL))
            assert fetched(world, two, small(MODEL, tp=4))
            assert one.drop_tenant() > 0
            assert store.capacity().objects == 0


def test_other_weights_dtypes_formats_models_and_tenants_are_misses_with_their_reason() -> None:
    world, store = World(MODEL, 64), HostStore()
    with tier_in(store, MODEL) as tier:
        world.store(tier, small(MODEL))
        keys = world.keys(tier)
    others = {
        "other_tenant": (tier_plan(MODEL), CacheIdentity(weights="ours", tenant="else")),
        "other_weights": (tier_plan(MODEL), CacheIdentity(weights="theirs")),
        "other_dtype": (tier_plan(MODEL.with_cache("fp8")), OURS),
        "other_format": (tier_plan(MODEL, layout="BHLNC"), OURS),
        "other_model": (tier_plan(MODELS["latent"]), OURS),
        "absent": (tier_plan(MODEL), OURS),
    }
    for reason, (plan, identity) in others.items():
        asked = {0: [b"other " + key[:32] for key in keys[0]]} if reason == "absent" else keys
        with StoreTier(store, plan, identity, staging=1 << 16) as tier:
            assert tier.match(asked, 64) == 0
            assert tier.misses == {reason: 1}


def test_a_tenants_data_is_found_by_no_other_and_removed_as_a_whole() -> None:
    world, store, made = World(MODEL, 64), HostStore(), small(MODEL)
    tenants = [CacheIdentity(weights="ours", tenant=who) for who in ("a", "../a", "a/", "")]
    tiers = [StoreTier(store, tier_plan(MODEL), who, staging=1 << 16) for who in tenants]
    for place, tier in enumerate(tiers):
        assert tier.match(world.keys(tier), 64) == 0
        world.store(tier, made)
        assert len({name.split("/")[1] for name in store.names()}) == place + 1
    assert tiers[1].drop_tenant() > 0
    assert [tier.match(world.keys(tier), 64) for tier in tiers] == [64, 0, 64, 64]
    for tier in tiers:
        tier.close()


def test_keys_from_outside_stay_in_their_namespace() -> None:
    store = HostStore()
    made = small(MODEL)
    with tier_in(store, MODEL) as tier:
        for key in (b"../../x", b"/etc/passwd", b"\x00", b"kv1/", b"*" * 64):
            held = {0: np.zeros(made.pools[0].nbytes, np.uint8)}
            tier.store(held, made, blocks=[1], tokens=16, keys=[key])
        inside = (tier.namespace.prefix, f"{tier.namespace.tenant_prefix}marks/")
        assert all(name.startswith(inside) for name in store.names())
        with pytest.raises(AtlasError):
            tier.match([b"x" * 65], 16)


def test_what_is_stored_later_is_there_after_a_flush() -> None:
    world, made = World(MODEL, 160), small(MODEL)
    with tier_in(HostStore(), MODEL) as tier:
        world.store(tier, made, wait=False)
        assert tier.flush()
        assert tier.idle()
        world.check(tier, small(MODEL, tp=2))


def test_who_does_not_wait_is_not_held_up_by_a_store_that_hangs() -> None:
    world, made, store = World(MODEL, 70), small(MODEL), LyingStore()
    with tier_in(store, MODEL, timeout=20.0) as tier:
        store.fault = "put stalls"
        begun = time.monotonic()
        assert world.store(tier, made, wait=False)[0].waiting == 5
        assert time.monotonic() - begun < 10
        assert tier._traffic.mark() is None, "they are on their way, once"
        store.stalled.set()
        assert tier.flush()
        assert tier.match(world.keys(tier), 70) == 70
        assert sum("marks" in name for name in store.names()) == 5


def test_a_dropped_key_is_gone_whatever_tokens_it_had() -> None:
    world, made = World(MODEL, 70), small(MODEL)
    with tier_in(HostStore(), MODEL) as tier:
        world.store(tier, made)
        keys = world.keys(tier)
        assert tier.drop({0: keys[0][4:]}) == 4
        assert tier.match(keys, 70) == 64


def test_a_wrong_block_table_is_the_callers_error_and_no_miss() -> None:
    world, made = World(MODEL, 64), small(MODEL)
    with tier_in(HostStore(), MODEL) as tier:
        with pytest.raises(AtlasError) as refusal:
            tier.store({0: np.zeros(made.pools[0].nbytes, np.uint8)}, made, blocks=[1], tokens=64,
                       keys=world.keys(tier))  # fmt: skip
        assert refusal.value.code == Code.MISSING_BLOCKS
        world.store(tier, made)
        with pytest.raises(AtlasError) as refusal:
            tier.fetch({0: np.zeros(made.pools[0].nbytes, np.uint8)}, made, blocks=[1], tokens=64,
                       keys=world.keys(tier))  # fmt: skip
        assert refusal.value.code == Code.MISSING_BLOCKS
        assert not tier.misses
        assert tier.idle()


def test_a_rank_asks_for_its_own_objects_alone_before_it_stores() -> None:
    """Else every rank of a fleet would ask for all objects of all rows."""
    store, world, made = LyingStore(), World(MODEL, 64), small(MODEL, tp=4)
    with tier_in(store, MODEL) as tier:
        for salt in ("one", "two"):
            store.asked = 0
            keys = world.keys(tier, salt=salt)
            world.store(tier, made, keys=keys, wait=False)
            assert tier.flush()
        assert store.asked == 4 * 4  # rows, and an object of each for each rank
        assert tier.match(keys, 64) == 64


def test_little_staging_memory_is_enough_for_any_request_and_many_threads() -> None:
    """Two rows of memory, requests of twelve, four threads that fetch at once."""
    world, made = World(MODEL, 192), small(MODEL)
    with StoreTier(HostStore(), tier_plan(MODEL), OURS, staging=1, timeout=20.0) as tier:
        assert world.store(tier, made)[0].whole == 12
        outcomes: list[bool] = []
        fetchers = [
            threading.Thread(target=lambda: outcomes.append(fetched(world, tier, made)))
            for _ in range(4)
        ]
        for fetcher in fetchers:
            fetcher.start()
        for fetcher in fetchers:
            fetcher.join()
        assert outcomes == [True] * 4
        assert tier.idle()


def test_whoever_stores_after_a_tenant_was_dropped_marks_it_again() -> None:
    world, store, made = World(MODEL, 64), HostStore(), small(MODEL)
    with tier_in(store, MODEL) as tier:
        world.store(tier, made)
        tier.drop_tenant()
        world.store(tier, made)
        assert sum("marks" in name for name in store.names()) == 5


def test_rows_look_alike_whatever_the_greatest_length() -> None:
    """Else engines of unlike max_len would share nothing."""
    for name in ("gpt-oss-20b", *(("Nemotron-H-8B", "DeepSeek-V4-Pro") if DEEP else ())):
        model = Model.load(name)
        plans = [rows_of(model, 64, longest, "1TiB") for longest in (2048, 65536)]
        assert len({row_format(RowObjects(one)) for one in plans}) == 1


def test_tokens_that_are_no_whole_numbers_have_no_keys() -> None:
    plan = tier_plan(MODEL)
    for tokens in ([1.5], ["a"], [2**63], [None]):
        with pytest.raises(AtlasError) as refusal:
            prefix_keys(plan, tokens)  # type: ignore[arg-type]
        assert refusal.value.code == Code.NOT_AN_INTEGER
    [keys] = prefix_keys(plan, range(40)).values()
    assert len(set(keys)) == 3
    assert prefix_keys(plan, range(33))[0][:2] == keys[:2]
    assert prefix_keys(plan, range(40), lora="an adapter")[0][0] != keys[0]


def test_an_adapter_whose_name_is_no_text_has_no_keys() -> None:
    with pytest.raises(AtlasError) as refusal:
        prefix_keys(tier_plan(MODEL), range(40), lora="half a \ud83d pair")
    assert refusal.value.code == Code.BAD_CONFIG
    assert str(refusal.value).encode(), "what is said of it is text"
