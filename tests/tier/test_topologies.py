"""What one topology stores, any other loads: every byte, and no byte beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.specs import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    SlidingAttention,
)
from kvatlas.tier import Tier
from kvatlas.tier.blocks import StoreResult
from tests.planning.models import LATENT, SMALL, model_of
from tests.tier.world import World, every_block, pools, small, tier_plan

SIX: dict[str, Any] = {"attn": FullAttention(heads=6, head_dim=8)}
SIX_DELTA: dict[str, Any] = {
    "linear": GatedDeltaNet(key_heads=6, value_heads=6, key_dim=8, value_dim=8, ssm_dtype="fp32")
}
WIDE: dict[str, Any] = {"attn": FullAttention(heads=4, head_dim=32)}
CHUNKED: dict[str, Any] = {"attn": ChunkedAttention(heads=4, head_dim=8, chunk=48)}
NARROW: dict[str, Any] = {"attn": SlidingAttention(heads=4, head_dim=8, window=9)}
CROSS: dict[str, Any] = {
    "attn": FullAttention(heads=4, head_dim=8),
    "cross": CrossAttention(heads=4, head_dim=8, source=40),
}
MODELS: dict[str, Model] = {
    **{name: model for name, model in SMALL.items() if name != "compressed"},
    "six": model_of("six", *[SIX] * 3, heads=6),
    "six hybrid": model_of("six hybrid", *[SIX_DELTA, SIX] * 2, heads=6),
    "chunked": model_of("chunked", *[CHUNKED, SIX] * 2, heads=12),
    "narrow": model_of("narrow", *[NARROW, SIX] * 2, heads=12),
    "cross": model_of("cross", *[CROSS] * 2),
}

MAIN = ("dense", "sliding", "latent", "delta hybrid", "mamba hybrid")
TURNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp 2 to 1": ({"tp": 2, "layout": "LBNHC"}, {"layout": "BLHNC"}),
    "tp 1 to 2": ({"layout": "LBHNC"}, {"tp": 2, "layout": "LBNHC"}),
    "tp 4 to 2": ({"tp": 4, "layout": "BLNHC"}, {"tp": 2, "layout": "LBHNC"}),
    "pp 2 to 1": ({"pp": 2, "layout": "LBNHC"}, {"layout": "LBNHC"}),
    "pp 1 to 2, tp 2": ({}, {"tp": 2, "pp": 2}),
    "blocks 16, 32 and 64": ({"block_size": 16}, {"block_size": 64, "layout": "BLHNC"}),
    "blocks 64, 32 and 16": ({"block_size": 64, "tp": 2}, {"block_size": 16}),
}


def tier_of(model: Model, turn: str) -> Tier:
    options: dict[str, Any] = {"block_size": 32} if turn.startswith("blocks") else {}
    return Tier(tier_plan(model, **options))


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", MAIN)
def test_another_topology_loads_what_one_has_stored(name: str, turn: str) -> None:
    model, (src, dst) = MODELS[name], TURNS[turn]
    tier = tier_of(model, turn)
    world = World(model, 100)
    stored = world.store(tier, small(model, **src))
    assert stored[-1].whole == len(tier) > 0
    assert not any(one.no_room for one in stored)
    world.check(tier, small(model, **dst))


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(MAIN)))
def test_every_kind_of_cache_goes_through_a_tier(name: str) -> None:
    model = MODELS[name]
    world = World(model, 150)
    tier = Tier(tier_plan(model, states="apart"))
    world.store(tier, small(model, tp=2))
    world.check(tier, small(model, layout="LBNHC"))


@pytest.mark.parametrize("states", ["auto", "shared", "apart"])
def test_states_that_are_cut_by_heads(states: str) -> None:
    model = MODELS["cut hybrid"]
    world = World(model, 64)
    tier = Tier(tier_plan(model, states=states))
    world.store(tier, small(model, tp=2))
    world.check(tier, small(model, tp=4, policy="vllm"))


@pytest.mark.parametrize("name", ["dense", "latent", "mamba hybrid"])
def test_ranks_that_hold_the_same_heads(name: str) -> None:
    """Each byte comes from one of them; the others have nothing to bring."""
    world = World(MODELS[name], 45)
    tier = Tier(tier_plan(MODELS[name]))
    world.store(tier, small(MODELS[name], tp=8))
    world.check(tier, small(MODELS[name], tp=8, layout="LBHNC"))


@pytest.mark.parametrize("name", ["six", "six hybrid"])
def test_from_two_ranks_to_three(name: str) -> None:
    world = World(MODELS[name], 77)
    tier = Tier(tier_plan(MODELS[name]))
    world.store(tier, small(MODELS[name], tp=2))
    world.check(tier, small(MODELS[name], tp=3, layout="LBNHC"))
    world.check(tier, small(MODELS[name], tp=6, pp=2))


def test_compressed_caches_with_unlike_blocks() -> None:
    model = SMALL["compressed"]
    big: dict[str, Any] = {"memory": "24MiB"}
    world = World(model, 192, memory="96MiB")
    tier = Tier(tier_plan(model, **big))
    assert len({group.block for group in tier.plan.groups}) > 1
    world.store(tier, small(model, policy="vllm", **big))
    world.check(tier, small(model, **big))


@pytest.mark.parametrize("dtype", ["fp8", "nvfp4", "int8_per_token_head", "int4_per_token_head"])
def test_quantised_caches(dtype: str) -> None:
    model = model_of("wide", *[WIDE] * 2)
    model = model.with_cache(dtype)
    world = World(model, 90, layout="LBHNC")
    tier = Tier(tier_plan(model))
    world.store(tier, small(model, tp=2, layout="LBHNC"))
    world.check(tier, small(model, tp=4, layout="BLHNC"))


def test_context_parallel_ranks_store_and_load() -> None:
    model = MODELS["latent"]
    world = World(model, 101)
    tier = Tier(tier_plan(model))
    world.store(tier, small(model, tp=4, dcp=2))
    world.check(tier, small(model, tp=4, dcp=4))
    world.check(tier, small(model))


def test_which_rank_brings_a_token_depends_on_where_it_is() -> None:
    """Of three context-parallel ranks the second has token 16, as the first has token 0."""
    model = model_of("latent", *[LATENT] * 2, heads=6)
    world, tier, made = World(model, 17), Tier(tier_plan(model)), small(model, tp=6, dcp=3)
    keys = world.keys(tier)
    assert world.store(tier, made, ranks=[0], tokens=1, keys=[b"one"]) == [StoreResult(1, 0, 0)]
    assert world.store(tier, made, ranks=[0, 2]) == [StoreResult(0, 2, 0), StoreResult(0, 2, 0)]
    assert world.store(tier, made, ranks=[1]) == [StoreResult(2, 0, 0)]
    assert tier.match(keys, 17) == 17
    world.check(tier, small(model))


@pytest.mark.parametrize("order", ["BHLNC", "BLNHC"])
@pytest.mark.parametrize("name", ["dense", "latent"])
def test_the_tier_has_any_block_outermost_order(name: str, order: str) -> None:
    world = World(MODELS[name], 50)
    tier = Tier(tier_plan(MODELS[name], layout=order))
    world.store(tier, small(MODELS[name], tp=2, layout="LBNHC"))
    world.check(tier, small(MODELS[name], layout="LBHNC"))


@pytest.mark.parametrize("name", MAIN)
def test_through_a_file_that_was_closed_between(name: str, tmp_path: Path) -> None:
    world = World(MODELS[name], 100)
    with Tier.open(tmp_path / "tier", tier_plan(MODELS[name])) as tier:
        world.store(tier, small(MODELS[name], tp=2, pp=2))
    with Tier.open(tmp_path / "tier") as tier:
        world.check(tier, small(MODELS[name], layout="LBNHC"))
        world.check(tier, small(MODELS[name], tp=4))


def test_a_window_stored_as_it_goes_is_loaded_at_any_block() -> None:
    """Stored block by block every key is whole; at once, what windows left behind is not."""
    model = MODELS["sliding"]
    world = World(model, 160)
    src = small(model, tp=2)
    whole, steps = Tier(tier_plan(model)), Tier(tier_plan(model))
    world.store(whole, src)
    for stop in range(16, 161, 16):
        for rank in (0, 1):
            held, tables = pools(src, rank, 1), every_block(src, stop)
            world.put(src, rank, held, tables, (stop - 16, stop))
            keys = world.keys(steps)
            request = {"tokens": (stop - 16, stop), "keys": keys}
            steps.store(held, src, rank=rank, blocks=tables, **request)
    keys = world.keys(whole)
    assert [whole.match(keys, n) for n in (160, 159, 144, 100, 32)] == [160, 0, 0, 0, 0]
    assert [steps.match(keys, n) for n in (160, 159, 144, 100, 32)] == [160, 159, 144, 100, 32]
    for stop in (160, 144, 100, 32):
        world.check(steps, small(model), tokens=stop)


def test_a_tier_that_keeps_windows_and_all_tokens_in_one_block() -> None:
    """Such a block has what all of its layers have: nothing less is said to be there."""
    model = MODELS["sliding"]
    world = World(model, 160, policy="uniform")
    uniform, apart = small(model, policy="uniform"), small(model)
    kept = tier_plan(model, policy="uniform")
    tier = Tier(kept)
    keys = world.keys(tier)
    world.store(tier, apart)
    assert 0 < len(tier) < len(keys[0])
    assert tier.match(keys, 160) == 0
    world.store(tier, uniform)
    assert tier.match(keys, 160) == 160
    world.check(tier, uniform)
    world.check(tier, small(model, tp=2))


def test_a_prefix_is_loaded_from_where_the_engine_has_it() -> None:
    world = World(MODELS["dense"], 128)
    tier = Tier(tier_plan(MODELS["dense"]))
    world.store(tier, small(MODELS["dense"], tp=2))
    world.check(tier, small(MODELS["dense"]), tokens=(37, 101))


def test_another_models_caches_and_other_dtypes_are_refused() -> None:
    tier = Tier(tier_plan(MODELS["dense"]))
    world = World(MODELS["sliding"], 32)
    with pytest.raises(AtlasError) as refusal:
        world.store(tier, small(MODELS["sliding"]), keys=[b"k", b"l"])
    assert refusal.value.code == Code.MISSING_LAYERS
    other = small(MODELS["dense"].with_cache("fp8"))
    with pytest.raises(AtlasError) as refusal:
        tier.store(pools(other, 0, 0), other, blocks=[1], tokens=16, keys=[b"k"])
    assert refusal.value.code == Code.UNLIKE_DTYPES


def test_another_requests_keys_load_other_bytes() -> None:
    """The negative control: what is loaded depends on the key."""
    model = MODELS["dense"]
    tier, made = Tier(tier_plan(model)), small(model)
    one, two = World(model, 48, seed=1), World(model, 48, seed=2)
    one.store(tier, made)
    two.store(tier, made, keys=two.keys(tier, salt="other"))
    one.check(tier, made)
    two.check(tier, made, keys=two.keys(tier, salt="other"))
    with pytest.raises(AssertionError):
        one.check(tier, made, keys=two.keys(tier, salt="other"))


def test_torch_tensors_are_pools() -> None:
    from kvatlas.cache import allocate

    model = MODELS["dense"]
    made = small(model, tp=2)
    world = World(model, 40)
    tier = Tier(tier_plan(model))
    for rank in (0, 1):
        held, tables = world.holding(made, rank)
        cache = allocate(made, rank=rank)
        cache.pools[0].numpy()[:] = held[0][: cache.pools[0].nbytes]
        tier.store(cache.pools, made, rank=rank, blocks=tables, tokens=40, keys=world.keys(tier))
    world.check(tier, small(model))
    assert np.count_nonzero(tier.pools[0])
