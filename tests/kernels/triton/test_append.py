"""New tokens stored and all in sight gathered at once, in Triton's interpreter, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvatlas.errors import AtlasError, Code  # noqa: E402
from kvatlas.kernels import triton as gpu  # noqa: E402
from kvatlas.specs import FullAttention  # noqa: E402
from tests.kernels.triton.cases import ORDERS, Pool, check_append  # noqa: E402


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_appended_in_every_order(order: str) -> None:
    check_append(FullAttention(heads=2, head_dim=32, dtype="fp16"), order, "cpu")


@pytest.mark.parametrize(
    "form",
    [
        {"head_dim": 48, "v_dim": 16, "dtype": "fp32"},
        {"head_dim": 5, "dtype": "fp16"},
        {"head_dim": 32, "packing": "tiled_planes"},
        {"head_dim": 32, "packing": "transposed"},
    ],
)
def test_tokens_are_appended_to_odd_rows(form: dict[str, Any]) -> None:
    check_append(FullAttention(heads=3, **form), "LBHNC", "cpu", block=16)


def test_what_cannot_be_appended() -> None:
    spec = FullAttention(heads=2, head_dim=16, dtype="fp16")
    layer, rows = Pool(spec, "LBNHC", "cpu").layer, torch.zeros(2, 2, 1, 16, dtype=torch.float16)
    tables = torch.zeros(2, 3, dtype=torch.long)
    refused: list[tuple[Code, dict[str, Any]]] = [
        (Code.OUT_OF_RANGE, {"start": 48}),
        (Code.OUT_OF_RANGE, {"start": 4, "first": 5}),
        (Code.BAD_TENSOR, {"tables": tables[:1]}),
        (Code.BAD_TENSOR, {"tables": tables.float()}),
        (Code.BAD_TENSOR, {"k": rows.float()}),
        (Code.BAD_TENSOR, {"v": rows[:, :1]}),
    ]
    for code, other in refused:
        with pytest.raises(AtlasError) as refusal:
            gpu.append_and_gather(layer, **{"k": rows, "v": rows, "tables": tables, "start": 4} | other)
        assert refusal.value.code is code, other
    quantised = Pool(FullAttention(heads=2, head_dim=16, cache="fp8"), "LBNHC", "cpu").layer
    with pytest.raises(AtlasError) as refusal:
        gpu.append_and_gather(quantised, rows, rows, tables, start=4)
    assert refusal.value.code is Code.NO_KERNEL
