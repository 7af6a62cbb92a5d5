"""Blocks converted on a GPU: the model's dtypes and fp8, orders, packings, layers at once."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas.kernels.cell_conversion import convert_cells
from kvatlas.routing import scattered
from kvatlas.specs import CellFormat, FullAttention, TensorScales
from kvatlas.wire import Session
from tests.gpu.ranks import GpuRanks
from tests.kernels.triton.cases import check_cast_runs, check_convert
from tests.planning.models import model_of
from tests.routing.cases import small_plan
from tests.routing.converting import assert_converted, conversion_of, fill_sources, scales_of
from tests.routing.oracle import Memory, Move

TOKENS = 40
PLAIN = ("bf16", "fp16", "fp32")


def dense(name: str, **more: Any) -> FullAttention:
    written = {"dtype": name} if name in PLAIN else {"cache": name}
    return FullAttention(**{"heads": 4, "head_dim": 128, **written, **more})


@pytest.mark.parametrize("pair", list(permutations((*PLAIN, "fp8", "fp8_e5m2"), 2)))
def test_elements_are_cast_on_the_way(pair: tuple[str, str]) -> None:
    one, two = (dense(name) for name in pair)
    check_convert(one, two, ("LBNHC", "BHLNC"), "cuda", scales=(0.5, 0.25))


def test_runs_are_cast_on_the_way() -> None:
    """As codecs do it on a CPU, to the bit: scales that are factors, and that are divisors."""
    pairs = [("bf16", "fp8"), ("fp8", "bf16"), ("fp32", "bf16"), ("fp16", "e5m2"), ("e5m2", "fp32")]
    for number, (pair, item) in enumerate(zip(pairs, (256, 128, 7, 48, 64), strict=True)):
        for scales in ((0.5, 0.25), (0.0314159, 0.3)):
            about: Any = {"alike": number % 2 == 0, "programs": number % 3, "scales": scales}
            check_cast_runs(pair, item, "cuda", **about)


@pytest.mark.parametrize("orders", [("LBNHC", "LBNHC"), ("BHLNC", "LBHNC"), ("LHBNC", "BLNHC")])
def test_orders_convert(orders: tuple[str, str]) -> None:
    check_convert(dense("bf16"), dense("fp8"), orders, "cuda", layers=3, blocks=40)
    check_convert(dense("fp8"), dense("bf16"), orders, "cuda", layers=3, blocks=40)


@pytest.mark.parametrize("packing", ["planes", "head_groups", "transposed"])
def test_packings_convert(packing: str) -> None:
    check_convert(dense("bf16", packing=packing), dense("fp8"), ("LBHNC", "LBNHC"), "cuda")
    check_convert(dense("fp8"), dense("bf16", packing=packing), ("LBNHC", "LBHNC"), "cuda")


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8_per_token_head", "nvfp4"])
def test_cells_on_a_gpu_are_those_of_the_host(name: str) -> None:
    """Within a code: a GPU divides as it does."""
    one, two = CellFormat(dense("bf16")), CellFormat(dense(name), scales=TensorScales(0.1, 0.2))
    rows = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    cells = rows.view(torch.uint8)
    here, there = convert_cells(cells, one, two), convert_cells(cells.cuda(), one, two).cpu()
    assert float((here != there).float().mean()) < 0.01


@pytest.mark.parametrize("names", [("fp8", "bf16"), ("bf16", "int8_per_token_head")])
def test_pools_on_a_gpu_convert_over_a_wire(names: tuple[str, str]) -> None:
    """By way of the host: what is offered in one format arrives in another."""
    src, dst = (
        small_plan(model_of("m", {"attn": dense(name, head_dim=64)}), layout=layout, tp=tp)
        for name, layout, tp in zip(names, ("LBNHC", "LBHNC"), (2, 1), strict=True)
    )
    move = Move(src, dst, scattered(src, TOKENS), scattered(dst, TOKENS), (0, TOKENS))
    rng = np.random.default_rng(5)
    memories, numbers = fill_sources(move, rng)
    before = {rank: Memory(dst, rank, rng) for rank in range(dst.ranks)}
    ends = []
    try:
        for made, held in ((src, memories), (dst, before)):
            contents = {rank: memory.pools for rank, memory in held.items()}
            about = {"convert": conversion_of(src, dst), "scales": scales_of(made)}
            ends.append(GpuRanks(made, "shm", contents, TOKENS, **about))
        here, there = ends
        here.offer("r")
        for node in there.nodes:
            with Session(node, here.endpoints) as session:
                session.pull(
                    "r", destination_blocks=there.blocks, tokens=TOKENS, checksums=True
                ).wait(20)
        after = {rank: memory.copy() for rank, memory in before.items()}
        for rank, memory in after.items():
            for index, pool in there.pools(rank).items():
                memory.pools[index][:] = pool.cpu().numpy()
        assert_converted(move, numbers, before, after)
    finally:
        for end in ends:
            end.close()
