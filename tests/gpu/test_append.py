"""New tokens stored and all in sight gathered at once, on a GPU, and launched again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime import jit

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import append_step
from kvatlas.specs import FullAttention
from tests.kernels.triton.cases import ORDERS, Pool, check_append

DENSE = FullAttention(heads=2, head_dim=128)


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_appended_in_every_order(order: str) -> None:
    check_append(DENSE, order, "cuda")


@pytest.mark.parametrize(
    "form",
    [
        {"head_dim": 48, "v_dim": 16, "dtype": "fp32"},
        {"head_dim": 5, "dtype": "fp16"},
        {"head_dim": 64, "packing": "tiled_planes"},
        {"head_dim": 64, "packing": "transposed"},
    ],
)
def test_tokens_are_appended_to_odd_rows(form: dict[str, Any]) -> None:
    check_append(FullAttention(heads=3, **form), "LBHNC", "cuda")


def test_steps_launch_again_what_triton_would_find() -> None:
    """Tokens that are not aligned, and tables, as they come; numbers of tokens as they grow."""
    layer, other = (Pool(DENSE, "LBNHC", "cuda").layer for _ in range(2))
    memory = torch.randperm(12, device="cuda")
    for start in range(1, 50):
        shift = start % 2
        tables = memory[shift : shift + 10].view(2, 5)
        rows = torch.randn(1 + 2 * 2 * 128, device="cuda").bfloat16()[shift:][:512]
        k = v = rows.view(2, 1, 2, 128).transpose(1, 2)
        step = append_step(tables, block=16, start=start, count=1)
        with patch.object(jit.JITFunction, "run", None if start > 2 else jit.JITFunction.run):
            mine = step(layer, k, v)
        again = append_step(tables, block=16, start=start, count=1)(replace(other), k, v)
        for a, b in zip(mine, again, strict=True):
            assert a.view(torch.int16).equal(b.view(torch.int16)), start
    assert layer.buffer.equal(other.buffer)


def test_what_was_launched_before_is_looked_at_again() -> None:
    """Rows like those of an earlier step are refused where this step wants more of them."""
    layer = Pool(DENSE, "LBNHC", "cuda").layer
    tables = torch.randperm(12, device="cuda").view(3, 4)
    k = v = torch.randn(2, 1, 2, 128, device="cuda").bfloat16().transpose(1, 2)
    for start in (5, 6):
        append_step(tables[:2], block=16, start=start, count=1)(layer, k, v)
    for wrong, count in ((tables, 1), (tables[:2], 3)):
        with pytest.raises(AtlasError) as refused:
            append_step(wrong, block=16, start=7, count=count)(layer, k, v)
        assert refused.value.code is Code.BAD_TENSOR
