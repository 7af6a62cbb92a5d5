"""Transfers that brought wrong bytes to users of other projects, each as a test of routes.

A test is named after the public report that it would have caught. What is a mistake of
geometry alone is in `tests/test_reported_bugs.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import route
from kvatlas.specs import FullAttention, GatedDeltaNet, Mamba2, SlidingAttention, Spec
from tests.routing import oracle
from tests.routing.arrives import ask, assert_arrives
from tests.routing.cases import moving, small_plan, stacked
from tests.routing.oracle import Memory, Move

FULL = FullAttention(heads=4, head_dim=8)
DELTA = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=8, ssm_dtype="fp32")
HYBRID = stacked("hybrid", DELTA, DELTA, FULL, DELTA, DELTA, FULL)
ROOM = 1 << 19


def arrived(move: Move, rank: int = 0) -> tuple[Memory, Memory]:
    """A destination rank's memory after a move, and what it was before."""
    rng = np.random.default_rng(1)
    sources, before = oracle.fill(move, rng), Memory(move.destination, rank, rng)
    after, made = before.copy(), route(move.source, move.destination)
    for source in made.sources(rank):
        bound = made.bind(source_rank=source, destination_rank=rank, **ask(move))
        oracle.carry_out(bound.copies, sources[source], after)
    return after, before


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_lmcache_4463_4247_dynamo_14416_k_and_v_split_meets_k_and_v_packed(order: str) -> None:
    """K and V moved from two planes into one cell; consumers kept the old split."""
    planes = stacked("m", *[FullAttention(heads=4, head_dim=8, packing="planes")] * 2)
    cells = stacked("m", FULL, FULL)
    src, dst = (small_plan(model, layout=order, block_size=16) for model in (planes, cells))
    assert src.bytes_per_block == dst.bytes_per_block
    move = moving(src, dst, 16)
    assert_arrives(move)
    assert_arrives(moving(dst, src, 16))
    # The bytes of a block as they are would be garbage on the other side.
    after, _ = arrived(move)
    page = dst.page(dst.layers[0]).nbytes
    block = move.destination_blocks[0][0] * page
    here = oracle.fill(move, np.random.default_rng(1))[0].pools[0]
    there = move.source_blocks[0][0] * page
    assert (after.pools[0][block : block + page] != here[there : there + page]).any()


@pytest.mark.parametrize(("tp", "to"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_vllm_49011_nvfp4_arrives_across_tp(tp: int, to: int) -> None:
    """Data and scales are planes of a page whose extent depends on the heads of a rank."""
    spec = FullAttention(heads=4, head_dim=32, cache="nvfp4")
    src, dst = (small_plan(stacked("m", spec), layout="LBHNC", tp=n) for n in (tp, to))
    assert_arrives(moving(src, dst, 40))


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2(heads=8, head_dim=4, groups=8, state_size=4),
        Mamba2(heads=8, head_dim=4, groups=1, state_size=4),
        DELTA,
    ],
    ids=["mamba2", "mamba2 with one group", "gated delta net"],
)
@pytest.mark.parametrize(("tp", "to"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_vllm_55208_sglang_23746_conv_sections_arrive_across_tp(
    spec: Spec, tp: int, to: int
) -> None:
    """Cut as one slab, the rows of x|B|C or q|k|v went to ranks of other sections."""
    model = stacked("m", spec, FULL)
    src, dst = (small_plan(model, tp=n, policy="vllm") for n in (tp, to))
    assert_arrives(moving(src, dst, 20))


@pytest.mark.parametrize(("tp", "to"), [(8, 2), (8, 1), (2, 8), (8, 4), (4, 8)])
def test_vllm_52516_ready_means_every_byte_was_named(tp: int, to: int) -> None:
    """With replicated heads 196,608 of 262,144 bytes were never sent, and it was called ready."""
    model = stacked("m", *[FullAttention(heads=2, head_dim=128)] * 8)
    src, dst = (small_plan(model, tp=n, layout="LBHNC") for n in (tp, to))
    move = moving(src, dst, 16)
    assert_arrives(move)
    made = route(src, dst)
    needs = made.needs(destination_rank=0, destination_blocks=move.destination_blocks, tokens=16)
    total = sum(int(lengths.sum()) for _, lengths in needs.values())
    assert total == 8 * 16 * 2 * 128 * 2 * max(2 // to, 1)
    named = sum(
        made.bind(source_rank=source, destination_rank=0, **ask(move)).nbytes
        for source in made.sources(0)
    )
    assert named == total


def test_vllm_54338_bf16_does_not_go_into_an_fp16_cache() -> None:
    """Equal bytes, unlike meaning: fluent nonsense instead of an error."""
    src = small_plan(stacked("m", FullAttention(heads=4, head_dim=8, dtype="bf16")))
    dst = small_plan(stacked("m", FullAttention(heads=4, head_dim=8, dtype="fp16")))
    assert src.bytes_per_block == dst.bytes_per_block
    with pytest.raises(AtlasError) as refusal:
        route(src, dst)
    assert refusal.value.code is Code.UNLIKE_DTYPES


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_dynamo_15079_a_failed_read_leaves_bytes_that_are_missing(failed: int) -> None:
    """A failed transfer counted as loaded: what is needed and was not named says so."""
    model = stacked("m", *[FullAttention(heads=6, head_dim=8)] * 2)
    src, dst = small_plan(model, tp=3), small_plan(model, tp=1, layout="BLHNC")
    move, made = moving(src, dst, 40), route(src, dst)
    assert made.sources(0) == (0, 1, 2)
    needs = made.needs(destination_rank=0, destination_blocks=move.destination_blocks, tokens=40)
    missing = {
        pool: oracle.times_named([pair], dst.pools[pool].nbytes) for pool, pair in needs.items()
    }
    for source in {0, 1, 2} - {failed}:
        for copy in made.bind(source_rank=source, destination_rank=0, **ask(move)).copies:
            size = dst.pools[copy.destination_pool].nbytes
            missing[copy.destination_pool] -= oracle.times_named(
                [(copy.destination, copy.length)], size
            )
    lost = made.bind(source_rank=failed, destination_rank=0, **ask(move))
    assert sum(int(left.sum()) for left in missing.values()) == lost.nbytes > 0
    for copy in lost.copies:
        size = dst.pools[copy.destination_pool].nbytes
        missing[copy.destination_pool] -= oracle.times_named(
            [(copy.destination, copy.length)], size
        )
    assert not any(left.any() for left in missing.values())


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_vllm_51094_the_state_at_an_exact_boundary(blocks: int, off: int) -> None:
    """After exactly n blocks of tokens the state is in block n - 1, not in the one after it."""
    src = small_plan(HYBRID, policy="vllm", max_len=200, least=ROOM)
    dst = small_plan(HYBRID, policy="vllm", max_len=200, tp=2, least=ROOM)
    size = src.block_size
    stop = blocks * size + off
    move = moving(src, dst, stop, complete=True)
    group = next(i for i, g in enumerate(src.groups) if g.kind == "recurrent")
    assert len(move.source_blocks[group]) == (blocks + 1 if off == 1 else blocks)
    assert_arrives(move)
    # The table that an engine keeps may already have the next block: it is not the one.
    longer = {g: [*ids, next(b for b in range(src.num_blocks) if b not in ids)]
              for g, ids in move.source_blocks.items()}  # fmt: skip
    made = route(src, dst)
    same, other = (
        made.bind(source_rank=0, destination_rank=0, **{**ask(move), "source_blocks": blocks_})
        for blocks_ in (move.source_blocks, longer)
    )
    assert same.copies[0].source.tolist() == other.copies[0].source.tolist()


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
def test_lmcache_2863_states_come_with_the_attention_blocks(policy: Any) -> None:
    """Attention blocks were restored and the recurrent state was not."""
    src, dst = small_plan(HYBRID, policy=policy), small_plan(HYBRID, policy=policy, tp=2)
    move = moving(src, dst, 40)
    assert_arrives(move)
    for layer in dst.layers:
        one = move.only(layer)
        needs = route(src, dst).needs(
            destination_rank=0,
            destination_blocks=one.destination_blocks,
            tokens=40,
            layers=one.layers,
        )
        page = dst.page(layer)
        whole = sum(f.nbytes for p in range(dst.parts(layer)) for f in dst.page(layer, 0, p).fields)
        expected = (
            40 * page.unpadded // page.states if "v" in [f.name for f in page.fields] else whole
        )
        assert sum(int(lengths.sum()) for _, lengths in needs.values()) == expected
    # Without a block for the state nothing is moved at all.
    group = next(i for i, g in enumerate(dst.groups) if g.kind == "recurrent")
    with pytest.raises(AtlasError) as refusal:
        route(src, dst).bind(
            source_rank=0,
            destination_rank=0,
            **{**ask(move), "destination_blocks": {**move.destination_blocks, group: []}},
        )
    assert refusal.value.code is Code.MISSING_BLOCKS


@pytest.mark.parametrize("block", [32, 64, 96])
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_vllm_ascend_15408_larger_blocks_leave_states_alone(block: int, order: str) -> None:
    """A larger block size made attention overwrite the recurrent state in the same page."""
    src = small_plan(HYBRID, policy="vllm")
    dst = small_plan(HYBRID, policy="vllm", block_size=block, layout=order)
    move = moving(src, dst, 90)
    assert_arrives(move)
    attention = [n for n in dst.layers if "k" in [f.name for f in dst.page(n).fields]]
    recurrent = [n for n in dst.layers if n not in attention]
    for some, others in ((attention, recurrent), (recurrent, attention)):
        after, before = arrived(move.only(*some))
        _, theirs = oracle.expected(move.only(*others), 0, before)
        for pool, mask in theirs.items():
            assert mask.any()
            assert (after.pools[pool][mask] == before.pools[pool][mask]).all()


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize(("tp", "to"), [(2, 2), (2, 4), (4, 1)])
def test_vllm_54465_55431_attention_and_states_block_by_block(order: str, tp: int, to: int) -> None:
    """In BLHNC the wrong page was read, even at equal tp."""
    src, dst = (small_plan(HYBRID, tp=n, layout=order) for n in (tp, to))
    assert_arrives(moving(src, dst, 40))
    assert_arrives(moving(src, small_plan(HYBRID, tp=to, policy="vllm"), 40))


@pytest.mark.parametrize(
    ("order", "to"), [("LBNHC", "BLHNC"), ("BLHNC", "LBHNC"), ("BHLNC", "LBNHC")]
)
def test_lmcache_4358_unlike_head_dims_travel_together(order: str, to: str) -> None:
    """Gemma-4: wide heads in some layers, many in others, and unlike blocks."""
    narrow = SlidingAttention(heads=8, head_dim=4, window=24)
    wide = FullAttention(heads=2, head_dim=16)
    model = stacked("m", narrow, narrow, wide, narrow, narrow, wide)
    for policy in ("vllm", "atlas"):
        src = small_plan(model, layout=None if policy == "vllm" else order, policy=policy)
        assert_arrives(moving(src, small_plan(model, tp=4, layout=to), (2, 70)))


def test_vllm_50765_42895_block_sizes_that_depend_on_tp_meet() -> None:
    """One model, two tp sizes, two block sizes that are no multiples of each other."""
    heavy = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=14, ssm_dtype="fp32")
    model = stacked("m", heavy, FullAttention(heads=1, head_dim=16), heavy)
    made = [small_plan(model, tp=tp, policy="vllm", max_len=200) for tp in (1, 2, 4)]
    sizes = [one.block_size for one in made]
    assert len(set(sizes)) == 3
    assert sizes[0] % sizes[1]
    for src in made:
        for dst in made:
            assert_arrives(moving(src, dst, 170))


@pytest.mark.parametrize("model", [HYBRID, stacked("m", FULL, FULL)], ids=["hybrid", "dense"])
def test_llm_d_2433_tp_1_to_4_is_a_route(model: Model) -> None:
    for order in ("LBNHC", "LBHNC"):
        src, dst = (small_plan(model, tp=tp, layout=order, policy="vllm") for tp in (1, 4))
        assert_arrives(moving(src, dst, 40))
        assert [route(src, dst).sources(rank) for rank in range(4)] == [(0,)] * 4


def test_vllm_55434_dynamo_12750_nixl_135_a_block_is_one_descriptor() -> None:
    """91-120k descriptors for 4.9 GB, 96 reads per block, lists of 20 MB."""
    made = plan("Llama-3.1-8B", memory="16GiB", layout="BLHNC", max_len=40_000)
    way, count = route(made, made), 2400
    assert count * made.bytes_per_block > 4.9e9
    ids = np.random.default_rng(0).permutation(made.num_blocks)[:count].tolist()
    run = list(range(100, 100 + count))
    for blocks, to, least in ((run, ids, count - 8), (run, run, 1), (ids, ids, 1)):
        (copy,) = way.bind(
            source_rank=0,
            destination_rank=0,
            source_blocks=blocks,
            destination_blocks=to,
            tokens=count * 16,
        ).copies
        assert least <= len(copy) <= count
        assert copy.nbytes == count * made.bytes_per_block
    prepared = way.prepare(source_rank=0, destination_rank=0)
    assert prepared.source.shape == (made.num_blocks, 3)
    src, dst = prepared.select(source_blocks=run, destination_blocks=ids, tokens=count * 16)
    assert len(src) == len(dst) == count


@pytest.mark.parametrize(("block", "to"), [(64, 128), (128, 64), (32, 96)])
def test_vllm_cpu_block_64_to_128_transposed_k_is_joined_by_states(block: int, to: int) -> None:
    """K is [D, N] inside a head's page; joining pages by bytes gives wrong tokens."""
    spec = FullAttention(heads=2, head_dim=8, dtype="fp16", packing="transposed")
    src, dst = (
        small_plan(
            stacked("m", spec), layout="LBHNC", block_size=size, backend="CPU_ATTN", max_len=256
        )
        for size in (block, to)
    )
    move = moving(src, dst, 256, style="neighbours")
    assert_arrives(move)
    assert_arrives(moving(src, dst, (10, 201)))
    # Blocks that are neighbours on both sides would be one run, were it a matter of bytes.
    assert len(route(src, dst).bind(source_rank=0, destination_rank=0, **ask(move)).copies[0]) > 1


def test_vllm_42374_two_blocks_are_two_blocks_at_both_ends() -> None:
    """`shape[0] == 2` was read as K and V: a pool of two blocks is where that bites."""

    def made(blocks: int, packing: Any) -> Plan:
        model = stacked("m", FullAttention(heads=2, head_dim=8, packing=packing))
        return plan(
            model, memory=blocks * 16 * 2 * 8 * 2 * 2, max_len=16, in_flight=0, layout="LBHNC"
        )

    for one, other in ((2, 2), (2, 3), (5, 2)):
        for packing in ("cells", "planes", "head_groups"):
            src, dst = made(one, packing), made(other, "cells")
            assert (src.num_blocks, dst.num_blocks) == (one, other)
            assert_arrives(moving(src, dst, 16))
