"""What one topology stores in a fleet's store, any other loads: every byte, and no byte beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import CacheIdentity, Model
from kvatlas.tier import (
    FolderStore,
    HostStore,
    ObjectStore,
    StoreTier,
    row_runs,
    row_storing,
    row_traffic,
    store_hit,
)
from tests.planning.models import SMALL
from tests.profiles import DEEP
from tests.tier.test_topologies import MODELS, TURNS
from tests.tier.world import World, small, tier_plan

OURS = CacheIdentity(weights="ours")
FIVE = ("dense", "sliding", "latent", "delta hybrid", "mamba hybrid")


def tier_in(store: ObjectStore, model: Model, **options: Any) -> StoreTier:
    about: dict[str, Any] = {"staging": 1 << 20, "timeout": 30.0}
    about |= {key: options.pop(key) for key in ("shards", "stages", "timeout") if key in options}
    return StoreTier(store, tier_plan(model, **options), OURS, **about)


@pytest.mark.parametrize("name", FIVE)
def test_another_topology_loads_what_one_has_stored(name: str) -> None:
    model, world = MODELS[name], World(MODELS[name], 100)
    # Another of the turns for each model, all where there is time.
    for turn in list(TURNS) if DEEP else [list(TURNS)[1 + FIVE.index(name)]]:
        src, dst = TURNS[turn]
        options: dict[str, Any] = {"block_size": 32} if turn.startswith("blocks") else {}
        pp = src.get("pp", 1)
        with tier_in(HostStore(), model, stages=pp, **options) as tier:
            stored = world.store(tier, small(model, **src))
            assert stored[-1].whole > 0, turn
            assert not any(one.no_room for one in stored), turn
            world.check(tier, small(model, **dst))


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(FIVE))[:: 1 if DEEP else 3])
def test_every_kind_of_cache_goes_through_a_store(name: str) -> None:
    model, world = MODELS[name], World(MODELS[name], 150)
    with tier_in(HostStore(), model, states="apart") as tier:
        world.store(tier, small(model, tp=2))
        world.check(tier, small(model, layout="LBNHC"))


@pytest.mark.parametrize("large", [False, True])
def test_runs_are_written_out_as_for_a_gpu(*, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (row_storing, store_hit):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    if large:
        monkeypatch.setattr(row_runs, "_LARGE_ROW", 1)
        monkeypatch.setattr(row_runs, "_LONG_RUN", 1)
    for name in FIVE if DEEP else ("sliding", "delta hybrid"):
        model, world = MODELS[name], World(MODELS[name], 100)
        with tier_in(HostStore(), model, block_size=32) as tier:
            world.store(tier, small(model, tp=2, layout="LBNHC"))
            world.check(tier, small(model, block_size=64))
            world.check(tier, small(model, tp=4), (33, 100))


def test_compressed_caches_with_unlike_blocks_go_through_a_store() -> None:
    model, big = SMALL["compressed"], {"memory": "24MiB"}
    world = World(model, 192, memory="96MiB")
    with tier_in(HostStore(), model, **big) as tier:
        world.store(tier, small(model, policy="vllm", **big))
        world.check(tier, small(model, **big))


def test_two_tiers_of_unlike_staging_share_a_folder(tmp_path: Path) -> None:
    model, world = MODELS["six hybrid"], World(MODELS["six hybrid"], 77)
    with tier_in(FolderStore(tmp_path), model, shards=6) as one:
        world.store(one, small(model, tp=2))
    with StoreTier(FolderStore(tmp_path), tier_plan(model), OURS, shards=6, staging=1 << 16) as two:
        world.check(two, small(model, tp=3, layout="LBNHC"))
        assert world.store(two, small(model, tp=6))[-1].waiting == 0
        assert not two.misses


def test_marks_that_a_store_has_evicted_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_traffic, "_MARKED_FOR", 0.0)
    model, store = MODELS["dense"], HostStore()
    world = World(model, 64)
    with tier_in(store, model) as tier:
        world.store(tier, small(model))
        store.remove(tier.namespace.marks)
        tier.drop(world.keys(tier))
        world.store(tier, small(model))
        with tier_in(store, model) as fresh:
            assert fresh.match([b"of nobody"] * 4, 64) == 0
            assert fresh.misses == {"absent": 1}


def test_a_rank_that_has_a_part_of_an_object_is_refused() -> None:
    model = MODELS["dense"]
    world = World(model, 50)
    with tier_in(HostStore(), model) as tier:
        with pytest.raises(AtlasError) as refusal:
            world.store(tier, small(model, pp=2))
        assert refusal.value.code == Code.BAD_TOPOLOGY
        world.store(tier, small(model))
        world.check(tier, small(model, pp=2))


def test_a_row_is_found_only_when_every_rank_has_stored() -> None:
    model = MODELS["dense"]
    world, made = World(model, 64), small(model, tp=4)
    with tier_in(HostStore(), model) as tier:
        for rank in range(3):
            assert world.store(tier, made, ranks=[rank])[0] == (0, 4, 0)
            assert tier.match(world.keys(tier), 64) == 0
        assert world.store(tier, made, ranks=[3])[0] == (4, 0, 0)
        assert tier.match(world.keys(tier), 64) == 64
        assert tier.misses == {"incomplete": 3}


def test_equal_rows_are_equal_bytes_whoever_writes_them() -> None:
    for name in FIVE if DEEP else FIVE[1:2]:
        model, world = MODELS[name], World(MODELS[name], 75)
        written = []
        for options in ({"tp": 2, "layout": "LBNHC"}, {"block_size": 32}, {"tp": 4}):
            store = HostStore()
            with tier_in(store, model) as tier:
                world.store(tier, small(model, **options))
                names = sorted(store.names())
                sizes = [store.size(one) for one in names]
                found = [
                    (one, [np.zeros(n, np.uint8)]) for one, n in zip(names, sizes, strict=True)
                ]
                store.get(found)
                written.append([(one, parts[0].tobytes()) for one, parts in found])
        assert written[0] == written[1] == written[2]
