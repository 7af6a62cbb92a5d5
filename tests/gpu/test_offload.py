"""Blocks of a GPU's pools in a tier and back, in memory and in a file, in every order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas.planning import Plan
from kvatlas.tier import Tier
from tests.gpu.peer import contents_of, move_of
from tests.gpu.test_wires import TOKENS, small
from tests.kernels.triton.cases import ORDERS
from tests.routing import oracle


def keys_of(plan: Plan) -> dict[int, list[bytes]]:
    return {
        group: [f"{group} {number}".encode() for number in range(-(-TOKENS // one.block))]
        for group, one in enumerate(plan.groups)
    }


def check(tier: Tier, src: Plan, dst: Plan) -> None:
    """What is stored from one GPU cache and fetched into another is as if it had moved there."""
    move, rng = move_of(src, dst, TOKENS), np.random.default_rng(3)
    filled, poison = contents_of(move, 5)[0], oracle.Memory(dst, 0, rng)
    mine, other = (
        {index: torch.from_numpy(pool.copy()).to("cuda") for index, pool in pools.items()}
        for pools in (filled, poison.pools)
    )
    keys: Any = keys_of(tier.plan)
    tier.store(mine, src, blocks=move.source_blocks, tokens=TOKENS, keys=keys)
    tier.fetch(other, dst, blocks=move.destination_blocks, tokens=TOKENS, keys=keys)
    tier.drop(keys)
    right, _ = oracle.expected(move, 0, poison)
    for index, pool in other.items():
        assert np.array_equal(pool.cpu().numpy(), right.pools[index]), (src, dst)


@pytest.mark.parametrize("where", ["memory", "file"])
def test_what_is_stored_is_fetched_in_every_order(where: str, tmp_path: Path) -> None:
    rows = small("dense", layout="BLHNC")
    with Tier(rows) if where == "memory" else Tier.open(tmp_path / "blocks", rows) as tier:
        for source, target in zip(ORDERS, [*ORDERS[1:], ORDERS[0]], strict=True):
            check(tier, small("dense", layout=source), small("dense", layout=target, block_size=32))


def test_hybrids_are_stored_and_fetched() -> None:
    with Tier(small("delta hybrid", layout="BLHNC")) as tier:
        check(tier, small("delta hybrid", layout="LBNHC"), small("delta hybrid", layout="LBHNC"))
