"""Plans whose fields are stored apart move over a wire and into a tier, like other plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvatlas import AtlasError, Code
from kvatlas.cache import allocate
from kvatlas.tier import Tier
from kvatlas.tier.ingest import check_tier_plan
from kvatlas.wire import Memory
from kvatlas.wire.handshake_checks import check_memory
from tests.planning.models import SMALL
from tests.planning.test_foreign_fields import (
    DENSE,
    Arena,
    allocations,
    described,
    in_segments,
    sglang_hnd,
)
from tests.routing.fields_apart import apart
from tests.tier.world import World, tier_plan
from tests.tier.world import small as small_world
from tests.wire.helpers import End, assert_by_oracle, ends, fill_by_oracle, pull_all, small

MODELS = ("dense", "latent", "mamba hybrid")


@pytest.mark.parametrize("how", ["direct", "staged"])
@pytest.mark.parametrize("name", MODELS)
def test_a_wire_moves_fields(name: str, how: str) -> None:
    whole, fields = small(name, tp=2), apart(small(name), 5, pages=0)
    for number, (src, dst) in enumerate([(fields, whole), (whole, fields)]):
        with ends(End(src, 50, seed=1), End(dst, 50, seed=2)) as (source, target):
            move = fill_by_oracle(source, target)
            source.offer(f"r{number}")
            pull_all(source, target, f"r{number}", how=how, checksums=True)
            for rank in range(dst.tp):
                assert_by_oracle(move, target, rank)


@pytest.mark.parametrize("name", MODELS)
def test_a_tier_stores_and_loads_fields(name: str) -> None:
    model = SMALL[name]
    fields = apart(small_world(model), 6, pages=0)
    world, tier = World(model, 100), Tier(tier_plan(model))
    world.store(tier, fields)
    world.check(tier, small_world(model, layout="LBHNC"))
    other, again = World(model, 100), Tier(tier_plan(model))
    other.store(again, small_world(model, tp=2))
    other.check(again, fields)


def test_what_needs_one_allocation_or_whole_pages_refuses() -> None:
    arena = Arena()
    tensors = sglang_hnd(arena)
    made = described(DENSE, tensors)
    refused: list[tuple[Code, Callable[[], object]]] = [
        (Code.FIELDS_APART, lambda: allocate(made)),
        (Code.FIELDS_APART, lambda: check_tier_plan(made)),
    ]
    segments = in_segments(made, *allocations(arena, tensors))
    memory = {0: Memory(1 << 20, made.pools[0].nbytes)}
    refused.append((Code.BAD_PLAN, lambda: check_memory(segments, 0, memory)))
    for code, act in refused:
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is code
    check_memory(made, 0, memory)
