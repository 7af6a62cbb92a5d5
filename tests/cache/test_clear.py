"""A block that passes from one group to another shows nothing old where the plan needs that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.cache import allocate
from kvatlas.planning import Plan
from kvatlas.specs import FullAttention, SlidingAttention, Spec
from tests.guards import ORDERS, Guarded, small_plan
from tests.planning.models import SMALL, model_of

CACHED: dict[str, Any] = {"heads": 4, "head_dim": 8, "cache": "int8_per_token_head"}
WINDOW: dict[str, Spec] = {"attn": SlidingAttention(**CACHED, window=40)}
WHOLE: dict[str, Spec] = {"attn": FullAttention(**CACHED)}
UNLIKE = model_of("unlike numbers", *[WINDOW, WHOLE] * 2)
MODELS = {**SMALL, "unlike numbers": UNLIKE}


def layers_of(made: Plan, group: int) -> list[tuple[str, int]]:
    """(layer, part) of a group."""
    return [
        (layer, part)
        for layer in made.layers
        for part in range(made.parts(layer))
        if made.region_of(layer, part)[0].group == group
    ]


def bytes_of(cache: Any, group: int, block: int) -> Any:
    """Which bytes of its pool a group's fields have in a block."""
    made = cache.plan
    mine = torch.zeros(cache.pools[made.groups[group].pool].numel(), dtype=torch.bool)
    for layer, part in layers_of(made, group):
        starts, lengths = made.placement(layer, part).narrow("B", block, 1).runs()
        before = lengths.cumsum() - lengths
        mine[np.repeat(starts - before, lengths) + np.arange(lengths.sum())] = True
    return mine


@pytest.mark.parametrize("name", [n for n in MODELS if n != "compressed"])
def test_nothing_old_is_seen_where_it_must_not(name: str) -> None:
    """Every pair of groups of a pool: one fills a block, another takes it."""
    for order in ORDERS:
        check_cleared(name, order)


def check_cleared(name: str, order: str) -> None:
    made = small_plan(MODELS[name], layout=order)
    guarded = Guarded(made)
    cache = guarded.cache
    block = 3
    for group, kind in enumerate(made.groups):
        pool = cache.pools[kind.pool]
        pool.fill_(0x7F)  # whatever others left: as bf16, fp16 or fp32 it is NaN
        cleared = cache.clear(group, [block])
        assert cleared == (group in made.groups_to_clear)
        changed = pool != 0x7F
        expected = bytes_of(cache, group, block) if cleared else torch.zeros_like(changed)
        assert torch.equal(changed, expected), order
        for layer, part in layers_of(made, group):
            view = cache.parts(layer)[part]
            split = view.kernel_blocks.size("B") // made.pool_of(layer).blocks
            for tensor in view.fields.values():
                taken = tensor[block * split : (block + 1) * split]
                assert not cleared or not taken.float().any()


def test_what_needs_clearing_is_derived_from_the_plan() -> None:
    """States are read before they are written; unlike numbers in one pool can be NaN."""
    for name, model in MODELS.items():
        made = small_plan(model)
        for index, group in enumerate(made.groups):
            others = [g for g in made.groups if g is not group and g.pool == group.pool]
            hybrid = any(other.kind == "recurrent" for other in others)
            if group.kind == "recurrent":
                assert index in made.groups_to_clear
            elif not others:
                assert index not in made.groups_to_clear
            elif hybrid and name == "delta hybrid":
                assert index in made.groups_to_clear  # fp32 states beside bf16 rows
    assert small_plan(SMALL["sliding"]).groups_to_clear == ()
    assert small_plan(SMALL["dense"]).groups_to_clear == ()
    unlike = small_plan(UNLIKE)
    assert len(unlike.groups) == 2
    assert unlike.groups_to_clear == (0, 1)  # one's codes could lie where the other has scales


def test_memory_starts_as_the_plan_needs_it() -> None:
    assert not any(pool.any() for pool in allocate(small_plan(UNLIKE)).pools.values())
    assert any(pool.any() for pool in allocate(small_plan(SMALL["dense"])).pools.values())


def test_blocks_and_groups_that_are_not_there_are_refused() -> None:
    cache = allocate(small_plan(SMALL["delta hybrid"]))
    for group, ids in ((-1, [1]), (99, [1]), (0, [-1]), (0, [10**6])):
        with pytest.raises(AtlasError) as refusal:
            cache.clear(group, ids)
        assert refusal.value.code is Code.OUT_OF_RANGE
