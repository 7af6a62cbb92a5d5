"""Blocks converted in Triton's interpreter: the model's dtypes and fp8, across orders."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.kernels import convert_blocks, read_latent
from kvatlas.kernels.cell_conversion import convert_cells
from kvatlas.kernels.triton import BlockConversion
from kvatlas.specs import CellFormat, FullAttention, LatentAttention, Mamba2, TensorScales
from tests.kernels.triton.cases import Pool, check_convert

PLAIN = ("bf16", "fp16", "fp32")


def dense(name: str, **more: Any) -> FullAttention:
    written = {"dtype": name} if name in PLAIN else {"cache": name}
    return FullAttention(**{"heads": 2, "head_dim": 8, **written, **more})


def test_elements_are_cast_on_the_way() -> None:
    names = (*PLAIN, "fp8", "fp8_e5m2")
    for place, step in product(range(len(names)), (1, 3)):  # all pairs of them on a GPU
        one, two = names[place], names[(place + step) % len(names)]
        check_convert(dense(one), dense(two), ("LBNHC", "BHLNC"), "cpu", scales=(0.5, 0.25))


def test_orders_packings_and_layers_convert() -> None:
    bf16, fp8 = dense("bf16"), dense("fp8")
    for orders in (("LBNHC", "LBNHC"), ("BHLNC", "LHBNC")):
        check_convert(bf16, fp8, orders, "cpu", layers=3)
        check_convert(fp8, bf16, orders, "cpu", layers=2)
    for packing in ("planes", "head_groups", "transposed"):
        check_convert(dense("bf16", packing=packing), fp8, ("LBHNC", "LBNHC"), "cpu")
        check_convert(fp8, dense("bf16", packing=packing), ("LBNHC", "LBHNC"), "cpu")
    one, two = (LatentAttention(latent=16, rope=8, cache=cache) for cache in ("auto", "fp8"))
    check_convert(one, two, ("LBNHC", "BLNHC"), "cpu", scales=(1.0, 0.5))


def test_alike_pages_are_one_launch_of_long_rows() -> None:
    ends = [Pool(dense(name), "LBNHC", "cpu").layers for name in ("bf16", "fp8")]
    assert BlockConversion(*ends).launches == 1


def test_what_shares_scales_has_no_kernel() -> None:
    one, two = (Pool(dense(name), "LBNHC", "cpu").layer for name in ("bf16", "int8_per_token_head"))
    with pytest.raises(AtlasError) as refusal:
        BlockConversion([one], [two])
    assert refusal.value.code is Code.NO_KERNEL


@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head", "fp16"])
def test_blocks_hold_what_their_cells_become(name: str) -> None:
    """With torch alone: the same bytes as a route's cells."""
    one, two = dense("bf16", head_dim=16), dense(name, head_dim=16)
    source, target = Pool(one, "LBNHC", "cpu", seed=1), Pool(two, "LBNHC", "cpu", seed=2)
    for view in source.layer.fields.values():
        view.normal_()
    scales = TensorScales(0.1, 0.2)
    ids, places = torch.tensor([3, 8]), torch.tensor([1, 0])
    convert_blocks(source.layer, ids, target.layer, places, destination_scales=scales)
    cells = source.layer.tensor[ids].reshape(-1, source.layer.page.content).numpy()
    made = convert_cells(cells.copy(), CellFormat(one), CellFormat(two, scales=scales))
    found = target.layer.tensor[places].reshape(-1, target.layer.page.content).numpy()
    assert (made == found).all()
    target.untouched()


def test_states_and_rows_convert_with_torch() -> None:
    for one, two in (
        (
            Mamba2(heads=2, head_dim=4, groups=1, state_size=4, ssm_dtype=d)
            for d in ("fp32", "bf16")
        ),
        (LatentAttention(latent=128, rope=8, cache=c) for c in ("auto", "fp8_ds_mla")),
    ):
        source, target = Pool(one, "LBNHC", "cpu", seed=1), Pool(two, "LBNHC", "cpu", seed=2)
        for view in source.layer.fields.values():
            view.normal_()
        ids, places = torch.tensor([3, 8]), torch.tensor([1, 0])
        convert_blocks(source.layer, ids, target.layer, places)
        within = torch.arange(16)
        slots, into = ((16 * some[:, None] + within).flatten() for some in (ids, places))
        if isinstance(one, LatentAttention):
            for a, b in zip(
                read_latent(source.layer, slots), read_latent(target.layer, into), strict=True
            ):
                assert float((a - b).norm() / a.norm()) < 0.04
        else:
            for field, view in target.layer.fields.items():
                assert torch.equal(view[places], source.layer.field(field)[ids].to(view.dtype))
        target.untouched()


def test_states_of_unlike_dtypes_are_cast_by_the_kernel() -> None:
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 4, "groups": 1, "state_size": 4}
    one, two = (
        Mamba2(**sizes, ssm_dtype=dtype, conv_order=order)  # type: ignore[arg-type]
        for dtype, order in (("fp32", "TR"), ("bf16", "RT"))
    )
    check_convert(one, two, ("LBNHC", "BLNHC"), "cpu")
