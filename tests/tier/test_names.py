"""Which names a tier has, page by page, while names come and go."""

from __future__ import annotations

import numpy as np

from kvatlas.tier.index import BlockIndex, TierBlock
from kvatlas.tier.request_blocks import Cover
from tests.planning.models import SMALL
from tests.tier.world import tier_plan

PLAN = tier_plan(SMALL["dense"], memory=8192 * 3000)


class CountedBlock(TierBlock):
    """A block that counts how often it is asked when it could first be found."""

    asked = 0

    def __getattribute__(self, name: str) -> object:
        CountedBlock.asked += name in ("found", "dropped")
        return super().__getattribute__(name)


def filled(index: BlockIndex, first: int, many: int) -> list[TierBlock]:
    """Blocks that are whole, as ranks leave them."""
    made: list[TierBlock] = [
        CountedBlock(0, number % 3000, 0, b"%d" % number, Cover(0, 16), pins=1)
        for number in range(first, first + many)
    ]
    index.settle(made)
    return made


def test_all_names_are_listed_page_by_page_and_each_page_costs_the_same() -> None:
    index = BlockIndex(PLAN, lambda _: None)
    filled(index, 0, 3000)
    CountedBlock.asked, listed, mark = 0, list[bytes](), 0
    while True:
        names, after = index.names_since(mark, 10)
        if after == mark:
            break
        listed, mark = [*listed, *(key for _, key in names)], after
    assert listed == [b"%d" % number for number in range(3000)]
    assert CountedBlock.asked < 3000 * 10


def test_names_that_come_and_go_are_listed_once_and_forgotten() -> None:
    index, rng = BlockIndex(PLAN, lambda _: None), np.random.default_rng(0)
    there: dict[bytes, TierBlock] = {}
    mark, seen, number = 0, list[bytes](), 0
    for _ in range(60):
        for block in filled(index, number, 50):
            there[block.key] = block
        number += 50
        for key in rng.permutation(sorted(there))[: len(there) // 2].tolist():
            index.drop(there.pop(key))
        while (page := index.names_since(mark, 7))[1] != mark:
            names, mark = page
            seen += [key for _, key in names]
        assert set(there) <= set(seen)
    assert len(seen) == len(set(seen))
    everything = {key for _, key in index.names_since(0, 10**6)[0]}
    assert everything == set(there)
    assert len(index._in_order) <= 2 * len(there) + 2048
