"""New tokens stored and all in sight gathered at once, in Triton's interpreter, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import append_step
from kvatlas.kernels import triton as gpu
from kvatlas.specs import FullAttention
from tests.kernels.triton.cases import ORDERS, Pool, check_append


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
    where = {"start": 4, "count": 1, "first": 0, "visible": 0}
    step = gpu.TableAppend(tables, **where)
    for k, v in ((rows.float(), rows), (rows, rows[:, :1]), (rows[:1], rows[:1])):
        assert refusal(partial(step, layer, k, v)) is Code.BAD_TENSOR
    assert refusal(lambda: gpu.TableAppend(tables.float(), **where)) is Code.BAD_TENSOR
    quantised = Pool(FullAttention(heads=2, head_dim=16, cache="fp8"), "LBNHC", "cpu").layer
    assert refusal(lambda: step(quantised, rows, rows)) is Code.NO_KERNEL
    for tokens in ({"start": 48}, {"start": 4, "first": 5}, {"start": -1}):
        step_of = partial(append_step, tables, block=16, count=1)
        assert refusal(partial(step_of, **tokens)) is Code.OUT_OF_RANGE


def refusal(call: Callable[[], object]) -> Code:
    with pytest.raises(AtlasError) as refused:
        call()
    return refused.value.code
