"""Blocks converted on a GPU: the model's dtypes and fp8, orders, packings, layers at once."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from kvatlas.kernels import convert_cells
from kvatlas.specs import CellFormat, FullAttention, TensorScales
from tests.kernels.triton.cases import check_convert

PLAIN = ("bf16", "fp16", "fp32")


def dense(name: str, **more: Any) -> FullAttention:
    written = {"dtype": name} if name in PLAIN else {"cache": name}
    return FullAttention(**{"heads": 4, "head_dim": 128, **written, **more})


@pytest.mark.parametrize("pair", list(permutations((*PLAIN, "fp8", "fp8_e5m2"), 2)))
def test_elements_are_cast_on_the_way(pair: tuple[str, str]) -> None:
    one, two = (dense(name) for name in pair)
    check_convert(one, two, ("LBNHC", "BHLNC"), "cuda", scales=(0.5, 0.25))


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
