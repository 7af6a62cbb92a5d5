"""Engines with another cache dtype load what was stored, converted, where they ask for that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying import copy_request
from kvatlas.models import CacheIdentity, Model
from kvatlas.planning import Plan
from kvatlas.routing import route, scattered
from kvatlas.tier import (
    Converting,
    FolderStore,
    HostStore,
    PrefixFinder,
    StoreTier,
    Tier,
    TierEvents,
    open_tier,
    prefix_finder,
)
from kvatlas.tier.converting import TierRoutes
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.stored_rows import OtherRows
from tests.profiles import DEEP
from tests.tier.test_topologies import MODELS
from tests.tier.world import GUARD, Pools, World, pools, small, tier_plan

OURS = CacheIdentity(weights="ours")
HOW = Converting("bf16->fp8", destination_scales=0.5)
TOKENS = 100


def rows_of(model: Model, **options: Any) -> Plan:
    block = {"block_size": 64} if model.name == "latent" else {}  # what its fp8 kernel takes
    return tier_plan(model, states="apart", **block, **options)


def opened(store: Any, model: Model, *, other: bool) -> StoreTier:
    """The tier of an engine that keeps fp8."""
    source = OtherRows(rows_of(model), HOW) if other else None
    about: dict[str, Any] = {"staging": 1 << 20, "timeout": 30.0, "other": source}
    return StoreTier(store, rows_of(model, kv_dtype="fp8"), OURS, **about)


def expected(world: World, src: Plan, dst: Plan, rank: int, tables: Any, tokens: Any) -> Pools:
    """What a rank should hold, by a converting route that never meets a tier."""
    made = pools(dst, rank, 7)
    holding = {r: world.holding(src, r) for r in range(src.tp)}
    way = route(src, dst, convert=HOW.name, destination_scales=HOW.destination_scales)
    blocks: dict[str, Any] = {"source_blocks": holding[0][1], "destination_blocks": tables}
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
    with StoreTier(store, rows_of(model), OURS, staging=1 << 20, timeout=30.0) as tier:
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


class TroubledStore(HostStore):
    """Is late for names that begin as said, and refuses memory beyond so many stretches."""

    late, stretches = "no name", 4

    def exists(self, names: Sequence[str]) -> list[bool]:
        if any(name.startswith(self.late) for name in names):
            raise AtlasError(Code.DEADLINE, got="nothing", hint="Wait")
        return super().exists(names)

    def register(self, memory: Any) -> None:
        self.stretches -= 1
        if self.stretches < 0:
            raise AtlasError(Code.WIRE_FAILED, got="no room", hint="Give it more")
        super().register(memory)


def test_what_an_engine_has_stored_itself_is_found_where_asking_for_the_rest_is_late() -> None:
    model, world, store = MODELS["dense"], World(MODELS["dense"], TOKENS), TroubledStore()
    dst = small(model, kv_dtype="fp8")
    with opened(store, model, other=True) as fp8:
        keys, own, theirs = world.keys(fp8), *(rows.namespace for rows in fp8._rows)
        held = pools(dst, 0, 3)
        fp8.store(held, dst, blocks=scattered(dst, 32), tokens=32, keys=keys)
        for late in (theirs.prefix, f"{own.tenant_prefix}marks/"):
            store.late = late
            assert fp8.match(keys, TOKENS) == 32
        assert fp8.misses["late"] == 2
        lease = fp8._rows[1].staging.lease({0: 1}, Deadline(1.0))
        assert lease is not None
        assert not fp8.idle(), "rows of the other dtype are on their way"
        fp8._rows[1].staging.give_back(lease)
        assert fp8.idle()


def test_a_tier_that_cannot_be_opened_leaves_no_threads() -> None:
    before, store = threading.active_count(), TroubledStore()
    store.stretches = 1  # enough for the engine's own rows
    with pytest.raises(AtlasError):
        opened(store, MODELS["dense"], other=True)
    assert threading.active_count() == before


def test_what_does_not_say_how_to_convert_is_refused_with_a_code() -> None:
    model = MODELS["dense"]
    dst, tier = small(model, kv_dtype="fp8"), Tier(tier_plan(model, kv_dtype="fp8"))
    rescaled = Converting("fp8->fp8", source_scales=0.5, destination_scales=0.25)
    named: Any = "bf16->fp8"
    wrong: list[Any] = [np.array([0.5, 0.5]), {"layers.0.attn": np.array([0.5, 0.5])}, -1.0]
    for scales in wrong:
        with pytest.raises(AtlasError) as refusal:
            Converting(named, destination_scales=scales)
        assert refusal.value.code is Code.BAD_SIZE
    with tier.pin([], 16) as hit:
        for how in (named, rescaled):
            with pytest.raises(AtlasError) as refusal:
                hit.fetch(pools(dst, 0, 7), dst, blocks=[0], convert=how)
            assert refusal.value.code is Code.BAD_CONVERSION
    with pytest.raises(AtlasError) as refusal:
        open_tier("host://", dst, OURS, max_len=64, staging=1, convert=named)
    assert refusal.value.code is Code.BAD_CONVERSION


def test_rows_that_could_never_be_converted_are_refused_when_a_tier_is_opened() -> None:
    model, in_vain = (
        MODELS["dense"],
        Converting("fp8->bf16", source_scales=0.5, destination_scales=0.5),
    )
    for other, code in (
        (OtherRows(tier_plan(MODELS["latent"]), HOW), Code.BAD_PLAN),
        (OtherRows(rows_of(model), Converting(HOW.name)), Code.MISSING_SCALES),
        (OtherRows(rows_of(model), Converting("fp8->bf16")), Code.BAD_CONVERSION),
        (OtherRows(rows_of(model, kv_dtype="fp8"), in_vain), Code.BAD_CONVERSION),
    ):
        with pytest.raises(AtlasError) as refusal:
            StoreTier(HostStore(), rows_of(model, kv_dtype="fp8"), OURS, staging=1, other=other)
        assert refusal.value.code is code


def test_rows_are_never_copied_into_a_cache_of_other_scales() -> None:
    model, world, store = MODELS["dense"], World(MODELS["dense"], TOKENS), HostStore()
    bf16, fp8 = small(model), small(model, kv_dtype="fp8")
    half = Converting("fp8->bf16", source_scales=0.5)
    other = OtherRows(rows_of(model, kv_dtype="fp8"), half)
    held, tables = pools(fp8, 0, 3), scattered(fp8, TOKENS)
    with (
        StoreTier(store, rows_of(model, kv_dtype="fp8"), OURS, staging=1 << 20) as theirs,
        StoreTier(store, rows_of(model), OURS, staging=1 << 20, other=other) as tier,
        tier.pin(world.keys(tier), TOKENS) as nothing,
    ):
        assert not nothing.tokens
        theirs.store(held, fp8, blocks=tables, tokens=TOKENS, keys=world.keys(theirs))
        with tier.pin(world.keys(tier), TOKENS) as hit:
            assert hit.tokens == TOKENS
            # Who asks for what the tier's own rows would need knows nothing of these.
            for cache, asked in (
                (fp8, Converting("bf16->fp8", destination_scales=0.25)),
                (fp8, Converting("bf16->fp8", source_scales=0.25, destination_scales=0.25)),
                (fp8, None),
                (bf16, Converting("fp8->bf16", source_scales=0.25)),
            ):
                with pytest.raises(AtlasError) as refusal:
                    hit.fetch(pools(cache, 0, 7), cache, blocks=tables, convert=asked)
                assert refusal.value.code is Code.BAD_CONVERSION
            same = {i: np.zeros_like(pool) for i, pool in held.items()}
            alike = Converting("bf16->fp8", destination_scales=0.5)
            hit.fetch(same, fp8, blocks=tables, convert=alike)
            assert all((same[i] == pool)[same[i] != 0].all() for i, pool in held.items())
            assert any(pool.any() for pool in same.values())
            into = [pools(bf16, 0, 7) for _ in range(2)]
            hit.fetch(into[0], bf16, blocks=tables)
            hit.fetch(into[1], bf16, blocks=tables, convert=Converting("fp8->bf16"))
            for index, pool in into[0].items():
                np.testing.assert_array_equal(pool, into[1][index])


def test_rows_of_ones_own_dtype_are_fetched_as_they_are_by_who_would_convert_others() -> None:
    model, world, store = MODELS["dense"], World(MODELS["dense"], TOKENS), HostStore()
    fp8 = small(model, kv_dtype="fp8")
    held, tables = pools(fp8, 0, 3), scattered(fp8, TOKENS)
    with opened(store, model, other=True) as tier, opened(store, model, other=False) as alone:
        request: dict[str, Any] = {"blocks": tables, "tokens": TOKENS, "keys": world.keys(tier)}
        tier.store(held, fp8, **request)
        right, *got = ({i: np.zeros_like(pool) for i, pool in held.items()} for _ in range(4))
        tier.fetch(right, fp8, **request)
        tier.fetch(got[0], fp8, **request, convert=HOW)
        alone.fetch(got[1], fp8, **request, convert=HOW)
        with Tier(tier_plan(model, kv_dtype="fp8")) as in_memory:
            in_memory.store(held, fp8, **request | {"keys": world.keys(in_memory)})
            in_memory.fetch(got[2], fp8, **request | {"keys": world.keys(in_memory)}, convert=HOW)
        assert any(pool.any() for pool in right.values())
        for index, pool in right.items():
            for mine in got:
                np.testing.assert_array_equal(pool, mine[index])
        for how in (Converting(HOW.name, destination_scales=0.25), Converting(HOW.name)):
            with pytest.raises(AtlasError) as refusal:  # what the tier knows of its own scales
                tier.fetch(got[0], fp8, **request, convert=how)
            assert refusal.value.code is Code.BAD_CONVERSION


def test_conversions_that_say_the_same_are_compiled_once() -> None:
    model = MODELS["dense"]
    routes, cache = TierRoutes(tier_plan(model)), small(model, kv_dtype="fp8")
    by_layer = {layer: [0.5, 0.25] for layer in cache.layers}
    for scales in (0.5, by_layer):
        one, two = (
            routes.to(cache, Converting(HOW.name, destination_scales=scales)) for _ in range(2)
        )
        assert one is two
    how = Converting(HOW.name, destination_scales=by_layer)
    by_layer[next(iter(by_layer))] = [8.0, 8.0]  # too late
    assert routes.to(cache, how) is one
    assert routes.to(cache, Converting(HOW.name, destination_scales=by_layer)) is not one


def test_a_request_is_found_in_rows_of_one_dtype() -> None:
    model, store = MODELS["delta hybrid"], HostStore()
    bf16, fp8 = small(model, states="apart"), small(model, kv_dtype="fp8", states="apart")
    heard: list[Any] = []
    with (
        StoreTier(store, rows_of(model), OURS, staging=1 << 20, timeout=30.0) as theirs,
        opened(store, model, other=True) as tier,
    ):
        finder, events = PrefixFinder(tier), TierEvents(tier, heard.extend)
        chain = finder.chain(range(TOKENS))

        def keep(into: StoreTier, cache: Plan, stop: int) -> None:
            about: dict[str, Any] = {"tokens": stop, "keys": chain.keys(stop)}
            into.store(pools(cache, 0, stop), cache, blocks=scattered(cache, stop), **about)

        keep(theirs, bf16, 50)
        assert finder.longest(chain) == tier.match(chain.keys(50), 50) == 50
        assert tier.match(chain.keys(50), 50, convert=False) == 0
        events.note(chain, 50)
        events.tell()
        assert heard == [], "what others keep in another dtype is theirs to tell"
        for stop in range(60, 80):
            keep(tier, fp8, stop)
        assert finder.longest(chain) == 79
        first = tier.plan.groups[finder._keeping or 0].block
        tier.drop({finder._keeping or 0: [chain.key_at(first)]})
        # Without its first block, no end in fp8 is of use, however many there are.
        assert finder.longest(chain) == 50


def test_ends_of_requests_are_looked_for_until_the_longest_is_found_and_kept_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, store = MODELS["delta hybrid"], TroubledStore()
    store.stretches = 99
    fp8 = small(model, kv_dtype="fp8", states="apart")
    monkeypatch.setattr(prefix_finder, "_AT_ONCE", 8)
    with opened(store, model, other=True) as tier:
        finder = PrefixFinder(tier)
        chain = finder.chain(range(TOKENS))
        about: dict[str, Any] = {"tokens": 96, "keys": chain.keys(96)}
        tier.store(pools(fp8, 0, 3), fp8, blocks=scattered(fp8, 96), **about)
        asked: list[int] = []
        kept_ends = tier.kept_ends

        def counted(group: int, ends: Any, **rows: bool) -> list[bool]:
            asked.extend(stop for stop, _ in ends if group == finder._ending)
            return kept_ends(group, ends, **rows)

        monkeypatch.setattr(tier, "kept_ends", counted)
        assert finder.longest(chain) == 96
        assert min(asked) > 96 - 8, "a shorter end is of no use"
        store.late = tier._rows[1].namespace.prefix
        assert finder.longest(chain) == 96, "only the other dtype's rows are late"
