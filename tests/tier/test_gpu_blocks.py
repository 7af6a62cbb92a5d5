"""Blocks of a GPU's pools in a tier in memory and back, with a driver that is none."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from kvatlas.copying import Memory, memory_copy
from kvatlas.copying.block_staging import BlockStaging, split_blocks
from kvatlas.copying.gpu_offload import HostPins
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan
from kvatlas.routing import route, scattered
from kvatlas.tier import Tier, storage
from tests.routing import oracle
from tests.wire.helpers import small
from tests.wire.transports.fake_cuda import FakeCuda, FakeMachine, FakePosted, FakeQueue

ORDERS = ("LBHNC", "LBNHC", "BLNHC", "BHLNC")
TOKENS = 61


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stands for CUDA wherever a tier asks for it."""
    made = FakeCuda(FakeMachine())
    monkeypatch.setattr(storage, "load_driver", lambda: made)
    monkeypatch.setattr(memory_copy, "load_driver", lambda: made)
    monkeypatch.setattr(HostPins, "pin", lambda *_: True)
    return made


def on_gpu(driver: FakeCuda, pools: dict[int, Bytes]) -> dict[int, Memory]:
    placed = {}
    for index, pool in pools.items():
        placed[index], there = driver.allocate(pool.nbytes)
        there[:] = pool
    return placed


def keys_of(made: Plan) -> dict[int, list[bytes]]:
    return {
        group: [f"{group} {number}".encode() for number in range(-(-TOKENS // one.block))]
        for group, one in enumerate(made.groups)
    }


def check(driver: FakeCuda, tier: Tier, src: Plan, dst: Plan) -> None:
    """What is stored from one cache and fetched into another is as if it had moved there."""
    rng = np.random.default_rng(3)
    move = oracle.Move(src, dst, scattered(src, TOKENS), scattered(dst, TOKENS), (0, TOKENS))
    filled, keys = oracle.fill(move, rng), keys_of(tier.plan)
    about: dict[str, Any] = {"tokens": TOKENS, "keys": keys}
    for rank in range(src.ranks):
        mine = on_gpu(driver, filled[rank].pools)
        tier.store(mine, src, rank=rank, blocks=move.source_blocks, **about)
    for rank in range(dst.ranks):
        poison = oracle.Memory(dst, rank, rng)
        other = on_gpu(driver, poison.pools)
        tier.fetch(other, dst, rank=rank, blocks=move.destination_blocks, **about)
        right, _ = oracle.expected(move, rank, poison)
        for index, pool in right.pools.items():
            there = as_bytes(Memory(other[index].address, other[index].nbytes))
            assert np.array_equal(there[: pool.nbytes], pool), (src, dst)
    tier.drop(keys)


def test_whole_blocks_go_over_the_link_as_they_lie_in_every_order(driver: FakeCuda) -> None:
    with Tier(small("dense", layout="BLHNC")) as tier:
        for source, target in zip(ORDERS, [*ORDERS[1:], ORDERS[0]], strict=True):
            driver.log.clear()
            dst = small("dense", layout=target, block_size=32)
            check(driver, tier, small("dense", layout=source), dst)
            # 61 tokens are three whole blocks, and one that a kernel reaches for by itself.
            assert [what for what, _ in driver.log].count("staged") == 2
            assert [what for what, _ in driver.log].count("post") == 2
        assert driver.lent_streams() == 2
    assert driver.lent_streams() == 0, "a tier that is closed has given its streams back"


def test_blocks_that_ranks_bring_in_part_are_not_overwritten(driver: FakeCuda) -> None:
    with Tier(small("dense", layout="BLHNC")) as tier:
        check(driver, tier, small("dense", tp=2), small("dense", tp=4, layout="BHLNC"))
        assert "staged" not in {what for what, _ in driver.log}


def test_hybrids_and_latents_come_back(driver: FakeCuda) -> None:
    for name in ("delta hybrid", "latent", "sliding"):
        with Tier(small(name, layout="BLHNC")) as tier:
            check(driver, tier, small(name), small(name))


def test_a_buffer_takes_as_many_blocks_as_it_has_room_for(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small("dense", layout="BLHNC")
    size = made.pools[0].block_bytes
    blocks: dict[str, Any] = {"source_blocks": [7, 2, 3, 5], "destination_blocks": [1, 0, 2, 3]}
    grids = route(made, made).stream(source_rank=0, destination_rank=0, **blocks, tokens=64).grids()
    for room, expected in ((2 * size, [[2, 3], [5, 7]]), (9 * size, [[2, 3, 5, 7]])):
        split = split_blocks(grids, {0: size}, end=0, room=room)
        assert [piece.blocks.tolist() for piece in split.pieces] == expected
        assert not split.rest
    assert split_blocks(grids, {0: size}, end=0, room=size - 1).pieces == []
    monkeypatch.setattr(storage, "BlockStaging", partial(BlockStaging, room=2 * size))
    with Tier(made) as tier:
        check(driver, tier, made, small("dense", layout="LBNHC"))


def test_one_buffer_is_filled_while_the_link_carries_the_other(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces take two streams in turn; what is under way is waited for where a later one fails."""
    made = small("dense", layout="BLHNC")
    size = made.pools[0].block_bytes
    monkeypatch.setattr(storage, "BlockStaging", partial(BlockStaging, room=size))
    taken: list[int] = []
    staged, waited = FakeQueue.staged, list[FakePosted]()

    def noted(self: FakeQueue, *about: Any, out: bool) -> Any:
        taken.append(self.stream.address)
        if len(taken) == 3:
            raise RuntimeError("the GPU has no more")
        return staged(self, *about, out=out)

    monkeypatch.setattr(FakeQueue, "staged", noted)
    monkeypatch.setattr(FakePosted, "wait", lambda self: waited.append(self))
    rng, blocks = np.random.default_rng(3), scattered(made, TOKENS)
    mine = on_gpu(driver, oracle.Memory(made, 0, rng).pools)
    with Tier(made) as tier, pytest.raises(RuntimeError):
        tier.store(mine, made, blocks=blocks, tokens=TOKENS, keys=keys_of(made))
    assert taken[0] == taken[2] != taken[1]
    assert len(waited) == 2
