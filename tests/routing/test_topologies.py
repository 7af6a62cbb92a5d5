"""Any two topologies, orders, packings and block sizes, case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from kvatlas import Placement
from kvatlas.geometry import StridedRuns, merge_runs
from kvatlas.models import Model
from kvatlas.planning import Plan, foreign
from kvatlas.routing import fingerprint, route
from kvatlas.specs import (
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    SlidingAttention,
)
from tests.planning.models import SMALL
from tests.routing.arrives import assert_arrives
from tests.routing.cases import moving, small_plan, stacked

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
DENSE = stacked("dense", *[FullAttention(heads=4, head_dim=8)] * 3)
FULL = FullAttention(heads=2, head_dim=4)
WINDOW = SlidingAttention(heads=2, head_dim=4, window=20)


# -- who reads from whom --------------------------------------------------------------------------


def test_replicas_are_read_once_and_spread() -> None:
    """Two kv heads at tp 8 are four replicas each: eight readers use all eight ranks."""
    model = stacked("gqa", *[FullAttention(heads=2, head_dim=8)] * 2)
    src, dst = small_plan(model, tp=8), small_plan(model, tp=8, layout="BLHNC")
    made = route(src, dst)
    chosen = [made.sources(rank) for rank in range(8)]
    assert all(len(ranks) == 1 for ranks in chosen)
    assert [ranks[0] // 4 for ranks in chosen] == [rank // 4 for rank in range(8)]
    assert len({ranks[0] for ranks in chosen}) == 8
    assert_arrives(moving(src, dst, 40))
    for one in ("latent", "sparse"):
        src, dst = (small_plan(SMALL[one], tp=tp) for tp in (4, 8))
        chosen = [route(src, dst).sources(rank) for rank in range(8)]
        assert all(len(ranks) == 1 for ranks in chosen)
        assert Counter(ranks[0] for ranks in chosen) == dict.fromkeys(range(4), 2)


def test_groups_that_lie_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid's states are in 18 groups, each at the same places of a block."""
    merged: list[object] = []

    def counting(strips: Iterable[StridedRuns]) -> list[StridedRuns]:
        merged.append(strips)
        return merge_runs(strips)

    monkeypatch.setattr("kvatlas.routing.compiler.merge_runs", counting)
    state = GatedDeltaNet(key_heads=12, value_heads=24, key_dim=2, value_dim=3)
    model = stacked("hybrid", *[state] * 9, FULL)
    src, dst = (small_plan(model, tp=tp) for tp in (2, 1))
    assert len(src.groups) == len(dst.groups) == 19
    way = route(src, dst)
    assert [way.compile(source_rank=rank, destination_rank=0) > 0 for rank in (0, 1)] == [
        True,
        True,
    ]
    assert len(merged) <= 8  # by rank: attention, and which half of a state is whose


@pytest.mark.parametrize(("tp", "to"), [(2, 3), (3, 2), (4, 6), (6, 4), (1, 12), (12, 1)])
def test_tp_sizes_that_are_no_multiples(tp: int, to: int) -> None:
    model = stacked("twelve", *[FullAttention(heads=12, head_dim=4)] * 2)
    for order in ("LBHNC", "LBNHC", "BHLNC"):
        src, dst = small_plan(model, tp=tp, layout=order), small_plan(model, tp=to)
        assert_arrives(moving(src, dst, 40))
        made = route(src, dst)
        for rank in range(to):
            held = range(rank * 12 // to, (rank + 1) * 12 // to)
            assert made.sources(rank) == tuple(sorted({head * tp // 12 for head in held}))


@pytest.mark.parametrize(("pp", "to"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("name", ["dense", "delta hybrid", "sliding"])
def test_pipelines_on_either_side(pp: int, to: int, name: str) -> None:
    src, dst = small_plan(SMALL[name], pp=pp, tp=2), small_plan(SMALL[name], pp=to, layout="BLHNC")
    assert_arrives(moving(src, dst, 50))
    made = route(src, dst)
    for rank, layer in product(range(to), dst.layers):
        if dst.region_of(layer)[0].stage == rank:
            assert 2 * src.region_of(layer)[0].stage in made.sources(rank)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tp": 4, "dcp": 2}, {"tp": 2}),
        ({"tp": 2}, {"tp": 4, "dcp": 2}),
        ({"tp": 8, "dcp": 4}, {"tp": 4, "dcp": 2}),
        ({"tp": 6, "dcp": 3}, {"tp": 8, "dcp": 2}),
        ({"tp": 8, "dcp": 4, "pp": 2}, {"tp": 1, "block_size": 32}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dense", "latent", "hybrid"])
def test_tokens_sharded_over_context_parallel_ranks(
    one: dict[str, Any], other: dict[str, Any], kind: str
) -> None:
    attention = FullAttention(heads=2, head_dim=4)
    models: dict[str, Model] = {
        "dense": stacked("dense", attention, attention),
        "latent": stacked("latent", *[LatentAttention(latent=16, rope=4)] * 2),
        "hybrid": stacked(
            "hybrid", Mamba2(heads=24, head_dim=2, groups=1, state_size=2), attention
        ),
    }
    src, dst = small_plan(models[kind], **one), small_plan(models[kind], **other)
    for tokens in ((0, 70), (13, 14), (16, 33)):
        assert_arrives(moving(src, dst, tokens))


# -- any two orders, packings and blocks ----------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("to", ORDERS)
def test_any_two_orders(order: str, to: str) -> None:
    src, dst = small_plan(DENSE, tp=2, layout=order), small_plan(DENSE, tp=4, layout=to)
    assert_arrives(moving(src, dst, (3, 40)))


PACKINGS = ("cells", "head_groups", "planes", "tiled_planes", "transposed")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("to", PACKINGS)
def test_any_two_packings(packing: Any, to: Any) -> None:
    def packed(word: Any, block: int, tp: int) -> Plan:
        spec = FullAttention(heads=4, head_dim=16, packing=word)
        return small_plan(stacked("m", spec, spec), layout="LBHNC", block_size=block, tp=tp)

    for blocks in ((16, 16), (64, 128), (48, 32)):
        src, dst = packed(packing, blocks[0], 2), packed(to, blocks[1], 1)
        assert_arrives(moving(src, dst, (0, 70)))
        assert fingerprint(src) == fingerprint(dst)


@pytest.mark.parametrize(("block", "to"), [(16, 48), (48, 32), (128, 64), (192, 128), (80, 112)])
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_blocks_and_kernel_blocks_of_any_two_sizes(block: int, to: int, order: str) -> None:
    more: dict[str, Any] = {"backend": "FLASHINFER", "max_len": 300}
    src = small_plan(DENSE, block_size=block, layout=order, **more)
    dst = small_plan(DENSE, block_size=to, tp=2, **more)
    for tokens in ((0, 250), (77, 191)):
        assert_arrives(moving(src, dst, tokens))


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BHLNC"])
def test_packs_beyond_the_number_of_layers(order: str) -> None:
    delta = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=16, value_dim=16, ssm_dtype="fp32")
    attention = FullAttention(heads=2, head_dim=8)
    model = stacked("m", *[delta, delta, attention] * 2)
    packed = small_plan(model, layout=order, pack=5, tp=2)
    assert packed.pack == 5
    others = [small_plan(model, layout="BLHNC"), small_plan(model, layout="LBNHC", pack=2)]
    others.append(small_plan(model, layout="BHLNC", pack=7, tp=2))
    for other in others:
        assert_arrives(moving(packed, other, 70))
        assert_arrives(moving(other, packed, 70))


NVFP4 = FullAttention(heads=4, head_dim=32, cache="nvfp4")


@pytest.mark.parametrize(("src", "dst"), list(permutations(ORDERS, 2)))
def test_nvfp4_arrives_between_any_two_orders(src: str, dst: str) -> None:
    model = stacked("m", NVFP4, NVFP4)
    for tps, blocks in (((1, 1), (16, 16)), ((2, 4), (32, 48)), ((4, 1), (16, 32))):
        one, two = (
            small_plan(model, layout=order, tp=tp, block_size=block)
            for order, tp, block in zip((src, dst), tps, blocks, strict=True)
        )
        assert_arrives(moving(one, two, (5, 70)))


def test_heads_of_nvfp4_are_one_run_per_block_in_bhlnc() -> None:
    """The order that transfers want: K of a rank's heads in one run per block, and V in another."""
    model = stacked("m", NVFP4, NVFP4, NVFP4)
    src, dst = (small_plan(model, layout="BHLNC", tp=tp, block_size=16) for tp in (1, 2))
    for rank in (0, 1):
        ids: Any = {"source_blocks": [1, 3, 5], "destination_blocks": [2, 4, 1], "tokens": 48}
        (copy,) = route(src, dst).bind(source_rank=0, destination_rank=rank, **ids).copies
        two_heads = 2 * 3 * 16 * (16 + 2)  # in 3 layers: 16 states of data and scales
        assert copy.length.tolist() == [two_heads] * 2 * 3


@pytest.mark.parametrize("scales", ["inline", "planes", "state_planes"])
def test_scales_go_where_each_side_keeps_them(scales: Any) -> None:
    def made(where: Any, order: str, tp: int, block: int) -> Plan:
        spec = FullAttention(heads=4, head_dim=32, cache="nvfp4", scales=where)
        return small_plan(stacked("m", spec), layout=order, tp=tp, block_size=block)

    for where, order in (("inline", "LBHNC"), ("planes", "LBHNC"), ("state_planes", "LBNHC")):
        src = made(scales, "LBNHC" if scales == "state_planes" else "LBHNC", 2, 16)
        assert_arrives(moving(src, made(where, order, 4, 32), 40))


def test_a_fingerprint_is_that_of_the_model() -> None:
    latent = LatentAttention(latent=16, rope=8)
    model = stacked("m", FULL, latent)
    same = [
        small_plan(model), small_plan(model, tp=4, pp=2, layout="BLHNC"),
        small_plan(stacked("m", FullAttention(heads=2, head_dim=4, packing="planes"), latent)),
        small_plan(stacked("/models/m", FULL, latent)),
    ]  # fmt: skip
    assert len({fingerprint(made) for made in same}) == 1
    others = [
        stacked("m", FullAttention(heads=4, head_dim=4), latent),
        stacked("m", FullAttention(heads=2, head_dim=4, dtype="fp16"), latent),
        stacked("m", FullAttention(heads=2, head_dim=4, cache="fp8"), latent),
        stacked("m", WINDOW, latent),
        stacked("m", FULL, LatentAttention(latent=8, rope=16)),
        stacked("m", latent, FULL),
        stacked("m", FULL, latent, latent),
        stacked("m", SlidingAttention(heads=2, head_dim=4, window=9), latent),
        stacked("m", CrossAttention(heads=2, head_dim=4, source=8), latent),
        stacked("m", CrossAttention(heads=2, head_dim=4, source=9), latent),
        stacked("m", FullAttention(heads=2, head_dim=4, v_dim=8), latent),
    ]
    seen = {fingerprint(small_plan(other)) for other in others}
    assert len(seen) == len(others)
    assert fingerprint(same[0]) not in seen


def test_conv_rows_of_any_two_orders_and_tp_sizes() -> None:
    def made(order: Any, tp: int, policy: str) -> Plan:
        conv = GatedDeltaNet(
            key_heads=12, value_heads=24, key_dim=2, value_dim=3, conv_order=order, kernel=4
        )
        return small_plan(stacked("m", conv, conv, FULL), tp=tp, policy=policy)

    for (one, tp), (two, to) in product(
        product(("TR", "RT"), (1, 4)), product(("TR", "RT"), (2, 6))
    ):
        move = moving(made(one, tp, "atlas"), made(two, to, "vllm"), 40, single=True)
        assert_arrives(move)


@pytest.mark.parametrize("axes", ["BNHC", "BHNC", "NBHC", "HBNC"])
@pytest.mark.parametrize("layers_inside", [False, True])
def test_an_engines_own_tensors(axes: str, layers_inside: bool) -> None:
    """Memory that was not planned here, with its axes named, is an end like any other."""
    sizes = {"B": 7, "N": 16, "H": 2, "C": 16}
    shape = [sizes[axis] for axis in axes]
    memory = np.zeros((shape[0], 3, *shape[1:]) if layers_inside else (3, *shape), np.uint16)
    tensors = {
        name: Placement.from_tensor(memory[:, i] if layers_inside else memory[i], axes=axes)
        for i, name in enumerate(layer.name for layer in DENSE.layers)
    }
    engine = foreign(DENSE, tensors, tp=2, max_len=96)
    for other in (small_plan(DENSE, tp=4, layout="BHLNC"), small_plan(DENSE, block_size=48)):
        assert_arrives(moving(engine, other, (3, 80)))
        assert_arrives(moving(other, engine, 75))
