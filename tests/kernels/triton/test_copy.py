"""Copies in Triton's interpreter: every pair of orders, packings, layers at once, states."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas.kernels.triton import Staging, tune  # noqa: E402
from kvatlas.kernels.triton.copy import moves  # noqa: E402
from kvatlas.specs import FullAttention, Mamba2, ShortConv  # noqa: E402
from tests.kernels.triton.cases import ORDERS, Pool, check_copy, check_zero  # noqa: E402

DENSE = FullAttention(heads=2, head_dim=8)
STATES = [Mamba2(heads=2, head_dim=4, groups=1, state_size=4), ShortConv(width=6)]


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ORDERS)
def test_blocks_cross_orders(source: str, target: str) -> None:
    check_copy(DENSE, DENSE, (source, target), "cpu")


@pytest.mark.parametrize("packing", ["transposed", "planes", "tiled_planes", "head_groups"])
def test_fields_cross_packings(packing: str) -> None:
    other = FullAttention(heads=2, head_dim=8, packing=packing)  # type: ignore[arg-type]
    check_copy(DENSE, other, ("LBHNC", "LBHNC"), "cpu")
    check_copy(other, DENSE, ("LBHNC", "LBNHC"), "cpu")


@pytest.mark.parametrize("orders", [("LBNHC", "BHLNC"), ("BLHNC", "LHBNC")])
def test_layers_move_in_one_launch(orders: tuple[str, str]) -> None:
    check_copy(DENSE, DENSE, orders, "cpu", layers=3)


@pytest.mark.parametrize("spec", [*STATES, FullAttention(heads=3, head_dim=5, dtype="fp16")])
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_states_and_odd_sizes(spec: object, order: str) -> None:
    check_copy(spec, spec, (order, "LBNHC"), "cpu")  # type: ignore[arg-type]
    check_zero(spec, order, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_cleared_blocks_are_zero_and_others_are_not(order: str) -> None:
    check_zero(DENSE, order, "cpu")


@pytest.mark.parametrize("order", ORDERS)
def test_rows_come_back_from_staging(order: str) -> None:
    first, second = Pool(DENSE, order, "cpu", seed=1), Pool(DENSE, "LBNHC", "cpu", seed=2)
    ids, places = torch.tensor([4, 0, 9]), torch.tensor([1, 2, 11])
    staging = Staging(first.layers, 5)
    rows = torch.zeros(3, staging.row_bytes, dtype=torch.uint8)
    staging.store(ids, rows)
    page = first.layers[2].tensor[9].flatten()
    assert torch.equal(rows[2, -page.numel() :], page)
    Staging(second.layers, 3).load(rows, places)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert torch.equal(a.tensor[ids], b.tensor[places])
    first.untouched()
    second.untouched()


def test_rows_are_as_wide_as_they_can_be() -> None:
    """A page that both sides keep whole is one row; unlike orders meet in cells."""
    pools = {order: Pool(FullAttention(heads=8, head_dim=128), order, "cpu") for order in ORDERS}
    place = {order: pool.layer.kernel_blocks for order, pool in pools.items()}
    assert moves(place["LBNHC"], place["BLNHC"]).words == 8 * 16 * 512 // 8
    assert moves(place["LBHNC"], place["BHLNC"]).words == 16 * 512 // 8
    assert moves(place["LBNHC"], place["LBHNC"]).words == 512 // 8


def test_the_tuner_remembers(tmp_path: object) -> None:
    path = tmp_path / "rules.json"  # type: ignore[operator]
    tune.remember(path, "any", "copy", {"dim": 64}, {"tile": 1})
    tune.remember(path, "any", "copy", {"dim": 64}, {"tile": 2})
    assert path.read_text().count("tile") == 1
