"""Whole or absent, room and pins, many threads, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying.gather_scatter import gather, scatter, stream_bytes
from kvatlas.copying.memory import Memory
from kvatlas.planning import Plan
from kvatlas.routing import Copy, scattered
from kvatlas.tier import Tier
from kvatlas.tier.blocks import StoreResult
from tests.planning.models import SMALL
from tests.tier.world import World, digest, pools, small, tier_plan

DENSE, SLIDING, HYBRID = SMALL["dense"], SMALL["sliding"], SMALL["delta hybrid"]


def code_of(act: Any) -> Code:
    with pytest.raises(AtlasError) as refusal:
        act()
    return refusal.value.code


def blocks(tier: Tier) -> int:
    return sum(pool.blocks for pool in tier.plan.pools)


def free(tier: Tier) -> int:
    return sum(tier._index.free(pool.index) for pool in tier.plan.pools)


# -- whole or absent ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_key_is_there_when_the_last_rank_has_stored(order: Sequence[int]) -> None:
    made = small(DENSE, tp=2, pp=2)
    world, tier = World(DENSE, 64), Tier(tier_plan(DENSE))
    for rank in order[:-1]:
        assert world.store(tier, made, ranks=[rank]) == [StoreResult(0, 4, 0)]
        assert len(tier) == tier.match(world.keys(tier), 64) == 0
    # A rank that stores again is not another rank.
    assert world.store(tier, made, ranks=[order[0]]) == [StoreResult(0, 4, 0)]
    assert world.store(tier, made, ranks=[order[-1]]) == [StoreResult(4, 0, 0)]
    assert len(tier) == 4
    world.check(tier, small(DENSE))


def test_ranks_of_two_topologies_do_not_make_one_block() -> None:
    """Half of the heads from one plan and half of the layers from another is not a block."""
    world, tier = World(DENSE, 64), Tier(tier_plan(DENSE))
    world.store(tier, small(DENSE, tp=2), ranks=[0])
    world.store(tier, small(DENSE, pp=2), ranks=[1])
    world.store(tier, small(DENSE, tp=2, layout="LBHNC"), ranks=[1])
    assert len(tier) == 0
    world.store(tier, small(DENSE, tp=2), ranks=[1])
    assert len(tier) == 4
    world.check(tier, small(DENSE))


def test_a_carry_that_fails_leaves_nothing() -> None:
    world, tier = World(DENSE, 64), Tier(tier_plan(DENSE))
    made = small(DENSE)

    def fails(_: Sequence[Copy]) -> None:
        raise OSError("the wire broke")

    with pytest.raises(OSError, match="broke"):
        world.store(tier, made, carry=fails)
    assert len(tier) == 0
    assert free(tier) == blocks(tier)
    world.store(tier, made)
    world.check(tier, made)


def test_a_rank_that_failed_may_store_again() -> None:
    world, tier, made = World(DENSE, 64), Tier(tier_plan(DENSE)), small(DENSE, tp=2)
    world.store(tier, made, ranks=[0])
    held, tables = world.holding(made, 1)
    with pytest.raises(AtlasError):
        tier.store({}, made, rank=1, blocks=tables, tokens=64, keys=world.keys(tier))
    assert len(tier) == 0
    tier.store(held, made, rank=1, blocks=tables, tokens=64, keys=world.keys(tier))
    world.check(tier, made)


def test_any_transport_carries_the_copies() -> None:
    world, tier, made = World(HYBRID, 80), Tier(tier_plan(HYBRID)), small(HYBRID)
    held, tables = world.holding(made, 0)

    def staged(copies: Sequence[Copy]) -> None:
        stream = np.empty(stream_bytes(copies), dtype=np.uint8)
        gather(copies, held, stream)
        scatter(copies, stream, tier.pools)

    keys = world.keys(tier)
    tier.store(None, made, blocks=tables, tokens=80, keys=keys, carry=staged)
    assert {i: m.nbytes for i, m in tier.memory.items()} == {
        pool.index: pool.nbytes for pool in tier.plan.pools
    }
    got, expected = pools(made, 0, 5), pools(made, 0, 5)
    world.put(made, 0, expected, tables)

    def back(copies: Sequence[Copy]) -> None:
        stream = np.empty(stream_bytes(copies), dtype=np.uint8)
        gather(copies, tier.pools, stream)
        scatter(copies, stream, got)

    tier.fetch(None, made, blocks=tables, tokens=80, keys=keys, carry=back)
    assert all(np.array_equal(got[i], expected[i]) for i in got)


def test_a_block_that_has_only_begun() -> None:
    """Its key stands for the tokens that it had; more of them are another key."""
    made = small(DENSE)
    tier = Tier(tier_plan(DENSE))
    short, longer = World(DENSE, 50), World(DENSE, 60)
    keys = short.keys(tier)
    assert short.store(tier, made)[0].whole == 4
    assert tier.match(keys, 50) == 50
    assert tier.match(keys, 49) == 49
    # Asked for more than the last key stands for, whole blocks are what there is.
    assert tier.match(keys, 60) == 48
    assert longer.store(tier, made)[0].whole == 4
    assert len(tier) == 5
    short.check(tier, small(DENSE, tp=2))
    longer.check(tier, small(DENSE, tp=2))


def test_the_same_key_with_more_tokens_replaces_the_block() -> None:
    made = small(DENSE)
    tier, world = Tier(tier_plan(DENSE)), World(DENSE, 60)
    keys = world.keys(tier)
    world.store(tier, made, tokens=50, keys=keys)
    assert (tier.match(keys, 60), len(tier)) == (48, 4)
    world.store(tier, made, tokens=60, keys=keys)
    assert (tier.match(keys, 60), len(tier)) == (60, 4)
    assert free(tier) == blocks(tier) - 4
    world.check(tier, made)


def test_a_start_within_a_block_is_taken_from_its_beginning() -> None:
    made, world, tier = small(DENSE), World(DENSE, 64), Tier(tier_plan(DENSE))
    assert world.store(tier, made, tokens=(40, 64))[0] == StoreResult(2, 0, 0)
    assert tier.match(world.keys(tier), (32, 64)) == 64
    assert tier.match(world.keys(tier), 64) == 0
    world.check(tier, made, tokens=(32, 64))


def test_a_state_serves_its_own_tokens_alone() -> None:
    tier, made = Tier(tier_plan(HYBRID)), small(HYBRID)
    world = World(HYBRID, 64)
    keys = world.keys(tier)
    world.store(tier, made)
    assert [tier.match(keys, n) for n in (64, 63, 48, 16)] == [64, 0, 0, 0]
    earlier = World(HYBRID, 32)
    earlier.store(tier, made)
    assert [tier.match(keys, n) for n in (64, 63, 48, 32, 31)] == [64, 32, 32, 32, 0]
    world.check(tier, small(HYBRID, tp=2))


def test_keys_of_one_block_for_all_groups() -> None:
    tier, made, world = Tier(tier_plan(HYBRID)), small(HYBRID), World(HYBRID, 64)
    keys = [digest(str(i)) for i in range(4)]
    world.store(tier, made, keys=keys)
    world.check(tier, made, keys=keys)
    # The state has the last key alone, so only that one is there in every group.
    assert keys[3] in tier
    assert keys[0] not in tier
    assert tier.has(keys[0], group=0)
    assert tier.drop(keys) == 4 + len(tier.plan.groups) - 1
    assert len(tier) == 0
    assert free(tier) == blocks(tier)


def test_blocks_without_a_key_are_not_stored() -> None:
    tier, made, world = Tier(tier_plan(DENSE)), small(DENSE), World(DENSE, 64)
    keys = [b"a", None, b"c", b"d"]
    assert world.store(tier, made, keys=keys) == [StoreResult(3, 0, 0)]
    assert tier.match(keys, 64) == 16
    world.check(tier, made, tokens=(32, 64), keys=keys)
    assert code_of(lambda: world.check(tier, made, keys=keys)) == Code.MISSING_BLOCKS


# -- room ---------------------------------------------------------------------------------


def tight(blocks: int) -> Plan:
    """A tier with so many blocks."""
    made = tier_plan(DENSE, max_len=16, memory=8192 * blocks)
    assert made.num_blocks == blocks
    return made


def one_block(tier: Tier, key: bytes, seed: int = 0) -> StoreResult:
    made = small(DENSE)
    held = pools(made, 0, seed)
    return tier.store(held, made, blocks=[5], tokens=16, keys=[key])


def test_what_was_used_longest_ago_makes_room() -> None:
    tier = Tier(tight(4))
    for name in (b"a", b"b", b"c", b"d"):
        one_block(tier, name)
    with tier.pin([b"a"], 16) as hit:
        assert hit.tokens == 16
    one_block(tier, b"b")  # stored again: used again
    assert one_block(tier, b"e") == StoreResult(1, 0, 0)
    assert one_block(tier, b"f") == StoreResult(1, 0, 0)
    assert [key for _, key in tier.names()] == [b"a", b"b", b"e", b"f"]
    assert tier.evicted == 2


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    made, world = small(DENSE), World(DENSE, 64)
    tier = Tier(tier_plan(DENSE, max_len=64, memory=8192 * 5))
    world.store(tier, made)
    keys = world.keys(tier)
    one_block(tier, b"x")
    one_block(tier, b"y")
    assert tier.match(keys, 64) == 48
    one_block(tier, b"z")
    assert tier.match(keys, 64) == 32


def test_what_is_being_loaded_stays() -> None:
    tier, made = Tier(tight(2)), small(DENSE)
    one_block(tier, b"a", seed=1)
    one_block(tier, b"b", seed=2)
    with tier.pin([b"a"], 16) as first, tier.pin([b"b"], 16) as second:
        assert one_block(tier, b"c") == StoreResult(0, 0, 1)
        assert tier.drop([b"a"]) == 1
        assert one_block(tier, b"c") == StoreResult(0, 0, 1), "dropped, and still being read"
        assert (first.tokens, second.tokens) == (16, 16)
        got = pools(made, 0, 9)
        first.fetch(got, made, blocks=[3])
        source = pools(made, 0, 1)
        view = made.view("layers.2.attn", "v")
        assert bytes(got[0][view(B=3, H=2, N=4, C=[0, 7])]) == bytes(
            source[0][view(B=5, H=2, N=4, C=[0, 7])]
        )
    assert one_block(tier, b"c") == StoreResult(1, 0, 0)
    assert sorted(key for _, key in tier.names()) == [b"b", b"c"]


def test_a_request_larger_than_the_tier_keeps_its_beginning() -> None:
    made, world = small(DENSE, tp=2), World(DENSE, 128)
    tier = Tier(tier_plan(DENSE, max_len=128, memory=8192 * 9))
    for name in range(4):
        one_block(tier, bytes([name]) * 8)
    with tier.pin([bytes([0]) * 8], 16), tier.pin([bytes([1]) * 8], 16):
        stored = world.store(tier, made)
    assert stored == [StoreResult(0, 7, 1), StoreResult(7, 0, 1)]
    assert tier.match(world.keys(tier), 128) == 112


def test_half_stored_blocks_make_room_in_their_turn() -> None:
    tier, made, world = Tier(tight(3)), small(DENSE, tp=2), World(DENSE, 16)
    for name in (b"a", b"b", b"c", b"d"):
        held, tables = world.holding(made, 0)
        tier.store(held, made, rank=0, blocks=tables, tokens=16, keys=[name])
    held, tables = world.holding(made, 1)
    stored = [
        tier.store(held, made, rank=1, blocks=tables, tokens=16, keys=[name])
        for name in (b"d", b"c", b"b", b"a")
    ]
    assert stored == [StoreResult(1, 0, 0)] * 3 + [StoreResult(0, 1, 0)]
    assert tier.evicted == 1


# -- many at once -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_threads_store_and_load_while_blocks_come_and_go(kind: str, tmp_path: Path) -> None:
    """Whatever a thread loads is what was stored under that key, all of it."""
    made, names = small(DENSE, tp=2), [bytes([n]) * 5 for n in range(12)]
    if kind == "memory":
        tier = Tier(tight(6))
    else:
        tier = Tier.open(tmp_path / "t", tight(6), durable=False, verify="always")
    worlds = {name: World(DENSE, 16, seed=seed) for seed, name in enumerate(names)}
    ready = {name: [world.holding(made, rank) for rank in (0, 1)] for name, world in worlds.items()}
    alone = small(DENSE)
    expected = {}
    for name, world in worlds.items():
        expected[name] = pools(alone, 0, 7)
        world.put(alone, 0, expected[name], [2])
    loaded: list[bytes] = []
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                name = names[int(rng.integers(len(names)))]
                if rng.random() < 0.6:
                    rank = int(rng.integers(2))
                    held, tables = ready[name][rank]
                    tier.store(held, made, rank=rank, blocks=tables, tokens=16, keys=[name])
                    continue
                got = pools(alone, 0, 7)
                with tier.pin([name], 16) as hit:
                    hit.fetch(got, alone, blocks=[2])
                    if hit.tokens:
                        assert np.array_equal(got[0], expected[name][0])
                        loaded.append(name)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert loaded
    assert tier.evicted
    assert tier.metrics.values["damaged"] == 0
    assert all(block.pins == 0 for block in tier._index._whole.values())
    tier.drop([names[0]])
    waiting = len(tier._index._filling)
    assert free(tier) + len(tier) + waiting == blocks(tier)
    tier.close()


def test_ranks_store_at_once() -> None:
    made, world = small(HYBRID, tp=2, pp=2), World(HYBRID, 128)
    tier = Tier(tier_plan(HYBRID))
    ready = [world.holding(made, rank) for rank in range(4)]
    start = threading.Barrier(4)

    def work(rank: int) -> None:
        held, tables = ready[rank]
        start.wait()
        tier.store(held, made, rank=rank, blocks=tables, tokens=128, keys=world.keys(tier))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    world.check(tier, small(HYBRID))


# -- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"pp": 2}, {"layout": "LBNHC"}, {"layout": "LHBNC"}], ids=str
)
def test_a_tier_keeps_each_block_in_one_piece(options: dict[str, Any]) -> None:
    assert code_of(lambda: Tier(tier_plan(DENSE, **options))) == Code.BAD_PLAN


@pytest.mark.parametrize("key", [b"", b"x" * 65, "text", 7])
def test_keys_are_short_bytes(key: Any) -> None:
    tier = Tier(tight(2))
    assert code_of(lambda: one_block(tier, key)) == Code.BAD_SIZE


def test_bad_calls_are_refused_and_leave_nothing() -> None:
    tier, made = Tier(tight(3)), small(DENSE)
    held = pools(made, 0, 0)
    request: dict[str, Any] = {"blocks": [5], "tokens": 16, "keys": [b"k"]}
    few = {0: held[0][: made.pools[0].nbytes - 1]}
    few_elsewhere = {0: Memory(4096, made.pools[0].nbytes - 1, "cuda:0")}
    apart = {0: held[0][::2]}
    refusals = [
        (Code.BAD_RANK, lambda: tier.store(held, made, rank=1, **request)),
        (Code.BAD_TOKENS, lambda: tier.store(held, made, **{**request, "tokens": 17})),
        (Code.OUT_OF_RANGE, lambda: tier.store(held, made, **{**request, "blocks": [10**6]})),
        (Code.MISSING_BLOCKS, lambda: tier.store(held, made, **{**request, "blocks": []})),
        (Code.OUT_OF_RANGE, lambda: tier.store(held, made, **{**request, "keys": {3: [b"k"]}})),
        (Code.OUT_OF_BOUNDS, lambda: tier.store({}, made, **request)),
        (Code.OUT_OF_BOUNDS, lambda: tier.store(few, made, **request)),
        (Code.OUT_OF_BOUNDS, lambda: tier.store(few_elsewhere, made, **request)),
        (Code.OUT_OF_BOUNDS, lambda: tier.store(apart, made, **request)),
        (Code.MISSING_BLOCKS, lambda: tier.fetch(held, made, **request)),
    ]
    for code, act in refusals:
        assert code_of(act) == code
        assert len(tier) == 0
        assert free(tier) == 3
    assert one_block(tier, b"k") == StoreResult(1, 0, 0)


def test_groups_with_unlike_blocks_have_keys_of_their_own() -> None:
    tier = Tier(tier_plan(SMALL["compressed"], memory="24MiB"))
    assert code_of(lambda: tier.match([b"k"], 16)) == Code.MISSING_BLOCKS


def test_a_closed_tier_is_not_used() -> None:
    tier = Tier(tight(2))
    one_block(tier, b"k")
    with tier.pin([b"k"], 16) as hit:
        tier.close()
        tier.close()
        made = small(DENSE)
        assert code_of(lambda: hit.fetch(pools(made, 0, 0), made, blocks=[1])) == Code.UNREADABLE
    assert code_of(lambda: one_block(tier, b"k")) == Code.UNREADABLE


def test_memory_of_the_callers_own() -> None:
    made = tier_plan(DENSE)
    mine = {0: np.zeros(made.pools[0].nbytes, dtype=np.uint8)}
    tier, world = Tier(made, mine), World(DENSE, 40)
    world.store(tier, small(DENSE))
    world.check(tier, small(DENSE, tp=2))
    assert mine[0].any()
    assert tier.memory[0].address == mine[0].ctypes.data
    assert code_of(lambda: Tier(made, {0: mine[0][:-1]})) == Code.OUT_OF_BOUNDS


def test_what_windows_left_behind_is_not_read() -> None:
    """Entries of blocks that an engine has freed may be anything, also no block at all."""
    made, world = small(SLIDING), World(SLIDING, 150)
    held, tables = world.holding(made, 0)
    tables = {group: list(ids) for group, ids in scattered(made, 150).items()}
    window = next(i for i, g in enumerate(made.groups) if g.window)
    gone = (150 - 40 + 1) // made.groups[window].block
    tables[window][:gone] = [-1] * gone
    tier = Tier(tier_plan(SLIDING))
    tier.store(held, made, blocks=tables, tokens=150, keys=world.keys(tier))
    assert sum(group == window for group, _ in tier.names()) == len(tables[window]) - gone
    world.check(tier, small(SLIDING, tp=2))
