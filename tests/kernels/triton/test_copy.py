"""Copies in Triton's interpreter: every pair of orders, packings, layers at once, states."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.kernels.triton import Staging, between, tune
from kvatlas.kernels.triton.launch_copy import fold_copy
from kvatlas.specs import FullAttention, Mamba2, ShortConv
from tests.kernels.triton.cases import ORDERS, Pool, check_copy, check_zero

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


FLAT = FullAttention(heads=2, head_dim=32, cache="nvfp4")
WHOLE = [order for order in ORDERS if order.index("B") < order.index("H") and order != "BHLNC"]
"""Orders in which a page is one stretch of memory, as fields that lie flat over it want."""


@pytest.mark.parametrize("target", WHOLE)
@pytest.mark.parametrize("source", WHOLE)
def test_fields_that_lie_flat_cross_orders(source: str, target: str) -> None:
    check_copy(FLAT, FLAT, (source, target), "cpu")


@pytest.mark.parametrize("cache", ["int8_per_token_head", "int4_per_token_head", "fp8"])
@pytest.mark.parametrize("orders", [("LBNHC", "BHLNC"), ("LHBNC", "BLNHC")])
def test_quantised_cells_cross_orders(cache: str, orders: tuple[str, str]) -> None:
    spec = FullAttention(heads=2, head_dim=16, cache=cache)
    check_copy(spec, spec, orders, "cpu")


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_fields_that_lie_flat_are_not_torn(order: str) -> None:
    torn = Pool(FLAT, order, "cpu").layer
    for act in (
        lambda: between(torn, Pool(FLAT, "LBNHC", "cpu").layer),
        lambda: Staging([torn], 1),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.NOT_CONTIGUOUS


@pytest.mark.parametrize("target", WHOLE)
def test_flat_fields_come_back_from_staging(target: str) -> None:
    first, second = Pool(FLAT, "LBNHC", "cpu", seed=1), Pool(FLAT, target, "cpu", seed=2)
    staging = Staging(first.layers, 2)
    rows = torch.zeros(2, staging.row_bytes, dtype=torch.uint8)
    ids, places = torch.tensor([4, 9]), torch.tensor([1, 0])
    staging.store(ids, rows)
    Staging(second.layers, 2).load(rows, places)
    for a, b in zip(first.layers, second.layers, strict=True):
        for name, view in a.fields.items():
            mine, theirs = view[ids], b.fields[name][places]
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    second.untouched()


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
    assert fold_copy(place["LBNHC"], place["BLNHC"]).shape.words == 8 * 16 * 512 // 8
    assert fold_copy(place["LBHNC"], place["BHLNC"]).shape.words == 16 * 512 // 8
    assert fold_copy(place["LBNHC"], place["LBHNC"]).shape.words == 512 // 8


def test_the_tuner_remembers(tmp_path: object) -> None:
    path = tmp_path / "rules.json"  # type: ignore[operator]
    tune.remember(path, "any", "copy", {"dim": 64}, {"tile": 1})
    tune.remember(path, "any", "copy", {"dim": 64}, {"tile": 2})
    assert path.read_text().count("tile") == 1


def test_a_broken_file_of_launch_parameters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.json"
    monkeypatch.setenv("KVATLAS_TUNE", str(path))
    broken = ("{", "[]", '{"any": 1}', '{"any": {"copy": [{"when": {}}]}}', '{"any": {"copy": 7}}')
    try:
        for text in broken:
            path.write_text(text)
            tune._rules.cache_clear()
            tune._choose.cache_clear()
            with pytest.raises(AtlasError) as refusal:
                tune.choose("copy", torch.device("cpu"))
            assert refusal.value.code is Code.UNREADABLE
        path.write_text('{"any": {"copy": [{"when": {"dim": 3}, "use": {"tile": 1}}]}}')
        assert tune.choose("copy", torch.device("cpu"), dim="wide")["tile"] > 1
    finally:
        monkeypatch.undo()
        tune._rules.cache_clear()
        tune._choose.cache_clear()
