"""Copies on a GPU: orders, packings, layers at once, recurrent states, pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvatlas.kernels.triton import Staging
from kvatlas.specs import FullAttention, Mamba2, ShortConv
from tests.kernels.triton.cases import (
    ORDERS,
    Pool,
    check_copy,
    check_repeated_runs,
    check_runs,
    check_zero,
)

DENSE = FullAttention(heads=4, head_dim=128)
HOST, HERE = True, False


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ORDERS)
def test_blocks_cross_orders(source: str, target: str) -> None:
    check_copy(DENSE, DENSE, (source, target), "cuda", blocks=40)


@pytest.mark.parametrize("packing", ["transposed", "planes", "tiled_planes", "head_groups"])
def test_fields_cross_packings(packing: Any) -> None:
    other = FullAttention(heads=4, head_dim=128, packing=packing)
    check_copy(DENSE, other, ("LBHNC", "LBHNC"), "cuda")
    check_copy(other, DENSE, ("LBHNC", "LBNHC"), "cuda")


@pytest.mark.parametrize("orders", [("LBNHC", "BHLNC"), ("BLHNC", "LHBNC")])
@pytest.mark.parametrize("hosts", [(HERE, HERE), (HERE, HOST), (HOST, HERE)])
def test_layers_move_in_one_launch(orders: tuple[str, str], hosts: tuple[bool, bool]) -> None:
    check_copy(DENSE, DENSE, orders, "cuda", layers=3, hosts=hosts)


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2(heads=4, head_dim=64, groups=1, state_size=128),
        ShortConv(width=48),
        FullAttention(heads=3, head_dim=5, dtype="fp16"),
    ],
)
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_states_and_odd_sizes(spec: Any, order: str) -> None:
    check_copy(spec, spec, (order, "LBNHC"), "cuda")
    check_zero(spec, order, "cuda")


@pytest.mark.parametrize("order", ORDERS)
def test_rows_come_back_from_staging(order: str) -> None:
    first, second = Pool(DENSE, order, "cuda", seed=1), Pool(DENSE, "LBNHC", "cuda", seed=2)
    ids, places = (torch.tensor(some, device="cuda") for some in ([4, 0, 9], [1, 2, 11]))
    staging = Staging(first.layers, 5)
    rows = torch.zeros(3, staging.row_bytes, dtype=torch.uint8, pin_memory=True)
    staging.store(ids, rows)
    Staging(second.layers, 3).load(rows, places)
    torch.cuda.synchronize()
    for a, b in zip(first.layers, second.layers, strict=True):
        assert torch.equal(a.tensor[ids], b.tensor[places])
    first.untouched()
    second.untouched()


def test_runs_that_are_copied_again_and_again() -> None:
    for number, item in enumerate((512, 48, 20, 7, 4096)):
        check_repeated_runs(item, "cuda", alike=bool(number % 2), seed=number)


def test_runs_at_sums_of_starts_and_spans() -> None:
    for number, item in enumerate([512, 48, 20, 7, 4096, 2, 264, 1, 65536]):
        for programs in (0, 1, 16):
            check_runs(item, "cuda", alike=bool(number % 2), programs=programs, seed=number)
