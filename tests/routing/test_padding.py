"""Padding of rows that both ends declare is copied, because skipping it would split runs.

`test_unused_bytes.py` tests the same for padding of pages and blocks.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.planning import Plan, plan
from kvatlas.routing import route
from kvatlas.specs import LatentAttention
from tests.planning.models import SMALL
from tests.routing import oracle
from tests.routing.arrives import assert_arrives, assert_prepared_arrives
from tests.routing.cases import moving, small_plan, stacked
from tests.routing.fields_apart import apart

V4 = stacked("v4", *[LatentAttention(latent=64, rope=16, cache="fp8_ds_mla", version="v4")] * 3)


def equal(made: Plan, tokens: int, **options: Any) -> Any:
    """A request between two equal plans, whose blocks follow each other."""
    tables, first = {}, dict.fromkeys(range(len(made.groups)), 1)
    for index, group in enumerate(made.groups):
        start = first[group.pool]
        stop = first[group.pool] = start + -(-tokens // group.block)
        tables[index] = list(range(start, stop))
    return route(made, made, **options).bind(
        source_rank=0,
        destination_rank=0,
        source_blocks=tables,
        destination_blocks=tables,
        tokens=tokens,
    )


def test_deepseek_v4_moves_in_runs_of_pages() -> None:
    """Each row has 7 scales and a byte of padding; that byte split 26,906 of 28,388 runs."""
    made = plan("DeepSeek-V4-Flash", memory="100GiB", max_len=8192)
    joined, apart = equal(made, 4096), equal(made, 4096, padding=False)
    assert min(int(copy.length.min()) for copy in joined.copies) > 500
    assert len(joined) < 200 < 28_000 < len(apart)
    unused = 0
    for index, group in enumerate(made.groups):
        rows = sum(
            len(region.layers) * region.first_page(1).unpadded
            for region in made.regions
            if region.group == index
        )
        first = 4096 - group.window + 1 if group.window else 0  # the first token that moves
        whole = 4096 // group.block - -(-first // group.block)
        unused += whole * (made.bytes_per_block - rows)
    padding = joined.nbytes - apart.nbytes - unused
    assert 0 < padding < apart.nbytes / 500
    assert {copy.destination_pool for copy in joined.copies} == {
        copy.destination_pool for copy in apart.copies
    }


ENDS = (("BLNHC", "BLNHC"), ("BLNHC", "LBHNC"), ("BHLNC", "BLNHC"))


@pytest.mark.parametrize("ends", ENDS)
def test_padding_arrives_with_its_row(ends: tuple[str, str]) -> None:
    """Every byte of memory is compared: nothing but rows and their padding is written."""
    for blocks, tps in (((64, 64), (1, 1)), ((64, 192), (2, 4))):
        src, dst = (
            small_plan(V4, layout=order, block_size=block, tp=tp, max_len=250)
            for order, block, tp in zip(ends, blocks, tps, strict=True)
        )
        move = moving(src, dst, (5, 200))
        assert oracle.moving_padding(move, "layers.0.cache") == {"pad"}
        assert_arrives(move)
        assert_prepared_arrives(move.between(0, 192))


def test_padding_of_overlaid_groups() -> None:
    """A byte of padding may be content of another group, in blocks that it owns."""
    src, dst = (small_plan(SMALL["compressed"], tp=tp) for tp in (1, 2))
    move = moving(src, dst, 90)
    assert any(oracle.moving_padding(move, layer) for layer in src.layers)
    assert_arrives(move)


def test_bytes_that_must_arrive_are_those_that_are_sent() -> None:
    made = small_plan(V4, block_size=64, max_len=400)
    for padding in (True, False):
        way = route(made, made, padding=padding)
        asked: Any = {"destination_blocks": [3, 1, 2], "tokens": 150}
        bound = way.bind(source_rank=0, destination_rank=0, source_blocks=[1, 2, 4], **asked)
        assert bound.nbytes == way.needed_bytes(destination_rank=0, **asked)
        row = 64 + 2 * 16 + 1 + 7 * padding  # latent, rope, one scale, padding
        unused = made.bytes_per_block - 3 * 64 * row if padding else 0
        assert bound.nbytes == 3 * 150 * row + 2 * unused  # two blocks are copied whole


def test_a_region_whose_layers_copy_different_padding() -> None:
    """A source whose fields are apart declares no padding; pages of another layer do."""
    form = LatentAttention(latent=48, rope=16, cache="fp8_ds_mla", version="v4.1")
    made = small_plan(stacked("v4.1", form, form))
    sources = [apart(made, seed, pages=0.5) for seed in range(12)]
    mixed = [one for one in sources if len({region.apart for region in one.regions}) == 2]
    assert mixed
    for source in mixed:
        assert_arrives(moving(source, made, (0, 1)))
