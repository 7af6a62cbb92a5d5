"""Rows have the same names and bytes for every plan of a model, whoever planned it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.models import Layer, Model
from kvatlas.models.known_models import catalogue
from kvatlas.planning import Plan, foreign, plan
from kvatlas.tier import HostStore, StoreTier, open_tier, prefix_keys
from kvatlas.tier.canonical_rows import canonical_rows
from kvatlas.tier.namespaces import Namespace
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.store_inspection import collect_garbage, older_objects, summaries
from tests.profiles import DEEP
from tests.tier.test_store_topologies import OURS
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small, tier_plan

PLANS: list[dict[str, Any]] = [
    {},
    {"policy": "vllm"},
    {"tp": 4, "layout": "BHLNC"},
    {"pp": 2, "layout": "BLHNC"},
    {"block_size": 256},
    {"policy": "vllm", "tp": 8, "pp": 2},
]
CATALOGUE = list(catalogue())


def plans_of(model: Model, chosen: list[dict[str, Any]] = PLANS) -> list[Plan]:
    found = []
    for options in chosen:
        try:
            found.append(plan(model, memory="300GiB", max_len=1024, **options))
        except AtlasError:  # the model cannot be divided or laid out in this way
            continue
    return found


def digest(model: str | Model | Plan) -> str:
    with open_tier("host://", model, OURS, max_len=256, shards=1, staging=0) as tier:
        assert isinstance(tier, StoreTier)
        return tier.namespace.prefix


@pytest.mark.parametrize("name", CATALOGUE)
def test_rows_by_name_and_by_any_plan_have_the_same_names(name: str) -> None:
    """A plan of each model, and another one by turns; in the deep profile, all plans."""
    model = Model.load(name)
    turn = CATALOGUE.index(name) % 5
    plans = plans_of(model, PLANS if DEEP else [{}, PLANS[1:][turn]])
    rows = canonical_rows(model, span=64, max_len=1024)
    assert len(plans) >= (3 if DEEP else 1)
    for made in plans:
        assert canonical_rows(made, span=64) == rows, made
    assert digest(name) == digest(plans[-1])


def test_the_catalogue_has_65_models() -> None:
    assert len(CATALOGUE) == 65


@pytest.mark.parametrize("name", ["Whisper-large-v3", "LFM2-1.2B"])
def test_rows_stored_by_name_are_found_by_the_plan_of_another_topology(name: str) -> None:
    store, model = HostStore(), Model.load(name)
    own = plan(model, memory="288MiB", max_len=128, in_flight=0)
    other = plan(model, memory="256MiB", max_len=128, in_flight=0, policy="vllm", tp=2)
    rng = np.random.default_rng(5)
    pools = {pool.index: rng.integers(0, 256, pool.nbytes, dtype=np.uint8) for pool in own.pools}
    about: dict[str, Any] = {"staging": 1 << 20, "span": 64, "timeout": 60.0}
    with StoreTier(store, canonical_rows(name, span=64), OURS, **about) as tier:
        keys = prefix_keys(tier.plan, range(128))
        free = {pool.index: iter(range(pool.blocks)) for pool in own.pools}
        tables = {
            number: [
                next(free[group.pool]) for _ in range(-(-max(128, group.source) // group.block))
            ]
            for number, group in enumerate(own.groups)
        }
        for group, of_group in keys.items():
            source = tier.plan.groups[group].source
            of_group += [b"source %d" % n for n in range(len(of_group), -(-source // 64))]
        assert tier.store(pools, own, blocks=tables, tokens=128, keys=keys).no_room == 0
    with StoreTier(store, other, OURS, **about) as theirs:
        assert theirs.match(keys, 128) == 128


class Backwards:
    """A planner that lists groups, regions and layers in the opposite order, with other pools."""

    def __call__(self, made: Plan) -> Plan:
        last = len(made.groups) - 1
        regions = tuple(
            msgspec.structs.replace(region, group=last - region.group)
            for region in reversed(made.regions)
        )
        return msgspec.structs.replace(
            made, groups=tuple(reversed(made.groups)), regions=regions, policy="another planner"
        )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_change_of_the_planner_leaves_the_names_of_rows_unchanged(name: str) -> None:
    made = small(MODELS[name])
    one, two = (
        Namespace(OURS, RowObjects(canonical_rows(each, span=64)))
        for each in (made, Backwards()(made))
    )
    assert one.prefix == two.prefix
    assert one.marks == two.marks


def test_names_of_layers_do_not_matter() -> None:
    model = Model.load("gpt-oss-20b")
    layers = tuple(
        Layer(name=f"decoder/{layer.index}", index=layer.index, spec=layer.spec)
        for layer in model.layers
    )
    assert digest(msgspec.structs.replace(model, layers=layers)) == digest(model)


def test_packings_of_backends_share_rows() -> None:
    model = MODELS["dense"]
    packed = []
    for packing in ("cells", "planes", "head_groups", "transposed"):
        layers = tuple(
            msgspec.structs.replace(
                layer, spec=msgspec.structs.replace(layer.spec, packing=packing)
            )
            for layer in model.layers
        )
        packed.append(msgspec.structs.replace(model, layers=layers))
    assert len({digest(one) for one in packed}) == 1
    world, store = World(model, 64), HostStore()
    with StoreTier(store, tier_plan(model), OURS, staging=1 << 20) as tier:
        for one in packed[1:]:
            world.store(tier, small(one))
            world.check(tier, small(model))
            world.check(tier, small(one))
            tier.drop(world.keys(tier))


def test_memory_described_by_an_engine_shares_rows() -> None:
    model = MODELS["sliding"]
    made = small(model, layout="LBNHC", policy="vllm")
    seen = foreign(
        model,
        {layer: made.placement(layer) for layer in made.layers},
        groups=[
            [layer for layer in made.layers if made.region_of(layer)[0].group == number]
            for number in reversed(range(len(made.groups)))
        ],
        max_len=made.max_len,
    )
    assert canonical_rows(seen, span=64).regions == canonical_rows(model, span=64).regions


def test_objects_of_an_older_format_are_reported_and_removed_but_never_read() -> None:
    store, model = HostStore(), MODELS["dense"]
    world = World(model, 64)
    with StoreTier(store, tier_plan(model), OURS, staging=1 << 20) as tier:
        world.store(tier, small(model))
        for name in list(store.names()):  # as a store that an older release filled
            found = np.zeros(store.size(name), np.uint8)
            store.get([(name, [found])])
            store.put([(name.replace("kv2", "kv1", 1), [found])])
        tier.drop_tenant()
        assert tier.match(world.keys(tier), 64) == 0
        assert tier.misses == {"older_format": 1}
        objects, nbytes = older_objects(store)
        assert objects > 5
        assert nbytes == store.capacity().used
        assert summaries(store) == []
        assert collect_garbage(store, older=True) == (objects, 0)
        assert store.capacity().objects == 0
