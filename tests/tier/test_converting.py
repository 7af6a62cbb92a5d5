"""Engines with another cache dtype load what was stored, converted, where they ask for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan
from kvatlas.routing import route, scattered
from kvatlas.tier import (
    CacheIdentity,
    Converting,
    FolderStore,
    HostStore,
    OtherRows,
    StoreTier,
    Tier,
)
from kvatlas.wire import copy_request
from tests.profiles import DEEP
from tests.tier.test_topologies import MODELS
from tests.tier.world import GUARD, Pools, World, pools, small, tier_plan

OURS = CacheIdentity(weights="ours")
HOW = Converting("bf16->fp8", dst_scales=0.5)
TOKENS = 100


def rows_of(model: Model, **options: Any) -> Plan:
    block = {"block_size": 64} if model.name == "latent" else {}  # what its fp8 kernel takes
    return tier_plan(model, states="apart", **block, **options)


def opened(store: Any, model: Model, *, other: bool) -> StoreTier:
    """The tier of an engine that keeps fp8."""
    source = OtherRows(rows_of(model), HOW) if other else None
    about: dict[str, Any] = {"staging": 1 << 20, "deadline": 30.0, "other": source}
    return StoreTier(store, rows_of(model, kv_dtype="fp8"), OURS, **about)


def expected(world: World, src: Plan, dst: Plan, rank: int, tables: Any, tokens: Any) -> Pools:
    """What a rank should hold, by a converting route that never meets a tier."""
    made = pools(dst, rank, 7)
    holding = {r: world.holding(src, r) for r in range(src.tp)}
    way = route(src, dst, convert=HOW.name, dst_scales=HOW.dst_scales)
    blocks: dict[str, Any] = {"src_blocks": holding[0][1], "dst_blocks": tables}
    held = {r: own for r, (own, _) in holding.items()}
    copy_request(way, held, {rank: made}, **blocks, tokens=tokens)
    return made


def check(world: World, tier: StoreTier | Tier, src: Plan, dst: Plan, **how: Any) -> None:
    """Every rank fetches, all of the request and its end: the bytes are right, and no others."""
    for rank in range(dst.tp):
        for start in (0, 40):
            tables = scattered(dst, world.tokens)
            got = pools(dst, rank, 7)
            with tier.pin(world.keys(tier), world.tokens) as hit:
                assert hit.tokens == world.tokens
                fetched = {i: pool[:-GUARD] for i, pool in got.items()}
                hit.fetch(fetched, dst, rank=rank, blocks=tables, start=start, **how)
            right = expected(world, src, dst, rank, tables, (start, world.tokens))
            for index, pool in got.items():
                np.testing.assert_array_equal(pool, right[index])


NAMES = ("dense", "sliding", "latent", "delta hybrid")


@pytest.mark.parametrize("name", NAMES if DEEP else NAMES[:1])
def test_an_fp8_engine_loads_what_a_bf16_engine_has_stored(name: str) -> None:
    model, world = MODELS[name], World(MODELS[name], TOKENS)
    src, dst = small(model, tp=2, layout="LBNHC"), small(model, kv_dtype="fp8", block_size=64)
    store = HostStore()
    with StoreTier(store, rows_of(model), OURS, staging=1 << 20, deadline=30.0) as tier:
        assert world.store(tier, src)[-1].whole > 0
        stored = sorted(store.names())
        alone, fp8 = opened(store, model, other=False), opened(store, model, other=True)
        assert alone.match(world.keys(alone), TOKENS) == 0
        assert alone.misses == {"other_dtype": 1}
        assert fp8.match(world.keys(fp8), TOKENS) == TOKENS
        assert not fp8.misses
        check(world, fp8, src, dst)
        # What was converted is nobody's: it is stored only when the engine stores its own.
        assert sorted(store.names()) == stored
        converted = fp8.metrics.values["converted_bytes"]
        assert converted > 0
        mine, tables = pools(dst, 0, 3), scattered(dst, TOKENS)
        request: dict[str, Any] = {"tokens": TOKENS, "keys": world.keys(fp8)}
        assert fp8.store(mine, dst, blocks=tables, **request).whole > 0
        into = pools(dst, 0, 9)
        fp8.fetch(into, dst, blocks=tables, **request)
        assert fp8.metrics.values["converted_bytes"] == converted
        with pytest.raises(AtlasError) as refusal:  # nothing in fp8 is stored as bf16
            tier.store(mine, dst, blocks=tables, tokens=TOKENS, keys=world.keys(tier, salt="x"))
        assert refusal.value.code is Code.UNLIKE_DTYPES


def test_a_tier_in_memory_or_in_a_file_is_fetched_into_another_dtype(tmp_path: Path) -> None:
    model, world = MODELS["sliding"], World(MODELS["sliding"], TOKENS)
    src, dst = small(model, layout="LBHNC"), small(model, kv_dtype="fp8", tp=2)
    for tier in (Tier(tier_plan(model)), Tier.open(tmp_path / "t", tier_plan(model))):
        with tier:
            world.store(tier, src)
            check(world, tier, src, dst, convert=HOW)
            pools_, tables = pools(dst, 0, 7), scattered(dst, TOKENS)
            for how, code in (
                (None, Code.UNLIKE_DTYPES),
                (Converting("fp8->bf16"), Code.BAD_CONVERSION),
                (Converting(HOW.name), Code.MISSING_SCALES),
            ):
                about: dict[str, Any] = {"blocks": tables, "tokens": TOKENS, "convert": how}
                with pytest.raises(AtlasError) as refusal:
                    tier.fetch(pools_, dst, keys=world.keys(tier), **about)
                assert refusal.value.code is code
            world.check(tier, src)  # equal formats are served as they are


def test_what_an_engine_has_stored_itself_is_taken_where_it_is_as_much(tmp_path: Path) -> None:
    model, world = MODELS["dense"], World(MODELS["dense"], TOKENS)
    src, dst = small(model), small(model, kv_dtype="fp8")
    with StoreTier(FolderStore(tmp_path), rows_of(model), OURS, staging=1 << 20) as tier:
        world.store(tier, src)
    with opened(FolderStore(tmp_path), model, other=True) as fp8:
        held, tables = pools(dst, 0, 3), scattered(dst, 32)
        fp8.store(held, dst, blocks=tables, tokens=32, keys=world.keys(fp8))
        keys = world.keys(fp8)
        with fp8.pin(keys, 32) as own, fp8.pin(keys, TOKENS) as theirs:
            assert (own.tokens, theirs.tokens) == (32, TOKENS)
            own.fetch(pools(dst, 0, 5), dst, blocks=tables)
            assert "converted_bytes" not in fp8.metrics.values
        assert fp8.match(world.keys(fp8, salt="others"), TOKENS) == 0
        assert fp8.misses == {"absent": 1}


def test_rows_that_could_never_be_converted_are_refused_when_a_tier_is_opened() -> None:
    model = MODELS["dense"]
    for other, code in (
        (OtherRows(tier_plan(model, block_size=64), HOW), Code.BAD_PLAN),
        (OtherRows(rows_of(model), Converting(HOW.name)), Code.MISSING_SCALES),
        (OtherRows(rows_of(model), Converting("fp8->bf16")), Code.BAD_CONVERSION),
        (OtherRows(small(model, layout="LBNHC"), HOW), Code.BAD_PLAN),
    ):
        with pytest.raises(AtlasError) as refusal:
            StoreTier(HostStore(), rows_of(model, kv_dtype="fp8"), OURS, staging=1, other=other)
        assert refusal.value.code is code
