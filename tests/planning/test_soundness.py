"""Every plan of small models, byte by byte: who owns what, and when.

The oracle walks the bytes of every layer in every block. Inside a group nothing may
share a byte. A block of one group and another block of another group in the same
pool may not either, since both can be in use at once. Nothing leaves its pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan, plan
from kvatlas.specs import FullAttention
from tests.planning.models import SMALL
from tests.profiles import DEEP

POLICIES: tuple[Any, ...] = ("vllm", "atlas")
MEMORY = {"compressed": "20MiB"}
"""4 MiB hold a request of every other model, and little is quickly walked."""
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def check(made: Plan) -> None:
    for pool in made.pools:
        mine = [
            region
            for region in made.regions
            if (region.stage, made.groups[region.group].pool) == (pool.stage, pool.index)
        ]
        # Which block uses a byte, over all groups; and which bytes a group has used.
        user = np.full(pool.nbytes, -1, dtype=np.int32)
        for index in {region.group for region in mine}:
            used = np.zeros(pool.nbytes, dtype=bool)
            homes = [(r, slot) for r in mine if r.group == index for slot in range(len(r.layers))]
            for region, slot in homes:
                layer = region.layers[slot].name
                part = region.parts[slot] if region.parts else 0
                blocks = sorted({0, 1 % pool.blocks, pool.blocks - 1})
                for block, start, stop in stretches(made, layer, part, blocks):
                    assert stop <= pool.nbytes, f"{layer} leaves its pool"
                    assert not used[start:stop].any(), f"{layer} shares bytes in its group"
                    others = user[start:stop]
                    assert ((others == -1) | (others == block)).all(), f"{layer} in another block"
                    used[start:stop] = True
                    user[start:stop] = block
    for stage in range(made.pp):
        assert sum(pool.nbytes for pool in made.pools if pool.stage == stage) <= made.memory


def stretches(
    made: Plan, layer: str, part: int, blocks: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Block and range of every run of every field of a layer, as the field's own view has it."""
    page, (region, _) = made.page(layer, part=part), made.region_of(layer, part)
    fields = [field for field in page.fields if not (region.apart and field.padding)]
    views = [made.view(layer, field.name, part) for field in fields]
    kernel_blocks = region.block // region.kernel_block
    content = region.page_bytes if region.apart else page.unpadded * kernel_blocks
    for block in blocks:
        found = 0
        for view in views:
            starts, lengths = view.runs(B=[block])
            for start, nbytes in zip(starts.tolist(), lengths.tolist(), strict=True):
                yield block, start, start + nbytes
                found += nbytes
        assert found == content


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("policy", ["vllm", "atlas", "uniform"])
def test_every_byte_has_one_owner(name: str, policy: Any) -> None:
    """Refusals are fine for vllm and uniform; atlas plans every order that backends take.

    Each order has one of two sizes, by turns; in the deep profile it has both.
    """
    by_turns = zip(ORDERS, (1, 4, 1, 4, 1, 4, 1)[list(SMALL).index(name) % 2 :], strict=False)
    for order, tp in product(ORDERS, (1, 4)) if DEEP else by_turns:
        try:
            made = plan(
                SMALL[name], memory=MEMORY.get(name, "4MiB"), tp=tp, layout=order, policy=policy,
                max_len=64, in_flight=32,
            )  # fmt: skip
        except AtlasError as refusal:
            assert policy != "atlas" or name in ("recurrent", "compressed"), refusal
            assert refusal.code in (
                Code.LAYOUT_REFUSED, Code.PAGES_NOT_UNIFIED, Code.NOT_CONTIGUOUS
            )  # fmt: skip
            continue
        check(made)


@pytest.mark.parametrize("name", ["delta hybrid", "mamba hybrid", "parallel"])
def test_packs(name: str) -> None:
    attention = sum(isinstance(layer.spec, FullAttention) for layer in SMALL[name].layers)
    packs = sorted({min(pack, attention) for pack in (1, 2, 3)})
    for order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"):
        sizes = []
        for pack in packs:
            made = plan(
                SMALL[name], memory="4MiB", layout=order, pack=pack, max_len=64, in_flight=32
            )
            check(made)
            assert (made.pack, len(made.pools)) == (pack, 1)
            sizes.append(made.block_size)
        assert max(sizes) == sizes[0], order


@pytest.mark.parametrize("name", list(SMALL))
def test_pipelines(name: str) -> None:
    for pp, policy in product((2, 3), POLICIES):
        made = plan(
            SMALL[name], memory=MEMORY.get(name, "4MiB"), pp=pp, policy=policy, max_len=64,
            in_flight=32,
        )  # fmt: skip
        check(made)
        stages = {layer: made.region_of(layer)[0].stage for layer in made.layers}
        assert set(stages.values()) == set(range(pp))
        assert sorted(stages) == sorted(layer.name for layer in SMALL[name].layers)
        blocks = {(pool.index, pool.blocks) for pool in made.pools}
        assert len(blocks) == len({pool.index for pool in made.pools})


@pytest.mark.parametrize("order", ORDERS)
def test_kernel_blocks_of_larger_blocks(order: str) -> None:
    """FlashInfer reads at most 64 states at once: larger blocks are split, in every order."""
    made = plan(
        SMALL["dense"], memory="4MiB", layout=order, backend="FLASHINFER", block_size=128,
        max_len=256,
    )  # fmt: skip
    check(made)
    assert {region.kernel_block for region in made.regions} == {64}
    placed = made.placement("layers.0.attn").fold("B", "k", into="B")
    assert placed.size("B") == made.num_blocks * 2
    assert placed.size("N") == 64
    assert not made.warnings


def test_states_apart_hold_what_was_asked() -> None:
    made = plan("Nemotron-H-8B", memory="20GiB", max_len=4096, requests=50)
    assert [pool.index for pool in made.pools] == [0, 1]
    held = next(group.held for group in made.groups if group.kind == "recurrent")
    assert made.pools[1].blocks == 50 * held + 1
    assert made.block_size == 16
    assert any("in a separate pool" in reason for reason in made.reasons)


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_of_a_state_are_together_the_whole(tp: int) -> None:
    """Each row of a rank's conv and ssm is in exactly one part."""
    model = SMALL["cut hybrid"]
    made = plan(model, memory="4MiB", max_len=512, in_flight=32, tp=tp)
    check(made)
    layer = next(layer for layer in model.layers if layer.name.endswith("linear"))
    assert made.parts(layer.name) == 2
    for rank in range(tp):
        whole = layer.spec.page(1, tp=tp, rank=rank)
        parts = [made.page(layer.name, rank, part) for part in range(2)]
        for field in whole.fields:
            rows = [
                row
                for page in parts
                for piece in page.field(field.name).ranges
                for row in range(piece.start, piece.start + piece.length)
            ]
            expected = [
                row
                for piece in field.ranges
                for row in range(piece.start, piece.start + piece.length)
            ]
            assert sorted(rows) == sorted(expected)
    with pytest.raises(AtlasError) as refusal:
        made.placement(layer.name, part=2)
    assert refusal.value.code is Code.OUT_OF_RANGE
